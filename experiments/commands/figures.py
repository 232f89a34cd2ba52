"""Draw the paper's figures from stored results or, with --rerun, from new simulations."""

from __future__ import annotations

import argparse
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="figures to draw, e.g. fig5 table7 (default all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("figures"),
        metavar="DIR",
        help=(
            "folder for the pictures, their CSV files, and a page that shows all of them (default"
            " figures)"
        ),
    )
    parser.add_argument(
        "--rerun",
        action="store_true",
        help=(
            "first run the simulations of these figures again and store their results, which takes"
            " some minutes. An installed package is not changed: its results are copied to"
            " DIR/results of --out, and the new ones are stored there"
        ),
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help=(
            "folder of the results (default: the stored ones, in the repository or the package)."
            " With --rerun, a new folder becomes a copy of the stored results, which then stay as"
            " they are"
        ),
    )


def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.paper_data.stored import RESULTS, is_stale, writable_results
    from megatrain.paper_figures.common.results import Results
    from megatrain.paper_figures.gallery import FIGURES, build, known

    published = ["published"] if args.rerun else []
    names = known(args.names, [*published, *FIGURES])
    folder: Path = (
        writable_results(args.out, args.results) if args.rerun else args.results or RESULTS
    )
    if args.rerun:
        from megatrain.experiments.paper_data.rerun import rerun

        rerun(names, folder, lambda line: print(line, flush=True))
    drawn = [name for name in names if name in FIGURES]
    for path in build(drawn, Results(folder), args.out) if drawn else []:
        print(path)
    stale = [
        name
        for name in drawn
        if (folder / "figures" / f"{name}.json").exists() and is_stale(folder, name)
    ]
    if stale:
        print(
            "drawn from results of an earlier version of the simulator, from which today's may"
            f" differ: {', '.join(stale)}; `megatrain figures {' '.join(stale)} --rerun` simulates"
            " them again, in some minutes"
        )
    return 0
