"""This machine: its device, its memory, and a description for files of results."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import warnings

import psutil
import torch
import transformers

from megatrain.runtime.host import (
    RAM_AS_DEVICE,
    cores,
    host_bytes,
    processor,
    torchrun_variable,
    usable_host_bytes,
)
from megatrain.simulator.base.errors import UserError

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def default_device() -> torch.device:
    """Returns the first CUDA device, or the CPU if there is none. On a CPU, a limited part of host
    memory stands in for device memory.

    In a process that torchrun started, returns the device with the index `LOCAL_RANK`. The returned
    CUDA device becomes the current device.

    Raises:
        UserError: The host has fewer devices than processes that torchrun started, or a variable of
            torchrun is not a number.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.init()
    number = torchrun_variable("LOCAL_RANK", default=0, least=0)
    needed = max(torchrun_variable("LOCAL_WORLD_SIZE", default=1, least=1), number + 1)
    if (found := torch.cuda.device_count()) < needed:
        raise UserError(
            "ranks: GPUs",
            found=found,
            allowed=f"{needed}, one for each process that torchrun has started on this host",
            fix="start as many processes as there are GPUs, with a plan for as many if there is"
            " one, or pass --device cpu",
        )
    torch.cuda.set_device(number)
    return usable_device(torch.device("cuda", number))


def usable_device(device: torch.device | str) -> torch.device:
    """Returns `device` as a torch.device.

    PyTorch's warning about a thread without a CUDA context is ignored from then on. PyTorch warns
    if the first kernel of its backward thread is a matrix product, and creates the context itself.

    Raises UserError unless it is the CPU or a CUDA device of this machine.
    """
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS", category=UserWarning)
    found: str | torch.device | None = device
    with contextlib.suppress(RuntimeError, TypeError):
        chosen, count = torch.device(device), torch.cuda.device_count()
        if chosen.type == "cpu" or (chosen.type == "cuda" and (chosen.index or 0) < count):
            return chosen
        if chosen.type == "cuda":
            found = f"{chosen}, but torch reports {count or 'no'} CUDA device{'s' * (count > 1)}"
    raise UserError(
        "device",
        found=found,
        allowed="cpu, or a CUDA device that torch reports",
        fix="pass cpu, or cuda:N with the number of a device that torch reports",
    )


def grow_segments() -> None:
    """Sets `expandable_segments:True` for PyTorch's CUDA allocator, unless the user configured the
    allocator. Must be called before the first allocation on a GPU; later it has no effect.

    Without expandable segments, fragmentation made a plan of 136.0 GiB run out of memory on an H200
    with 139.8 GiB.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def device_bytes(device: torch.device) -> int:
    """Returns the memory of `device` in bytes: for a CPU, the memory of the whole machine."""
    return (
        int(torch.cuda.get_device_properties(device).total_memory)
        if device.type == "cuda"
        else psutil.virtual_memory().total
    )


_SLACK = 0.04
"""Fraction of a GPU's memory that is left for kernels, libraries and fragmentation. On an H200 with
139.8 GiB, plans of up to 135.6 GiB ran, and most larger plans ran out of memory
(`docs/lab_notes.md`)."""


def usable_device_bytes(device: torch.device) -> int:
    """Returns the device memory in bytes that tensors can use: free memory plus memory that the
    allocator of this process holds, minus a reserve for kernels, libraries and fragmentation.

    On a CPU, it is half of the memory that a plan may use. The other half is the host memory.
    """
    if device.type != "cuda":
        return usable_host_bytes() // 2
    forget_device_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - _SLACK * total)


def make_deterministic() -> None:
    """Makes PyTorch use only deterministic algorithms in this process, so results have the same
    bits in every run. By default, cuBLAS and the backward pass of attention on a GPU may not be
    deterministic.
    """
    # cuBLAS reads this at the first matrix product
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def forget_device_memory(device: torch.device) -> None:
    """Frees cached device memory, including cuBLAS workspaces, and resets the peak of device
    memory, so the next peak does not include earlier work of this process.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        # 8 to 32 MiB for each thread and stream that has run a matrix product
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def describe(device: torch.device) -> dict[str, object]:
    """Returns a description of the machine and its software, as values for a JSON or TOML file."""
    description: dict[str, object] = {
        "device": (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{processor()}, {RAM_AS_DEVICE}"
        ),
        "device_bytes": device_bytes(device),
        "processor": processor(),
        "cores": cores(),
        "host_bytes": host_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        description["cuda"] = torch.version.cuda
    return description
