"""Small training rows, their workload, and a comparison of batches."""

from __future__ import annotations

import torch

from megatrain.runtime.batch import Batch
from megatrain.simulator.model.workload import Workload

WORK = Workload(batch=2, sequence=48)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
BOTTOM = [{"text": f"hello {number} world"} for number in range(50)]


def same(left: list[Batch], right: list[Batch]) -> bool:
    """Returns whether two lists of batches are equal."""
    return all(
        a is b is None or torch.equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )
