"""Memory that outlives an executor: the same pages again, zeroed, and more only where there is no room."""

from __future__ import annotations

import torch

from megatrain.runtime.memory.kept_memory import KeptMemory


def test_the_next_executor_gets_the_same_pages_and_zeros() -> None:
    memory, ready = KeptMemory(registered=False), list[int]()
    memory.reserve(2**20)
    first = torch.empty(0, dtype=torch.uint8).set_(memory.allocate([4096, 100], ready.append))
    first.fill_(7)
    other = memory.allocate([2**19], ready.append)
    assert other.data_ptr() == first.data_ptr() + 8192
    assert ready == [4196, 2**19]
    memory.close()
    kept = memory.kept_bytes
    again = torch.empty(0, dtype=torch.uint8).set_(memory.allocate([2**20], ready.append))
    assert again.data_ptr() == first.data_ptr()
    assert not again.any()
    assert memory.kept_bytes == kept == 2**20
    memory.allocate([1], ready.append)
    assert memory.kept_bytes > kept
    memory.free()
    assert memory.kept_bytes == 0
