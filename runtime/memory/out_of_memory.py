"""What to tell a user whose device or host had no room in the middle of a step: which op, beside which pools, and what would help."""

from __future__ import annotations

import torch

from megatrain.runtime.lanes import LaneError
from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.errors import UserError
from megatrain.simulator.units import format_bytes

_DEVICE = ("CUDA out of memory", "CUDA error: out of memory", "ALLOC_FAILED", "Triton Error [CUDA]: out of memory")
_HOST = ("can't allocate memory",)
_MOST_POOLS = 4


def out_of_memory(failure: LaneError, arenas: Arenas) -> UserError | None:
    """None where `failure` is of another kind. The error does not hold on to `failure`, whose traceback holds the step's activations."""
    cause, text = failure.__cause__, str(failure.__cause__)
    if isinstance(cause, torch.OutOfMemoryError) or any(words in text for words in _DEVICE):
        place, allowed = "device", "room for activations and workspace beside the pools"
        fix = (
            "close what else uses the device; or plan again with a smaller --batch, --seq or --loss-chunk, or a lower --device-memory, which shrinks the pools"
        )
    elif isinstance(cause, MemoryError) or any(words in text for words in _HOST):
        place, allowed = "host", "room for temporaries beside the pools"
        fix = "close what else uses the memory, or plan again with a lower --host-memory"
    else:
        return None
    pools = sorted(((size, pool) for pool, size in arenas.pool_bytes.items() if pool.startswith(f"{place}.")), reverse=True)
    largest = ", ".join(f"{pool} {format_bytes(size)}" for size, pool in pools[:_MOST_POOLS])
    found = f"no room beside pools of {format_bytes(arenas.total(place))}, the largest {largest} ({text.splitlines()[0][:120]})" if text else "no room"
    return UserError(f"{place} memory, {failure.op} on lane {failure.lane}", found=found, allowed=allowed, fix=fix)
