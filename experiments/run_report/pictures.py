"""Draws the pictures in a run's folder: the predicted and the measured timeline, the errors, the
memory with its limit, and the loss.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.experiments.run_report.compared_run import ComparedRun
from megatrain.experiments.run_report.step_record import StepRecord
from megatrain.simulator.base.units import format_count
from megatrain.simulator.memory.account import WORKSPACE, kinds_of, usage
from megatrain.simulator.model.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.planner.assessment import layer_activations, plan_account, slot_bytes
from megatrain.simulator.plots.error_pictures import errors_png
from megatrain.simulator.plots.loss_picture import loss_png
from megatrain.simulator.plots.memory_picture import memory_png
from megatrain.simulator.plots.pictures import timeline_png
from megatrain.simulator.schedule.buffer import Buffer
from megatrain.simulator.schedule.plan import Plan


def draw_run(run: ComparedRun) -> None:
    """Draws `timeline.png`, `errors.png`, `memory.png` and `loss.png` in the run's folder."""
    folder, plan, schedule, measured = run.folder, run.plan, run.schedule, run.measured
    work, seconds = plan.workload, measured.makespan_ns / 1e9
    what, where = _what(plan), _where(run.record, plan)
    speed = (
        f"{tokens_per_second(work, seconds):,.0f} tokens/s,"
        f" {tflops_6n(plan.model, work, seconds):.3g} TFLOPS (6N)"
    )
    timeline_png(
        folder / "timeline.png",
        [run.predicted, measured],
        f"One optimizer step: {what}",
        f"{where}; {speed}",
    )
    errors_png(folder / "errors.png", run.errors, f"Predicted against measured: {what}")
    account = plan_account(plan, schedule, run.costs)
    fixed = {pool: size for pool, size in account.pools.items() if pool == WORKSPACE}
    workspace = Buffer(id=f"{WORKSPACE}:all", bytes=0, data="workspace", dtype="mixed")
    memory_png(
        folder / "memory.png",
        usage(schedule, measured, slot_bytes(plan, layer_activations(plan, run.costs))),
        plan.device_limit_bytes,
        plan.host_limit_bytes,
        f"Memory over one step: {what}",
        fixed=fixed,
        subtitle=where,
        step_ns=measured.makespan_ns,
        kinds={**kinds_of(schedule), WORKSPACE: workspace},
    )
    draw_loss(folder, run.record, plan)


def draw_loss(folder: Path, record: StepRecord, plan: Plan) -> None:
    """Draws `loss.png` in the run's folder."""
    loss_png(
        folder / "loss.png",
        record.steps,
        record.losses,
        record.rates,
        record.norms,
        record.speeds,
        f"Training loss: {_what(plan)}",
        _where(record, plan),
        [(evaluation.step, evaluation.loss) for evaluation in record.evaluations],
        record.smoothing,
    )


def _what(plan: Plan) -> str:
    parameters = plan.model.parameters
    count = f"{parameters / 1e6:,.0f} M" if parameters >= 1e6 else format_count(parameters)
    return f"{plan.model.name}, {count} parameters, policy {plan.policy}"


def _where(record: StepRecord, plan: Plan) -> str:
    work = plan.workload
    return (
        f"{record.device}, {record.cores} cores; {work.accumulation} x {work.batch} x"
        f" {work.sequence} tokens, {work.precision}"
    )
