"""Measures plans of the figures on one H200: `python -m megatrain.experiments.paper_data.measure
[CASE ...] --out DIR`

Each case has a plan, `DIR/CASE.plan.toml`, and a benchmark in its own process, `DIR/CASE.json`. The
result is written when the case is done, so an interrupted command loses at most one case. The
figures read the results in `experiments/results/figures/measured`. The plans are for the calibrated
H200 with 16 cores and 128 GiB of host memory (`ablations.CALIBRATED`). Table 4's full plan is
measured in `experiments/results/h200-qwen2.5-7b-batches`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from megatrain.experiments import benchmark
from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.paper_data import ablations
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.schedule.plan import Plan

CASES = {f"table4-{case.replace(' ', '-')}": case for case in ablations.CASES[1:]}
"""Name -> case of Table 4, the most useful first."""


def arguments(case: str, out: Path, steps: int) -> list[str]:
    """Returns the benchmark's arguments for a case. Writes the plan into the folder `out`."""
    plan = ablations.ablated(CASES[case]).plan
    machine = os.path.relpath(ablations.CALIBRATED, out)  # as seen from the folder of the plan
    msgspec.structs.replace(plan, hardware=machine).save(path := out / f"{case}.plan.toml")
    return [
        "--plan",
        str(path),
        "--systems",
        "ours",
        "--steps",
        str(steps),
        "--out",
        str(out / f"{case}.json"),
    ]


def main() -> int:
    """Plans and measures the cases. Returns 2 for a mistake of the user, or the largest exit status
    of the benchmarks.
    """
    parser = OneLineParser(
        prog="python -m megatrain.experiments.paper_data.measure", description=__doc__
    )
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"one of {', '.join(CASES)} (default all, in this order)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help=f"steps of each case; the first {WARM_UP_STEPS} are warm-up (default 5)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--commit",
        metavar="HASH",
        help="the commit to record if the code is not in a git repository",
    )
    parser.add_argument(
        "--only-plan",
        action="store_true",
        help="write the plans and print their predictions, but measure nothing",
    )
    try:
        args: argparse.Namespace = parser.parse_args()
        if unknown := [case for case in args.cases if case not in CASES]:
            raise UserError(
                "CASE", found=", ".join(unknown), allowed=", ".join(CASES), fix="name some of these"
            )
        args.out.mkdir(parents=True, exist_ok=True)
        failed = 0
        for case in args.cases or CASES:
            words = arguments(case, args.out, args.steps)
            if args.only_plan:
                print(_expected(args.out / f"{case}.plan.toml"), flush=True)
                continue
            print(f"=== {case}", flush=True)
            failed = max(
                failed,
                benchmark.main([*words, *(["--commit", args.commit] if args.commit else [])]),
            )
    except UserError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    return failed


def _expected(path: Path) -> str:
    prediction = Plan.load(path).prediction
    assert prediction is not None
    peaks = (
        format_bytes(size) for size in (prediction.device_peak_bytes, prediction.host_peak_bytes)
    )
    return (
        f"{path.name}: step {format_seconds(prediction.step_seconds)}, device"
        f" {' host '.join(peaks)}"
    )


if __name__ == "__main__":
    sys.exit(main())
