"""Tests of clipping by `adagc`: its arithmetic, and steps beyond its warm-up under several plans.

The cases have sums of gradients, state formats, frozen tensors, checkpoints and values that are not
finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_step import Reference
from small_runs import SETTINGS as RUN
from small_runs import everything, run_of

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.moving_norms import clip
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

STEPS, WARM_UP = 12, 5
SETTINGS = AdamW(
    max_norm=0.05,
    weight_decay=0.1,
    adagc_warm_up=WARM_UP,
    groups=(GroupSettings(match="*k_proj*", rate_factor=0),),
)
"""The keys are frozen, so their gradients are zero in every step."""
HALF = Placement(weights="0,h", moments="e,1", master_low="2", gradients="2", host_updated="1,h")
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("sequential", {}),
    ("double_buffer", {}),
    ("resident", {}),
    ("overlapped", {"chunk_bytes": 4096}),
    ("overlapped", {"weights_ahead": 1, "gradient_slots": 1, "state_slots": 1}),
    ("overlapped", {"placement": Placement(host_updated="all"), "chunk_bytes": 2**20}),
    ("overlapped", {"placement": HALF, "device_limit_bytes": 2**25}),
]
GROUPED: list[tuple[str, dict[str, Any]]] = [
    ("overlapped", {"micro_batch_group": group, "placement": placement})
    for group, placement in ((2, Placement()), (4, HALF))
]


# ---- arithmetic


def expected(
    norms: list[list[float]], settings: AdamW
) -> tuple[list[list[float]], list[list[float]]]:
    """Returns factors and moving norms of each step and tensor by the authors' code, in fp64."""
    moving, factors, kept = [0.0] * len(norms[0]), [], []
    for number, sizes in enumerate(norms, 1):
        row = []
        for index, (size, before) in enumerate(zip(sizes, moving, strict=True)):
            warming = number <= settings.adagc_warm_up
            limit = settings.max_norm if warming else settings.adagc_factor * before
            row.append(min(1.0, limit / size))
            if warming:
                moving[index] = min(before or math.inf, row[-1] * size)
            else:
                decay = settings.adagc_decay
                moving[index] = decay * before + (1 - decay) * row[-1] * size
        factors.append(row)
        kept.append(list(moving))
    return factors, kept


def test_clipping_follows_the_authors_rule_for_each_tensor() -> None:
    settings = AdamW(adagc_warm_up=10, max_norm=1.0)
    sizes = torch.rand(40, 6, generator=torch.Generator().manual_seed(1)).mul_(2).add_(0.01)
    factors, kept = expected(sizes.tolist(), settings)
    moving = torch.zeros(6)
    for number, norms in enumerate(sizes, 1):
        factor, moving = clip(norms * norms, moving, settings=settings, number=number)
        torch.testing.assert_close(factor, torch.tensor(factors[number - 1]))
        torch.testing.assert_close(moving, torch.tensor(kept[number - 1]))
    assert min(min(row) for row in factors[10:]) < 0.5
    assert max(max(row) for row in factors[10:]) == 1


def test_a_gradient_of_zeros_leaves_the_moving_norm() -> None:
    """Otherwise a moving norm of 0 would clip every later gradient to zero."""
    settings = AdamW(adagc_warm_up=2)
    moving = torch.tensor([0.0, 0.5])
    for number in (1, 2, 3):
        factor, moving = clip(torch.zeros(2), moving, settings=settings, number=number)
        assert factor.tolist() == [1, 1]
        assert moving.tolist() == [0, 0.5]
    factor, moving = clip(torch.tensor([16.0, 0.0]), moving, settings=settings, number=4)
    assert factor.tolist() == [0.25, 1]
    assert moving.tolist() == [1, 0.5]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("number", [1, 9])
def test_a_norm_that_is_not_finite_makes_all_factors_of_the_layer_nan(
    bad: float, number: int
) -> None:
    sums, moving = torch.tensor([1.0, bad, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    factor, _ = clip(sums, moving, settings=AdamW(adagc_warm_up=3), number=number)
    assert factor.isnan().all()


# ---- steps


def drawn(plan: Plan, steps: int = STEPS) -> list[list[Batch]]:
    """Returns the batches of every step. Every third step has few labels, so norms differ."""
    work, generator = plan.workload, torch.Generator().manual_seed(3)
    made = []
    for number in range(steps):
        shape = (work.accumulation, 2, work.batch, work.sequence)
        tokens = torch.randint(plan.model.vocabulary, shape, generator=generator)
        if number % 3 == 1:
            tokens[:, 1, :, 2:] = IGNORED
        made.append([Batch(ids, labels) for ids, labels in tokens])
    return made


def trained(
    session: Callable[..., Any], plan: Plan
) -> tuple[list[Any], dict[str, bytes], dict[str, dict[str, torch.Tensor]]]:
    """Returns the loss, norm and factor of each step, and the state after the last step.

    The state is given as a whole, and as master weights by layer and tensor.
    """
    with session(plan, settings=SETTINGS) as running:
        results = [
            running.executor.step(batches, rate=1e-2, number=number)
            for number, batches in enumerate(drawn(plan), 1)
        ]
        masters = {layer.name: running.state.masters(layer) for layer in plan.model.stack.values()}
        values = [(made.loss, made.gradient_norm, made.clip_factor) for made in results]
        return values, everything(running), masters


@pytest.mark.parametrize(
    ("work", "plans"),
    [
        ({}, PLANS),
        ({"dtype": "fp32", "accumulation": 4}, [PLANS[1], PLANS[3], GROUPED[1]]),
        ({"accumulation": 4}, GROUPED),
        ({"state": "master24"}, PLANS[2::2]),
        ({"state": "bf16-sr", "accumulation": 4}, [PLANS[1], *GROUPED]),
        ({"optimizer": "muon"}, PLANS[2:4]),
    ],
    ids=["bf16", "fp32", "grouped", "master24", "bf16-sr", "muon"],
)
def test_every_plan_has_the_reference_s_bits_after_the_warm_up(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    work: dict[str, Any],
    plans: list[tuple[str, dict[str, Any]]],
) -> None:
    """12 steps with a warm-up of 5 steps have the bits of plain PyTorch on the whole model."""
    first = executable(plans[0][0], layers=3, clipping="adagc", **work, **plans[0][1])
    weights = random_weights(0)
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in first.model.stack.values()
    }
    config = config_of(first.model)
    cpu = torch.device("cpu")
    reference = Reference(first.model, first.workload, config, SETTINGS, masters, cpu)
    wanted = []
    for number, batches in enumerate(drawn(first), 1):
        loss, norm = reference.step(batches, rate=1e-2, number=number)
        wanted.append((loss, norm, reference.clip_factor))
    least = [factor for _, _, factor in wanted]
    assert max(least[:WARM_UP]) < 1, "every step of the warm-up clips"
    assert min(least[WARM_UP:]) < 0.9, "steps after the warm-up clip"
    kept = {
        f"{layer.name}.moving_norms": torch.stack(
            [reference.moving.get((layer.name, t.name), torch.zeros(())) for t in layer.tensors]
        )
        for layer in first.model.stack.values()
    }
    assert any((each == 0).any() for each in kept.values()), "frozen tensors have no moving norm"
    state = None
    for name, knobs in plans:
        plan = executable(name, layers=3, clipping="adagc", **work, **knobs)
        results, found, weights_found = trained(session, plan)
        assert results == wanted
        assert found == (state := state or found)
        for layer, tensors in weights_found.items():
            for key, master in tensors.items():
                assert torch.equal(master, reference.masters[layer][key]), (layer, key)
        for key, norms in kept.items():
            assert found[key] == norms.view(torch.uint8).numpy().tobytes(), key


def test_a_run_resumes_within_and_after_the_warm_up(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path
) -> None:
    plans = [
        executable(name, layers=3, clipping="adagc", state="master24", **knobs)
        for name, knobs in (PLANS[4], PLANS[1], PLANS[6])
    ]
    batches = drawn(plans[0])
    *wanted, _ = trained(session, plans[0])
    results = []
    for plan, (first, end) in zip(plans, itertools.pairwise((0, 3, 8, STEPS)), strict=True):
        with session(plan, settings=SETTINGS) as running:
            if first:
                assert restore(running.executor, tmp_path / str(first), RUN) == run_of(first)
            for number in range(first + 1, end + 1):
                made = running.executor.step(batches[number - 1], rate=1e-2, number=number)
                results.append((made.loss, made.gradient_norm, made.clip_factor))
            save(running.executor, run_of(end), tmp_path / str(end))
            state = everything(running)
    assert [results, state] == wanted


@pytest.mark.parametrize("policy", policies.names())
def test_a_step_that_is_not_finite_leaves_the_moving_norms(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str
) -> None:
    """A loss that is not finite changes no state.

    A gradient that is not finite changes no state of its layer.
    """
    plan = executable(policy, layers=3, clipping="adagc", state="bf16-sr")
    batches = drawn(plan)

    def broken(op: str, written: int, value: float) -> tuple[dict[str, bytes], dict[str, bytes]]:
        with session(plan, settings=SETTINGS) as running:
            for number in (1, 2):
                running.executor.step(batches[number], rate=1e-2, number=number)
            before = everything(running)
            task, target = running.tasks[op], running.executor.schedule.by_id[op].writes[written]
            memory = running.executor._arenas.flat(target, torch.bfloat16, 8)
            work = task.run
            task.run = lambda: (work(), memory.fill_(value))
            with pytest.raises(FloatingPointError, match=r"^step 3: loss .*: not finite"):
                running.executor.step(batches[3], rate=1e-2, number=3)
            return before, everything(running)

    before, after = broken("F1.m0", 0, math.nan)
    assert after == before
    before, after = broken("B1.m0", 0, math.inf)
    changed = {name.partition(".")[0] for name in before if after[name] != before[name]}
    assert changed == set(plan.model.stack) - {"1"}
    assert all(after[name] == before[name] for name in before if name.startswith("1."))


def test_adagc_stores_no_gradient_and_costs_as_much_as_clipping_by_layer(
    make_plan: Callable[..., Plan],
) -> None:
    for policy, knobs in PLANS:
        by_layer, by_tensor = (
            policies.lower(make_plan(policy, clipping=kind, **knobs)) for kind in ("layer", "adagc")
        )
        for one, other in zip(by_layer.ops, by_tensor.ops, strict=True):
            same = ("id", "lane", "after", "offset", "bytes", "parameters", "flops", "shape")
            assert all(getattr(one, key) == getattr(other, key) for key in same)
        sizes = [
            {buffer.id: buffer.bytes for buffer in schedule.buffers if buffer.data == "gradients"}
            for schedule in (by_layer, by_tensor)
        ]
        assert sizes[0] == sizes[1]


def test_a_run_begins_without_moving_norms(executable: Callable[..., Plan]) -> None:
    plan = executable("resident", clipping="adagc")
    with Executor(plan, config_of(plan.model), SETTINGS, torch.device("cpu")) as executor:
        executor.state.load(random_weights(0))
        tensors = executor.state.tensors()
        for layer in plan.model.stack.values():
            assert tensors[f"{layer.name}.moving_norms"].tolist() == [0] * len(layer.tensors)


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "work", [{"state": "master24"}, {"state": "bf16-sr", "accumulation": 4}], ids=str
)
def test_every_plan_has_the_same_bits_on_a_gpu(
    make_plan: Callable[..., Plan], work: dict[str, Any]
) -> None:
    sizes = {
        "layers": 4,
        "hidden": 256,
        "intermediate": 512,
        "head_dim": 64,
        "device_limit_bytes": 2**32,
        "host_limit_bytes": 2**32,
        "clipping": "adagc",
    }
    first = None
    for policy, knobs in [*PLANS, *(GROUPED if "accumulation" in work else PLANS[-1:])]:
        plan = make_plan(policy, **{**work, **knobs, **sizes})
        with Executor(
            plan,
            config_of(plan.model),
            SETTINGS,
            torch.device("cuda", 0),
            schedule=policies.lower(plan),
        ) as executor:
            executor.state.load(random_weights(0))
            results = [
                executor.step(batches, rate=1e-2, number=number)
                for number, batches in enumerate(drawn(plan), 1)
            ]
            values = [(made.loss, made.gradient_norm, made.clip_factor) for made in results]
            state = {name: tensor.cpu() for name, tensor in executor.state.tensors().items()}
        assert min(made.clip_factor or 1 for made in results[WARM_UP:]) < 0.95
        first = first or (values, state)
        assert values == first[0], (policy, knobs)
        for name, tensor in state.items():
            bits = (each.contiguous().view(torch.uint8) for each in (tensor, first[1][name]))
            assert torch.equal(*bits), (policy, knobs, name)


@pytest.mark.cuda
def test_a_gpu_has_the_factors_and_moving_norms_of_the_cpu() -> None:
    settings = AdamW(adagc_warm_up=20)
    sizes = torch.rand(60, 500, generator=torch.Generator().manual_seed(1)).mul_(3)
    found = []
    for device in ("cpu", "cuda"):
        moving = torch.zeros(500, device=device)
        for number, sums in enumerate(sizes.to(device), 1):
            factors, moving = clip(sums, moving, settings=settings, number=number)
            found.append((factors.cpu(), moving.cpu()))
    for on_cpu, on_gpu in zip(found[:60], found[60:], strict=True):
        assert torch.equal(on_cpu[0], on_gpu[0])
        assert torch.equal(on_cpu[1], on_gpu[1])
