"""Tests of Muon on the CPU.

Ten steps have the bits of the reference and are near those of `torch.optim.Muon`. Runs fail, or are
saved, resumed and exported. `tests/properties` tests random plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counted import Counted
from reference_step import Reference
from reference_step import _muon as plain_muon
from safetensors.torch import load_file
from small_runs import SETTINGS as RUN_SETTINGS
from small_runs import everything, run_of
from tiny_families import config_of as tiny_config

from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.files.model_files import export, random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.optimizer import muon
from megatrain.runtime.optimizer.adamw import join, split, sum_of_squares, sums_of_squares
from megatrain.runtime.optimizer.blockwise import (
    decoded_first,
    encode_first,
    records,
    rounding_keys,
    split_randomly,
)
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model import muon as sizes
from megatrain.simulator.model.muon import CODED_GPU_BYTES, Matrices
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import FORMATS, GPU_BLOCK, UPDATE_COSTS
from megatrain.simulator.schedule import update_layout
from megatrain.simulator.schedule.plan import Placement, Plan

CPU = torch.device("cpu")
SETTINGS = AdamW(
    max_norm=0.05,
    weight_decay=0.1,
    groups=(
        GroupSettings(match="*up_proj*", rate_factor=0.5),
        GroupSettings(match="*k_proj*", rate_factor=0),
    ),
)
"""tensors decay differently, one kind has half the rate, and one is frozen"""
PLACED = Placement(weights="0", master_low="1", moments="e,0", host_updated="h")


def mixture() -> ModelSpec:
    """Returns a model of two layers with experts, whose router and experts are matrices."""
    config = tiny_config(
        "qwen3_moe",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=64,
    )
    return ModelSpec.from_config(config.to_dict(), "mixture", "mixture")


@pytest.mark.parametrize(
    ("kind", "dtype", "clipping", "state"),
    [
        ("dense", "bf16", "global", "exact"),
        ("dense", "fp32", "none", "exact"),
        ("mixture", "bf16", "layer", "exact"),
        ("dense", "bf16", "global", "master24"),
        ("mixture", "bf16", "none", "bf16-sr"),
    ],
)
def test_ten_steps_give_the_reference_s_bits(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    kind: str,
    dtype: str,
    clipping: str,
    state: str,
) -> None:
    work = {"dtype": dtype, "clipping": clipping, "optimizer": "muon", "accumulation": 2}
    work["state"] = state
    model = {"model": mixture()} if kind == "mixture" else {"layers": 2}
    plan = executable("overlapped", placement=PLACED, **work, **model)
    draw = random_weights(0)
    first = {
        layer.name: {t.name: draw(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in plan.model.stack.values()
    }
    with session(plan, settings=SETTINGS) as running:
        reference = Reference(
            plan.model, plan.workload, config_of(plan.model), SETTINGS, first, CPU
        )
        begun = {
            layer: {name: tensor.clone() for name, tensor in tensors.items()}
            for layer, tensors in reference.masters.items()
        }
        for number in range(1, 11):
            made = running.step(number)
            wanted = reference.step(running.batches(number), rate=1e-2, number=number)
            assert (made.loss, made.gradient_norm) == wanted, number
        for layer in plan.model.stack.values():
            for tensor, values in running.state.masters(layer).items():
                found = reference.masters[layer.name][tensor]
                assert torch.equal(values, found), (layer.name, tensor)
                moved = not torch.equal(values, begun[layer.name][tensor])
                assert moved != ("k_proj" in tensor), tensor


def updated(
    shape: tuple[int, int], steps: int, *, number: int = 1, clip: float = 1.0, coded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns masters, momentum and first masters of matrices of `shape` after some steps.

    If `coded`, the state format is master24.
    """
    generator = torch.Generator().manual_seed(0)
    found = Matrices(number, *shape)
    count = number * found.size
    first = torch.randn(count, generator=generator)
    high = torch.empty(count, dtype=torch.bfloat16)
    low = torch.empty(count, dtype=torch.int8 if coded else torch.int16)
    split(first, high, low)
    first = join(high, low)
    momentum = torch.zeros(count)
    if coded:
        momentum = torch.zeros(records(count), dtype=torch.uint8)
    room = torch.empty(sum(found.workspace), dtype=torch.uint8)
    for step in range(1, steps + 1):
        muon.update(
            high,
            low,
            momentum,
            torch.randn(count, generator=generator),
            matrices=found,
            rate=1e-2,
            weight_decay=0.1,
            clip=torch.tensor(clip),
            workspace=room,
            number=step,
        )
    return join(high, low), decoded_first(momentum) if coded else momentum, first


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_ten_steps_are_near_those_of_pytorch_s_muon(shape: tuple[int, int], coded: bool) -> None:
    ours, momentum, first = updated(shape, 10, coded=coded)
    parameter = torch.nn.Parameter(first.view(shape).clone())
    theirs = torch.optim.Muon(
        [parameter], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    generator = torch.Generator().manual_seed(0)
    torch.randn(len(first), generator=generator)
    for _ in range(10):
        parameter.grad = torch.randn(len(first), generator=generator).view(shape)
        theirs.step()
    change = parameter.detach().view(-1) - first
    assert (ours - first - change).norm() < 0.01 * change.norm()
    wanted = theirs.state[parameter]["momentum_buffer"].view(-1)
    if coded:
        assert 0.002 < (momentum - wanted).norm() / wanted.norm() < 0.02
    else:
        assert torch.allclose(momentum, wanted, atol=1e-6)


def test_a_matrix_that_ends_inside_a_block_gives_the_reference_s_bits() -> None:
    """The padding of a tensor is part of the last block.

    It does not change the scale, and stays 0 with any gradient.
    """
    draw, found = torch.Generator().manual_seed(0), Matrices(3, 10, 14)
    count, padded = 3 * found.size, found.padded
    assert (count, padded) == (420, 448)
    high, low = torch.zeros(padded).bfloat16(), torch.zeros(padded, dtype=torch.int8)
    split(torch.randn(count, generator=draw), high[:count], low[:count])
    master = join(high, low)[:count].view(3, 10, 14)
    coded, momentum = torch.zeros(records(padded), dtype=torch.uint8), torch.zeros(3, 10, 14)
    room = torch.empty(sum(found.workspace), dtype=torch.uint8)
    for number in range(1, 4):
        gradient = torch.randn(padded, generator=draw)
        gradient[count:] = 1e6 if number < 3 else float("nan")
        muon.update(
            high,
            low,
            coded,
            gradient,
            matrices=found,
            rate=1e-2,
            weight_decay=0.1,
            clip=torch.tensor(0.5),
            workspace=room,
            number=number,
            seed=7,
            index=64,
        )
        plain_muon(master, momentum, gradient[:count].view(3, 10, 14) * 0.5, 1e-2, 0.1)
        stored = torch.empty_like(coded)
        encode_first(torch.nn.functional.pad(momentum.view(-1), (0, padded - count)), stored)
        assert torch.equal(coded, stored)
        momentum = decoded_first(stored)[:count].view(3, 10, 14).clone()
        parts = torch.zeros(padded).bfloat16(), torch.zeros(padded, dtype=torch.int8)
        flat = torch.nn.functional.pad(master.view(-1), (0, padded - count))
        split_randomly(flat, *parts, rounding_keys(7, number)[0], 64)
        assert torch.equal(join(high, low), join(*parts))
        assert not join(high, low)[count:].any()
        master = join(*parts)[:count].view(3, 10, 14)


@pytest.mark.parametrize("state", ["master24", "bf16-sr"])
def test_an_update_of_codes_moves_and_holds_the_predicted_bytes(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The bytes are counted without matrix products, as the difference from the format `exact`."""
    monkeypatch.setattr(muon, "_orthogonalised", lambda _first, second, *_: second)
    found, low = Matrices(1, 128, 128), FORMATS[state].low
    weights, gradient = torch.randn(2, found.size).bfloat16()
    moved, peak = [], []
    for momentum, rest in (
        (torch.zeros(found.size), torch.int16),
        (torch.zeros(records(found.size), dtype=torch.uint8), TORCH_DTYPE[low] if low else None),
    ):
        with Counted() as counted:
            muon.update(
                weights.clone(),
                None if rest is None else torch.zeros(found.size, dtype=rest),
                momentum,
                gradient,
                matrices=found,
                rate=1e-2,
                weight_decay=0.1,
                clip=torch.tensor(0.5),
                workspace=torch.empty(sum(found.workspace), dtype=torch.uint8),
            )
        moved.append(counted.moved / found.size)
        peak.append(counted.peak / found.size)
    # the state has 16 bytes that are read or written in `exact`, and 8 in master24
    assert 0.75 * CODED_GPU_BYTES < moved[1] - moved[0] + 8 < 1.01 * CODED_GPU_BYTES
    assert peak[1] * GPU_BLOCK < UPDATE_COSTS["block8"].gpu_temporary_bytes


def test_an_update_is_nearly_orthogonal_and_as_large_as_adamw_s() -> None:
    for shape in ((48, 96), (96, 48)):
        ours, _, first = updated(shape, 1)
        step = (first * (1 - 1e-2 * 0.1) - ours).view(shape) / 1e-2
        values = torch.linalg.svdvals(step / (0.2 * max(shape) ** 0.5))
        assert 0.4 < float(values.min()) < float(values.max()) < 1.35
        assert 0.1 < float(step.square().mean().sqrt()) < 0.25


def test_each_expert_is_orthogonalised_separately() -> None:
    generator, found = torch.Generator().manual_seed(0), Matrices(3, 16, 24)
    room = torch.empty(sum(found.workspace), dtype=torch.uint8)
    first, second, square, other, *_ = muon._views(room, found)
    drawn = torch.randn(3, 16, 24, generator=generator).bfloat16()
    second.copy_(drawn)
    together = muon._orthogonalised(first, second, square, other).clone()
    one = Matrices(1, 16, 24)
    for index in range(3):
        first, second, square, other, *_ = muon._views(room, one)
        second.copy_(drawn[index : index + 1])
        alone = muon._orthogonalised(first, second, square, other)
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("kernels", ["eager", "fused"])
@pytest.mark.parametrize("length", [100, 4096, 3 * 4096])
def test_norms_of_many_matrices_are_those_of_each(
    monkeypatch: pytest.MonkeyPatch, length: int, kernels: str
) -> None:
    if kernels == "eager":
        monkeypatch.setenv("MEGATRAIN_KERNELS", kernels)
    drawn = torch.randn(5, length, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(
        sums_of_squares(drawn), torch.stack([sum_of_squares(each) for each in drawn])
    )


@pytest.mark.parametrize("coded", [False, True])
def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch, coded: bool) -> None:
    whole = updated((24, 40), 2, coded=coded)
    monkeypatch.setattr(muon, "BLOCK", 128)
    monkeypatch.setattr(sizes, "BLOCK", 128)
    found = updated((24, 40), 2, coded=coded)
    assert all(map(torch.equal, found, whole))


@pytest.mark.parametrize("coded", [False, True])
def test_a_clip_factor_of_nan_changes_nothing(coded: bool) -> None:
    master, momentum, first = updated((24, 40), 1, clip=float("nan"), coded=coded)
    assert torch.equal(master, first)
    assert not momentum.count_nonzero()


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Limits a group of matrices to 512 elements, so chunks end between experts."""
    monkeypatch.setattr(sizes, "_GROUP", 512)
    made = (update_layout._layout, update_layout._shared_layout)
    for cached in made:
        cached.cache_clear()
    yield
    for cached in made:
        cached.cache_clear()


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("state", ["exact", "master24"])
def test_chunks_of_some_experts_give_the_bits_of_whole_layers(
    executable: Callable[..., Plan], session: Callable[..., Any], state: str
) -> None:
    common = {"model": mixture(), "optimizer": "muon", "clipping": "layer", "state": state}
    small = executable("overlapped", chunk_bytes=4096, state_slots=3, **common)
    whole = executable("resident", **common)
    layer = small.model.stack["0"]
    layout = update_layout.update_layout("muon", layer)
    assert layout is not None
    cuts = {first for _, first, _ in layout.chunks(2048)}
    experts = next(
        (offset, offset + tensor.elements)
        for tensor, offset in zip(layer.tensors, layer.offsets, strict=True)
        if len(tensor.shape) == 3
    )
    assert any(experts[0] < cut < experts[1] for cut in cuts)
    bits = []
    for plan in (small, whole):
        with session(plan, settings=SETTINGS) as running:
            bits.append(running.bits(steps=3))
    assert bits[0] == bits[1]


@pytest.mark.parametrize(
    ("policy", "clipping", "state"),
    [
        *itertools.product(["resident", "overlapped"], ["global", "layer", "none"], ["exact"]),
        ("overlapped", "global", "master24"),
        ("resident", "none", "bf16-sr"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    policy: str,
    clipping: str,
    state: str,
) -> None:
    plan = executable(policy, optimizer="muon", clipping=clipping, state=state)
    with session(plan) as running:
        running.step(1)
        before = everything(running)
        head = next(op for op in running.executor.schedule.ops if op.kind == "head")
        task = running.tasks[head.id]
        loss, work = running.executor._arenas.flat(head.writes[2], torch.float32, 1), task.run
        task.run = lambda: (work(), loss.fill_(float("inf")))
        with pytest.raises(FloatingPointError, match=r"^step 2: loss inf"):
            running.step(2)
        assert everything(running) == before


@pytest.mark.parametrize("state", ["exact", "master24"])
def test_a_run_is_resumed_under_another_plan_evaluated_and_exported(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path, state: str
) -> None:
    plan, other = (
        executable("overlapped", optimizer="muon", placement=PLACED, state=state),
        executable("resident", optimizer="muon", state=state),
    )
    with session(plan, settings=SETTINGS) as running:
        running.step(1)
        save(running.executor, run_of(1), tmp_path / "step-1")
        found = running.executor.evaluate(running.batches(2))
        assert found.loss == running.step(2).loss
        straight = everything(running)
        export(running.state, plan, config_of(plan.model), tmp_path / "model", dtype="fp32")
        masters = running.state.masters(plan.model.stack["1"])
        exported = load_file(tmp_path / "model" / "model.safetensors")
        for name, tensor in masters.items():
            assert torch.equal(exported[f"model.layers.1.{name}"], tensor)
    with session(other, settings=SETTINGS) as running:
        restore(running.executor, tmp_path / "step-1", RUN_SETTINGS)
        running.step(2)
        assert everything(running) == straight
    with (
        session(executable("resident", state=state), settings=SETTINGS) as running,
        pytest.raises(UserError) as caught,
    ):
        restore(running.executor, tmp_path / "step-1", RUN_SETTINGS)
    assert "found workload.optimizer muon in the checkpoint and adamw" in str(caught.value)


@pytest.mark.parametrize("state", ["exact", "bf16-sr"])
@pytest.mark.parametrize("policy", ["resident", "overlapped"])
def test_the_executor_allocates_what_the_schedule_says(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, state: str
) -> None:
    plan = executable(policy, model=mixture(), optimizer="muon", state=state)
    with session(plan) as running:
        pools: dict[str, int] = {}
        for buffer in running.executor.schedule.buffers:
            if not buffer.dynamic:
                pools[buffer.pool] = pools.get(buffer.pool, 0) + buffer.allocated
        assert running.executor.pool_bytes == pools
        assert pools["device.update_workspace"] > 0
        place = "device" if policy == "resident" else "host"
        layer = plan.model.stack["0"]
        norms = sum(tensor.padded for tensor in layer.tensors if len(tensor.shape) == 1)
        home = running.executor.schedule.buffer[f"{place}.moments:0"]
        assert home.bytes == (4 if state == "exact" else 34 / 32) * (layer.elements + norms)
