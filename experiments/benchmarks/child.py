"""Times one system in a process of its own: `python -m megatrain.experiments.benchmarks.child
SYSTEM PLAN STEPS DEVICE [TIMELINE]`.

`megatrain.experiments.benchmark` starts this process. Each system has its own CUDA context, so a
system that runs out of memory does not end the others. The process prints one JSON object, a
`MeasuredSteps`, on standard output. Everything that libraries print there goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatrain.experiments.benchmarks import own
from megatrain.experiments.benchmarks.steps import MeasuredSteps, repeat
from megatrain.runtime.machine import default_device, describe, forget_device_memory, grow_segments
from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

OWN, BASELINES = ("ours", "ceiling"), ("zero3", "fsdp2")


def baseline(system: str, device: torch.device) -> tuple[Any, str]:
    """Returns the module of a baseline, and why it cannot run on this device. The reason is empty
    if it can.
    """
    module: Any = importlib.import_module(f"megatrain.experiments.baselines.{system}")
    missing = [package for package in module.NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        return module, f"not installed: {', '.join(missing)}"
    return module, "" if device.type in module.DEVICES else "needs a CUDA GPU"


def measure(
    system: str, plan: Plan, steps: int, device: torch.device, timeline: Path | None = None
) -> MeasuredSteps:
    """Returns the system's steps. If a baseline cannot run here, `failure` states the reason. Only
    `ours` and `ceiling` write the `timeline` of their last step.
    """
    if system in OWN:
        return own.measure(system, plan, steps, device, timeline)
    module, obstacle = baseline(system, device)
    if obstacle:
        return MeasuredSteps(system=system, failure=obstacle)
    forget_device_memory(device)
    step, notes = module.prepare(plan, device)
    readings = repeat(lambda number: step(number, plan.workload), steps, system)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return MeasuredSteps(
        system=system,
        notes=notes,
        steps=readings,
        device_peak_bytes=peak,
        host_peak_bytes=host_peak_bytes(),
    )


def attempt(
    system: str, plan_path: Path, steps: int, device_name: str, timeline: Path | None = None
) -> MeasuredSteps:
    """Returns the result of `measure` with a description of the machine. An error becomes the line
    `failure`.
    """
    try:
        if system in OWN:
            grow_segments()  # other systems run with PyTorch's defaults
        device = torch.device("cpu") if device_name == "cpu" else default_device()
        measured = measure(system, Plan.load(plan_path), steps, device, timeline)
        return msgspec.structs.replace(measured, machine=describe(device))
    except UserError as error:
        return MeasuredSteps(system=system, failure=str(error))
    except Exception as error:  # the table shows the first line; standard error shows all of it
        traceback.print_exc()
        return MeasuredSteps(
            system=system, failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        )


def main() -> None:
    """Parses the arguments, times the system, and prints the result as JSON."""
    name = "python -m megatrain.experiments.benchmarks.child"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    for argument in ("system", "plan", "steps", "device"):
        parser.add_argument(argument)
    parser.add_argument("timeline", nargs="?", type=Path)
    args = parser.parse_args()
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        measured = attempt(
            args.system, Path(args.plan), int(args.steps), args.device, args.timeline
        )
    except KeyboardInterrupt:
        os._exit(130)  # the command that waits for this process reports it
    with os.fdopen(result, "wb") as file:
        file.write(msgspec.json.encode(measured))
    sys.stderr.flush()
    # The result is written. Exit at once: a library's cleanup must not delay the next system.
    os._exit(0)


if __name__ == "__main__":
    main()
