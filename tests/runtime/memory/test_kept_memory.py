"""Tests of memory that outlives an executor: its pages are zeroed and reused.

New pages are allocated only if the kept ones do not suffice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.schedule.plan import Plan

ONE_THREAD = dict.fromkeys(("compute", "update", "h2d", "d2h", "cpu"), 1)


def kept_bytes(memory: ReusablePinnedPool) -> int:
    return sum(region.nbytes for _, region in memory._regions)


def test_the_next_executor_gets_the_same_pages_zeroed() -> None:
    memory, ready = ReusablePinnedPool(registered=False), list[int]()
    memory.reserve(2**20)
    first = torch.empty(0, dtype=torch.uint8).set_(memory.allocate([4096, 100], ready.append))
    first.fill_(7)
    other = memory.allocate([2**19], ready.append)
    assert other.data_ptr() == first.data_ptr() + 8192
    assert ready == [4196, 2**19]
    memory.close()
    kept = kept_bytes(memory)
    again = torch.empty(0, dtype=torch.uint8).set_(memory.allocate([2**20], ready.append))
    assert again.data_ptr() == first.data_ptr()
    assert not again.any()
    assert kept_bytes(memory) == kept == 2**20
    memory.allocate([1], ready.append)
    assert kept_bytes(memory) > kept
    memory.free()
    assert kept_bytes(memory) == 0


def test_an_executor_on_kept_memory_computes_the_same_bits(executable: Callable[..., Plan]) -> None:
    """Executors on reused pages compute the same bits as on new pages.

    This also holds if their plans use the pages differently.
    """
    memory, plans = (
        ReusablePinnedPool(registered=False),
        [executable("k_buffer"), executable("overlapped", chunk_bytes=2**16)],
    )

    def masters(plan: Plan, kept: ReusablePinnedPool | None) -> bytes:
        with Executor(
            plan,
            config_of(plan.model),
            AdamW(),
            torch.device("cpu"),
            threads=ONE_THREAD,
            host_memory=kept,
        ) as executor:
            state = executor.state
            state.load(random_weights(0))
            generator = torch.Generator().manual_seed(0)
            for number in (1, 2):
                drawn = torch.randint(
                    plan.model.vocabulary,
                    (2, plan.workload.batch, plan.workload.sequence),
                    generator=generator,
                )
                executor.step([Batch(*drawn)], rate=1e-2, number=number)
            executor.flush_update()
            tensors = [
                tensor
                for layer in plan.model.stack.values()
                for tensor in state.masters(layer).values()
            ]
            return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)

    wanted = masters(plans[0], None)
    assert [masters(plan, memory) for plan in (*plans, *plans)] == [wanted] * 4
    memory.free()
