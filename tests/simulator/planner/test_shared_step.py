"""Tests of the search for the best plan for several GPUs."""

from __future__ import annotations

import msgspec
import pytest
import small_model

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, cost_model, costs_of
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess, exchanged_bytes, with_knobs
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import plans_of, search
from megatrain.simulator.planner.shared_step import alone, of_all, shared_step, shares
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.arithmetic import part_elements
from megatrain.simulator.schedule.plan import Knobs, Plan

# The limits of small models leave no room for what NCCL keeps on each GPU.
H200 = msgspec.structs.replace(
    HardwareSpec.load("h200"), collective_bytes=0, collective_peer_bytes=0
)
GIB = 2**30


@pytest.fixture(scope="module")
def one() -> Plan:
    """Returns the best plan of `overlapped` for one GPU with 4 GiB."""
    work = Workload(batch=8, sequence=1024, accumulation=2)
    model = small_model.SMALL.with_layers(6)
    return search(model, H200, work, device_limit=4 * GIB, policies=["overlapped"])[0].plan


def speed(choice: Choice) -> float:
    """Returns tokens per second, or 0 if the plan does not fit."""
    return choice.plan.workload.step_tokens / choice.step_seconds if choice.feasible else 0.0


def limited(plan: Plan, gib: float) -> Plan:
    return msgspec.structs.replace(plan, device_limit_bytes=int(gib * GIB))


def test_a_shared_step_is_a_plan_that_ranks_can_execute(one: Plan) -> None:
    """It has N times the micro-batches, its own prediction, and an N-th of the host's memory."""
    choice = shared_step(one, H200, 4)
    plan = choice.plan
    assert (plan.gpus, plan.workload.accumulation, plan.micro_batches) == (4, 8, 2)
    assert plan.host_limit_bytes == one.host_limit_bytes // 4
    assert plan.knobs.micro_batch_group == plan.workload.sum_group
    assert verified(plan).digest == plan.digest
    costs = cost_model(H200, plan.model, plan.workload, 4)
    assert assess(plan, costs).step_seconds == choice.step_seconds
    assert choice.feasible
    assert {op.lane for op in verified(plan).ops} >= {"exchange", "h2d", "d2h"}


def test_the_knobs_of_the_given_plan_do_not_matter(one: Plan) -> None:
    other = msgspec.structs.replace(one, knobs=Knobs(), digest="", prediction=None)
    assert shared_step(other, H200, 2) == shared_step(one, H200, 2)


def test_where_memory_suffices_each_gpu_keeps_its_part_of_all_state(one: Plan) -> None:
    """Then nothing is copied to or from the host. With a quarter of the state, this takes less
    memory than on one GPU.
    """
    choice = shared_step(limited(one, 80), H200, 4)
    assert {op.lane for op in verified(choice.plan).ops} == {"compute", "update", "exchange"}
    assert not choice.streams
    assert choice.account.host_peak_bytes == 0
    lean = shared_step(one, H200, 4).plan
    state = sum(
        len(lean.placed(name)) for name in ("weights", "master_low", "moments", "gradients")
    )
    alone = sum(len(one.placed(name)) for name in ("weights", "master_low", "moments", "gradients"))
    assert state > alone


def test_a_model_that_is_too_large_for_one_gpu_fits_on_four() -> None:
    """The host has no memory for the state, and one GPU has not enough."""
    model = small_model.SMALL.with_layers(6)
    (plan,) = plans_of(
        model,
        H200,
        Workload(batch=1, sequence=256),
        device_limit=4 * GIB,
        host_limit=GIB // 4,
        policies=["overlapped"],
    )
    assert [shared_step(plan, H200, count).feasible for count in (2, 4)] == [False, True]


@pytest.mark.parametrize("gib", [3, pytest.param(5, marks=pytest.mark.nightly), 20])
def test_more_gpus_or_memory_never_make_a_plan_slower(one: Plan, gib: int) -> None:
    alone = search(one.model, H200, one.workload, device_limit=gib * GIB, policies=["overlapped"])[
        0
    ]
    speeds = [speed(alone), *(speed(shared_step(limited(one, gib), H200, n)) for n in (2, 4, 8))]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 0
    more = [speed(shared_step(limited(one, gib * factor), H200, 2)) for factor in (1, 1.1, 1.5)]
    assert more[1] > 0.995 * more[0]
    assert more[2] > 0.995 * more[1]


def test_gradients_are_exchanged_in_larger_pieces_if_that_is_faster() -> None:
    """Each piece waits for the matrix product under way, and smaller pieces wait more often."""
    hardware = HardwareSpec.load("h100-sxm")
    assert hardware.turns
    (plan,) = plans_of(
        ModelSpec.load("qwen2.5-7b").with_layers(4),
        hardware,
        Workload(batch=16, sequence=1024, compiled=True),
        policies=["overlapped"],
    )
    chosen = shared_step(plan, hardware, 4).plan
    whole = 4 * 2 * part_elements(chosen, "1")
    assert whole // 2 <= chosen.knobs.exchange_bytes <= whole
    costs = cost_model(hardware, chosen.model, chosen.workload, 4)
    times = [
        assess(with_knobs(chosen, exchange_bytes=room), costs).step_seconds
        for room in (2**24, chosen.knobs.exchange_bytes)
    ]
    assert times[1] < 0.99 * times[0]
    assert plan.knobs.exchange_bytes == alone(chosen, hardware).knobs.exchange_bytes == 0


def test_a_plan_that_exchanges_whole_gradients_is_found_without_a_climb_to_it() -> None:
    """On two H200, the search for 14B that begins with pieces ends 2 % above this plan."""
    machine = HardwareSpec.load("h200")
    work = Workload(batch=32, sequence=1024, compiled=True, attention="cudnn", loss_chunk=4096)
    plan = Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        device_limit_bytes=machine.device_bytes,
        host_limit_bytes=240 * 2**30,
        model=ModelSpec.load("qwen2.5-14b"),
        workload=work,
    )
    first = of_all(plan, machine, 2)
    costs = costs_of(first, machine)
    found = {
        room: PlacementSearch(with_knobs(first, exchange_bytes=room), costs).best()
        for room in (first.knobs.exchange_bytes, exchanged_bytes(first))
    }
    pieces, whole = (entry.step_seconds for entry in found.values() if entry)
    assert whole < pieces
    assert shared_step(plan, machine, 2).step_seconds <= whole


def test_layers_may_stay_in_their_slots_instead_of_saving_activations() -> None:
    """A layer that stays in its slot is not gathered again for the backward pass. All state is on
    the devices, and its layers pass through slots, too.
    """
    (plan,) = plans_of(
        ModelSpec.load("qwen2.5-0.5b").with_layers(8),
        H200,
        Workload(batch=1, sequence=4096, accumulation=4),
        policies=["overlapped"],
    )
    less, more = (shared_step(limited(plan, gib), H200, 4) for gib in (6, 6.3))
    assert more.plan.placed("weights") == set(plan.model.stack)
    assert more.plan.knobs.weight_slots > 2
    assert speed(more) > 0.995 * speed(less) > 0


def test_if_no_placement_fits_the_plans_that_need_the_least_memory_are_tried(
    one: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep on the device what the host cannot hold. The search is replaced, because its plans
    fail only in narrow ranges of memory.
    """
    monkeypatch.setattr("megatrain.simulator.planner.shared_step.fastest", lambda _: None)
    short = msgspec.structs.replace(one, host_limit_bytes=4 * GIB)
    assert not shared_step(limited(short, 1), H200, 2).feasible
    monkeypatch.setattr(PlacementSearch, "nearest_miss", None)  # it is not called
    choice = shared_step(short, H200, 2)
    assert choice.feasible
    assert choice.plan.knobs.placement.weights
    verified(choice.plan).check()


def test_those_plans_have_no_groups_or_one_group(
    one: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they do, whatever size of groups the search tried first."""
    tried: list[int] = []

    def none_fits(plan: Plan, *_: object) -> None:
        tried.append(plan.knobs.micro_batch_group)

    monkeypatch.setattr("megatrain.simulator.planner.shared_step.fitting", none_fits)
    monkeypatch.setattr(
        PlacementSearch, "rough_ns", lambda self: abs(self.plan.knobs.micro_batch_group - 2)
    )
    many = msgspec.structs.replace(
        limited(one, 0.5),
        workload=msgspec.structs.replace(one.workload, accumulation=4),
        host_limit_bytes=GIB,
    )
    assert not shared_step(many, H200, 2).feasible
    assert tried == [1, 4]


def test_the_search_takes_about_as_long_as_for_one_gpu(
    one: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ops of all simulated schedules are at most 2.5 times as many as for one GPU."""
    simulated = list[int]()

    def counted(schedule: Schedule, costs: CostModel) -> int:
        simulated.append(len(schedule.compiled.lanes))
        return makespan_ns(schedule, costs)

    monkeypatch.setattr("megatrain.simulator.planner.known_plans.expected_ns", counted)
    search(one.model, H200, one.workload, device_limit=4 * GIB, policies=["overlapped"])
    alone = sum(simulated)
    for count in (2, 4, 8):
        simulated.clear()
        shared_step(one, H200, count)
        assert 0 < sum(simulated) <= 2.5 * alone, count


def test_tied_embeddings_share_a_step_without_groups() -> None:
    """Their gradients are added one micro-batch at a time, so no group of them is tried."""
    config = {**small_model.SMALL.config, "num_hidden_layers": 2, "tie_word_embeddings": True}
    model = ModelSpec(name="tied", config=config)
    work = Workload(batch=1, sequence=256, accumulation=2)
    (one,) = search(model, H200, work, policies=["overlapped"])
    assert shares(one.plan, 2)
    plan = shared_step(one.plan, H200, 2).plan
    assert (plan.knobs.micro_batch_group, plan.workload.sum_group) == (1, 1)


def test_other_policies_and_models_cannot_share_a_step(one: Plan) -> None:
    assert shares(one, 2)
    model = small_model.SMALL.with_layers(6)
    (resident,) = search(model, H200, one.workload, policies=["resident"])
    assert not shares(resident.plan, 2)
    with pytest.raises(UserError, match="policy resident: gpus: found 2"):
        shared_step(resident.plan, H200, 2)


def test_a_step_with_too_many_micro_batches_is_estimated_or_refused(one: Plan) -> None:
    """`check` estimates the step from the plan for one GPU. `plan` names the allowed number."""
    work = msgspec.structs.replace(one.workload, accumulation=300)
    many = msgspec.structs.replace(one, workload=work, digest="")
    assert shares(many, 2)
    assert not shares(many, 4)
    with pytest.raises(
        UserError,
        match="found 300 micro-batches on each of 4 GPUs; allowed: 256, which is 1,024 in a step;",
    ):
        shared_step(many, H200, 4)


def test_low_halves_may_have_the_memory_before_gradients() -> None:
    """Copies of the state delay the forward pass. Gradients leave earlier, beside the backward
    pass. A plan that kept gradients on the GPUs is predicted to be 2.7 % slower.
    """
    work = Workload(batch=32, sequence=1024, compiled=True)
    machine = HardwareSpec.load("h200")
    limits = {"device_limit": 24 * GIB, "host_limit": 480 * GIB}
    (alone,) = plans_of(
        ModelSpec.load("qwen2.5-7b"), machine, work, policies=["overlapped"], **limits
    )
    plan = shared_step(alone, machine, 4).plan
    halves, gradients = len(plan.placed("master_low")), len(plan.placed("gradients"))
    assert halves > gradients
    placement = msgspec.structs.replace(
        plan.knobs.placement, master_low="0-1,h", gradients="e,0-20,h"
    )
    other = assess(with_knobs(plan, placement=placement), costs_of(plan, machine))
    assert plan.prediction is not None
    assert other.step_seconds > 1.01 * plan.prediction.step_seconds
