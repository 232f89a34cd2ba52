"""Compares the predicted memory of a run with the bytes that were allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json
from megatrain.simulator.compare.error_report import PeakError, peak_error
from megatrain.simulator.costs import CostModel
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan


def memory_errors(
    measured: Mapping[str, Any], plan: Plan, schedule: Schedule, costs: CostModel
) -> tuple[PeakError, ...]:
    """Returns the errors of the predicted bytes of the pools on device and host.

    With CUDA, a third row has the error of the peak of the whole device. `measured` is the content
    of a run's `memory.json`.
    """
    rows = []
    for place in ("device", "host"):
        sized = sum(
            buffer.allocated
            for buffer in schedule.buffers
            if buffer.place == place and not buffer.dynamic
        )
        rows.append(peak_error(f"{place} pools", sized, int(measured[f"{place}_pool_bytes"])))
    if "device_peak_bytes" in measured:
        predicted = plan_account(plan, schedule, costs).device_peak_bytes
        rows.append(peak_error("whole device peak", predicted, int(measured["device_peak_bytes"])))
    return tuple(rows)


def peaks(folder: Path, plan: Plan, schedule: Schedule, costs: CostModel) -> tuple[PeakError, ...]:
    """Returns the errors of the predicted memory of the run in `folder`.

    Raises UserError if `memory.json` has unexpected content.
    """
    measured = read_json(folder / "memory.json")
    try:
        return memory_errors(measured, plan, schedule, costs)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            str(folder / "memory.json"),
            found="other content",
            allowed="what `megatrain train` writes",
            fix="train again",
        ) from None
