"""Draws the pictures in a run's folder, and compares its predicted and allocated memory.

The pictures show the predicted and the measured timeline, the errors, memory against its limit,
and the loss.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json, read_text
from megatrain.simulator.compare.error_report import ErrorReport, PeakError, peak_error
from megatrain.simulator.costs import CostModel
from megatrain.simulator.memory.account import WORKSPACE, usage
from megatrain.simulator.model.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.planner.assessment import activations_bytes, plan_account
from megatrain.simulator.plots.error_pictures import errors_png
from megatrain.simulator.plots.pictures import loss_png, memory_png, timeline_png
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline


class StepRecord(NamedTuple):
    """The machine and the steps of a run, as its folder records them."""

    device: str
    """Name of the GPU, or of the CPU if there is none."""
    cores: int
    """CPU cores of the host."""
    steps: list[int]
    """Number of each step."""
    losses: list[float]
    """Loss of each step."""
    speeds: list[float]
    """Tokens per second of each step."""
    seconds: list[float]
    """Wall time of each step."""
    evaluations: list[tuple[int, float]]
    """Step number and loss of each evaluation."""
    first: int = 0
    """Position in `steps` of the first step of the plan that the run has now."""

    @property
    def steady_seconds(self) -> dict[int, float]:
        """Wall time by step number, of the steps under the plan that the run has now. Warm-up steps
        are left out, unless there are no others.
        """
        times = list(zip(self.steps, self.seconds, strict=True))[self.first :]
        return dict(times[WARM_UP_STEPS:] or times)


def read_record(folder: Path) -> StepRecord:
    """Returns the contents of `environment.json` and `metrics.jsonl` in a run's folder.

    Raises UserError if they are not as `megatrain train` writes them.
    """
    machine, text = read_json(folder / "environment.json"), read_text(folder / "metrics.jsonl")
    name = "environment.json"
    try:
        device, cores = str(machine["device"]), int(machine["cores"])
        name = "metrics.jsonl"
        rows = [json.loads(line) for line in text.splitlines()]
        evaluations = [
            (int(row["step"]), float(row["evaluation_loss"]))
            for row in rows
            if row.get("evaluation_loss") is not None
        ]
        rows = [row for row in rows if "evaluation_loss" not in row]
        columns = [
            [float(row[key]) for row in rows] for key in ("loss", "tokens_per_second", "seconds")
        ]
        return StepRecord(
            device,
            cores,
            [int(row["step"]) for row in rows],
            columns[0],
            columns[1],
            columns[2],
            evaluations,
            _first_of_plan([str(row.get("schedule")) for row in rows]),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            str(folder / name),
            found="other content",
            allowed="what `megatrain train` writes",
            fix="train again",
        ) from None


def _first_of_plan(schedules: Sequence[str]) -> int:
    """Returns the position from which on all of `schedules` are that of the last step."""
    others = [index for index, each in enumerate(schedules) if each != schedules[-1]]
    return others[-1] + 1 if others else 0


def draw_run(
    folder: Path,
    record: StepRecord,
    plan: Plan,
    schedule: Schedule,
    predicted: Timeline,
    measured: Timeline,
    costs: CostModel,
    errors: ErrorReport,
) -> None:
    """Draws `timeline.png`, `errors.png`, `memory.png` and `loss.png` in the run's folder."""
    work, seconds = plan.workload, measured.makespan_ns / 1e9
    what = (
        f"{plan.model.name}, {plan.model.parameters / 1e6:,.0f} M parameters, policy {plan.policy}"
    )
    where = (
        f"{record.device}, {record.cores} cores; {work.accumulation} x {work.batch} x"
        f" {work.sequence} tokens, {work.dtype}"
    )
    speed = (
        f"{tokens_per_second(work, seconds):,.0f} tokens/s,"
        f" {tflops_6n(plan.model, work, seconds):.3g} TFLOPS (6N)"
    )
    timeline_png(
        folder / "timeline.png",
        [predicted, measured],
        f"One optimizer step: {what}",
        f"{where}; {speed}",
    )
    errors_png(folder / "errors.png", errors, f"Predicted against measured: {what}")
    account = plan_account(plan, schedule, costs)
    fixed = {pool: size for pool, size in account.pools.items() if pool == WORKSPACE}
    data = {
        pool: "staging" if kind.staging or kind.chunk else kind.data
        for pool, kind in account.kinds.items()
    } | {WORKSPACE: "workspace"}
    memory_png(
        folder / "memory.png",
        usage(schedule, measured, activations_bytes(plan.model, work, costs)),
        plan.device_limit_bytes,
        plan.host_limit_bytes,
        f"Memory over one step: {what}",
        fixed=fixed,
        subtitle=where,
        step_ns=measured.makespan_ns,
        data=data,
    )
    draw_loss(folder, record, plan)


def draw_loss(folder: Path, record: StepRecord, plan: Plan) -> None:
    """Draws `loss.png` in the run's folder."""
    work = plan.workload
    what = (
        f"{plan.model.name}, {plan.model.parameters / 1e6:,.0f} M parameters, policy {plan.policy}"
    )
    where = (
        f"{record.device}, {record.cores} cores; {work.accumulation} x {work.batch} x"
        f" {work.sequence} tokens, {work.dtype}"
    )
    loss_png(
        folder / "loss.png",
        record.steps,
        record.losses,
        record.speeds,
        f"Training loss: {what}",
        where,
        record.evaluations,
    )


def memory_errors(
    measured: Mapping[str, Any], plan: Plan, schedule: Schedule, costs: CostModel
) -> tuple[PeakError, ...]:
    """Returns predicted and allocated bytes of the pools on device and host.

    With CUDA, a third row compares the peak of the whole device. `measured` is what a run writes
    to `memory.json`.
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
    """Returns predicted and allocated memory of the run in `folder`.

    Raises UserError if `memory.json` is not as `megatrain train` writes it.
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
