"""Tests of the choice of the loss chunk: it is fast, it fits, and measured chunks are preferred."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.batch_splits import best_split
from megatrain.simulator.planner.capacity import usable
from megatrain.simulator.planner.loss_chunk import _step_ns, least_chunks, with_loss_chunk
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import candidates, plans_of
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.verdict import explain, judge

GIB = 2**30
HALF = ModelSpec.load("qwen2.5-0.5b")
H200 = HardwareSpec.load("h200")
MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen3-0.6b")
MACHINES = ("h200", "rtx4090", "rtx3080-10gb", "a100-40")


def with_chunk(work: Workload, chunk: int) -> Workload:
    return msgspec.structs.replace(work, loss_chunk=chunk)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_chunk_is_faster_under_a_full_search(seed: int) -> None:
    """The choice compares lower bounds, so another chunk may be 1 % faster."""
    draw = random.Random(seed)
    model = ModelSpec.load(draw.choice(MODELS))
    hardware = HardwareSpec.load(draw.choice(MACHINES))
    rows = draw.choice((2, 4, 8))
    work = Workload(batch=rows, sequence=1024, accumulation=draw.choice((1, 1, 3)))
    limit = round(hardware.device_bytes * draw.choice((0.3, 0.6, 1)))
    chosen = with_loss_chunk(model, hardware, work, device_limit=limit)

    def seconds(chunk: int) -> float:
        found = candidates(model, hardware, with_chunk(work, chunk), device_limit=limit)[0]
        return found.step_seconds if found.feasible else float("inf")

    best = min(seconds(2**power) for power in range(7, 14) if 2**power < 2 * work.tokens)
    assert seconds(chosen.loss_chunk) <= 1.01 * best


def test_memory_for_the_plan_counts_more_than_a_faster_head() -> None:
    """With 2,048 tokens, the lowest bound of all placements is lower, but no plan is near it."""
    model, machine = ModelSpec.load("gemma-2-9b"), HardwareSpec.load("rtx4090")
    work = Workload(batch=16, sequence=1024, documents=True)
    chosen = with_loss_chunk(model, machine, work, host_limit=192 * GIB, policies=["overlapped"])
    assert chosen.loss_chunk == 1024


@pytest.mark.parametrize(
    ("tokens", "batch"),
    [
        pytest.param(8192, 1, id="long"),
        pytest.param(1024, 2, id="short", marks=pytest.mark.nightly),
    ],
)
def test_a_plan_fits_wherever_one_fits_with_the_smallest_chunk(tokens: int, batch: int) -> None:
    """Chunks are small where memory is, until nothing fits."""
    work, seen = Workload(batch=batch, sequence=tokens), []
    for size in (4 * GIB, 5 * GIB // 2, 2 * GIB):
        fits = []
        for small in least_chunks(work, H200):
            (plan,) = plans_of(HALF, H200, small, device_limit=size, policies=["overlapped"])
            footprints = list(usable(plan, H200, cost_model(H200, HALF, small), ["overlapped"]))
            fits += [footprint.account().fits for footprint in footprints]
        chosen = with_loss_chunk(HALF, H200, work, device_limit=size, policies=["overlapped"])
        found = candidates(HALF, H200, chosen, device_limit=size, policies=["overlapped"])[0]
        assert found.feasible == any(fits)
        assert found.feasible or chosen == work
        seen.append((found.feasible, chosen.loss_chunk))
    assert [feasible for feasible, _ in seen] == [True, True, False]
    assert max(chunk for feasible, chunk in seen if feasible) <= 512


@pytest.mark.parametrize(
    ("name", "machine", "batch", "share", "gain"),
    [
        ("qwen3-0.6b", "a100-40", 2, 0.1, 0.2),
        ("qwen3-0.6b", "rtx4090", 2, 0.35, 0.07),
        ("llama-3.1-8b", "rtx4090", 8, 0.35, 0.06),
        ("qwen3-0.6b", "rtx4090", 2, 0.6, 0.0),  # 512 tokens would be 2 % slower
        ("olmoe-1b-7b", "h200", 2, 0.1, 0.0),
    ],
)
def test_chunks_below_1024_tokens_are_chosen_if_they_are_clearly_faster(
    name: str, machine: str, batch: int, share: float, gain: float
) -> None:
    """Their logits leave memory for state, which counts where memory is short."""
    model, hardware = ModelSpec.load(name), HardwareSpec.load(machine)
    work = Workload(batch=batch, sequence=1024, documents=True, short_recompute=True)
    limits = {"device_limit": int(share * hardware.device_bytes), "host_limit": 256 * GIB}
    chosen = with_loss_chunk(model, hardware, work, **limits)
    assert (chosen.loss_chunk < 1024) == (gain > 0)
    ours, usual = (
        candidates(model, hardware, each, **limits)[0].step_seconds
        for each in (chosen, with_chunk(work, 1024))
    )
    assert ours <= (1 - gain) * usual


def test_a_micro_batch_in_one_chunk_may_need_less_memory_than_in_small_ones() -> None:
    """Several chunks sum their gradients in fp32."""
    mac, model = HardwareSpec.load("ryzen-ai-max-395-128gb"), ModelSpec.load("qwen3-8b")
    verdict = judge(model, mac, Workload(batch=1, sequence=1024, loss_chunk=128), advise=False)
    assert not verdict.feasible
    chosen = with_loss_chunk(model, mac, Workload(batch=1, sequence=1024, loss_chunk=128))
    choice = candidates(model, mac, chosen)[0]
    assert choice.feasible
    assert (explain(choice, mac, advise=False, chunk_chosen=True).longest_context or 0) >= 1024


def test_a_given_chunk_limits_the_longest_context() -> None:
    """Smaller chunks are only counted on where the planner chooses them."""
    work, limits = Workload(batch=1, sequence=2048, loss_chunk=8192), {"device_limit": 12 * GIB}
    choice = candidates(HALF, H200, work, **limits, policies=["overlapped"])[0]
    assert choice.feasible
    given, chosen = (
        explain(choice, H200, ["overlapped"], advise=False, marginal=False, **known).longest_context
        for known in ({}, {"chunk_chosen": True})
    )
    assert given is not None
    assert chosen is not None
    assert 2048 <= given < 8192 < chosen


def test_more_memory_is_used_for_a_larger_chunk() -> None:
    work = Workload(batch=16, sequence=1024)
    sizes = (HALF.parameters * factor for factor in (8, 40, 200))
    chunks = [with_loss_chunk(HALF, H200, work, device_limit=size).loss_chunk for size in sizes]
    assert chunks == sorted(chunks)
    assert chunks[0] < chunks[-1]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_chunk_is_timed_with_single_micro_batches_and_with_the_largest_groups(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """Several GPUs sum the gradients of a group before they exchange the sum."""
    plan, timed = make_plan("overlapped", gpus=gpus, accumulation=4 * gpus), list[Plan]()
    costs = cost_model(H200, plan.model, plan.workload, gpus)

    def first_ns(search: PlacementSearch, _: float) -> float:
        timed.append(search.plan)
        return 1.0

    monkeypatch.setattr(PlacementSearch, "first_ns", first_ns)
    assert _step_ns(plan, costs, math.inf) == 1.0
    groups = [(each.knobs.micro_batch_group, each.workload.sum_group) for each in timed]
    assert groups == [(1, 1), (4, 1 if gpus == 1 else 4)]


CALIBRATED = "experiments/results/h200-heldout/hardware.toml"


def calibrated(chunk: int) -> HardwareSpec:
    """Returns an H200 that was measured with these loss chunks, in tokens. 0 means unknown."""
    hardware = HardwareSpec.load(CALIBRATED)
    assert hardware.costs
    assert hardware.costs.loss_chunk == 2048
    costs = msgspec.structs.replace(hardware.costs, loss_chunk=chunk)
    return msgspec.structs.replace(hardware, costs=costs)


def test_a_chunk_that_was_measured_is_preferred_to_a_derived_one() -> None:
    model, work = ModelSpec.load("qwen2.5-3b"), Workload(batch=12, sequence=2048)
    for chunk in (2048, 4096):
        assert with_loss_chunk(model, calibrated(chunk), work).loss_chunk == chunk
    # but where nothing fits with it, or where it is much slower
    small = with_loss_chunk(model, calibrated(2**20), work, device_limit=16 * GIB)
    assert small.loss_chunk < 2**15
    assert with_loss_chunk(model, calibrated(128), work).loss_chunk >= 1024


@pytest.mark.parametrize(("factor", "expected"), [(0.9, 1024), (1.1, 2048)])
def test_the_faster_of_two_measured_chunks_is_chosen(factor: float, expected: int) -> None:
    """The measured time of the head counts, and not that of the datasheet."""
    model, hardware = ModelSpec.load("qwen2.5-3b"), calibrated(2048)
    work = Workload(batch=12, sequence=2048)
    shape = f"{model.shape}/{work.shape}"
    assert hardware.costs
    duration = round(factor * hardware.costs.compute["head"][shape][1])
    head = hardware.costs.workspace[shape].head
    heads = {shape: ((1024, duration, head), (4096, 2 * duration, head))}
    costs = msgspec.structs.replace(hardware.costs, heads=heads)
    measured = msgspec.structs.replace(hardware, costs=costs)
    assert with_loss_chunk(model, measured, work).loss_chunk == expected


def test_a_calibration_that_does_not_say_its_chunk_keeps_the_default() -> None:
    model, work = ModelSpec.load("qwen2.5-3b"), Workload(batch=12, sequence=2048)
    assert with_loss_chunk(model, calibrated(0), work) == work


def test_a_short_micro_batch_is_one_chunk() -> None:
    work = Workload(batch=1, sequence=100)
    assert with_loss_chunk(HALF, H200, work).loss_chunk == work.loss_chunk >= work.tokens


def test_a_policy_of_another_system_keeps_the_chunk() -> None:
    work = Workload(batch=16, sequence=1024, loss_chunk=300)
    assert with_loss_chunk(HALF, H200, work, policies=["zero3_offload"]) == work


@pytest.mark.parametrize("policy", ["k_buffer", "resident"])
def test_a_policy_that_does_not_place_state_takes_the_fastest_chunk(policy: str) -> None:
    work = Workload(batch=8, sequence=1024)
    chosen = with_loss_chunk(HALF, H200, work, policies=[policy])
    times = {
        chunk: candidates(HALF, H200, with_chunk(work, chunk), policies=[policy])[0].step_seconds
        for chunk in (1024, chosen.loss_chunk)
    }
    assert chosen.loss_chunk > 1024
    assert times[chosen.loss_chunk] == min(times.values())


def test_one_memory_has_the_lower_of_both_limits() -> None:
    mac, work = HardwareSpec.load("apple-m4-max"), Workload(batch=8, sequence=1024)
    limits = [{"device_limit": 16 * GIB}, {"host_limit": 16 * GIB}]
    found = {with_loss_chunk(HALF, mac, work, **each).loss_chunk for each in limits}
    assert len(found) == 1


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UserError, match="fastest"):
        with_loss_chunk(HALF, H200, Workload(batch=1, sequence=64), policies=["fastest"])


def test_every_split_gets_its_own_chunk() -> None:
    work = Workload(batch=1, sequence=1024)
    given = best_split(HALF, H200, work, 8192, policies=["overlapped"])[0]
    found = best_split(HALF, H200, work, 8192, policies=["overlapped"], choose_chunk=True)[0]
    assert given.plan.workload.loss_chunk == work.loss_chunk
    again = with_loss_chunk(HALF, H200, found.plan.workload, policies=["overlapped"])
    assert found.plan.workload == again
    assert found.step_seconds <= given.step_seconds


@pytest.mark.parametrize(
    ("model", "machine", "rows", "share", "chunk"),
    [
        # A micro-batch of 1,024 tokens fits at once, and its logits leave no memory for state.
        ("qwen2.5-0.5b", "rtx4090", 1, 0.15, 512),
        # The first plan with 512 tokens is the faster one, and the best plan has 1,024.
        pytest.param("qwen2.5-1.5b", "a100-40", 8, 0.15, 1024, marks=pytest.mark.nightly),
    ],
)
def test_a_chunk_below_1024_tokens_is_faster_in_a_whole_search(
    model: str, machine: str, rows: int, share: float, chunk: int
) -> None:
    spec, hardware = ModelSpec.load(model), HardwareSpec.load(machine)
    work = Workload(batch=rows, sequence=1024, accumulation=4, documents=True)
    limits = {"device_limit": int(share * hardware.device_bytes), "host_limit": 256 * GIB}
    seconds = {
        size: candidates(spec, hardware, with_chunk(work, size), **limits)[0].step_seconds
        for size in (512, 1024)
    }
    assert min(seconds, key=seconds.__getitem__) == chunk
    assert max(seconds.values()) > 1.01 * min(seconds.values())
    assert with_loss_chunk(spec, hardware, work, **limits).loss_chunk == chunk


def test_the_chunk_is_kept_if_nothing_fits() -> None:
    model, hardware = ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load("rtx4090")
    work = Workload(batch=1, sequence=256, loss_chunk=100)
    limits = {"device_limit": 2**28, "host_limit": 2**28}
    assert with_loss_chunk(model, hardware, work, **limits) == work
