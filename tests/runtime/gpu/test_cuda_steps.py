"""Tests of steps on a GPU: waiting, allocations, a full device, and checksums.

No step waits for a value, and steady steps allocate nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution import checksum as checksums
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import LaneGroup
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import forget_device_memory
from megatrain.runtime.memory.allocation_guard import _SETTLING_STEPS
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
SIZES = {
    "hidden": 256,
    "intermediate": 512,
    "head_dim": 64,
    "vocabulary": 1000,
    "batch": 4,
    "sequence": 128,
    "loss_chunk": 100,
    "chunk_bytes": 2**18,
}
LIMITS = {"device_limit_bytes": 2**38, "host_limit_bytes": 2**38}
PLANS = [
    *(
        (policy, {"weight_slots": 1 if policy == "sequential" else 2})
        for policy in policies.names()
    ),
    (
        "overlapped",
        {"placement": Placement(moments="0-1", saved_activations="2", offloaded_inputs="0")},
    ),
    ("overlapped", {"clipping": "none"}),
    ("k_buffer", {"clipping": "none"}),
]


def opened(plan: Plan) -> Executor:
    """Returns an executor with random weights."""
    executor = Executor(
        plan,
        config_of(plan.model),
        AdamW(max_norm=0.5),
        torch.device("cuda", 0),
        schedule=policies.lower(plan),
    )
    executor.state.load(random_weights(0))
    return executor


def batches(plan: Plan, number: int) -> list[Batch]:
    work, generator = plan.workload, torch.Generator().manual_seed(number)
    return [
        Batch(
            *torch.randint(
                plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator
            )
        )
        for _ in range(work.accumulation)
    ]


@pytest.fixture
def waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes waiting for the device an error while lanes run, from the third step on.

    Earlier steps compile kernels and start libraries.
    """
    play, played = LaneGroup.play, dict[int, int]()

    def strict(crew: LaneGroup, queues: Any) -> None:
        played[id(crew)] = played.get(id(crew), 0) + 1
        torch.cuda.set_sync_debug_mode("error" if played[id(crew)] > 2 else "default")
        try:
            play(crew, queues)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(LaneGroup, "play", strict)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("waiting_is_an_error")
@pytest.mark.parametrize("kernels", ["fused", "eager"])
@pytest.mark.parametrize(("policy", "changes"), PLANS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_step_waits_for_a_value_and_no_steady_step_allocates(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    changes: dict[str, object],
    accumulation: int,
    kernels: str,
) -> None:
    """Eight steps with a flush between them neither wait nor allocate.

    The executor itself raises an error if a step after the second calls cudaMalloc.
    """
    monkeypatch.setenv("MEGATRAIN_KERNELS", kernels)
    plan = make_plan(
        policy,
        accumulation=accumulation,
        **(
            {"gradient_staging": 2} if policy in ("k_buffer", "double_buffer", "sequential") else {}
        ),
        **SIZES,
        **LIMITS,
        **changes,
    )
    with opened(plan) as executor:
        for number in range(1, 9):
            executor.step(batches(plan, number), rate=1e-3, number=number)
            if number == 5:
                executor.flush_update()


@pytest.mark.usefixtures("waiting_is_an_error")
def test_a_step_that_waits_is_found(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("overlapped", **SIZES, **LIMITS)
    with opened(plan) as executor:
        for number in (1, 2):
            executor.step(batches(plan, number), rate=1e-3, number=number)
        works, flag = executor.tasks["F1.m0"].run, torch.ones((), device="cuda")
        executor.tasks["F1.m0"].run = lambda: (works(), flag.item())
        with pytest.raises(Exception, match=r"^F1.m0 on lane compute: RuntimeError: .*synchroniz"):
            executor.step(batches(plan, 3), rate=1e-3, number=3)


def test_steady_steps_that_take_device_memory_are_an_error(make_plan: Callable[..., Plan]) -> None:
    """A step that keeps allocating device memory is an error with both of PyTorch's allocators.

    The allocator with plain segments allocates in one call, and the one with expandable segments in
    several.
    """
    plan = make_plan("overlapped", **SIZES, **LIMITS)
    last = 3 + _SETTLING_STEPS + 1
    with opened(plan) as executor:
        for number in (1, 2, 3):
            executor.step(batches(plan, number), rate=1e-3, number=number)
        works, kept = executor.tasks["F1.m0"].run, []
        executor.tasks["F1.m0"].run = lambda: (
            works(),
            kept.append(torch.empty(2**28, dtype=torch.uint8, device="cuda")),
        )
        for number in range(4, last):
            executor.step(batches(plan, number), rate=1e-3, number=number)
        with pytest.raises(AssertionError, match=r"^a step after the warm-up allocated memory: "):
            executor.step(batches(plan, last), rate=1e-3, number=last)


def test_a_full_device_is_reported_and_all_memory_is_released(
    make_plan: Callable[..., Plan],
) -> None:
    """If the pools fit but the activations do not, the step gives a one-line error.

    All memory is released, and the same process can train again. Another tensor fills the device
    here.
    """
    device = torch.device("cuda", 0)
    plan = make_plan(
        "overlapped",
        **{**SIZES, "batch": 64, "sequence": 1024, "loss_chunk": 65536, "vocabulary": 32_000},
        **LIMITS,
    )
    forget_device_memory(device)
    before = torch.cuda.memory_allocated(device)
    executor = opened(plan)
    free, _ = torch.cuda.mem_get_info(device)
    rest = torch.empty(max(free - 2**28, 0), dtype=torch.uint8, device=device)
    with (
        executor,
        pytest.raises(
            UserError,
            match=(
                r"^device memory, \S+ on lane compute: found no memory left besides pools of .*"
                r"out of memory.*; fix: close other"
            ),
        ),
    ):
        executor.step(batches(plan, 1), rate=1e-3, number=1)
    assert not executor._arenas.host_memory._registered
    del rest, executor
    forget_device_memory(device)
    assert torch.cuda.memory_allocated(device) == before
    small = make_plan("overlapped", **SIZES, **LIMITS)
    with opened(small) as another:
        another.step(batches(small, 1), rate=1e-3, number=1)


def test_a_failed_registration_leaves_no_error_behind() -> None:
    memory = HostMemory(registered=True)
    storage = memory.allocate([2**20], lambda _: None)
    pages = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (2**20,))
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="cudaHostRegister failed"),
    ):  # in a thread, as in `allocate`
        pool.submit(memory._prepare, pages).result()
    assert float(torch.ones(3, device="cuda").sum()) == 3
    memory.close()
    assert not memory._registered


def test_a_checksum_is_the_same_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.randint(
        -(2**63), 2**63 - 1, (5_000_001,), generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(checksums._mixed_sum(words), checksums._mixed_sum(words.cuda()).cpu())
    monkeypatch.setattr(checksums, "_GPU_WORDS", 1000)
    assert torch.equal(
        checksums._mixed_sum(words[:9999]), checksums._mixed_sum(words[:9999].cuda()).cpu()
    )


def test_all_plans_report_the_same_checksum_in_each_step(make_plan: Callable[..., Plan]) -> None:
    """All plans report the same checksums.

    Weights are on the host or on the device, and updates are immediate or deferred.
    """
    from megatrain.runtime.machine import make_deterministic

    make_deterministic()
    try:
        results = []
        for policy, changes in PLANS[:-2]:
            plan = make_plan(policy, **SIZES, **LIMITS, **changes)
            with opened(plan) as executor:
                results.append(
                    [
                        executor.step(batches(plan, number), rate=1e-3, number=number).checksum
                        for number in range(1, 5)
                    ]
                )
        assert len(set(results[0])) == 4
        assert results == [results[0]] * len(results)
    finally:
        torch.use_deterministic_algorithms(False)
