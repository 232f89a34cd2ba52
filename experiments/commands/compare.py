"""Compare the predictions for a run with its measurements, or several runs with each other.

With one RUN: step time, operations and memory, predicted against measured. With several: losses,
speed and memory of each, and the settings in which they differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatrain.simulator.base.errors import UserError

PICTURE = "comparison.png"


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=Path,
        metavar="RUN",
        nargs="+",
        help="a folder written by `megatrain train`; several are compared with each other",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the picture of several runs (default {PICTURE}, in the current folder)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    if len(args.runs) > 1:
        return _several(args.runs, args.out or Path(PICTURE), as_json=args.json)
    if args.out:
        raise UserError(
            "megatrain compare: --out",
            found="one RUN, whose pictures are written into its folder",
            allowed="several RUNs, which have one picture",
            fix="leave --out out, or name another RUN",
        )
    return _one(args.runs[0], as_json=args.json)


def _one(folder: Path, *, as_json: bool) -> int:
    """Compares a run with its prediction, and writes files and pictures into its folder."""
    import textwrap

    import msgspec

    from megatrain.experiments.cli.verdict import layout
    from megatrain.experiments.run_report.compared_run import compare_run
    from megatrain.experiments.run_report.pictures import draw_run
    from megatrain.simulator.base.files import write_json
    from megatrain.simulator.compare.error_table import format_report
    from megatrain.simulator.plots.perfetto import save_trace

    run = compare_run(folder)
    run.predicted.save(folder / "predicted.json")
    write_json(folder / "comparison.json", run.errors)
    save_trace(folder / "trace.json", [run.predicted, run.measured], run.schedule)
    draw_run(run)
    if as_json:
        print(json.dumps(msgspec.to_builtins(run.errors)))
        return 0
    width = layout.terminal_width(most=120)
    print(format_report(run.errors, width).rstrip())
    wrote = (
        "wrote predicted.json, comparison.json, trace.json (open it at https://ui.perfetto.dev),"
        f" timeline.png, errors.png, memory.png and loss.png into {folder}"
    )
    print("", *textwrap.wrap(wrote, width, break_on_hyphens=False), sep="\n")
    return 0


def _several(folders: list[Path], picture: Path, *, as_json: bool) -> int:
    """Compares runs with each other, and draws them."""
    import msgspec

    from megatrain.experiments.cli import file_arguments
    from megatrain.experiments.cli.verdict import layout
    from megatrain.experiments.run_report.runs_picture import runs_png
    from megatrain.experiments.run_report.several_runs import format_runs, read_runs

    file_arguments.check_replaceable(picture, file_arguments.PICTURE_FILE)
    compared, runs = read_runs(folders)
    runs_png(picture, compared, runs)
    if as_json:
        print(json.dumps(msgspec.to_builtins(compared)))
        return 0
    print(format_runs(compared, [run.name for run in runs], layout.terminal_width()))
    print(f"\nwrote {picture}")
    return 0
