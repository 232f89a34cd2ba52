"""Describes this machine without importing torch: its GPU, its memory and its cores."""

from __future__ import annotations

import subprocess

import msgspec

from megatrain.runtime.host import cores, usable_host_bytes
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec

_USABLE = 0.96
"""The share of a GPU's memory that tensors can use, as `megatrain calibrate` assumes."""
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_MIB = 2**20


def this_machine() -> HardwareSpec:
    """Returns this machine: the rates of the library's machine with the same GPU, and this
    machine's memory and cores.

    The driver reports the first GPU and its memory. Nothing is measured. Raises UserError if there
    is no NVIDIA GPU, or if the library does not have it.
    """
    name, total = _gpu()
    known = HardwareSpec.of_gpu(name)
    if known is None:
        raise UserError(
            "--hardware",
            found=f"no --hardware, and a GPU that the library does not have, {name}",
            allowed="a name in the library, or a file that `megatrain calibrate` wrote",
            fix="run `megatrain calibrate --out hardware.toml` and give --hardware hardware.toml",
        )
    device = known.device_bytes if total is None else int(_USABLE * total)
    host = usable_host_bytes()
    return msgspec.structs.replace(
        known.with_cores(cores()),
        title=f"{known.title} (this machine)",
        device_bytes=min(device, host) if known.unified else device,
        host_bytes=host,
    )


def _gpu() -> tuple[str, int | None]:
    """Returns the first GPU's name and its memory in bytes.

    The memory is None if the driver does not report it, as on a machine with unified memory.
    """
    try:
        query = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=30, check=True)
        name, total = query.stdout.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        raise UserError(
            "--hardware",
            found="no --hardware, and no NVIDIA GPU on this machine (nvidia-smi finds none)",
            allowed="a name in the library, such as rtx4090, a100-80-sxm or h200, or a file that"
            " `megatrain calibrate` wrote",
            fix="name the machine to ask about, like --hardware rtx4090",
        ) from None
    return name, int(total) * _MIB if total.strip().isdigit() else None
