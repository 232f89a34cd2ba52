"""`megatrain calibrate --several`: adds measurements of several GPUs to the file of a machine.

A rank is a process that torchrun starts, one for each GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatrain.experiments.cli import file_arguments, options
from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.hardware.several_gpus import SeveralGpus

_START = "torchrun --standalone --nproc-per-node {count} -m megatrain calibrate --several ..."
_KEPT = ("several", "out", "device", "help")
"""Options that `--several` has too."""


def refuse_ranks() -> None:
    """Raises UserError if torchrun started several ranks. Each would measure one GPU, and all would
    write the same file.
    """
    if "WORLD_SIZE" not in os.environ:
        return
    from megatrain.runtime.host import torchrun_variable

    if (started := torchrun_variable("WORLD_SIZE", default=1, least=1)) > 1:
        raise UserError(
            "calibrate",
            found=f"{started} ranks (WORLD_SIZE)",
            allowed="one process, or --several with the file of a machine",
            fix="start the command without torchrun, or pass --several",
        )


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures the GPUs of all ranks, and writes the machine of `--several` with the measurements
    to `--out`. Returns the exit status.

    `parser` has the options of the verb. Raises UserError for options that have no meaning here, if
    torchrun has not started a rank for each of several GPUs, or if the machine is another one.
    """
    import msgspec

    from megatrain.simulator.hardware.machine import HardwareSpec

    _refuse_others(args, parser)
    file_arguments.check_new_file(args.out, "--out")
    options.refuse_missing_gpu(args)
    machine = HardwareSpec.load(args.several)
    count = _ranks(machine)

    # PyTorch is loaded only now, after all mistakes in the command have been reported.
    from megatrain.experiments.cli.training.progress import measuring
    from megatrain.experiments.files.hardware_file import write_hardware
    from megatrain.runtime.calibration.several_gpus import measure_several
    from megatrain.runtime.ranks import WithoutPlan, joined

    device = options.device(args)
    _refuse_other_gpu(args.several, machine, device)
    began = time.monotonic()
    with joined(WithoutPlan(count), device, machine) as ranks:
        assert ranks is not None
        if ranks.leads:
            with measuring() as progress:
                found = measure_several(ranks, device, progress)
            others = [each for each in machine.several if each.gpus != count]
            several = tuple(sorted([*others, found], key=lambda each: each.gpus))
            write_hardware(
                args.out,
                msgspec.structs.replace(machine, several=several),
                "megatrain calibrate --several",
            )
            print(f"wrote {args.out}: {_summary(found)}; took {time.monotonic() - began:.0f} s")
        else:
            measure_several(ranks, device, _silent)
        ranks.meet()
    return 0


def _silent(what: str) -> None:
    """Prints nothing, because only rank 0 prints."""


def _ranks(machine: HardwareSpec) -> int:
    """Returns the number of ranks. Raises UserError if `machine` cannot have as many GPUs."""
    from megatrain.runtime.host import torchrun_variable
    from megatrain.simulator.schedule.plan import MOST_GPUS

    count = torchrun_variable("WORLD_SIZE", default=1, least=1)
    if machine.unified:
        raise UserError(
            "--several",
            found=f"{machine.name}, which has one memory for CPU and GPU",
            allowed="a machine whose GPUs have memory of their own",
            fix="leave --several out",
        )
    if not 2 <= count <= MOST_GPUS:
        raise UserError(
            "--several",
            found=f"{count} rank{'s' * (count > 1)}",
            allowed=f"2 to {MOST_GPUS}, one for each GPU",
            fix=f"start the command with `{_START.format(count=2)}`",
        )
    return count


def _refuse_others(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UserError for an option that has no meaning with `--several`."""
    usual = parser.parse_args(["--out", str(args.out)])
    for action in parser._actions:
        name = action.dest
        if name in _KEPT or (value := getattr(args, name)) == getattr(usual, name):
            continue
        if action.nargs == 0 and action.const != value:
            continue  # another option sets the same value, as --plain-packing and --documents
        option = action.option_strings[-1] if action.option_strings else "MODEL"
        raise UserError(
            option,
            found="--several as well",
            allowed="--several with --out and --device only, because no layers are measured",
            fix=f"leave {option} out, or measure one GPU first, without --several",
        )


def _refuse_other_gpu(source: str, machine: HardwareSpec, device: object) -> None:
    """Raises UserError if `machine` is known to have another GPU than `device`."""
    import torch

    from megatrain.runtime.machine import describe

    assert isinstance(device, torch.device)
    found = str(describe(device)["device"])
    known = (machine.costs.measured_on,) if machine.costs else machine.gpu_names
    if known and found not in known:
        raise UserError(
            f"--several {source}",
            found=f"a machine with {' or '.join(known)}",
            allowed=f"one with {found}, as here",
            fix="name the machine that is measured, or calibrate one GPU of it first",
        )


def _summary(found: SeveralGpus) -> str:
    """Returns the measurements in words."""
    show: Callable[[float], str] = "{:.1f}".format
    return (
        f"links of {found.gpus} GPUs: H2D {show(found.h2d_gb_per_s)} GB/s, D2H"
        f" {show(found.d2h_gb_per_s)} GB/s, {show(found.h2d_both_gb_per_s)} and"
        f" {show(found.d2h_both_gb_per_s)} GB/s in both directions at once; a GPU receives"
        f" {show(found.gather.gb_per_s)} GB/s in all-gathers, {show(found.exchange.gb_per_s)} GB/s"
        f" in all-to-alls; compute keeps {found.compute_beside_gather:.0%} and"
        f" {found.compute_beside_exchange:.0%} of its speed beside them; the collectives keep"
        f" {found.collective_bytes / 2**20:,.0f} MiB of each GPU"
    )
