"""Measure this machine, and write a hardware file for predictions.

The command measures the link, the layers of models, the optimizer, and how much these slow each
other down, at several batch sizes and sequence lengths. With --several, it measures what several
GPUs do to each other.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.experiments.cli import file_arguments, options, several_gpus
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.state_format import EXACT

if TYPE_CHECKING:
    from megatrain.runtime.calibration.presets import CalibrationPreset
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.model.workload import Workload

_HELP = {
    "batch": "sequences per micro-batch (default: see MODEL)",
    "seq": "tokens per sequence (default: see MODEL)",
    "dtype": "dtype that layers compute in (default: bf16 on a GPU, fp32 on a CPU)",
    "state": "also measure the update on the host in this state format (default exact)",
}
"""Option of the workload -> its help in this command."""


def grid(text: str) -> list[tuple[int, int]]:
    """Returns the (batch, sequence) pairs of `text`, such as `4x1024,64x1024`.

    This is the `type` of an argument. Raises UserError for any other text.
    """
    points = [
        re.fullmatch(r"(\d{1,7})x(\d{1,8})", part)
        for part in filter(None, text.replace(" ", "").split(","))
    ]
    if not points or not all(points):
        raise UserError(
            "--grid",
            found=repr(text),
            allowed="BATCHxSEQUENCE,...",
            fix="write it like --grid 4x1024,64x1024,8x4096",
        )
    return [(int(point[1]), int(point[2])) for point in points if point]


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help=(
            "models whose layers are measured: a Hugging Face folder, a config.json, or a name in"
            " the library. The optimizer is measured on the first model only. Without MODEL, a"
            " default set is measured, and other models are predicted from the rates that it"
            " reaches, and flagged as extrapolated. The set is qwen2.5-3b, llama-3.1-8b,"
            " qwen2.5-14b at 32x1024, 4x1024, 16x1024, 8x4096 (batch x sequence). On a GPU below 64"
            " GiB, or a host below 32 GiB, it"
            " is qwen3-0.6b, qwen2.5-1.5b, qwen2.5-3b at a quarter of these batches. On a CPU, it"
            " is Llama layers 256, 512, 768 wide in fp32 at 2x128, 4x128, 1x256. --batch, --seq and"
            " --dtype replace the set's values. With MODEL, the values are 32x1024 in bf16,"
            " 8x1024 on a GPU below 64 GiB, and 4x128 in fp32 on a CPU"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="HARDWARE",
        help="the new hardware file, e.g. hardware.toml",
    )
    parser.add_argument(
        "--share",
        type=Path,
        metavar="FILE",
        help="also write a small new file for others: rates, the names of GPU and CPU, memory, date"
        " and version, but no name of a person or a host, and no path",
    )
    parser.add_argument(
        "--name",
        default="this-machine",
        help="the machine's name in reports (default this-machine)",
    )
    parser.add_argument(
        "--grid",
        type=grid,
        metavar="BxS,...",
        help=(
            "further batch sizes and sequence lengths at which layers are measured (default:"
            " several near --batch and --seq, or the grid of the default set)"
        ),
    )
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FIRST",
        help=(
            "an earlier hardware file to compare with this run; the exit status is 1 if the"
            " machine's speed changed between the two"
        ),
    )
    parser.add_argument(
        "--several",
        metavar="HARDWARE",
        help=(
            "measure what several GPUs do to each other, and write this machine with these"
            " measurements to --out: a hardware file that was calibrated on one GPU, or a name in"
            " the library. torchrun starts a process for each GPU, and no layers are measured"
        ),
    )
    options.add_workload(parser, any_state=False)
    parser.set_defaults(batch=None, seq=None, dtype=None)  # each default set has its own values
    for action in parser._actions:
        action.help = _HELP.get(action.dest, action.help)
    options.add_limits(parser)
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from megatrain.runtime.calibration.presets import model_of
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec

    if args.several is not None:
        parser = options.OneLineParser()
        describe(parser)
        return several_gpus.run(args, parser)
    several_gpus.refuse_ranks()
    file_arguments.check_new_file(args.out, "--out")
    options.refuse_missing_gpu(args)
    if args.share:
        file_arguments.check_new_file(args.share, "--share")
        _refuse_limits(args)
    if args.optimizer != "adamw":
        raise UserError(
            "--optimizer",
            found=args.optimizer,
            allowed="adamw, the only optimizer that is measured",
            fix="leave it out; a plan for another optimizer derives its costs from this file",
        )
    if args.gradients != "exact":
        raise UserError(
            "--gradients",
            found=args.gradients,
            allowed="exact, the only format that is measured",
            fix="leave it out; a plan with 8-bit gradients derives its costs from this file",
        )
    if args.token_piece:
        raise UserError(
            "--token-piece",
            found=args.token_piece,
            allowed="no --token-piece, because layers are measured without pieces",
            fix="leave it out; a plan with pieces derives its costs from this file",
        )
    if args.head_groups:
        raise UserError(
            "--head-groups",
            found=args.head_groups,
            allowed="no --head-groups, because layers are measured with all heads at once",
            fix="leave it out; a plan with groups of heads derives its costs from this file",
        )
    earlier = HardwareSpec.load(str(args.again)) if args.again else None
    if earlier and not earlier.costs:
        raise UserError(
            f"--again {args.again}",
            found="rates from a datasheet",
            allowed="a file that `megatrain calibrate` wrote",
            fix="leave --again out",
        )
    models = [ModelSpec.load(source) for source in args.model]
    sizes_chosen = bool(models) and args.batch is None
    if not models:
        preset = _preset_for(args)
        models = [model_of(name) for name in preset.models]
    else:
        preset = _set_of_named(args, models[0])
    workload, points = _workloads(args, models[0], preset)
    # Only the host's update is measured in the state format of --state.
    workload, *points = (msgspec.structs.replace(work, state=EXACT) for work in (workload, *points))
    if sizes_chosen:
        sizes = ", ".join(f"{work.batch} x {work.sequence:,}" for work in (workload, *points))
        print(
            f"micro-batches of {sizes} tokens in {args.dtype} are measured; --batch, --seq,"
            " --grid and --dtype choose others",
            flush=True,
        )

    # PyTorch is loaded only now, after all mistakes in the command have been reported.
    from megatrain.experiments.cli.training.progress import measuring
    from megatrain.experiments.files.hardware_file import write_hardware
    from megatrain.runtime.calibration.calibrate import Subject, calibrate
    from megatrain.runtime.layers.attention import with_kernel_for_sinks
    from megatrain.runtime.layers.functional_layers import config_of

    device = options.device(args)
    workload, *points = (
        with_kernel_for_sinks(work, models, device) for work in (workload, *points)
    )
    subject, *others = [Subject(model, config_of(model)) for model in models]
    if note := options.note_on_cpu(device):
        print(note, flush=True)
    began = time.monotonic()
    with measuring() as progress:
        hardware = calibrate(
            args.name,
            subject.model,
            workload,
            subject.config,
            device,
            grid=points,
            others=others,
            host_bytes=args.host_memory,
            device_bytes=args.device_memory,
            state=args.state,
            progress=progress,
        )
    write_hardware(args.out, hardware, "megatrain calibrate")
    print(
        f"wrote {args.out}: H2D {hardware.h2d_gb_per_s:.1f} GB/s, D2H {hardware.d2h_gb_per_s:.1f}"
        f" GB/s, each {hardware.duplex_fraction:.0%} of this while both run; matrix product"
        f" {hardware.peak_tflops[workload.dtype]:.3g} TFLOP/s, layer forward"
        f" {hardware.linear_efficiency:.0%} of this; CPU AdamW"
        f" {hardware.cpu_update_per_s / 1e9:.2f} G parameters/s; took"
        f" {time.monotonic() - began:.0f} s"
    )
    if args.share:
        _share(args.share, hardware)
    return _compare(earlier, hardware, str(args.again)) if earlier else 0


def _refuse_limits(args: argparse.Namespace) -> None:
    """Raises UserError for memory limits, because `--share` would write them as the memory of the
    machine.
    """
    for option, limit in (
        ("--device-memory", args.device_memory),
        ("--host-memory", args.host_memory),
    ):
        if limit is not None:
            raise UserError(
                "--share",
                found=f"{option} as well",
                allowed="a calibration with all of the machine's memory",
                fix=f"leave {option} out",
            )


def _share(file: Path, hardware: HardwareSpec) -> None:
    """Writes the part of a calibration that may be shared."""
    from importlib.metadata import version

    from megatrain.experiments.files.hardware_file import write_shared
    from megatrain.runtime.host import processor

    write_shared(file, hardware.shared(processor(), version("megatrain")))
    print(
        f"wrote {file}, to share: in the folder ~/.config/megatrain/machines it replaces the"
        " library's estimates of this machine"
    )


def _preset_for(args: argparse.Namespace) -> CalibrationPreset:
    """Returns the default set of models for this machine."""
    from megatrain.runtime import machine
    from megatrain.runtime.calibration.presets import preset_for

    device = options.device(args)
    return preset_for(
        device.type,
        args.device_memory or machine.usable_device_bytes(device),
        args.host_memory or machine.host_bytes(),
    )


def _set_of_named(args: argparse.Namespace, model: ModelSpec) -> CalibrationPreset:
    """Returns the workloads for `model`, which the command names. They depend on the device."""
    # Reports mistakes in the options before PyTorch is loaded.
    sized = options.replaced(
        args, batch=args.batch or 1, seq=args.seq or 1, dtype=args.dtype or "bf16"
    )
    options.workload(sized, model, quiet=True)

    from megatrain.runtime import machine
    from megatrain.runtime.calibration.presets import set_of_named

    device = options.device(args)
    memory = args.device_memory or machine.usable_device_bytes(device)
    return set_of_named(device.type, memory, sequence=args.seq, longest=model.longest_row)


def _workloads(
    args: argparse.Namespace, model: ModelSpec, preset: CalibrationPreset
) -> tuple[Workload, list[Workload]]:
    """Returns the workload of the options, and the other workloads of the grid.

    `preset` has the values of the options that are not given. They are stored in `args`.
    """
    import msgspec

    from megatrain.runtime.calibration.presets import usual_grid

    preset_grid = None if args.batch or (args.seq and preset.models) else preset.grid
    args.batch, args.seq, args.dtype = (
        args.batch or preset.batch,
        args.seq or preset.sequence,
        args.dtype or preset.dtype,
    )
    workload = options.workload(args, model)
    sizes = args.grid or preset_grid
    if sizes is None:
        return workload, usual_grid(workload)
    return workload, [
        msgspec.structs.replace(workload, batch=rows, sequence=length) for rows, length in sizes
    ]


def _compare(earlier: HardwareSpec, hardware: HardwareSpec, name: str) -> int:
    """Prints how two calibrations differ. Returns 1 if the machine is noisy, else 0.

    Raises UserError if the two have no number in common.
    """
    from megatrain.simulator.compare.error_table import signed_percent
    from megatrain.simulator.hardware.agreement import agreement

    result = agreement(earlier, hardware)
    if not result.compared:
        raise UserError(
            f"--again {name}",
            found="none of the numbers that this run measured",
            allowed="a calibration of the same models and workloads",
            fix="calibrate with the options of the earlier run",
        )
    print(
        f"{result.compared - len(result.differences)} of {result.compared} numbers agree with"
        f" {name} within their spreads"
    )
    for difference in result.differences:
        print(
            f"  {difference.name}: changed by {signed_percent(difference.change)}, more than the"
            f" spread of {difference.allowed:.1%}"
        )
    if result.noisy:
        whose = " and the ".join(result.noisy)
        print(
            f"the machine is noisy: the speed of the {whose} changed more between the two runs"
            " than within either; predictions from either file can be as wrong as this change"
        )
    return int(bool(result.noisy))
