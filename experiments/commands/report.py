"""One HTML file that shows a run: plan and why, both timelines, memory, errors, loss, machine. It works offline."""

from __future__ import annotations

import argparse
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder written by `megatrain train`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default RUN/report.html)")


def run(args: argparse.Namespace) -> int:
    from megatrain.experiments import options
    from megatrain.experiments.compared_run import compare_run
    from megatrain.experiments.page.page import write_page

    path: Path = args.out or args.run / "report.html"
    compared = compare_run(args.run)
    options.check_writable(path)
    write_page(compared, path)
    print(f"wrote {path}: open it in a browser, no network needed")
    return 0
