"""Compare the predictions for a run with its measurements: step time, operations and memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a folder written by `megatrain train`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    import msgspec

    from megatrain.experiments.run_report.compared_run import compare_run
    from megatrain.experiments.run_report.pictures import draw_run
    from megatrain.simulator.base.files import write_json
    from megatrain.simulator.compare.error_table import format_report
    from megatrain.simulator.plots.perfetto import save_trace

    folder: Path = args.run
    run = compare_run(folder)
    run.predicted.save(folder / "predicted.json")
    write_json(folder / "comparison.json", run.errors)
    save_trace(folder / "trace.json", [run.predicted, run.measured], run.schedule)
    draw_run(run)
    if args.json:
        print(json.dumps(msgspec.to_builtins(run.errors)))
        return 0
    print(format_report(run.errors).rstrip())
    print(
        "\nwrote predicted.json, comparison.json, trace.json (open it at https://ui.perfetto.dev),"
        f" timeline.png, errors.png, memory.png and loss.png into {folder}"
    )
    return 0
