"""ComparedRun: a run's folder, read, its plan predicted by today's simulator, and the two compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megatrain.experiments import options
from megatrain.experiments.pictures import Record, peaks, read_record
from megatrain.simulator.compare import compare
from megatrain.simulator.costs import CostModel, Replayed, cost_model
from megatrain.simulator.engine import simulate
from megatrain.simulator.error_report import ErrorReport
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Timeline


class ComparedRun(NamedTuple):
    """What the files say and what the simulator says."""

    folder: Path
    plan: Plan
    hardware: HardwareSpec
    costs: CostModel
    schedule: Schedule
    predicted: Timeline
    measured: Timeline
    record: Record
    errors: ErrorReport


def compare_run(folder: Path) -> ComparedRun:
    """Reads a folder that `megatrain train` has finished; writes nothing. Raises UserError where it is none, or a file of it is not what the command writes."""
    if not os.path.isfile(folder / "measured.json"):
        raise UserError(
            str(folder),
            found="no measured.json" if os.path.isdir(folder) else "no such folder",
            allowed="a folder that `megatrain train` has finished",
            fix="check the path, or train to the end",
        )
    plan = Plan.load(folder / "plan.toml")
    schedule = verified(plan)
    hardware = options.hardware_of(folder / "plan.toml", plan.hardware)
    costs = cost_model(hardware, plan.model, plan.workload)
    predicted, measured = simulate(schedule, costs), Timeline.load(folder / "measured.json")
    record, memory = read_record(folder), peaks(folder, plan, schedule, costs)
    try:
        replayed = simulate(schedule, Replayed(measured, costs.dispatch_ns))
        errors = compare(
            predicted, measured, schedule, replayed=replayed, step_seconds=record.steady_seconds, overhead_ns=costs.step_overhead_ns, memory=memory
        )
    except (UserError, ValueError) as error:
        raise UserError(str(folder / "measured.json"), found=str(error), allowed=f"a timeline of schedule {schedule.digest}", fix="train again") from None
    return ComparedRun(folder, plan, hardware, costs, schedule, predicted, measured, record, errors)
