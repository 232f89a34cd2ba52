"""Tests of the choice of the attention kernel: by its gain, and only where it can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import AttentionRate, HardwareSpec
from megatrain.simulator.model.attention_kernel import KERNELS, choosable, obstacle
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.attention_kernel import kernel_gain, with_attention_kernel
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import candidates

H200 = HardwareSpec.load("h200")
QWEN = ModelSpec.load("qwen2.5-7b").with_layers(4)
LONG = Workload(batch=1, sequence=32_768, compiled=True)
CALIBRATED = "experiments/results/h200-heldout/hardware.toml"


def changed(work: Workload, **changes: Any) -> Workload:
    return msgspec.structs.replace(work, **changes)


def with_rate(efficiency: float, kernel: str = "cudnn") -> HardwareSpec:
    """Returns an H200 with one rate of its own, with the half_tokens of the usual rate."""
    rate = AttentionRate(efficiency=efficiency, half_tokens=H200.attention_half_tokens)
    return msgspec.structs.replace(H200, attention={kernel: rate})


def test_the_faster_kernel_is_chosen_for_rows_of_one_text() -> None:
    chosen = with_attention_kernel(QWEN, H200, LONG)
    assert chosen == changed(LONG, attention="cudnn")
    before, after = (
        candidates(QWEN, H200, work, policies=["overlapped"])[0].step_seconds
        for work in (LONG, chosen)
    )
    assert before / after > 1.1
    assert kernel_gain(QWEN, H200, chosen) > before / after - 1, "the step also has a head"


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_a_kernel_is_chosen_if_it_gains_two_percent(kernel: str) -> None:
    """The decision changes once as the kernel gets faster, at a gain of 2 %."""
    decisions = []
    for percent in range(100, 121, 2):
        hardware = with_rate(H200.attention_efficiency * percent / 100, kernel)
        chosen = with_attention_kernel(QWEN, hardware, LONG).attention
        gain = kernel_gain(QWEN, hardware, changed(LONG, attention=kernel))
        assert (chosen == kernel) == (gain >= 0.02), (percent, gain)
        decisions.append(chosen)
    assert decisions == sorted(decisions, key=lambda name: name is not None)
    assert set(decisions) == {None, kernel}


def test_a_slower_kernel_and_the_slower_of_two_are_not_chosen() -> None:
    assert with_attention_kernel(QWEN, with_rate(0.2), LONG) == LONG
    rates = {
        name: AttentionRate(efficiency=efficiency, half_tokens=900)
        for name, efficiency in (("flash", 0.6), ("cudnn", 0.5))
    }
    both = msgspec.structs.replace(H200, attention=rates)
    assert with_attention_kernel(QWEN, both, LONG).attention == "flash"


def test_short_rows_keep_their_workload() -> None:
    model, work = ModelSpec.load("qwen2.5-72b"), Workload(batch=128, sequence=256, compiled=True)
    assert with_attention_kernel(model, H200, work) == work
    assert 0 < kernel_gain(model, H200, changed(work, attention="cudnn")) < 0.02


def test_a_named_kernel_is_kept() -> None:
    for kernel in KERNELS:
        work = changed(LONG, attention=kernel)
        assert with_attention_kernel(QWEN, H200, work) == work


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen2.5-7b", {"documents": True}),
        ("qwen2.5-7b", {"dtype": "fp32"}),
        ("gemma-2-9b", {}),  # soft caps, windows, and heads of 256
        ("gemma-3-12b", {}),
        ("gpt-oss-20b", {"dtype": "fp32"}),
        ("mixtral-8x7b", {}),
    ],
)
def test_no_kernel_is_chosen_where_the_runtime_would_refuse_it(
    model: str, changes: dict[str, Any]
) -> None:
    work = changed(LONG, **changes)
    spec = ModelSpec.load(model).with_layers(4)
    assert choosable(spec, work) == ()
    assert with_attention_kernel(spec, H200, work) == work


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["h200", "rtx4090", "a100-80-sxm"])
def test_flash_is_chosen_for_sinks_on_every_machine(name: str, documents: bool) -> None:
    """Without a kernel, their scores are written out. cuDNN has no sinks."""
    hardware, model = HardwareSpec.load(name), ModelSpec.load("gpt-oss-20b").with_layers(4)
    for work in (changed(LONG, documents=documents), Workload(batch=8, sequence=256)):
        assert choosable(model, work) == ("flash",)
        chosen = with_attention_kernel(model, hardware, work)
        assert chosen == changed(work, attention="flash")
        assert with_attention_kernel(model, hardware, work, deterministic=True) == chosen
        assert kernel_gain(model, hardware, chosen) > 0.2


@pytest.mark.parametrize(("size", "expected"), [(128, True), (64, True), (60, False), (256, False)])
def test_heads_must_have_a_size_that_the_kernels_compute(size: int, expected: bool) -> None:
    config = QWEN.config | {"head_dim": size}
    model = ModelSpec(name="heads", config=config | {"model_type": "llama"})
    assert model.heads.size == size
    assert bool(choosable(model, LONG)) == expected
    assert (with_attention_kernel(model, H200, LONG).attention is not None) == expected


def test_a_window_rules_out_every_kernel() -> None:
    config = ModelSpec.load("mistral-7b").with_layers(2).config | {"sliding_window": 4096}
    windowed = ModelSpec(name="windowed", config=config)
    assert windowed.decoders[0].attention != "full_attention"
    assert with_attention_kernel(windowed, H200, LONG) == LONG
    full = ModelSpec(name="full", config=config | {"sliding_window": 0})
    assert with_attention_kernel(full, H200, LONG).attention == "cudnn"


def test_only_deterministic_kernels_are_chosen_for_deterministic_training() -> None:
    assert choosable(QWEN, LONG, deterministic=True) == ("flash",)
    assert with_attention_kernel(QWEN, H200, LONG, deterministic=True) == LONG


def test_an_obstacle_names_the_field_of_the_workload() -> None:
    packed = obstacle(QWEN, changed(LONG, documents=True), "cudnn")
    assert packed
    assert packed.field == "documents"
    assert obstacle(QWEN, changed(LONG, documents=True), "flash") is None


def test_policies_of_other_systems_keep_the_workload() -> None:
    assert with_attention_kernel(QWEN, H200, LONG, policies=["zero3_offload"]) == LONG
    both = ["zero3_offload", "overlapped"]
    assert with_attention_kernel(QWEN, H200, LONG, policies=both).attention == "cudnn"
    with pytest.raises(UserError, match="fastest"):
        with_attention_kernel(QWEN, H200, LONG, policies=["fastest"])


def test_machines_without_a_rate_for_a_kernel_keep_the_workload() -> None:
    for name in ("a100-80-sxm", "rtx4090", "b200", "apple-m4-max", "mi300x"):
        assert with_attention_kernel(QWEN, HardwareSpec.load(name), LONG) == LONG


_OUTSIDE = """
from megatrain.simulator.costs import Datasheet


class Table(Datasheet):
    def duration_ns(self, op):
        return {}[op.shape]


def cost_model(hardware, model, workload):
    return Table(hardware, model, workload)
"""


def test_a_cost_model_from_outside_is_asked_only_about_kernels_with_a_rate(tmp_path: Path) -> None:
    """It may fail for a kernel that it does not know."""
    file = tmp_path / "costs.py"
    file.write_text(_OUTSIDE)
    hardware = msgspec.structs.replace(H200, attention={}, cost_model=str(file))
    assert with_attention_kernel(QWEN, hardware, LONG) == LONG


@pytest.mark.parametrize("sequence", [256, 1024, 4096])
def test_the_choice_does_not_depend_on_the_size_of_a_step(sequence: int) -> None:
    """`check` chooses it before the batch, and `plan` gets the batch from the user."""
    works = [
        Workload(
            batch=batch, sequence=sequence, accumulation=count, loss_chunk=chunk, token_piece=piece
        )
        for batch in (1, 7, 128)
        for count in (1, 4)
        for chunk, piece in ((1024, None), (4096, 2048))
    ]
    for name in ("qwen2.5-7b", "qwen2.5-72b", "llama-3.1-8b"):
        model = ModelSpec.load(name).with_layers(1)
        assert len({with_attention_kernel(model, H200, work).attention for work in works}) == 1


def test_the_choice_neither_searches_nor_lowers_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a search")

    monkeypatch.setattr(PlacementSearch, "__init__", fail)
    monkeypatch.setattr(policy_library, "lower_uncached", fail)
    assert with_attention_kernel(QWEN, H200, LONG).attention == "cudnn"


def calibrated(factor: float | None, usual: bool = True) -> HardwareSpec:
    """Returns an H200 whose layers of rows of one text were measured.

    The times with cuDNN are those with PyTorch's choice times `factor`. None means that they were
    not measured. With `usual` False, PyTorch's choice was not measured.
    """
    hardware = HardwareSpec.load(CALIBRATED)
    assert hardware.costs
    compute: dict[str, dict[str, tuple[int, int]]] = {}
    for kind, durations in hardware.costs.compute.items():
        compute[kind] = {}
        for shape, (amount, duration) in durations.items():
            plain = shape.removesuffix("-documents")
            if usual:
                compute[kind][plain] = (amount, duration)
            if factor is not None:
                compute[kind][f"{plain}-cudnn"] = (amount, round(factor * duration))
    costs = msgspec.structs.replace(hardware.costs, compute=compute)
    return msgspec.structs.replace(hardware, costs=costs)


@pytest.mark.parametrize(
    ("factor", "expected"), [(None, None), (0.99, None), (0.97, "cudnn"), (1.1, None)]
)
def test_a_calibrated_machine_needs_measurements_of_both_kernels(
    factor: float | None, expected: str | None
) -> None:
    model, work = ModelSpec.load("qwen2.5-3b"), Workload(batch=12, sequence=2048)
    assert with_attention_kernel(model, calibrated(factor), work).attention == expected
    named = changed(work, attention="cudnn")
    gain = kernel_gain(model, calibrated(factor), named)
    assert gain == pytest.approx(1 / factor - 1 if factor else 0, abs=1e-4)


def test_layers_that_were_measured_in_another_way_are_not_compared() -> None:
    """Eager layers with PyTorch's choice say nothing about compiled layers with cuDNN."""
    model, work = ModelSpec.load("qwen2.5-3b"), Workload(batch=12, sequence=2048, compiled=True)
    hardware = calibrated(None)
    assert hardware.costs
    compute = {
        kind: times
        | {f"{shape}-compiled-cudnn": (amount, 1) for shape, (amount, _) in times.items()}
        for kind, times in hardware.costs.compute.items()
    }
    costs = msgspec.structs.replace(hardware.costs, compute=compute)
    mixed = msgspec.structs.replace(hardware, costs=costs)
    assert with_attention_kernel(model, mixed, work) == work
    assert with_attention_kernel(model, mixed, changed(work, compiled=False)).attention is None


def test_a_measured_kernel_is_not_compared_with_a_rate() -> None:
    model, work = ModelSpec.load("qwen2.5-3b"), Workload(batch=12, sequence=2048)
    assert with_attention_kernel(model, calibrated(0.9), work).attention == "cudnn"
    rates = {"cudnn": AttentionRate(efficiency=0.9, half_tokens=100)}
    for hardware in (calibrated(0.9, usual=False), calibrated(None)):
        with_a_rate = msgspec.structs.replace(hardware, attention=rates)
        assert with_attention_kernel(model, with_a_rate, work) == work
        other = ModelSpec.load("llama-3.1-8b")  # its layers were not measured
        long = changed(LONG, compiled=False)
        assert with_attention_kernel(other, with_a_rate, long).attention == "cudnn"
