"""Runs on one H200 what the figures have no measurement of yet: `python -m megatrain.experiments.figures.measure CASE ... --hardware hardware.toml`

Each case is a benchmark of our runtime in a process of its own, `experiments/results/figures/measured/CASE.json`; the figure takes it up by itself. Some 3 minutes
a case: compiling, seven steps (five for contexts). Meant for one H200, 16 cores, 128 GiB of host memory, with a file that `megatrain calibrate qwen2.5-7b --batch 32
--seq 1024 --compile` made there. All of Table 4 is 7B, 32 x 1024 tokens; Table 7 is 7B with the paper's contexts and batches, as far as they fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatrain.experiments import benchmark
from megatrain.experiments.figures.stored import RESULTS
from megatrain.experiments.figures.table4 import streamed
from megatrain.experiments.options import OneLineParser
from megatrain.simulator.assessment import assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.specs import ModelSpec, Workload
from megatrain.simulator.units import parse_bytes
from megatrain.simulator.verdict import candidates

MODEL = "qwen2.5-7b"
CASES: dict[str, list[str]] = {
    "table4-full": ["--compile"], "table4-no-overlapped-update": ["--compile", "--policy", "k_buffer"], "table4-no-residency": ["--compile"],
    "table4-no-compile": [], "table4-no-chunked-loss": ["--compile", "--loss-chunk", "32768"],
    "table7-1k": ["--batch", "32", "--seq", "1024", "--accumulation", "5", "--steps", "5"], "table7-8k": ["--batch", "5", "--seq", "8192", "--accumulation", "5", "--steps", "5"],
    "table7-32k": ["--batch", "1", "--seq", "32768", "--accumulation", "6", "--steps", "5"], "table7-128k": ["--batch", "1", "--seq", "131072", "--steps", "4"],
}  # fmt: skip
"""case -> what follows `megatrain.experiments.benchmark MODEL`. Contexts and eager layers are not calibrated: their plans are made for the library's h200."""
_LIBRARY = ("table7-", "table4-no-compile", "table4-no-chunked-loss")


def arguments(case: str, hardware: str, host_memory: str, out: Path) -> list[str]:
    """The benchmark's words for a case. `table4-no-residency` plans as the full case, then lets all of the state stream: its plan is written beside `out`."""
    limits = ["--out", str(out), "--host-memory", host_memory]
    if case != "table4-no-residency":
        return [MODEL, *CASES[case], "--hardware", "h200" if case.startswith(_LIBRARY) else hardware, *limits]
    machine, model, work = HardwareSpec.load(hardware), ModelSpec.load(MODEL), Workload(batch=32, sequence=1024, compiled=True)
    best = candidates(model, machine, work, source=MODEL, hardware_name=str(Path(hardware).resolve()), host_limit=parse_bytes(host_memory))[0]
    plan = out.with_suffix(".plan.toml")
    assess(streamed(best.plan), cost_model(machine, model, work)).plan.save(plan)
    return ["--plan", str(plan), "--out", str(out)]


def main() -> int:
    parser = OneLineParser(prog="python -m megatrain.experiments.figures.measure", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default all)")
    parser.add_argument("--hardware", required=True, metavar="H", help="calibrated on this machine for 7B, 32 x 1024, compiled")
    parser.add_argument("--host-memory", default="118GiB", metavar="SIZE", help="what a run may take (default 118GiB)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "figures" / "measured", metavar="DIR", help="folder for the results (default that of the repository)"
    )
    try:
        args: argparse.Namespace = parser.parse_args()
        unknown = [case for case in args.cases if case not in CASES]
        if unknown:
            raise UserError("CASE", found=", ".join(unknown), allowed=", ".join(CASES), fix="name some of these")
        failed = 0
        for case in args.cases or CASES:
            args.out.mkdir(parents=True, exist_ok=True)
            print(f"=== {case}", flush=True)
            failed = max(failed, benchmark.main(arguments(case, args.hardware, args.host_memory, args.out / f"{case}.json")))
    except UserError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    return failed


if __name__ == "__main__":
    sys.exit(main())
