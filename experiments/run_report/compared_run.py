"""Reads a run's folder, simulates its plan, and compares the two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megatrain.experiments.cli import file_arguments
from megatrain.experiments.files.peaks import peaks
from megatrain.experiments.run_report.step_record import StepRecord, read_record
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.compare.compare import compare
from megatrain.simulator.compare.error_report import ErrorReport
from megatrain.simulator.costs import CostModel, Replayed, costs_of
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline


class ComparedRun(NamedTuple):
    """A run's files, its plan simulated by the current simulator, and the errors."""

    folder: Path
    """The run's folder."""
    plan: Plan
    """The run's plan."""
    hardware: HardwareSpec
    """The machine for which the plan was made."""
    costs: CostModel
    """The cost model of the plan on this machine."""
    schedule: Schedule
    """The operations of one step."""
    predicted: Timeline
    """The timeline of the simulated step."""
    measured: Timeline
    """The timeline of the measured step."""
    record: StepRecord
    """The run's steps and machine."""
    errors: ErrorReport
    """The errors of the predicted timeline and memory."""


def refuse_unmeasured(folder: Path) -> None:
    """Raises UserError if `folder` is not the folder of a run in which a step was measured."""
    if not os.path.isfile(folder / "measured.json"):
        raise UserError(
            str(folder),
            found="no measured.json" if os.path.isdir(folder) else "no such folder",
            allowed="a folder in which `megatrain train` measured a step",
            fix="check the path, or train at least three steps. A run that was killed has the file"
            " from its first checkpoint on",
        )


def compare_run(folder: Path) -> ComparedRun:
    """Returns the comparison for a folder that `megatrain train` wrote. Writes nothing.

    Raises UserError if `folder` is no such folder, or if one of its files cannot be read.
    """
    refuse_unmeasured(folder)
    plan = Plan.load(folder / "plan.toml")
    schedule = verified(plan)
    hardware = file_arguments.hardware_of(folder / "plan.toml", plan.hardware)
    costs = costs_of(plan, hardware)
    predicted, measured = simulate(schedule, costs), Timeline.load(folder / "measured.json")
    record, memory = read_record(folder), peaks(folder, plan, schedule, costs)
    try:
        replayed = simulate(schedule, Replayed(measured, costs.dispatch_ns))
        errors = compare(
            predicted,
            measured,
            schedule,
            replayed=replayed,
            step_seconds=record.steady_seconds,
            overhead_ns=costs.step_overhead_ns,
            memory=memory,
        )
    except (UserError, ValueError) as error:
        raise UserError(
            str(folder / "measured.json"),
            found=str(error),
            allowed=f"a timeline of schedule {schedule.digest}",
            fix="train again",
        ) from None
    return ComparedRun(folder, plan, hardware, costs, schedule, predicted, measured, record, errors)
