"""Tests that a search skips work without changing its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.simulator import policies
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner import batch_splits, known_plans, ranking
from megatrain.simulator.planner.assessment import Choice, assess, estimate, group_sizes, with_knobs
from megatrain.simulator.planner.batch_splits import best_split
from megatrain.simulator.planner.filling import Filling, last
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import best_estimate, candidates, plans_of
from megatrain.simulator.planner.slot_search import SlotSearch
from megatrain.simulator.policies.overlapped import Overlapped
from megatrain.simulator.schedule.plan import Placement
from megatrain.simulator.verdict.marginal_memory import one_more_gib

pytestmark = pytest.mark.usefixtures("without_libraries")

H200, MIB = HardwareSpec.load("h200"), 2**20
LIMIT = 10 * MIB
WORK = Workload(batch=2, sequence=64, accumulation=4, loss_chunk=64)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., ModelSpec]) -> ModelSpec:
    return make_model(
        layers=4, hidden=128, intermediate=256, head_dim=32, vocabulary=1024, tied=False
    )


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Returns a list that gets the arguments of each call of `owner.name`."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_a_search_lowers_only_the_plan_that_it_returns(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies._lowered.cache_clear()
    searched = counted(monkeypatch, PlacementSearch, "best")
    lowered = counted(monkeypatch, policies, "lower_uncached")
    best = candidates(model, H200, WORK, policies=["overlapped"], device_limit=LIMIT)[0]
    assert best.feasible
    assert len(searched) > 1
    assert [plan.knobs for (plan,) in lowered] == [best.plan.knobs]
    lowered.clear()
    found = best_estimate(model, H200, WORK, policies=["overlapped"], device_limit=LIMIT)
    assert found is not None
    assert (found.plan.knobs, found.step_seconds) == (best.plan.knobs, best.step_seconds)
    assert (found.runner_up, found.account.fits) == (best.runner_up, True)
    assert not lowered


@pytest.mark.parametrize("limit", [LIMIT, LIMIT + MIB])
def test_a_search_of_known_plans_times_none_and_finds_the_same(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    work = msgspec.structs.replace(WORK, accumulation=2)

    def found() -> Choice:
        return candidates(model, H200, work, policies=["overlapped"], device_limit=limit)[0]

    first = found()
    timed = counted(monkeypatch, ranking, "schedule_to_time")
    assert found() == first
    assert not timed
    # Another limit shares the times of plans, which do not depend on it.
    candidates(model, H200, work, policies=["overlapped"], device_limit=limit + MIB)
    assert found() == first
    timed.clear()
    known_plans._recent.clear()
    assert found() == first
    assert timed


def test_searches_with_other_costs_share_nothing(model: ModelSpec) -> None:
    peaks = {dtype: peak / 4 for dtype, peak in H200.peak_tflops.items()}
    slow = msgspec.structs.replace(H200, peak_tflops=peaks)
    best = [
        candidates(model, machine, WORK, policies=["overlapped"], device_limit=LIMIT)[0]
        for machine in (H200, slow, H200)
    ]
    assert best[0] == best[2]
    assert best[1].step_seconds > best[0].step_seconds


@pytest.mark.parametrize("policy", ["overlapped", "k_buffer", "resident", "sequential"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_estimate_has_the_memory_and_the_time_of_an_assessment(
    model: ModelSpec, policy: str, accumulation: int
) -> None:
    work = Workload(batch=2, sequence=64, accumulation=accumulation, loss_chunk=64)
    (plan,) = plans_of(model, H200, work, policies=[policy], device_limit=LIMIT)
    costs = cost_model(H200, model, work)
    plan = with_knobs(plan, weight_slots=1)
    quick, whole = estimate(plan, costs), assess(plan, costs)
    assert quick.step_seconds == whole.step_seconds
    assert quick.account.pools == whole.account.pools
    assert quick.streams == whole.streams == (policy != "resident")


@pytest.mark.parametrize("accumulation", [1, 4])
def test_offloaded_inputs_are_ignored_where_all_layers_save_their_activations(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """The schedule is the same, so a search lowers only one of the plans."""
    work = msgspec.structs.replace(WORK, accumulation=accumulation)
    (plan,) = plans_of(model, H200, work, policies=["overlapped"])
    kept, moved = (
        with_knobs(
            plan,
            placement=Placement(weights="0-1", saved_activations="all", offloaded_inputs=inputs),
        )
        for inputs in ("", "all")
    )
    assert policies.lower(kept).digest == policies.lower(moved).digest
    lowered = counted(monkeypatch, ranking, "schedule_to_time")
    search = PlacementSearch(plan, cost_model(H200, model, work))
    assert search.time(kept) == search.time(moved)
    assert search.lower_bound.step_ns(kept) == search.lower_bound.step_ns(moved)
    assert len(lowered) == 1
    fewer = msgspec.structs.replace(moved.knobs.placement, saved_activations="1-3")
    search.time(with_knobs(plan, placement=fewer))
    assert len(lowered) == 2
    assert lowered[-1][0].knobs.placement == fewer


@settings(max_examples=12, deadline=None)
@given(
    accumulation=st.sampled_from([1, 2, 4, 6]),
    clipping=st.sampled_from(["global", "none"]),
    limit=st.integers(6, 24),
)
def test_no_plan_of_a_group_is_faster_than_its_bound(
    model: ModelSpec, accumulation: int, clipping: Any, limit: int
) -> None:
    work = Workload(
        batch=2, sequence=64, accumulation=accumulation, clipping=clipping, loss_chunk=64
    )
    (plan,) = plans_of(model, H200, work, policies=["overlapped"], device_limit=limit * MIB)
    for size in group_sizes(plan):
        search = PlacementSearch(
            with_knobs(plan, micro_batch_group=size), cost_model(H200, model, work)
        )
        if found := search.best():
            assert found.step_seconds * 1e9 >= search.least_ns()


def test_groups_that_cannot_be_fast_enough_are_not_searched(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**options: float) -> tuple[float, int]:
        searched.clear()
        best = best_estimate(
            model,
            H200,
            WORK,
            policies=["overlapped"],
            device_limit=LIMIT,
            **options,  # type: ignore[arg-type]
        )
        assert best is not None
        return best.step_seconds, len(searched)

    searched = counted(monkeypatch, PlacementSearch, "best")
    seconds, every = found()
    assert every > 1
    assert found(most_seconds=1.01 * seconds)[0] == seconds
    assert found(most_seconds=0.0001 * seconds)[1] == 0


def test_each_split_of_a_step_is_searched_once(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two splits, and the second is faster."""
    works: list[Workload] = []

    def found(_model: ModelSpec, _hardware: HardwareSpec, work: Workload, **_: Any) -> list[int]:
        works.append(work)
        return [-len(works)]

    monkeypatch.setattr(batch_splits, "_CLOSE", 100.0)
    monkeypatch.setattr(batch_splits, "candidates", found)
    monkeypatch.setattr(batch_splits, "rank", lambda choice: choice)
    assert best_split(model, H200, WORK, 1024) == [-2]
    assert len(works) == len(set(works)) == 2


@pytest.mark.parametrize(("slower", "searched"), [(20, 1), (19, 2)])
def test_a_second_split_is_searched_if_it_is_close_enough(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch, slower: int, searched: int
) -> None:
    """A split of exactly twice the best quick time is not closer than a factor of two."""
    works: list[Workload] = []

    def found(_model: ModelSpec, _hardware: HardwareSpec, work: Workload, **_: Any) -> list[int]:
        works.append(work)
        return [len(works)]

    quick_times = iter([10, slower])
    monkeypatch.setattr(batch_splits, "_CLOSE", 2.0)
    monkeypatch.setattr(batch_splits, "_quick", lambda plan, _: [plan])
    monkeypatch.setattr(batch_splits, "_time_ns", lambda *_: next(quick_times))
    monkeypatch.setattr(batch_splits.LowerBound, "compute_ns", lambda *_: 0)
    monkeypatch.setattr(batch_splits, "candidates", found)
    monkeypatch.setattr(batch_splits, "rank", lambda choice: choice)
    assert best_split(model, H200, WORK, 2 * WORK.sequence) == [1]
    assert len(works) == searched


def test_the_second_plan_is_tried_with_host_updates_of_its_own() -> None:
    """The plan that is best at first has no host updates, but the second is faster with them."""
    model = ModelSpec.load("qwen2.5-32b").with_layers(16)
    work = Workload(batch=1, sequence=1024, accumulation=2, loss_chunk=1024, state="bf16-sr")
    limits = {"device_limit": 34 * 2**30, "host_limit": 192 * 2**30}
    found = best_estimate(model, H200, work, policies=["overlapped"], **limits)
    assert found is not None
    assert found.plan.knobs.placement.host_updated
    assert found.step_seconds < 1.42  # 1.53 without


def test_host_updates_are_tried_again_after_a_search_has_moved_on() -> None:
    """They are slower for the first plan, but faster for the one that the search moves on to."""
    model = ModelSpec.load("qwen2.5-1.5b").with_layers(8)
    machine = HardwareSpec.load("rtx3080-10gb")
    work = Workload(batch=2, sequence=4096, accumulation=2, clipping="update", loss_chunk=512)
    limits = {"device_limit": 5_328_046_592, "host_limit": 512 * 2**30}
    (plan,) = plans_of(model, machine, work, policies=["overlapped"], **limits)
    found = PlacementSearch(plan, cost_model(machine, model, work)).best()
    assert found is not None
    assert found.plan.knobs.placement.host_updated
    assert found.step_seconds < 2.492  # 2.495 without


@pytest.mark.parametrize("limit", [3 * MIB, 6 * MIB, LIMIT, 2**30])
def test_few_numbers_of_saved_layers_are_tried(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    (plan,) = plans_of(model, H200, WORK, policies=["overlapped"], device_limit=limit)
    filling = Filling(plan, cost_model(H200, model, WORK))
    rooms = [
        filling.room(with_knobs(plan, placement=Placement(saved_activations=last(4, count))))
        for count in range(5)
    ]
    tried = counted(monkeypatch, Filling, "room")
    assert filling.most_saved(plan, Placement()) == sum(room >= 0 for room in rooms) - 1
    assert len(tried) <= 3


def test_the_store_is_made_once_for_all_placements_of_activations(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = counted(monkeypatch, Overlapped, "storage")
    # slots that no other test has, whose buffers are remembered
    (plan,) = plans_of(model, H200, WORK, policies=["overlapped"])
    plan = with_knobs(plan, weight_slots=3, state_slots=7)
    activations = [
        Placement(saved_activations="2-3"),
        Placement(saved_activations="3", saved_attention="1-2", offloaded_inputs="0-1"),
        Placement(offloaded_inputs="all"),
        Placement(saved_attention="all", offloaded_attention="1-2"),
    ]
    found = [
        policies.outline(with_knobs(plan, placement=each), merged=True) for each in activations
    ]
    assert len(stores) == 1
    for placement, merged in zip(activations, found, strict=True):
        whole = policies.lower(with_knobs(plan, placement=placement))
        pools: list[dict[str, int]] = [{}, {}]
        for sizes, schedule in zip(pools, (merged, whole), strict=True):
            for buffer in schedule.buffers:
                sizes[buffer.pool] = sizes.get(buffer.pool, 0) + buffer.allocated
        assert pools[0] == pools[1]


def test_rates_are_found_once_for_each_set_of_busy_lanes(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = counted(monkeypatch, ContentionModel, "_shared")
    (plan,) = plans_of(model, H200, WORK, policies=["overlapped"])
    costs, schedule = cost_model(H200, model, WORK), policies.lower(plan)
    times = [makespan_ns(schedule, costs) for _ in range(2)]
    assert times[0] == times[1]
    assert len(shared) == len({busy for _, busy in shared}) > 1


@pytest.mark.parametrize(("limit", "searches"), [(None, 0), (4 * MIB, 1)])
def test_one_more_gib_is_only_searched_for_where_memory_is_short(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch, limit: int | None, searches: int
) -> None:
    choice = candidates(model, H200, WORK, policies=["k_buffer"], device_limit=limit)[0]
    assert choice.feasible
    searched = counted(monkeypatch, SlotSearch, "best")
    assert len(one_more_gib(choice, H200, cost_model(H200, model, WORK))) == 2
    assert len(searched) == searches


def test_of_the_plans_with_whole_layers_few_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of simulating all of them."""
    model, work = ModelSpec.load("qwen2.5-1.5b"), Workload(batch=8, sequence=1024)
    (plan,) = plans_of(model, H200, work, policies=["overlapped"], device_limit=12 * 2**30)
    found, effort = [], []
    for bounded in (True, False):
        search = PlacementSearch(plan, cost_model(H200, model, work))
        if not bounded:
            monkeypatch.setattr(search.lower_bound, "step_ns", lambda _: 0)
        timed = counted(monkeypatch, search, "time")
        found.append(search._fastest_whole(math.inf, search.plan))
        effort.append(len(timed))
    assert found[0] is not None
    assert found[0] == found[1]
    assert effort[0] < effort[1]
