"""Tests of the costs of attention with sinks: by the flash kernel, and with written-out scores."""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.formulas import activations_estimate, workspace_estimate
from megatrain.simulator.model.attention_masks import mask_bytes
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

OSS = ModelSpec.load("gpt-oss-20b").shortest(2)
WORK = Workload(batch=2, sequence=8192)
FLASH = msgspec.structs.replace(WORK, attention="flash")
H200 = HardwareSpec.load("h200")


def longer(work: Workload, factor: int) -> Workload:
    """Returns a workload with longer and fewer rows, and the same number of tokens."""
    return msgspec.structs.replace(
        work, batch=work.batch // factor, sequence=work.sequence * factor
    )


def test_memory_grows_with_the_tokens_and_not_with_the_square_of_a_row() -> None:
    for estimate in (activations_estimate, lambda *of: workspace_estimate(*of).layer):
        short, long = (estimate(OSS, work) for work in (FLASH, longer(FLASH, 2)))
        assert long == pytest.approx(short, rel=0.01)
        short, long = (estimate(OSS, work) for work in (WORK, longer(WORK, 2)))
        assert long > 1.5 * short
    assert mask_bytes(OSS, FLASH) == 0 < mask_bytes(OSS, WORK)


def test_the_flash_kernel_saves_what_it_saves_without_sinks() -> None:
    """Queries, keys, values, the output, and the log-sum-exp of each head."""
    heads, pairs, size = OSS.heads
    fused, written = (OSS.part("0", fused=fused) for fused in (True, False))
    kept = fused.kept.bytes(2) - written.kept.bytes(2)
    plain = 2 * (2 * heads + 2 * pairs) * size + 4 * heads
    copied = 2 * 4 * heads * size  # as in attention that is written out, without its scores
    assert kept == plain - copied
    saved = OSS.kept_attention("0", Workload(batch=1, sequence=10, attention="flash"))
    assert (saved.output, saved.log_sum_exp) == (10 * 2 * heads * size, 10 * 4 * heads)


def test_a_masked_kernel_in_fp32_has_the_masks_of_other_families() -> None:
    """A CPU has no kernel that receives lengths. Only windows and documents need a mask there."""
    work = msgspec.structs.replace(FLASH, dtype="fp32")
    pairs, full = 8192**2, OSS.with_layers(2)
    assert {layer.attention for layer in full.decoders} == {"sliding_attention", "full_attention"}
    assert mask_bytes(full, work) == pairs + 2 * pairs * 4, "one mask of the window for all rows"
    packed = msgspec.structs.replace(work, documents=True)
    assert mask_bytes(full, packed) == 2 * 2 * pairs + 2 * pairs * 4
    assert mask_bytes(full, msgspec.structs.replace(packed, dtype="bf16")) == 0


def test_the_time_of_attention_is_that_of_the_flash_kernel() -> None:
    """Full layers compute half of the pairs, and windows those in the window. Nothing else grows
    with the length of a row.
    """
    sheets = {work: Datasheet(H200, OSS, work) for work in (FLASH, longer(FLASH, 2))}
    full, window = OSS.decoders[1].name, OSS.decoders[0].name
    assert OSS.window(window) == 128
    (short, long) = sheets.values()
    for kind in ("forward", "backward"):
        for layer in (full, window):
            one, two = (
                op_work(OSS, kind, layer, work).moved_bytes for work in (FLASH, longer(FLASH, 2))
            )
            assert one == two
        grown = long.attention_ns(kind, full) / short.attention_ns(kind, full)
        assert 1.8 < grown < 2
        grown = long.attention_ns(kind, window) / short.attention_ns(kind, window)
        assert 0.9 < grown < 1.1
        ratio = short.attention_ns(kind, full) / short.attention_ns(kind, window)
        assert ratio == pytest.approx(8192 / 2 / (128 * (1 - 64 / 8192)))
    written = op_work(OSS, "backward", full, WORK).moved_bytes
    assert written > 3 * op_work(OSS, "backward", full, FLASH).moved_bytes


def test_a_workload_that_names_no_kernel_keeps_its_meaning() -> None:
    """Older plans and measurements have written-out scores."""
    assert not OSS.fuses_scores(WORK)
    assert OSS.fuses_scores(FLASH)
    assert WORK.shape == "2x8192-bf16"
    assert FLASH.shape == "2x8192-bf16-flash"
    assert WORK.same_bits != FLASH.same_bits


def test_a_kernel_fuses_only_scores_with_sinks() -> None:
    for name in ("qwen2.5-7b", "gemma-2-9b"):
        model = ModelSpec.load(name)
        assert not model.has_sinks
        assert not model.fuses_scores(FLASH)


def test_saved_attention_and_groups_of_heads_need_the_kernel() -> None:
    def plan(work: Workload) -> Plan:
        return Plan(
            policy="overlapped",
            hardware="h200",
            source="",
            model=OSS,
            workload=work,
            knobs=Knobs(placement=Placement(saved_attention="all")),
            device_limit_bytes=2**40,
            host_limit_bytes=2**42,
        )

    assert plan(FLASH).placed("saved_attention") == {layer.name for layer in OSS.decoders}
    with pytest.raises(UserError, match="attention with sinks and the kernel flash"):
        plan(WORK).placed("saved_attention")
    assert cost_model(H200, OSS, FLASH)
