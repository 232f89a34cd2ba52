"""Compares predictions for layers that were not measured with stored measurements: `python -m
megatrain.experiments.heldout.uncalibrated DIR`.

It predicts each stored plan again with the current simulator, and prints the errors of the step and
of device memory for each case. It also prints the memory traffic of forward, backward and head as a
share of the bytes that `op_work` counts. The traffic is (measured time - predicted time of
matrix products and attention) x the rate of a copy. Ops beside which an update ran are left out.
The medians over the fitted half of the models are the constants of
`simulator/costs/kernel_traffic.py`. The other half tests them.

With `--hardware FILE`, the machine of that file is used instead of the library's. A calibration of
other layers on the same kind of GPU is tested in this way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatrain.experiments.cli import options
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.heldout.rows import HeldoutRow, read_rows
from megatrain.experiments.heldout.suites import FITTED, suite
from megatrain.experiments.heldout.timelines import StoredTimeline, read_timelines
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.attention_masks import writes_scores
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule.timeline import Span

KINDS = ("forward", "backward", "head")


class UncalibratedCase(NamedTuple):
    """One case. Errors are (predicted - measured) / measured."""

    row: HeldoutRow
    """The plan and its measurement."""
    step: float
    """Error of the step time."""
    memory: float
    """Error of the peak of device memory."""
    shares: dict[str, float]
    """Kind of op -> its memory traffic as a share of the bytes that `op_work` counts."""

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted to the case's model."""
        return self.row.model in FITTED


def compare(row: HeldoutRow, stored: StoredTimeline, hardware: HardwareSpec) -> UncalibratedCase:
    """Returns the errors and the traffic of a measured case."""
    plan = row.plan
    assert row.step_seconds is not None, "the case was measured"
    assert row.device_peak_bytes is not None, "the case was measured"
    choice = assess(plan, cost_model(hardware, plan.model, plan.workload))
    schedule, sheet = verified(plan), Datasheet(hardware, plan.model, plan.workload)
    measured = stored.timeline(schedule)
    taken, known, moved = (defaultdict[str, float](float) for _ in range(3))
    updates = [measured.by_op[op.id] for op in schedule.ops if op.kind == "update"]
    for op in schedule.ops:
        if op.kind in KINDS and not _beside(measured.by_op[op.id], updates):
            work = op_work(plan.model, op.kind, op.layer, plan.workload)
            taken[op.kind] += measured.by_op[op.id].duration_ns
            known[op.kind] += (
                sheet.products_of_layers_ns(work)
                + sheet.attention_ns(op.kind, op.layer)
                + work.unfused_bytes / hardware.device_gb_per_s
            )
            moved[op.kind] += (work.moved_bytes - work.unfused_bytes) / hardware.device_gb_per_s
    return UncalibratedCase(
        row=row,
        step=choice.step_seconds / row.step_seconds - 1,
        memory=choice.account.device_peak_bytes / row.device_peak_bytes - 1,
        shares={kind: (taken[kind] - known[kind]) / moved[kind] for kind in taken},
    )


def _beside(event: Span, others: Iterable[Span]) -> bool:
    """Returns whether one of the other ops runs at the same time."""
    return any(event.start_ns < other.end_ns and other.start_ns < event.end_ns for other in others)


def _layers_of(case: UncalibratedCase) -> str:
    """Returns the kind of the model's layers: `dense`, `experts`, `clamped experts`, or an empty
    text for models of no group. They have layers that are not compiled, or write out attention
    scores.
    """
    model, work = case.row.plan.model, case.row.plan.workload
    if any(model.part(layer.name).clamped for layer in model.decoders):
        return "clamped experts"
    if writes_scores(model, work) or not all(layer.compilable for layer in model.decoders):
        return ""
    return "experts" if any(layer.experts for layer in model.decoders) else "dense"


def _groups(cases: Iterable[UncalibratedCase]) -> dict[str, list[UncalibratedCase]]:
    """Returns the cases by name of their group: eager or compiled, kind of layers, and half."""
    found: dict[str, list[UncalibratedCase]] = {}
    for case in cases:
        execution = "compiled" if case.row.plan.workload.compiled else "eager"
        if layers := _layers_of(case):
            name = f"{execution} {layers} {'fitted' if case.fitted else 'test'}"
            found.setdefault(name, []).append(case)
    return dict(sorted(found.items()))


def report(cases: Sequence[UncalibratedCase], uncertainty: float) -> str:
    """Returns the tables of cases, errors and traffic, and the number of steps within the range
    that `check` states for a machine with this relative `uncertainty`.
    """
    rows = [["case", "half", "step", "memory", *KINDS]]
    rows += [
        [
            case.row.name.replace("/whole/best", ""),
            "fitted" if case.fitted else "test",
            f"{case.step:+.1%}",
            f"{case.memory:+.1%}",
            *(f"{case.shares[kind]:.2f}" for kind in KINDS),
        ]
        for case in cases
    ]
    stated = f"within {uncertainty:.0%}"
    errors = [["cases", "count", "median error", "mean", "worst", stated, "memory, least", "most"]]
    for half in ("fitted", "test", "all"):
        for execution in ("eager", "compiled"):
            chosen = [
                case
                for case in cases
                if half in ("all", "fitted" if case.fitted else "test")
                and case.row.plan.workload.compiled == (execution == "compiled")
            ]
            if chosen:
                absolute = [abs(case.step) for case in chosen]
                errors.append(
                    [
                        f"{execution}, {half}",
                        str(len(chosen)),
                        f"{statistics.median(absolute):.1%}",
                        f"{statistics.mean(absolute):.1%}",
                        f"{max(absolute):.1%}",
                        str(sum(_within(case, uncertainty) for case in chosen)),
                        f"{min(case.memory for case in chosen):+.1%}",
                        f"{max(case.memory for case in chosen):+.1%}",
                    ]
                )
    traffic = [["median traffic", "count", *KINDS]]
    for name, group in _groups(cases).items():
        medians = [statistics.median(case.shares[kind] for case in group) for kind in KINDS]
        traffic.append([name, str(len(group)), *(f"{median:.2f}" for median in medians)])
    inside = sum(_within(case, uncertainty) for case in cases)
    tables = ["\n".join(align(table)) for table in (rows, errors, traffic)]
    return "\n\n".join([*tables, f"{inside} of {len(cases)} steps are {stated} of the prediction"])


def _within(case: UncalibratedCase, uncertainty: float) -> bool:
    """Returns whether the measured step is in the range of the prediction that `check` states."""
    return abs(1 / (1 + case.step) - 1) <= uncertainty


def parser() -> options.OneLineParser:
    """Returns the parser for the options."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.heldout.uncalibrated", description=__doc__
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="a folder that `python -m megatrain.experiments.heldout --suite families` wrote",
    )
    parser.add_argument(
        "--hardware",
        default=suite("families").library,
        metavar="H",
        help="a hardware file, or a name in the library (default %(default)s)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the report of the stored cases, and returns the exit status 0. Raises UserError if no
    case was measured.
    """
    timelines = read_timelines(args.folder / "timelines.jsonl")
    hardware = HardwareSpec.load(args.hardware)
    measured = [
        row for row in read_rows(args.folder / "rows.jsonl") if not (row.failure or row.same_as)
    ]
    if not measured:
        raise UserError(
            str(args.folder),
            found="no measured case",
            allowed="a folder of the suite `families`",
            fix="check the path",
        )
    print(
        report(
            [compare(row, timelines[row.name], hardware) for row in measured], hardware.uncertainty
        )
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the results were shown, and 2 for a mistake of the user."""
    return run_program("heldout.uncalibrated", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
