"""Chooses the device on which a trained model generates text, and prints the text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options
from megatrain.runtime.files.model_folder import weight_files
from megatrain.simulator.base.errors import DoesNotFit
from megatrain.simulator.base.units import format_bytes

if TYPE_CHECKING:
    import torch


def weight_bytes(folder: Path) -> int:
    """Returns the size in bytes of a model folder's weights. Raises UserError if it has none."""
    files = weight_files(folder, otherwise="name a folder with weights")
    return sum(file.stat().st_size for file in files)


def refuse_larger_than_host(folder: Path, needed: int) -> None:
    """Raises DoesNotFit if weights of `needed` bytes are larger than the free host memory."""
    import psutil

    _refuse_large(folder, needed, int(psutil.virtual_memory().available), "host memory")


def show(text: str) -> None:
    """Prints a part of an answer, without characters that control the terminal."""
    print("".join(c for c in text if c.isprintable() or c in "\n\t"), end="", flush=True)


def generation_device(args: argparse.Namespace, folder: Path, needed: int) -> torch.device:
    """Returns the device of `--device`, on which weights of `needed` bytes must fit.

    With `--device auto` it is the GPU if they fit there, and the CPU otherwise. Raises DoesNotFit
    if they do not fit.
    """
    import torch

    from megatrain.runtime.machine import usable_device_bytes

    device = options.device(args)
    if device.type == "cuda":
        free = usable_device_bytes(device)
        if needed <= free:
            return device
        if args.device == "cuda":
            _refuse_large(folder, needed, free, "device memory")
        print(
            f"on the CPU: the model has {format_bytes(needed)}, and {format_bytes(free)} of device"
            " memory are free",
            file=sys.stderr,
        )
    refuse_larger_than_host(folder, needed)
    return torch.device("cpu")


def _refuse_large(folder: Path, needed: int, free: int, place: str) -> None:
    """Raises DoesNotFit if the weights need more than the `free` bytes of `place`."""
    if needed > free:
        raise DoesNotFit(
            f"model {folder}",
            found=f"weights of {format_bytes(needed)}",
            allowed=f"{format_bytes(free)}, the {place} that is free",
            fix="close other programs, or use a machine with more memory",
        )
