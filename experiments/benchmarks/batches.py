"""Times steps of DeepSpeed ZeRO-3 or FSDP2 over several batches of one model, in one process:

    python -m megatrain.experiments.benchmarks.batches SYSTEM MODEL --batches 1,8,32 --out FILE

Loading a model into host memory takes longer than a few steps, so the batches share one model. They
run in the given order, smallest first. After a batch that fails, the others are not run. The file
is written after each batch, so a run that is ended early keeps the batches before. Weights and
tokens are random.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from megatrain.experiments.benchmark import commit, summary
from megatrain.experiments.benchmarks.child import BASELINES, baseline
from megatrain.experiments.benchmarks.steps import MeasuredSteps, Reading, repeat
from megatrain.experiments.cli import options
from megatrain.experiments.cli.program import run_program
from megatrain.runtime.machine import default_device, describe, forget_device_memory
from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.files import write_json
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan


def measure(
    system: str, plan: Plan, batches: list[int], steps: int, device: torch.device
) -> Iterator[tuple[Workload, MeasuredSteps]]:
    """Yields for each batch its workload and its steps, or the reason why there are none. Each is
    yielded as soon as it was measured.

    Args:
        system: `zero3` or `fsdp2`.
        plan: model and workload. The batch of the workload is not used.
        batches: sequences per micro-batch.
        steps: steps of each batch, warm-up included.
        device: the GPU, or for `fsdp2` also the CPU.
    """
    module, obstacle = baseline(system, device)
    works = [msgspec.structs.replace(plan.workload, batch=batch) for batch in batches]
    if obstacle:
        for work in works:
            yield work, MeasuredSteps(system=system, failure=obstacle)
        return
    forget_device_memory(device)
    failure = ""
    step, notes = module.prepare(msgspec.structs.replace(plan, workload=works[0]), device)
    for work in works:
        if failure:
            yield work, MeasuredSteps(system=system, failure=failure)
            continue
        forget_device_memory(device)

        def timed(number: int, work: Workload = work) -> Reading:
            return cast("Reading", step(number, work))

        try:
            readings = repeat(timed, steps, system)
        except Exception as error:  # another batch may be too large for the GPU
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            failure = f"not run, because batch {work.batch} failed"
            yield work, MeasuredSteps(system=system, failure=f"{type(error).__name__}: {first}")
            continue
        cuda = device.type == "cuda"
        yield (
            work,
            MeasuredSteps(
                system=system,
                notes=notes,
                steps=readings,
                device_peak_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
                host_peak_bytes=host_peak_bytes(),
            ),
        )


def _batches(text: str) -> list[int]:
    """Returns the numbers in a text such as `1,8,32`, smallest first, each once."""
    number = options.whole("--batches")
    return sorted({int(number(part.strip())) for part in text.split(",")})


def parser() -> options.OneLineParser:
    """Returns the parser of the program's options."""
    parser = options.OneLineParser(
        prog="python -m megatrain.experiments.benchmarks.batches", description=__doc__
    )
    parser.add_argument("system", choices=BASELINES)
    parser.add_argument("model", metavar="MODEL", help="a name in the library, or a config.json")
    parser.add_argument(
        "--batches", type=_batches, default=[1, 8, 32], metavar="N,N", help="default 1,8,32"
    )
    parser.add_argument("--seq", type=options.whole("--seq"), default=1024, help="default 1024")
    parser.add_argument(
        "--hardware", default="h200", help="machine for the MFU, a name in the library"
    )
    parser.add_argument(
        "--steps",
        type=options.whole("--steps", WARM_UP_STEPS + 1),
        default=5,
        help=f"steps of each batch; the first {WARM_UP_STEPS} are not counted (default 5)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--commit", metavar="HASH", help="commit to record")
    options.add_device(parser)
    return parser


def run(arguments: list[str] | None = None) -> int:
    """Times the batches, prints a line for each, and returns 1 if none ran, otherwise 0."""
    args = parser().parse_args(arguments)
    model, hardware = ModelSpec.load(args.model), HardwareSpec.load(args.hardware)
    device = torch.device("cpu") if args.device == "cpu" else default_device()
    work = Workload(batch=args.batches[0], sequence=args.seq, short_recompute=True)
    plan = Plan(
        model=model,
        workload=work,
        policy="overlapped",
        hardware=args.hardware,
        source=args.model,
        device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=hardware.host_bytes,
    )
    records: list[dict[str, Any]] = []
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit() or args.commit,
        "machine": describe(device),
        "model": model.name,
        "parameters": model.parameters,
        "warm_up_steps": WARM_UP_STEPS,
        "batches": records,
    }
    for each, found in measure(args.system, plan, args.batches, args.steps, device):
        timed = msgspec.structs.replace(plan, workload=each)
        record = summary(msgspec.to_builtins(found), timed, hardware)
        records.append({"batch": each.batch, "sequence": each.sequence} | record)
        speed = record.get("step_seconds_median")
        print(
            f"{args.system} {each.batch} x {each.sequence}:"
            f" {record['failure'] if speed is None else f'{speed:.3f} s'}",
            flush=True,
        )
        if args.out:
            write_json(args.out, result)
    if args.out:
        print(f"wrote {args.out}")
    return 0 if any("step_seconds_median" in record for record in records) else 1


def main(arguments: list[str] | None = None) -> int:
    """Runs the program and returns its exit status."""
    return run_program("batches", lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
