"""What machine this is: the device to train on, and a description to stand beside every number."""

from __future__ import annotations

import gc
import os
import platform
from pathlib import Path

import psutil
import torch
import transformers

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def default_device() -> torch.device:
    """The first CUDA device; without one the CPU, with a capped pool of its memory as the device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.init()
    return torch.device("cuda", 0)


def grow_segments() -> None:
    """Tells PyTorch's CUDA allocator to grow its segments, unless the user tells it something: else it leaves pieces too small to use, of which a step died
    on an H200 whose plan took 136.0 of 139.8 GiB, and which runs so. It listens until its first allocation in the process; later this changes nothing.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_bytes(device: torch.device) -> int:
    """Memory of the device; of the whole machine without CUDA."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else psutil.virtual_memory().total


_SLACK = 0.04
"""Of a GPU's memory, for kernels, libraries and pieces too small to use. On an H200, 139.8 GiB, plans of 131.3 GiB held 135.8 and of 135.6 held 138.7; another of
135.6 found no room for what it wanted in each of its first steps, and freed and took memory anew; of three of 137.3 and more two died."""


def usable_device_bytes(device: torch.device) -> int:
    """What tensors can have of the device's memory: all that is free or ours, the CUDA context out, less what the allocator leaves in pieces."""
    if device.type != "cuda":
        return device_bytes(device)
    forget_device_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - _SLACK * total)


def host_bytes() -> int:
    """Host memory this process may use: the machine's, or less where a control group says so.

    A virtual machine whose memory grows on use shows too little here; then pass the limit to the command.
    """
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        return total


def make_deterministic() -> None:
    """This process' torch uses only kernels that give the same bits every time: attention's backward and cuBLAS otherwise may not, with CUDA."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, at the first product
    torch.use_deterministic_algorithms(True)


def forget_device_memory(device: torch.device) -> None:
    """Makes the next peak of device memory that of what comes next alone: frees what earlier work in this process left, cuBLAS' workspaces too."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # one of 8 to 32 MiB per thread and stream that multiplied
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, object]:
    """The machine and the software, as plain values for a file."""
    described: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()}, memory pool as device",
        "device_bytes": device_bytes(device), "processor": processor(), "cores": cores(), "host_bytes": host_bytes(),
        "system": f"{platform.system()} {platform.machine()}", "python": platform.python_version(), "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }  # fmt: skip
    if device.type == "cuda":
        described["cuda"] = torch.version.cuda
    return described
