"""Measures this machine over a grid of workloads, for some models or a default set of widths: link, layers, optimizer, and how they slow each other."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.experiments import options
from megatrain.simulator.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatrain.runtime.calibrate import Subject
    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.workload import Workload

_TOLD = 5  # differences


def grid(text: str) -> list[tuple[int, int]]:
    """An argparse type: (batch, sequence) pairs."""
    points = [re.fullmatch(r"(\d{1,7})x(\d{1,8})", part) for part in filter(None, text.replace(" ", "").split(","))]
    if not points or not all(points):
        raise UserError("--grid", found=repr(text), allowed="BATCHxSEQUENCE,...", fix="write it like --grid 4x1024,64x1024,8x4096")
    return [(int(point[1]), int(point[2])) for point in points if point]


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="*", metavar="MODEL", help="a Hugging Face folder, a config.json, or a name in the library: the layers to measure; the first "
        "one's optimizer stands for all. None: a default set of widths, from which other models are predicted by FLOPs and flagged as extrapolated: "
        "qwen2.5-3b, llama-3.1-8b, qwen2.5-14b at 32x1024, 4x1024, 16x1024, 8x4096; on a GPU below 64 GiB, or a host below 32, qwen3-0.6b, qwen2.5-1.5b, "
        "qwen2.5-3b at a quarter of these batches; on a CPU, Llama layers 256, 512, 768 wide in fp32 at 2x128, 4x128, 1x256; --batch, --seq and --dtype are then the set's unless given",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="HARDWARE", help="the file to write, e.g. hardware.toml")
    parser.add_argument("--name", default="this-machine", help="the machine's name in reports")
    parser.add_argument(
        "--grid", type=grid, metavar="BxS,...", help="further batches and sequences at which layers are measured (default: around the workload, or the set's)"
    )
    parser.add_argument("--again", type=Path, metavar="FIRST", help="an earlier file: says whether this run agrees with it; exits 1 where the machine is noisy")
    options.add_workload(parser)
    parser.set_defaults(batch=None, seq=None, dtype=None)  # a default set has its own
    options.add_limits(parser)
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from megatrain.experiments.hardware_file import write_hardware
    from megatrain.runtime.calibrate import calibrate
    from megatrain.simulator.hardware import HardwareSpec

    options.check_writable(args.out)
    earlier = HardwareSpec.load(str(args.again)) if args.again else None
    if earlier and not earlier.costs:
        raise UserError(f"--again {args.again}", found="a datasheet's rates", allowed="a file that `megatrain calibrate` wrote", fix="leave it out")
    device = options.device(args)
    (subject, *others), workload, points = _wanted(args, device)
    console, began = Console(), time.monotonic()

    def progress(what: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  measuring {what}", highlight=False, markup=False, soft_wrap=True)

    with console.status("measuring"):
        hardware = calibrate(
            args.name, subject.model, workload, subject.config, device, grid=points, others=others,
            host_bytes=args.host_memory, device_bytes=args.device_memory, progress=progress,
        )  # fmt: skip
    write_hardware(args.out, hardware, "megatrain calibrate")
    print(
        f"wrote {args.out}: H2D {hardware.h2d_gb_per_s:.1f} GB/s, D2H {hardware.d2h_gb_per_s:.1f} GB/s, "
        f"both at once {hardware.duplex_fraction:.0%} each; matrix product {hardware.peak_tflops[args.dtype]:.3g} TFLOP/s, layer forward "
        f"{hardware.linear_efficiency:.0%} of it; CPU AdamW {hardware.cpu_update_per_s / 1e9:.2f} G parameters/s; "
        f"it took {time.monotonic() - began:.0f} s"
    )
    return _compare(earlier, hardware, str(args.again)) if earlier else 0


def _wanted(args: argparse.Namespace, device: torch.device) -> tuple[list[Subject], Workload, list[Workload]]:
    """The models to measure, the workload, and further points of the grid."""
    import msgspec

    from megatrain.runtime import machine
    from megatrain.runtime.calibrate import Subject
    from megatrain.runtime.default_set import DefaultSet, default_set, model_of, usual_grid
    from megatrain.runtime.layers.templates import config_of
    from megatrain.simulator.specs import ModelSpec

    usual = DefaultSet((), 32, 1024, ())
    if not args.model:
        usual = default_set(device.type, args.device_memory or machine.usable_device_bytes(device), args.host_memory or machine.host_bytes())
    models = [ModelSpec.load(source) for source in args.model] or [model_of(name) for name in usual.models]
    around = () if args.batch or args.seq else usual.grid
    args.batch, args.seq, args.dtype = args.batch or usual.batch, args.seq or usual.sequence, args.dtype or usual.dtype
    workload = options.workload(args, models[0])
    subjects = [Subject(model, config_of(model, workload)) for model in models]
    points = [msgspec.structs.replace(workload, batch=rows, sequence=length) for rows, length in args.grid or around] or usual_grid(workload)
    return subjects, workload, points


def _compare(earlier: HardwareSpec, hardware: HardwareSpec, name: str) -> int:
    from megatrain.simulator.agreement import agreement
    from megatrain.simulator.error_table import signed_percent

    found = agreement(earlier, hardware)
    if not found.compared:
        raise UserError(f"--again {name}", found="no number that this run has too", allowed="a file of the same models and workloads", fix="repeat its options")
    print(f"{found.compared - len(found.differences)} of {found.compared} numbers agree with {name} within their spreads")
    for difference in found.differences[:_TOLD]:
        print(f"  {difference.name}: {signed_percent(difference.change)}, where {difference.allowed:.1%} is allowed")
    if found.noisy:
        whose = " and the ".join(found.noisy)
        print(f"the machine is noisy: the speed of the {whose} changed between the two by more than within either; predictions from either are as far off")
    return int(bool(found.noisy))
