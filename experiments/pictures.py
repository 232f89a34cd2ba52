"""What a run leaves to look at: timelines one above the other, memory against its limit, loss; and memory predicted against allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.assessment import activations_bytes, plan_account
from megatrain.simulator.costs import CostModel
from megatrain.simulator.draw import loss_png, memory_png, timeline_png
from megatrain.simulator.draw_errors import errors_png
from megatrain.simulator.error_report import ErrorReport, PeakError, peak_error
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_json, read_text
from megatrain.simulator.memory import WORKSPACE, usage
from megatrain.simulator.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Timeline


class Record(NamedTuple):
    """What a run's folder says of itself."""

    device: str
    cores: int
    steps: list[int]
    losses: list[float]
    speeds: list[float]
    """tokens/s of each step"""
    seconds: list[float]
    """wall time of each step"""
    evaluations: list[tuple[int, float]]
    """(step, loss)"""

    @property
    def steady_seconds(self) -> dict[int, float]:
        """Wall time by step, without the first ones, unless there are no others."""
        times = list(zip(self.steps, self.seconds, strict=True))
        return dict(times[WARM_UP_STEPS:] or times)


def read_record(folder: Path) -> Record:
    """`environment.json` and `metrics.jsonl`. Raises UserError where they are not what `megatrain train` writes."""
    machine, text = read_json(folder / "environment.json"), read_text(folder / "metrics.jsonl")
    name = "environment.json"
    try:
        device, cores = str(machine["device"]), int(machine["cores"])
        name = "metrics.jsonl"
        rows = [json.loads(line) for line in text.splitlines()]
        evaluations = [(int(row["step"]), float(row["evaluation_loss"])) for row in rows if row.get("evaluation_loss") is not None]
        rows = [row for row in rows if "evaluation_loss" not in row]
        columns = [[float(row[key]) for row in rows] for key in ("loss", "tokens_per_second", "seconds")]
        return Record(device, cores, [int(row["step"]) for row in rows], columns[0], columns[1], columns[2], evaluations)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(str(folder / name), found="other content", allowed="what `megatrain train` writes", fix="train again") from None


def draw_run(
    folder: Path, record: Record, plan: Plan, schedule: Schedule, predicted: Timeline, measured: Timeline, costs: CostModel, errors: ErrorReport
) -> None:
    """`timeline.png`, `errors.png`, `memory.png` and `loss.png` in the run's folder."""
    work, seconds = plan.workload, measured.makespan_ns / 1e9
    what = f"{plan.model.name}, {plan.model.parameters / 1e6:,.0f} M parameters, policy {plan.policy}"
    where = f"{record.device}, {record.cores} cores; {work.accumulation} x {work.batch} x {work.sequence} tokens, {work.dtype}"
    speed = f"{tokens_per_second(work, seconds):,.0f} tokens/s, {tflops_6n(plan.model, work, seconds):.3g} TFLOPS (6N)"
    timeline_png(folder / "timeline.png", [predicted, measured], f"One optimizer step: {what}", f"{where}; {speed}")
    errors_png(folder / "errors.png", errors, f"Predicted against measured: {what}")
    account = plan_account(plan, schedule, costs)
    fixed = {pool: size for pool, size in account.pools.items() if pool == WORKSPACE}
    data = {pool: "staging" if kind.staging or kind.chunk else kind.data for pool, kind in account.kinds.items()} | {WORKSPACE: "workspace"}
    memory_png(
        folder / "memory.png", usage(schedule, measured, activations_bytes(plan.model, work, costs)), plan.device_limit_bytes, plan.host_limit_bytes,
        f"Memory over one step: {what}", fixed=fixed, subtitle=where, step_ns=measured.makespan_ns, data=data,
    )  # fmt: skip
    draw_loss(folder, record, plan)


def draw_loss(folder: Path, record: Record, plan: Plan) -> None:
    """`loss.png` in the run's folder."""
    work = plan.workload
    what = f"{plan.model.name}, {plan.model.parameters / 1e6:,.0f} M parameters, policy {plan.policy}"
    where = f"{record.device}, {record.cores} cores; {work.accumulation} x {work.batch} x {work.sequence} tokens, {work.dtype}"
    loss_png(folder / "loss.png", record.steps, record.losses, record.speeds, f"Training loss: {what}", where, record.evaluations)


def peaks(folder: Path, plan: Plan, schedule: Schedule, costs: CostModel) -> tuple[PeakError, ...]:
    """Predicted and allocated bytes: of the pools that the plan sizes, in each place, and with CUDA of the whole device."""
    measured = read_json(folder / "memory.json")
    account = plan_account(plan, schedule, costs)
    try:
        rows = []
        for place in ("device", "host"):
            sized = sum(buffer.allocated for buffer in schedule.buffers if buffer.place == place and not buffer.dynamic)
            rows.append(peak_error(f"{place} pools", sized, int(measured[f"{place}_pool_bytes"])))
        if "device_peak_bytes" in measured:
            rows.append(peak_error("whole device peak", account.device_peak_bytes, int(measured["device_peak_bytes"])))
        return tuple(rows)
    except (KeyError, TypeError, ValueError):
        raise UserError(str(folder / "memory.json"), found="other content", allowed="what `megatrain train` writes", fix="train again") from None
