"""Runs steps of a plan for several GPUs, from random weights and on random tokens:

    torchrun --standalone --nproc-per-node 2 -m megatrain.experiments.ranks PLAN --steps 3

torchrun starts one process, a rank, for each GPU of the plan. A plan for one GPU is run without
torchrun. Rank 0 prints a line of JSON for each step. At the end it prints a line with the peak
memory of each rank, and a line with a digest of the fp32 masters of the whole model, which is the
same for any number of GPUs. Without CUDA, the ranks run on the CPU.

With `--system zero3` or `--system fsdp2`, DeepSpeed or FSDP2 runs the micro-batches of the plan on
the same number of GPUs. torchrun gives each rank one thread. These systems update on the CPU, so
set OMP_NUM_THREADS to the number of cores divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatrain.experiments.benchmarks.child import BASELINES, OWN, baseline
from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.program import run_program
from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import default_device, grow_segments, make_deterministic
from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.ranks import Ranks, check_started, joined
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.schedule.arithmetic import own_micro_batches
from megatrain.simulator.schedule.plan import Plan

_LEAST_TIMEOUT_S = 0.1
"""With a shorter timeout, a rank would consider every other rank lost."""


def batches_of(plan: Plan, number: int) -> list[Batch]:
    """Returns the random micro-batches of step `number`, for all ranks."""
    work, generator = plan.workload, torch.Generator().manual_seed(number)
    batches = []
    for _ in range(work.accumulation):
        ids, labels = torch.randint(
            plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator
        )
        batches.append(Batch(ids, labels))
    return batches


def run(
    plan: Plan,
    steps: int,
    rate: float,
    settings: AdamW,
    timeout_s: float,
    *,
    digests: bool = True,
    timeline: Path | None = None,
    deterministic: bool = False,
) -> None:
    """Runs the steps from random weights. Rank 0 prints the losses, norms, peaks and the digest.

    Args:
        plan: the plan of all ranks.
        steps: number of steps.
        rate: the learning rate of each step.
        settings: the optimizer's settings.
        timeout_s: seconds after which a rank that does not answer is lost.
        digests: whether to compute the digest, which reads the whole model.
        timeline: the file to which rank 0 writes its timeline of the last step.
        deterministic: whether to use only deterministic kernels.
    """
    grow_segments()  # as `megatrain train` does
    if deterministic:
        make_deterministic()
    device = default_device()
    chosen = {"steps": steps, "rate": rate}
    with joined(plan, device, settings, chosen, timeout_s=timeout_s) as ranks:
        show = ranks is None or ranks.rank == 0
        with Executor(plan, config_of(plan.model), settings, device, ranks=ranks) as executor:
            executor.state.load(random_weights(0, device))
            for number in range(1, steps + 1):
                batches = batches_of(plan, number)
                own = [batches[place] for place in own_micro_batches(plan, executor.rank)]
                result = executor.step(own, rate=rate, number=number)
                if show:
                    loss, norm = result.loss, result.gradient_norm
                    row = {"step": number, "loss": loss, "norm": norm, "seconds": result.seconds}
                    print(json.dumps(row), flush=True)
            if show and timeline is not None:
                result.timeline.save(timeline)
            device_peak = (
                torch.cuda.max_memory_allocated(device)
                if device.type == "cuda"
                else executor.allocated("device")
            )
            peaks = [device_peak, host_peak_bytes()]
            all_peaks = [peaks] if ranks is None else ranks.values(peaks)
            if show:
                device_peaks, host_peaks = zip(*all_peaks, strict=True)
                found = {"device_peak_bytes": device_peaks, "host_peak_bytes": host_peaks}
                print(json.dumps(found), flush=True)
            if digests:
                _print_digest(plan, executor, ranks)


def run_baseline(system: str, plan: Plan, steps: int) -> None:
    """Runs the steps in a baseline, `zero3` or `fsdp2`, from random weights.

    Rank 0 prints a line of JSON with the system's version and settings, a line for each step with
    its seconds, mean loss, gradient norm and parts, and a line with the peak memory of each rank.

    Raises:
        UserError: The number of ranks is not the plan's, or the baseline cannot run here.
        RunError: The baseline failed. The message has the first line of its error.
    """
    check_started(plan)
    device = default_device()
    module, obstacle = baseline(system, device)
    if obstacle:
        raise UserError(f"--system {system}", found=obstacle, allowed="ours", fix="use ours")
    try:
        _run_baseline(module, system, plan, steps, device)
    except (UserError, RunError):
        raise
    except Exception as error:  # of a library: out of memory, a collective, a model it refuses
        first_line = (str(error).splitlines() or [""])[0]
        raise RunError(f"--system {system}: {type(error).__name__}: {first_line}") from error


def _run_baseline(module: Any, system: str, plan: Plan, steps: int, device: torch.device) -> None:
    """Does the work of `run_baseline`. `module` is the module of the baseline."""
    work = msgspec.structs.replace(
        plan.workload, accumulation=plan.workload.accumulation // plan.gpus, sum_group=1
    )
    step, notes = module.prepare(
        msgspec.structs.replace(plan, gpus=1, hosts=1, workload=work), device
    )
    rank = dist.get_rank()
    if rank == 0:
        print(json.dumps({"system": system, "notes": notes}), flush=True)
    for number in range(1, steps + 1):
        reading = step(plan.gpus * number + rank, work)
        losses = _of_all_ranks(reading.loss, plan.gpus)
        if rank == 0:
            row = msgspec.to_builtins(reading) | {"loss": sum(losses) / plan.gpus}
            print(json.dumps({"step": number, **row}), flush=True)
    device_peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    peaks = _of_all_ranks((device_peak, host_peak_bytes()), plan.gpus)
    if rank == 0:
        device_peaks, host_peaks = zip(*peaks, strict=True)
        found = {"device_peak_bytes": device_peaks, "host_peak_bytes": host_peaks}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _of_all_ranks(value: object, count: int) -> list[Any]:
    """Returns `value` of every rank, in the order of the `count` ranks."""
    values: list[Any] = [None] * count
    dist.all_gather_object(values, value)
    return values


def _print_digest(plan: Plan, executor: Executor, ranks: Ranks | None) -> None:
    """Prints the digest of the fp32 masters on rank 0, which receives the parts of other ranks."""
    if ranks is not None and ranks.rank != 0:
        executor.state.follow()
        return
    digest = hashlib.sha256()
    for layer in plan.model.stack.values():
        for tensor in executor.state.masters(layer).values():
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    if ranks is not None:
        executor.state.end_reads("no more reads")
    print(json.dumps({"masters": digest.hexdigest()}), flush=True)


def parser() -> options.OneLineParser:
    """Returns the parser of the program's options."""
    parser = options.OneLineParser(prog="megatrain.experiments.ranks", description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument(
        "--steps", type=options.whole("--steps"), default=3, help="optimizer steps (default 3)"
    )
    parser.add_argument(
        "--rate", type=options.real("--rate"), default=1e-2, help="the learning rate (default 0.01)"
    )
    parser.add_argument(
        "--timeout",
        type=options.real("--timeout", _LEAST_TIMEOUT_S),
        default=60.0,
        help="seconds that a rank waits for the others (default 60)",
    )
    parser.add_argument(
        "--no-digest",
        action="store_true",
        help="do not print the digest of the weights, which takes minutes for a large model",
    )
    parser.add_argument(
        "--system",
        choices=(OWN[0], *BASELINES),
        default=OWN[0],
        help="what runs the steps (default ours)",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the timeline of the last step on rank 0 as JSON",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="use only deterministic kernels: any number of GPUs then gives the same bits; slower",
    )
    return parser


def _refuse_options_of_ours(args: argparse.Namespace) -> None:
    """Raises UserError if an option is given that a baseline does not have."""
    usual = parser().parse_args([str(args.plan)])
    for name in ("rate", "timeout", "no_digest", "timeline", "deterministic"):
        if getattr(args, name) != getattr(usual, name):
            option = "--" + name.replace("_", "-")
            raise UserError(
                option,
                found=f"--system {args.system}",
                allowed=f"--system {OWN[0]}",
                fix=f"leave {option} out",
            )


def main(arguments: list[str] | None = None) -> int:
    """Runs the steps and returns the exit status of `run_program`."""

    def work() -> int:
        args = parser().parse_args(arguments)
        if args.timeline:
            file_arguments.check_writable(args.timeline)
        if args.system in BASELINES:
            _refuse_options_of_ours(args)
            run_baseline(args.system, Plan.load(args.plan), args.steps)
            return 0
        settings = AdamW(max_norm=0.05, weight_decay=0.1)
        try:
            run(
                Plan.load(args.plan),
                args.steps,
                args.rate,
                settings,
                args.timeout,
                digests=not args.no_digest,
                timeline=args.timeline,
                deterministic=args.deterministic,
            )
        except FloatingPointError as error:
            raise RunError(str(error)) from None
        return 0

    return run_program("megatrain", work)


if __name__ == "__main__":
    sys.exit(main())
