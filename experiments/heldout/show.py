"""Shows the held-out results: `python -m megatrain.experiments.heldout.show DIR` writes `table.md`,
`summary.json` and `errors.png` into DIR, from its stored rows alone.

With `--case TEXT` it compares one case op by op, as `megatrain compare` does for a run. It prints
the table and writes `comparison.json`, `trace.json`, `timeline.png` and `errors.png` into a folder
of the case. This needs the case's stored timeline and predicts with the current simulator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import run_program
from megatrain.experiments.heldout.compared import predict_and_compare, within_range
from megatrain.experiments.heldout.picture import draw
from megatrain.experiments.heldout.rows import HeldoutRow, read_rows
from megatrain.experiments.heldout.summary import summarize_errors
from megatrain.experiments.heldout.table import markdown
from megatrain.experiments.heldout.timelines import read_timelines
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_json, write_text
from megatrain.simulator.compare.error_report import peak_error
from megatrain.simulator.compare.error_table import format_report
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.plots.error_pictures import errors_png
from megatrain.simulator.plots.perfetto import save_trace
from megatrain.simulator.plots.pictures import timeline_png
from megatrain.simulator.policies import verified


def parser() -> options.OneLineParser:
    """Returns the parser for the options."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.heldout.show", description=__doc__
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="a folder that `python -m megatrain.experiments.heldout` wrote",
    )
    parser.add_argument(
        "--case",
        metavar="TEXT",
        help="compare one case op by op: the case whose name is TEXT or contains it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write (default DIR, or DIR/cases/NAME for a case)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Shows all results or one case, and returns the exit status. Raises UserError if the folder
    has no rows.
    """
    rows = read_rows(args.folder / "rows.jsonl")
    if not rows:
        raise UserError(
            str(args.folder / "rows.jsonl"),
            found="no rows",
            allowed="a folder of `python -m megatrain.experiments.heldout`",
            fix="check the path",
        )
    if args.case:
        return show_case(args.folder, _chosen(rows, args.case), args.out)
    out: Path = args.out or args.folder
    file_arguments.check_writable(out / "table.md")
    draw(rows, out / "errors.png")
    write_text(out / "table.md", markdown(rows))
    write_json(out / "summary.json", summarize_errors(rows))
    if (hardware := args.folder / "hardware.toml").exists():
        print(
            "{} of {} steps lie within the range that the calibration's spreads give".format(
                *within_range(rows, HardwareSpec.load(str(hardware)))
            )
        )
    print(f"wrote table.md, summary.json and errors.png into {out}")
    return 0


def _chosen(rows: Sequence[HeldoutRow], text: str) -> HeldoutRow:
    found = [row for row in rows if row.name == text] or [row for row in rows if text in row.name]
    if len(found) != 1:
        names = ", ".join(row.name for row in (found or rows)[:3])
        raise UserError(
            "--case",
            found=f"{len(found)} cases with {text!r} in their name",
            allowed=f"one, such as {names}",
            fix="give more of its name",
        )
    return found[0]


def show_case(folder: Path, row: HeldoutRow, out: Path | None) -> int:
    """Prints the errors of one case, writes them as files, and returns the exit status 0. Raises
    UserError if the case has no stored timeline.
    """
    stored = read_timelines(folder / "timelines.jsonl").get(row.same_as or row.name)
    if stored is None:
        raise UserError(
            row.name,
            found="no stored timeline",
            allowed="a case with one in timelines.jsonl",
            fix="run the case again",
        )
    plan, schedule = row.plan, verified(row.plan)
    costs = cost_model(HardwareSpec.load(str(folder / "hardware.toml")), plan.model, plan.workload)
    account, measured = plan_account(plan, schedule, costs), stored.timeline(schedule)
    sizes = (
        ("whole device peak", account.device_peak_bytes, row.device_peak_bytes),
        ("host memory", account.host_peak_bytes, row.host_bytes),
    )
    memory = tuple(
        peak_error(what, predicted, found) for what, predicted, found in sizes if found is not None
    )
    predicted, errors = predict_and_compare(schedule, measured, costs, memory)
    out = out or folder / "cases" / row.name.replace("/", "-").replace(" ", "-")
    file_arguments.check_writable(out / "comparison.json")
    write_json(out / "comparison.json", errors)
    save_trace(out / "trace.json", [predicted, measured], schedule)
    timeline_png(
        out / "timeline.png",
        [predicted, measured],
        f"One optimizer step: {row.name}",
        f"{row.machine}, {row.date}",
    )
    errors_png(out / "errors.png", errors, f"Predicted against measured: {row.name}")
    print(format_report(errors).rstrip())
    print(
        "\nwrote comparison.json, trace.json (open it at https://ui.perfetto.dev), timeline.png"
        f" and errors.png into {out}"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the results were shown, and 2 for a mistake of the user."""
    return run_program("heldout", lambda: run(parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
