"""Tests of gradients that are stored in 8 bits: codes, steps, savings and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from counted import Counted
from reference_step import Reference
from small_runs import SETTINGS as RUN
from small_runs import everything, run_of

from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer import coded_gradients
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.runtime.optimizer.blockwise import records
from megatrain.runtime.optimizer.coded_gradients import decoded, encode
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import BLOCK, CODED_GRADIENT_BYTES
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.verdict import advice
from megatrain.simulator.verdict.verdict import judge

STEPS = 4
KNOBS: list[dict[str, Any]] = [
    {"chunk_bytes": 4096},
    {"gradient_slots": 1, "state_slots": 1, "checkpoint_interval": 2},
    {"placement": Placement(gradients="all"), "chunk_bytes": 2**20},
    {"placement": Placement(host_updated="all"), "chunk_bytes": 8192},
    {"placement": Placement(gradients="e,1", weights="0,h", moments="1", host_updated="2")},
]


# ---- codes


def stored(gradient: torch.Tensor, seed: int = 0, number: int = 1, index: int = 0) -> torch.Tensor:
    made = torch.empty(records(gradient.numel()), dtype=torch.uint8)
    encode(gradient, made, seed, number, index)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_code_is_a_neighbour_and_has_no_error_on_average(dtype: torch.dtype) -> None:
    gradient = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    step = gradient.float().view(-1, BLOCK).abs().amax(1, keepdim=True) * 1.008 / 127
    read = torch.stack([decoded(stored(gradient, number=number)) for number in range(1, 401)])
    error = (read - gradient.float()).view(400, -1, BLOCK)
    assert (error.abs() <= step).all()
    # a code has a standard deviation of at most half a step, so their mean of at most 1/40
    assert (error.mean(0).abs() < 5 * step / 40).all()
    assert float(error.mean().abs() / step.mean()) < 0.005
    largest = gradient.float().abs().view(-1, BLOCK).argmax(1, keepdim=True)
    relative = read[0].view(-1, BLOCK).gather(1, largest) / gradient.view(-1, BLOCK).float().gather(
        1, largest
    )
    assert (relative - 1).abs().max() < 0.01


def test_codes_depend_on_seed_step_and_index_alone() -> None:
    gradient = torch.randn(2**17, generator=torch.Generator().manual_seed(0))
    whole = stored(gradient)
    for first in (0, BLOCK, 2**16 + 64):
        part = stored(gradient[first:], index=first)
        assert torch.equal(part, whole[records(first) :])
    for other in (stored(gradient, seed=1), stored(gradient, number=2), stored(gradient, index=64)):
        assert not torch.equal(other, whole)


def test_zeros_stay_zeros_and_what_is_not_finite_is_read_as_nan() -> None:
    for value in (math.inf, math.nan, 2.0**120):
        gradient = torch.zeros(2 * BLOCK)
        gradient[3] = value
        read = decoded(stored(gradient))
        assert read[:BLOCK].isnan().all()
        assert read[BLOCK:].tolist() == [0] * BLOCK


def test_encoding_and_decoding_move_the_predicted_bytes() -> None:
    count = 2**16
    for dtype in (torch.bfloat16, torch.float32):
        gradient = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
        made = torch.empty(records(count), dtype=torch.uint8)
        with Counted() as counted:
            encode(gradient, made, 0, 1, 0)
        assert 0.9 * CODED_GRADIENT_BYTES.encode < counted.moved / count
        assert counted.moved / count < CODED_GRADIENT_BYTES.encode + dtype.itemsize + 2
        assert counted.peak / count < CODED_GRADIENT_BYTES.temporary
        with Counted() as counted:
            decoded(made)
        assert 0.5 * CODED_GRADIENT_BYTES.decode < counted.moved / count
        assert counted.moved / count < CODED_GRADIENT_BYTES.decode
        assert counted.peak / count < CODED_GRADIENT_BYTES.temporary


# ---- steps


def planned(executable: Callable[..., Plan], knobs: dict[str, Any], **work: Any) -> Plan:
    return executable("overlapped", layers=3, gradients="8bit", **work, **knobs)


@pytest.mark.parametrize("work", [{}, {"dtype": "fp32"}, {"state": "master24"}], ids=str)
def test_every_plan_has_the_reference_s_bits(
    executable: Callable[..., Plan], session: Callable[..., Any], work: dict[str, Any]
) -> None:
    """Chunks, slots, placements and the place of updates change no bit."""
    reference: Reference | None = None
    wanted: list[tuple[float, float | None]] = []
    first: dict[str, bytes] = {}
    for knobs in KNOBS:
        plan = planned(executable, knobs, **work)
        with session(plan) as running:
            results = [running.step(number) for number in range(1, STEPS + 1)]
            state = everything(running)
            masters = {
                layer.name: running.state.masters(layer) for layer in plan.model.stack.values()
            }
            if reference is None:
                weights = random_weights(0)
                start = {
                    layer.name: {
                        t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors
                    }
                    for layer in plan.model.stack.values()
                }
                reference = Reference(
                    plan.model,
                    plan.workload,
                    config_of(plan.model),
                    running.executor.settings,
                    start,
                    torch.device("cpu"),
                )
                wanted = [
                    reference.step(running.batches(number), rate=1e-2, number=number)
                    for number in range(1, STEPS + 1)
                ]
                first = state
        assert [(made.loss, made.gradient_norm) for made in results] == wanted
        assert state == first
        for layer, tensors in masters.items():
            for name, master in tensors.items():
                assert torch.equal(master, reference.masters[layer][name]), (layer, name)


def test_the_first_update_is_near_that_of_exact_gradients(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """The norm is that of the gradients before they are encoded."""
    coded = planned(executable, {})
    exact = executable("overlapped", layers=3)
    found = []
    for plan in (coded, exact):
        with session(plan, settings=AdamW(max_norm=0.05, epsilon=1e-2)) as running:
            made = running.step(1)
            running.executor.flush_update()
            moments = running.state.tensors()["1.moments"][0].clone()
            found.append((made.loss, made.gradient_norm, moments))
    assert found[0][:2] == found[1][:2]
    difference = (found[0][2] - found[1][2]).norm() / found[1][2].norm()
    assert 0 < difference < 0.05


def test_an_update_decodes_few_elements_at_a_time(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded gradients are in no pool of the plan, so their memory does not grow with a layer."""
    counts: list[int] = []

    def counted(stored: torch.Tensor) -> torch.Tensor:
        found = decoded(stored)
        counts.append(found.numel())
        return found

    monkeypatch.setattr(coded_gradients, "CPU_BLOCK", 2**10)
    monkeypatch.setattr(coded_gradients, "decoded", counted)
    plan = planned(executable, KNOBS[2])
    assert max(layer.elements for layer in plan.model.decoders) > 2**12
    with session(plan) as running:
        running.step(1)
        running.executor.flush_update()
    assert max(counts) == 2**10
    assert sum(counts) >= sum(layer.elements for layer in plan.model.stack.values())


def test_a_run_resumes_under_another_plan(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path
) -> None:
    one, other = (planned(executable, KNOBS[index]) for index in (0, 4))
    with session(one) as running:
        for number in (1, 2):
            running.step(number)
        save(running.executor, run_of(2), tmp_path / "saved")
        wanted = running.step(3).loss, everything(running)
    with session(other) as running:
        restore(running.executor, tmp_path / "saved", RUN)
        assert (running.step(3).loss, everything(running)) == wanted


def test_an_evaluation_has_the_loss_of_the_next_step(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    for knobs in (KNOBS[1], KNOBS[3]):
        with session(planned(executable, knobs)) as running:
            running.step(1)
            found = running.executor.evaluate(running.batches(2))
            assert found.loss == running.step(2).loss


def test_a_step_that_is_not_finite_changes_nothing(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    for knobs in (KNOBS[0], KNOBS[2], KNOBS[3]):
        with session(planned(executable, knobs)) as running:
            running.step(1)
            before = everything(running)
            task = running.tasks["B1.m0"]
            target = running.executor.schedule.by_id["B1.m0"].writes[0]
            gradient = running.executor._arenas.flat(target, torch.bfloat16, 8)
            work = task.run
            task.run = lambda work=work, gradient=gradient: (work(), gradient.fill_(math.inf))
            with pytest.raises(FloatingPointError, match=r"^step 2: loss .*gradient norm inf"):
                running.step(2)
            assert everything(running) == before


# ---- what they save


def test_coded_gradients_take_half_of_the_memory_and_of_the_copies(
    executable: Callable[..., Plan],
) -> None:
    plan = planned(executable, KNOBS[0])
    exact = executable("overlapped", layers=3, **KNOBS[0])
    held, copied = [], []
    for each in (exact, plan):
        schedule = policies.lower(each)
        schedule.check()
        homes = [schedule.state["gradients", layer] for layer in plan.model.stack]
        held.append(sum(schedule.buffer[home].bytes for home in homes))
        copied.append(sum(op.bytes for op in schedule.ops if op.kind == "save_gradients"))
    elements = sum(layer.elements for layer in plan.model.stack.values())
    assert held == copied == [2 * elements, elements * 34 // 32]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_a_lower_bound_is_not_above_the_time(
    executable: Callable[..., Plan], knobs: dict[str, Any]
) -> None:
    plan = planned(executable, knobs)
    costs = cost_model(HardwareSpec.load("h200"), plan.model, plan.workload)
    assert PlacementSearch(plan, costs).least_ns() <= makespan_ns(policies.lower(plan), costs)


def test_coded_gradients_are_suggested_where_exact_ones_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("alternatives", "Adviser._more_memory"):
        monkeypatch.setattr(f"{advice.__name__}.{name}", lambda *_, **__: [])
    model, work = ModelSpec.load("qwen2.5-7b").with_layers(6), Workload(batch=1, sequence=1024)
    limits = {"device_limit": 8 * 2**30, "host_limit": 27 * 2**30}
    verdict = judge(model, HardwareSpec.load("h200"), work, policies=["overlapped"], **limits)
    assert not verdict.feasible
    (entry,) = [entry for entry in verdict.advice if "gradients" in entry.options]
    assert entry.options == {"gradients": "8bit"}
    assert entry.fits
    assert entry.note == "stores gradients in 8 bits, rounded at random"
    coded = msgspec.structs.replace(work, gradients="8bit")
    found = judge(model, HardwareSpec.load("h200"), coded, advise=False, **limits)
    assert (found.feasible, found.policy) == (True, "overlapped")
    assert entry.tokens_per_second == found.tokens_per_second


def test_a_plan_with_coded_gradients_gets_advice_that_it_can_follow(
    make_model: Callable[..., ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan has one micro-batch, and other clipping stores no gradients."""
    monkeypatch.setattr(advice, "alternatives", lambda *_, **__: [])
    model = make_model(layers=4, hidden=128, intermediate=256, head_dim=32, vocabulary=1024)
    work = Workload(batch=8, sequence=64, loss_chunk=512, gradients="8bit")
    hardware = HardwareSpec.load("h200")
    for device, fits in ((128, True), (64, False)):
        limit = device * 2**20 + hardware.library_bytes
        verdict = judge(model, hardware, work, device_limit=limit, host_limit=2**30)
        assert verdict.feasible is fits
        assert not {"accumulation", "policy"} & {key for e in verdict.advice for key in e.options}
        for entry in verdict.advice:
            assert entry.options.get("clipping") is None or entry.options["gradients"] == "exact"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"clipping": "layer"},
            r"found 8bit with clipping layer; allowed: 8bit with clipping glob",
        ),
        ({"accumulation": 2}, r"found 8bit with accumulation 2; allowed: 8bit with accumulation 1"),
        (
            {"optimizer": "other"},
            r"found 8bit with optimizer other; allowed: 8bit with optimizer a",
        ),
    ],
)
def test_a_workload_that_stores_no_single_gradient_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Workload(batch=1, sequence=8, gradients="8bit", **changes)


@pytest.mark.parametrize("policy", [*policies.names(), *policies.peers()])
@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_that_cannot_store_codes_refuses_the_plan(
    make_plan: Callable[..., Plan], policy: str, tied: bool
) -> None:
    plan = make_plan(policy, tied=tied, gradients="8bit")
    if policy == "overlapped" and not tied:
        assert policies.lower(plan).ops
        return
    for make in (policies.lower, policies.outline, policies.lower_for_timing):
        with pytest.raises(UserError, match=f"^policy {policy}: gradients: found 8bit"):
            make(plan)


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("work", [{}, {"state": "bf16-sr"}], ids=str)
def test_every_plan_has_the_same_bits_on_a_gpu(
    executable: Callable[..., Plan], session: Callable[..., Any], work: dict[str, Any]
) -> None:
    sizes = {
        "hidden": 256,
        "intermediate": 512,
        "head_dim": 64,
        "device_limit_bytes": 2**32,
        "host_limit_bytes": 2**32,
    }
    more = [
        {"chunk_bytes": 2**17, "weights_ahead": 1},
        {"placement": Placement(weights="all", master_low="all", moments="all", gradients="all")},
        {"placement": Placement(saved_activations="all"), "state_slots": 3},
    ]
    first = None
    for knobs in [*KNOBS, *more]:
        plan = planned(executable, {**knobs, **sizes}, **work)
        with Executor(
            plan,
            config_of(plan.model),
            AdamW(max_norm=0.5, weight_decay=0.1),
            torch.device("cuda", 0),
            schedule=policies.lower(plan),
        ) as executor:
            executor.state.load(random_weights(0))
            with session(executable("resident", layers=3)) as other:
                drawn = [other.batches(number) for number in range(1, 7)]
            results = [
                executor.step(batches, rate=1e-2, number=number)
                for number, batches in enumerate(drawn, 1)
            ]
            executor.flush_update()
            values = [(made.loss, made.gradient_norm) for made in results]
            state = {name: tensor.cpu() for name, tensor in executor.state.tensors().items()}
        first = first or (values, state)
        assert values == first[0], knobs
        for name, tensor in state.items():
            bits = (each.contiguous().view(torch.uint8) for each in (tensor, first[1][name]))
            assert torch.equal(*bits), (knobs, name)


@pytest.mark.cuda
def test_a_gpu_has_the_codes_of_the_cpu() -> None:
    gradient = torch.randn(2**20 + 64, generator=torch.Generator().manual_seed(0))
    for values in (gradient, gradient.bfloat16()):
        on_gpu = torch.empty(records(len(values)), dtype=torch.uint8, device="cuda")
        encode(values.cuda(), on_gpu, 5, 7, 96)
        on_cpu = stored(values, 5, 7, 96)
        assert torch.equal(on_gpu.cpu(), on_cpu)
        assert torch.equal(decoded(on_gpu).cpu(), decoded(on_cpu))
