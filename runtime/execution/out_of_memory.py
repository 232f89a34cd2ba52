"""The error message for memory that runs out during a step: the op, the largest pools and a fix."""

from __future__ import annotations

import torch

from megatrain.runtime.execution.lanes import OpFailed
from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_bytes

_DEVICE = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
_HOST = ("can't allocate memory",)
_MOST_POOLS = 4


def out_of_memory(failure: OpFailed, arenas: Arenas) -> UserError | None:
    """Returns the error to report to the user, or None if `failure` has another cause.

    The error has no reference to `failure`, because the traceback of `failure` would keep the
    activations of the step alive.
    """
    cause, text = failure.__cause__, str(failure.__cause__)
    if isinstance(cause, torch.OutOfMemoryError) or any(words in text for words in _DEVICE):
        place, allowed = "device", "free memory for activations and workspace, besides the pools"
        fix = (
            "close other programs that use the device; or plan again with a smaller --batch, --seq"
            " or --loss-chunk, or with a lower --device-memory, which makes the pools smaller"
        )
    elif isinstance(cause, MemoryError) or any(words in text for words in _HOST):
        place, allowed = "host", "free memory for temporary tensors, besides the pools"
        fix = "close other programs, or plan again with a lower --host-memory"
    else:
        return None
    pools = sorted(
        ((size, pool) for pool, size in arenas.pool_bytes.items() if pool.startswith(f"{place}.")),
        reverse=True,
    )
    largest = ", ".join(f"{pool} {format_bytes(size)}" for size, pool in pools[:_MOST_POOLS])
    found = (
        f"no memory left besides pools of {format_bytes(arenas.total(place))}, the largest"
        f" {largest} ({text.splitlines()[0][:120]})"
        if text
        else "no memory left"
    )
    return UserError(
        f"{place} memory, {failure.op} on lane {failure.lane}",
        found=found,
        allowed=allowed,
        fix=fix,
    )
