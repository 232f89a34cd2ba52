"""Times one system in a process of its own: `python -m megatrain.experiments.benchmarks.child SYSTEM PLAN STEPS DEVICE`.

A fresh CUDA context for each, and one that runs out of memory ends none of the others. Prints one JSON object, a `Measured`, on standard output, and
nothing else: whatever libraries print there goes to standard error. `megatrain.experiments.benchmark` calls it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from megatrain.experiments.benchmarks import own
from megatrain.experiments.benchmarks.steps import Measured, repeat
from megatrain.runtime.machine import default_device, describe, forget_device_memory, grow_segments
from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan

OWN, BASELINES = ("ours", "ceiling"), ("zero3", "fsdp2")


def measure(system: str, plan: Plan, steps: int, device: torch.device) -> Measured:
    """The system's steps; a baseline that cannot run here says why in `failure`."""
    if system in OWN:
        return own.measure(system, plan, steps, device)
    name = f"megatrain.experiments.baselines.{system}"
    module = importlib.import_module(name)
    missing = [package for package in module.NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        return Measured(system=system, failure=f"not installed: {', '.join(missing)}")
    if device.type not in module.DEVICES:
        return Measured(system=system, failure="needs a CUDA GPU")
    forget_device_memory(device)
    step, _ = prepared = module.prepare(plan, device)
    readings = repeat(step, steps, system)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Measured(system=system, notes=prepared[1], steps=readings, device_peak_bytes=peak, host_peak_bytes=host_peak_bytes())


def attempt(system: str, plan_path: Path, steps: int, device_name: str) -> Measured:
    """`measure`, where whatever goes wrong becomes the line `failure`."""
    try:
        if system in OWN:
            grow_segments()  # not for others: PyTorch as it comes
        device = torch.device("cpu") if device_name == "cpu" else default_device()
        measured = measure(system, Plan.load(plan_path), steps, device)
        return msgspec.structs.replace(measured, machine=describe(device))
    except UserError as error:
        return Measured(system=system, failure=str(error))
    except Exception as error:  # of another system's too: the table shows its first line, the rest is for who looks into it
        traceback.print_exc()
        return Measured(system=system, failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def main() -> None:
    system, plan, steps, device = sys.argv[1:]
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        measured = attempt(system, Path(plan), int(steps), device)
    except KeyboardInterrupt:
        os._exit(130)  # the command that waits for this process says so
    with os.fdopen(result, "wb") as file:
        file.write(msgspec.json.encode(measured))
    sys.stderr.flush()
    os._exit(0)  # everything is told; what a library still has to end must not keep the next system waiting


if __name__ == "__main__":
    main()
