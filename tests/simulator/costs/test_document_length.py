"""Tests of the length of documents, on which the time of attention depends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.metrics import mfu
from megatrain.simulator.model.op_work import attention_shape
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Schedule, has_saved_attention
from megatrain.simulator.schedule.plan import Placement, Plan

MODEL = ModelSpec.load("qwen2.5-7b").with_layers(4)
LIBRARY = HardwareSpec.load("h200")
CALIBRATED = HardwareSpec.load("experiments/results/h200-heldout/hardware.toml")
ROWS = Workload(batch=2, sequence=8192, documents=True)
PLACEMENT = Placement(saved_attention="1", saved_activations="3")
LAYERS = ("forward", "recompute", "backward")


def scheduled(work: Workload) -> Schedule:
    plan = Plan(
        policy="overlapped",
        hardware="",
        source="",
        model=MODEL,
        workload=work,
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
    )
    knobs = msgspec.structs.replace(plan.knobs, placement=PLACEMENT)
    return lower(msgspec.structs.replace(plan, knobs=knobs))


def durations(hardware: HardwareSpec, **changes: Any) -> dict[str, int]:
    """Returns the durations of the ops of decoder layers in ns, by the op's name."""
    work = msgspec.structs.replace(ROWS, **changes)
    costs = cost_model(hardware, MODEL, work)
    ops = scheduled(work).ops
    return {op.id: costs.duration_ns(op) for op in ops if op.kind in LAYERS}


def test_documents_take_the_time_of_rows_of_their_length() -> None:
    """On a machine that was not calibrated, all other times depend only on the tokens."""
    documents = durations(LIBRARY, document_length=1024)
    assert documents == pytest.approx(durations(LIBRARY, batch=16, sequence=1024), abs=1)
    assert sum(documents.values()) < 0.9 * sum(durations(LIBRARY).values())


def test_a_measured_time_loses_the_attention_between_documents() -> None:
    work = msgspec.structs.replace(ROWS, document_length=1024)
    sheets = [Datasheet(CALIBRATED, MODEL, each) for each in (ROWS, work)]
    rows, documents = durations(CALIBRATED), durations(CALIBRATED, document_length=1024)
    kept = 0
    for op in (op for op in scheduled(work).ops if op.kind in LAYERS):
        whole, less = (sheet.attention_ns(op.kind, op.layer) for sheet in sheets)
        assert 0 < less < whole / 3
        if has_saved_attention(op.shape):
            kept += 1
            assert documents[op.id] == rows[op.id]
        else:
            assert rows[op.id] - documents[op.id] == pytest.approx(whole - less, rel=0.01)
    assert kept == 1


def test_the_kernel_that_receives_lengths_has_times_of_its_own() -> None:
    """A calibration without them has the times of the same kernel on rows."""
    costs = CALIBRATED.costs
    assert costs
    shape = attention_shape(MODEL, ROWS)
    assert shape.endswith("-flash-lengths")
    dense = {shape.removesuffix("-lengths"): ((512, 10_000, 20_000), (8192, 900_000, 2_000_000))}
    own = {shape: ((512, 20_000, 60_000), (8192, 1_800_000, 6_000_000))}

    def attention(curves: Any) -> list[float]:
        table = msgspec.structs.replace(costs, attention=curves)
        sheet = Datasheet(msgspec.structs.replace(CALIBRATED, costs=table), MODEL, ROWS)
        return [sheet.attention_ns(kind, "0") for kind in ("forward", "backward")]

    assert attention(dense) == pytest.approx([2 * 900_000, 2 * 2_000_000], rel=1e-5)
    assert attention(dense | own) == pytest.approx([4 * 900_000, 6 * 2_000_000], rel=1e-5)


def test_a_part_of_what_documents_save_is_uncertain() -> None:
    """A tenth of the time that is computed, and not measured, is added to the spread."""
    work = msgspec.structs.replace(ROWS, document_length=1024)
    rows, documents = (cost_model(CALIBRATED, MODEL, each) for each in (ROWS, work))
    for op in scheduled(work).ops:
        more = documents.spread(op) - rows.spread(op)
        saved = rows.duration_ns(op) - documents.duration_ns(op)
        assert more == pytest.approx(0.1 * saved / documents.duration_ns(op), abs=1e-9)
        assert (more > 0.005) == (op.kind in LAYERS and not has_saved_attention(op.shape))


@pytest.mark.parametrize("hardware", [LIBRARY, CALIBRATED], ids=["library", "calibrated"])
@pytest.mark.parametrize(
    "changes",
    [
        {"document_length": 8192},
        {"document_length": 100_000},
        {"document_length": 1024, "documents": False},
    ],
    ids=str,
)
def test_a_length_without_effect_changes_nothing(
    hardware: HardwareSpec, changes: dict[str, Any]
) -> None:
    assert durations(hardware, **changes) == durations(
        hardware, documents=changes.get("documents", True)
    )


def test_a_mask_computes_the_pairs_between_documents() -> None:
    """In fp32, the kernel does not receive the lengths of documents."""
    machine = msgspec.structs.replace(LIBRARY, peak_tflops={"bf16": 900.0, "fp32": 60.0})
    one, other = (durations(machine, dtype="fp32", document_length=each) for each in (None, 64))
    assert one == other


def test_the_length_changes_no_bit_and_no_schedule() -> None:
    work = msgspec.structs.replace(ROWS, document_length=1024)
    assert work != ROWS
    assert work.same_bits == ROWS.same_bits
    assert scheduled(work).digest == scheduled(ROWS).digest


def test_mfu_counts_attention_inside_documents() -> None:
    one = mfu(MODEL, msgspec.structs.replace(ROWS, document_length=1024), 1.0, 989.0)
    assert one == mfu(MODEL, msgspec.structs.replace(ROWS, batch=16, sequence=1024), 1.0, 989.0)
    assert one < mfu(MODEL, ROWS, 1.0, 989.0)


def test_a_length_of_no_token_is_refused() -> None:
    with pytest.raises(UserError, match="document_length"):
        msgspec.structs.replace(ROWS, document_length=0)
