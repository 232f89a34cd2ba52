"""Predicts stored benchmarks again: `python -m megatrain.experiments.benchmarks.predicted FILE...`.

Each FILE is a result of `python -m megatrain.experiments.benchmark` with steps of `ours`. The plan
that ran is simulated with today's simulator, for the machine that the result names or for that of
`--hardware`. With a machine of the library, the errors are those of predictions without a
calibration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from megatrain.experiments.cli import options
from megatrain.experiments.cli.program import run_program
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import step_seconds
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule.plan import Knobs, Plan

_ROOT = Path(__file__).resolve().parents[2]


class _StoredPlan(msgspec.Struct, frozen=True):
    """The plan in a result file."""

    policy: str
    hardware: str
    workload: Workload
    knobs: Knobs
    digest: str = ""


class _StoredSystem(msgspec.Struct, frozen=True):
    """The steps of one system in a result file."""

    system: str
    step_seconds_median: float | None = None


class _Arguments(msgspec.Struct, frozen=True):
    """The arguments of the command that made a result file."""

    plan: str | None = None
    """The plan file that was executed, by its path from the repository's root."""


class StoredBenchmark(msgspec.Struct, frozen=True):
    """The parts of a result file from which its steps are predicted again."""

    model: str
    """A name in the library, or the name of another model, which `arguments.plan` describes."""
    plan: _StoredPlan
    systems: tuple[_StoredSystem, ...]
    arguments: _Arguments = _Arguments()

    @classmethod
    def load(cls, path: Path) -> StoredBenchmark:
        """Reads the result file `path`. Raises UserError if it is none."""
        return convert(read_json(path), cls, str(path))


def plan_of(result: StoredBenchmark) -> Plan:
    """Returns the plan of a benchmark, without memory limits."""
    said, file = result.plan, _ROOT / (result.arguments.plan or "")
    return Plan(
        policy=said.policy,
        digest=said.digest,
        hardware=said.hardware,
        source="",
        device_limit_bytes=1,
        host_limit_bytes=1,
        model=Plan.load(file).model if file.is_file() else ModelSpec.load(result.model),
        workload=said.workload,
        knobs=said.knobs,
    )


def machine_of(plan: Plan) -> HardwareSpec:
    """Returns the machine that a plan of `plan_of` names: a file, by its path from the repository's
    root, or a name in the library.
    """
    file = _ROOT / plan.hardware
    return HardwareSpec.load(str(file) if file.is_file() else plan.hardware)


def measured_seconds(result: StoredBenchmark, path: Path) -> float:
    """Returns the median step time of `ours` in a benchmark, in seconds. Raises UserError if `ours`
    was not timed. `path` is named in the error.
    """
    for system in result.systems:
        if system.system == "ours" and system.step_seconds_median is not None:
            return system.step_seconds_median
    raise UserError(
        str(path),
        found="no step of `ours`",
        allowed="a result of `python -m megatrain.experiments.benchmark` with steps of `ours`",
        fix="give another file",
    )


def parser() -> options.OneLineParser:
    """Returns the parser for the options."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.benchmarks.predicted", description=__doc__
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="stored benchmarks")
    parser.add_argument(
        "--hardware",
        metavar="H",
        help="machine to predict for: a file of `megatrain calibrate`, or a name in the library"
        " (default: that of each result)",
    )
    return parser


def run(arguments: list[str] | None = None) -> int:
    """Prints a line for each file, and returns the exit status 0."""
    args = parser().parse_args(arguments)
    rows = [["file", "model", "workload", "predicted", "measured", "error"]]
    for path in args.files:
        result = StoredBenchmark.load(path)
        plan, measured = plan_of(result), measured_seconds(result, path)
        hardware = HardwareSpec.load(args.hardware) if args.hardware else machine_of(plan)
        seconds = step_seconds(verified(plan), cost_model(hardware, plan.model, plan.workload))
        work = plan.workload
        rows.append(
            [
                f"{path.parent.name}/{path.name}",
                plan.model.name,
                f"{work.accumulation}x{work.shape}",
                f"{seconds:.3f} s",
                f"{measured:.3f} s",
                f"{seconds / measured - 1:+.1%}",
            ]
        )
    print("\n".join(align(rows)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    return run_program("predicted", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
