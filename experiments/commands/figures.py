"""The paper's figures, drawn from stored results; with --rerun after running their simulations again."""

from __future__ import annotations

import argparse
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="which, e.g. fig5 or table7 (default all)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("figures"),
        metavar="DIR",
        help="folder for the pictures, their CSV files, and the page that shows them all (default figures)",
    )
    parser.add_argument("--rerun", action="store_true", help="run the simulations of these figures again first, some minutes, and store their results")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where results are (default experiments/results of the repository)")


def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.figures.stored import RESULTS, is_stale
    from megatrain.paper_figures.gallery import FIGURES, build, known
    from megatrain.paper_figures.results import Results

    folder: Path = args.results or RESULTS
    published = ["published"] if args.rerun else []
    names = known(args.names, [*published, *FIGURES])
    if args.rerun:
        from megatrain.experiments.figures.rerun import rerun

        rerun(names, folder, lambda line: print(line, flush=True))
    drawn = [name for name in names if name in FIGURES]
    for path in build(drawn, Results(folder), args.out) if drawn else []:
        print(path)
    stale = [name for name in drawn if (folder / "figures" / f"{name}.json").exists() and is_stale(folder, name)]
    if stale:
        print(f"simulated with other code or data than today's: {', '.join(stale)}; `megatrain figures {' '.join(stale)} --rerun` runs them again")
    return 0
