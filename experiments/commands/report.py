"""Write a report on a run as one HTML page, which needs no network.

The page shows loss, learning rate, gradient norm, evaluations and data, the predicted and the
measured timeline, the plan and the reasons for it, prediction errors, memory, and the machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a folder written by `megatrain train`"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page to write (default RUN/report.html)"
    )


def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.cli import file_arguments
    from megatrain.experiments.run_report.compared_run import compare_run, refuse_unmeasured
    from megatrain.experiments.run_report.page import write_page

    path: Path = args.out or args.run / "report.html"
    refuse_unmeasured(args.run)
    file_arguments.check_replaceable(path, file_arguments.PAGE_FILE)
    compared = compare_run(args.run)
    write_page(compared, path)
    print(f"wrote {path}: open it in a browser; it needs no network")
    return 0
