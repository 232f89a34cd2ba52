"""Runs on one H200 what the figures have no measurement of yet: `python -m megatrain.experiments.figures.measure [CASE ...] --out DIR`

Each case is a plan, saved as `DIR/CASE.plan.toml`, and its benchmark in a process of its own, `DIR/CASE.json`, written when it is done: whoever cuts the
command off loses one case. The figures take up what lies in `experiments/results/figures/measured`. For the H200 of 16 cores and 128 GiB of host memory that
was calibrated there (`ablations.CALIBRATED`). Table 4's full plan and the contexts of 1,024 and 131,072 tokens are measured in
`experiments/results/h200-qwen2.5-7b-batches`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatrain.experiments import benchmark
from megatrain.experiments.figures import ablations
from megatrain.experiments.options import OneLineParser
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.assessment import Choice
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Plan
from megatrain.simulator.planner import candidates
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.units import format_bytes, format_seconds
from megatrain.simulator.workload import Workload

ABLATIONS = {f"table4-{case.replace(' ', '-')}": case for case in ablations.CASES[1:]}
CONTEXTS = {"table7-32k": (1, 32768), "table7-8k": (5, 8192)}
"""case -> sequences, one micro-batch of them; tokens of each"""
CASES = (*ABLATIONS, *CONTEXTS)
"""the most wanted first"""
CONTEXT_DEVICE_BYTES = 131 * 2**30
"""as the measured 1 x 131,072 had: the library counts eager activations, so less is taken"""


def plan(case: str) -> tuple[Choice, str]:
    """What one of CASES runs, and the machine that it is planned for: other contexts are not calibrated, so theirs are planned for the library's `h200`."""
    if case in ABLATIONS:
        return ablations.ablated(ABLATIONS[case]), os.path.relpath(ablations.CALIBRATED)
    batch, sequence = CONTEXTS[case]
    work = Workload(batch=batch, sequence=sequence, compiled=True, attention="cudnn", loss_chunk=ablations.WORK.loss_chunk)
    found = candidates(
        ModelSpec.load(ablations.MODEL), HardwareSpec.load("h200"), work, source=ablations.MODEL, hardware_name="h200",
        device_limit=CONTEXT_DEVICE_BYTES, host_limit=ablations.HOST_BYTES,
    )  # fmt: skip
    return found[0], "h200"


def arguments(case: str, out: Path, steps: int) -> list[str]:
    """The benchmark's words for a case, whose plan is written beside its result."""
    choice, hardware = plan(case)
    choice.plan.save(path := out / f"{case}.plan.toml")
    return ["--plan", str(path), "--hardware", hardware, "--systems", "ours", "--steps", str(steps), "--out", str(out / f"{case}.json")]


def main() -> int:
    parser = OneLineParser(prog="python -m megatrain.experiments.figures.measure", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default all, in this order)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help=f"of each; the first {WARM_UP_STEPS} do not count (default 5)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--commit", metavar="HASH", help="what to note as the commit where the code is not in a git repository")
    parser.add_argument("--only-plan", action="store_true", help="write the plans, say what they are predicted to take, and measure nothing")
    try:
        args: argparse.Namespace = parser.parse_args()
        if unknown := [case for case in args.cases if case not in CASES]:
            raise UserError("CASE", found=", ".join(unknown), allowed=", ".join(CASES), fix="name some of these")
        args.out.mkdir(parents=True, exist_ok=True)
        failed = 0
        for case in args.cases or CASES:
            words = arguments(case, args.out, args.steps)
            if args.only_plan:
                print(_expected(args.out / f"{case}.plan.toml"), flush=True)
                continue
            print(f"=== {case}", flush=True)
            failed = max(failed, benchmark.main([*words, *(["--commit", args.commit] if args.commit else [])]))
    except UserError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    return failed


def _expected(path: Path) -> str:
    prediction = Plan.load(path).prediction
    assert prediction is not None
    peaks = (format_bytes(size) for size in (prediction.device_peak_bytes, prediction.host_peak_bytes))
    return f"{path.name}: step {format_seconds(prediction.step_seconds)}, device {' host '.join(peaks)}"


if __name__ == "__main__":
    sys.exit(main())
