"""Tests of a run's memory: it is allocated, touched and registered once before the first step.

Progress is reported, and the memory is always released. A fake libcudart records registrations.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from megatrain.runtime.execution import executor
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.memory import arenas as arenas_module
from megatrain.runtime.memory import host_memory
from megatrain.runtime.memory.allocation_guard import AllocationGuard
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.runtime.optimizer import adamw
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator import policies
from megatrain.simulator.base.errors import DoesNotFit, RunError, UserError
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.arithmetic import layer_state
from megatrain.simulator.schedule.plan import Placement, Plan

CPU = torch.device("cpu")
SMAPS = Path("/proc/self/smaps")
CLASSES = ("weights", "master_low", "moments", "gradients")


class Registrar:
    """A fake libcudart that records the registered memory and the number of calls. The process uses
    GPU 3, and every thread that registers memory must do so too.
    """

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.calls = 0
        self.fail_at = 0
        self.thread = threading.local()
        self.set_device(3)

    def set_device(self, device: int) -> None:
        self.thread.device = device

    def current_device(self) -> int:
        return getattr(self.thread, "device", 0)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        assert self.current_device() == 3, "makes a context on another GPU"
        assert address % 4096 == 0
        assert size % 4096 == 0
        if self.calls == self.fail_at:
            return 2
        assert all(
            address >= start + length or start >= address + size
            for start, length in self.now.items()
        ), "registered twice"
        self.now[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.now[address]
        return 0


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> Registrar:
    """Makes host arenas register with the returned fake, in pieces of at least 8 KiB."""
    made = Registrar()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    for name in ("set_device", "current_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(arenas_module, "HostMemory", lambda **_: HostMemory(registered=True))
    monkeypatch.setattr(arenas_module.Arenas, "_allocate", functools.partialmethod(_as_on_a_gpu))
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 8192)
    return made


def _as_on_a_gpu(self: Any, pool: str, parts: list[int]) -> torch.UntypedStorage:
    if pool.startswith("host."):
        return self.host_memory.allocate(parts, self._report)
    self._report(sum(parts))
    return torch.zeros(sum(parts), dtype=torch.uint8).untyped_storage()


@pytest.mark.parametrize("kept", [False, True])
def test_the_optimizers_memory_may_lie_on_huge_pages_and_no_fork_copies_it(kept: bool) -> None:
    """Host memory is advised for huge pages and is not copied by a fork.

    It is private, because the kernel makes no huge pages of Python's shared mappings.
    """
    memory = ReusablePinnedPool(registered=False) if kept else HostMemory(registered=False)
    storage = memory.allocate([2**24], lambda _: None)
    flags = next(
        (
            each["flags"]
            for each in _mappings()
            if each["start"] <= storage.data_ptr() < each["end"]
        ),
        None,
    )
    memory.close()
    if flags is None or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages, or does not report them")
    assert {"hg", "dc"} <= flags, (
        "not advised for huge pages (hg), or copied by a fork (dc); see proc(5)"
    )
    assert "sh" not in flags


def test_memory_is_allocated_without_advice_about_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is allocated even without huge pages (EINVAL) or without MADV_DONTFORK."""

    class Mapped(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(host_memory.mmap, "mmap", Mapped)
    monkeypatch.delattr(host_memory.mmap, "MADV_DONTFORK", raising=False)
    assert HostMemory(registered=False).allocate([4096], lambda _: None).nbytes() == 4096


def _mappings() -> Iterator[dict[str, Any]]:
    mapping: dict[str, Any] = {}
    for line in SMAPS.read_text().splitlines() if SMAPS.exists() else ():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(address, 16) for address in first.split("-"))
            mapping = {"start": start, "end": end}
        elif first == "VmFlags:":
            yield mapping | {"flags": set(rest.split())}


@pytest.mark.parametrize("policy", policies.names())
def test_all_host_memory_is_registered_once_and_no_step_adds_to_it(
    executable: Callable[..., Plan], session: Callable[..., Any], registrar: Registrar, policy: str
) -> None:
    plan = executable(policy)
    with session(plan) as running:
        executor = running.executor
        assert (
            sum(registrar.now.values())
            == executor.allocated("host")
            == sum(piece.nbytes for piece in executor._arenas.host_memory._registered)
        )
        calls = registrar.calls
        assert calls > 1 or not executor.allocated("host")
        for number in range(1, 5):
            running.step(number)
        assert registrar.calls == calls == executor._arenas.host_memory.registrations
        for buffer in executor.schedule.buffers:
            if buffer.place == "host":  # a copy across two registrations fails
                start = executor._arenas.flat(buffer.id, torch.uint8, 1).data_ptr()
                assert any(
                    address <= start and start + buffer.bytes <= address + size
                    for address, size in registrar.now.items()
                )
    assert not registrar.now


@pytest.mark.parametrize("policy", policies.names())
def test_progress_reaches_the_total(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 8192)
    plan, reports = executable(policy), []
    with Executor(
        plan,
        config_of(plan.model),
        AdamW(),
        CPU,
        on_allocate=lambda done, total: reports.append((done, total)),
    ) as executor:
        total = executor.allocated("host") + executor.allocated("device")
        assert reports[-1] == (total, total)
        assert {one[1] for one in reports} == {total}
        assert [one[0] for one in reports] == sorted({one[0] for one in reports})
        assert len(reports) > len(executor.pool_bytes), (
            "pools of several pieces must report progress more than once"
        )


def test_a_failing_registration_names_the_pool_and_leaves_nothing(
    executable: Callable[..., Plan], session: Callable[..., Any], registrar: Registrar
) -> None:
    plan = executable()
    registrar.fail_at = 5
    with pytest.raises(
        UserError,
        match=(
            r"^pool host\.\S+: found no room for .* \(cudaHostRegister failed with status 2\);"
            r" allowed: free memory; fix: "
        ),
    ):
        session(plan)
    assert registrar.calls >= 5
    assert not registrar.now
    with session(plan) as running:
        running.step()
    assert not registrar.now


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, RunError])
def test_an_exception_while_memory_is_allocated_releases_it(
    executable: Callable[..., Plan], registrar: Registrar, error: type[BaseException]
) -> None:
    """Ctrl-C and a failing callback release the memory that was allocated so far.

    The error is passed on.
    """
    plan = executable()

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(error):
        Executor(plan, config_of(plan.model), AdamW(), CPU, on_allocate=interrupt)
    assert registrar.calls
    assert not registrar.now


@pytest.mark.parametrize("where", ["workers", "guard"])
def test_an_exception_after_memory_was_allocated_releases_it(
    executable: Callable[..., Plan],
    registrar: Registrar,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """Ctrl-C while the C kernels are compiled, or a device that has failed."""
    plan = executable()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if where == "workers":
        monkeypatch.setattr(adamw, "workers", interrupt)
    else:
        monkeypatch.setattr(executor, "AllocationGuard", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Executor(plan, config_of(plan.model), AdamW(), CPU)
    assert bool(registrar.calls) == (where == "guard")
    assert not registrar.now


def test_memory_that_does_not_fit_leaves_no_threads(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    workers = adamw.workers

    def watched(threads: int) -> adamw.Workers:
        made = workers(threads)
        close = made.close
        monkeypatch.setattr(made, "close", lambda: (closed.append(True), close()))
        return made

    monkeypatch.setattr(adamw, "workers", watched)
    plan = executable()
    small = msgspec.structs.replace(plan, host_limit_bytes=1)
    with pytest.raises(DoesNotFit):
        Executor(
            small, config_of(plan.model), AdamW(), CPU, schedule=lower(plan), threads={"cpu": 2}
        )
    assert closed == [True]


def test_an_allocation_that_fails_ends_when_no_piece_is_being_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a piece would be registered after `close` has unregistered all."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 8192)
    both, ended = threading.Barrier(2), threading.Event()
    memory = HostMemory(registered=False)

    def register(piece: torch.Tensor) -> None:
        both.wait()
        if piece.storage_offset() == 0:
            raise RuntimeError("no")
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(host_memory, "_THREADS", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(memory, "register", register)
    with pytest.raises(RuntimeError, match="no"):
        memory.allocate([8192, 8192], lambda _: None)
    assert ended.is_set()


def test_memory_is_released_although_the_device_has_failed(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    registrar: Registrar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = session(executable())
    monkeypatch.setattr(Executor, "_synchronize", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        running.executor.close()
    assert not registrar.now


# ---- steady steps ----


@pytest.mark.usefixtures("registrar")
def test_a_steady_step_that_takes_memory_is_an_error(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """The first two steps may allocate memory, and later ones may not.

    After a step with other shapes, or a failed step, two more steps may allocate.
    """
    with session(executable()) as running:
        memory = running.executor._arenas.host_memory

        def takes(number: int) -> None:
            task, work = running.tasks["H.m0"], running.tasks["H.m0"].run
            task.run = lambda: (work(), memory.allocate([4096], lambda _: None))
            try:
                running.step(number)
            finally:
                task.run = work

        takes(1)
        takes(2)
        running.step(3)
        with pytest.raises(
            AssertionError,
            match=(
                r"^a step after the warm-up allocated memory: .*registrations=(\d+)\) before it,"
                r" .*registrations=(?!\1)\d+\) after it$"
            ),
        ):
            takes(4)
        takes(5)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that runs one step under an `AllocationGuard` with fake counters.

    `took` is the number of bytes allocated in the step, `freed` the number of bytes freed before
    it, and `retried` the number of retried allocations.
    """
    reserved = {"allocated": 7 * 2**20, "freed": 2**20}
    stats = {"reserved_bytes": {"all": reserved}, "num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    watch = AllocationGuard(torch.device("cuda", 0), HostMemory(registered=False))

    def step(*, alike: bool = True, took: int = 0, freed: int = 0, retried: int = 0) -> None:
        reserved["freed"] += freed
        with watch.step(same_shapes=alike):
            reserved["allocated"] += took
            stats["num_alloc_retries"] = int(str(stats["num_alloc_retries"])) + retried

    for _ in range(WARM_UP_STEPS):
        step(took=2**20)
    return step


def test_a_retried_allocation_is_an_error_at_once(watched: Callable[..., None]) -> None:
    watched()
    with pytest.raises(AssertionError, match="retries"):
        watched(retried=1)


def test_a_guard_that_does_not_raise_has_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, Any] = {"reserved_bytes": {"all": {"allocated": 0, "freed": 0}}}
    stats["num_alloc_retries"] = 0
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    guard = AllocationGuard(torch.device("cuda", 0), HostMemory(registered=False), raises=False)
    findings = []
    for retries in (*[1] * WARM_UP_STEPS, 0, 2, 1, 1):
        with guard.step(same_shapes=True):
            stats["num_alloc_retries"] += retries
        findings.append(guard.finding)
    assert [bool(finding) for finding in findings] == [False] * 3 + [True] + [False] * 2
    assert findings[3].startswith(
        "a step after the warm-up took memory: 0 bytes of the device, 2 retries of allocations and"
        " 0 registrations of host memory; such steps are slower"
    )


def test_device_memory_that_grows_in_many_steps_is_an_error(
    watched: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Every steady step that takes device memory is logged, and too many such steps are an error.

    A step counts once, however many bytes it takes.
    """
    for number in range(1, 9):
        watched(took=2**20 * number)
        watched()
        assert (
            caplog.messages[-1]
            == f"a step after the warm-up took {2**20 * number:,} bytes of device memory;"
            f" {number} of this run's steps have done so"
        )
    with pytest.raises(AssertionError, match="device_bytes"):
        watched(took=1)
    watched(took=2**20)  # after an error, a new warm-up begins


def test_memory_that_was_freed_may_be_taken_again(
    watched: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    watched()
    watched(freed=2**20, took=2**20)
    for _ in range(WARM_UP_STEPS - 1):
        watched(took=2**20)
    assert caplog.messages == []
    watched(took=2**20)
    assert len(caplog.messages) == 1


def test_a_step_of_other_shapes_may_take_memory(
    watched: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    watched(alike=False, took=2**20)
    assert caplog.messages == []


def test_steady_steps_do_not_grow_the_process(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """Five steady steps do not grow the process by more than 2 % of its state.

    The model has 9 million parameters, or 100 MB of state.
    """
    plan = executable(
        "k_buffer",
        dtype="fp32",
        hidden=512,
        intermediate=1536,
        head_dim=64,
        heads=8,
        layers=3,
        batch=1,
        chunk_bytes=2**22,
        device_limit_bytes=2**30,
        host_limit_bytes=2**30,
    )
    assert plan.model.parameters > 8e6
    with session(plan) as running:
        for number in (1, 2, 3):
            running.step(number)
        growth = []
        # Arenas of malloc grow at first, once for each thread. Memory that steps keep would grow
        # in every round, so one round without growth proves that they keep none.
        for first in range(4, 44, 5):
            before = held_bytes()
            for number in range(first, first + 5):
                running.step(number)
            growth.append(held_bytes() - before)
            if growth[-1] < 2**21:
                break
        assert growth[-1] < 2**21, f"grew by more than 2 % of the state: {growth}"


def held_bytes() -> int:
    """Returns the private bytes of this process, without malloc's reserve."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_full_info().uss)


# ---- how much ----


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        *((policy, {}) for policy in policies.names()),
        (
            "overlapped",
            {
                "placement": Placement(
                    weights="all", master_low="all", moments="all", gradients="all"
                )
            },
        ),
        ("overlapped", {"clipping": "none"}),
        (
            "overlapped",
            {"placement": Placement(weights="1-2,e", gradients="0", offloaded_inputs="all")},
        ),
        ("overlapped", {"placement": Placement(moments="all")}),
    ],
)
def test_a_layer_s_state_is_stored_once_in_12_bytes_per_parameter_without_its_gradient(
    executable: Callable[..., Plan],
    policy: str,
    changes: dict[str, Any],
    accumulation: int,
    dtype: str,
) -> None:
    """Each layer's state is stored once, in 12 bytes per parameter on host and device together.

    Other buffers on the host are staging buffers, scalars and offloaded inputs.
    """
    plan = executable(
        policy,
        accumulation=accumulation,
        dtype=dtype,
        **({} if policy in ("resident", "overlapped") else {"gradient_staging": 2}),
        **changes,
    )
    schedule = lower(plan)
    kept = [buffer for buffer in schedule.buffers if buffer.persistent]
    for layer in plan.model.stack.values():
        homes = {
            buffer.pool: buffer.bytes
            for buffer in kept
            if buffer.id.partition(":")[2] == layer.name
            and buffer.pool.partition(".")[2] in CLASSES
        }
        gradients = [
            homes.pop(pool) for pool in ("host.gradients", "device.gradients") if pool in homes
        ]
        assert sum(homes.values()) == 12 * layer.elements
        assert len({pool.partition(".")[2] for pool in homes}) == len(homes), (
            "a class of data is stored twice"
        )
        assert gradients in ([], [layer_state(plan, layer.name)["gradients"].of(layer.elements)])
    host = [buffer for buffer in schedule.buffers if buffer.place == "host"]
    staging = {buffer.pool for buffer in host} - {f"host.{name}" for name in CLASSES}
    assert staging <= {
        "host.gradient_staging",
        "host.gradient_staging_vocabulary",
        "host.norm",
        "host.clips",
        "host.offloaded_inputs",
    }
    assert sum(buffer.allocated for buffer in host) - sum(
        buffer.bytes for buffer in host
    ) < 4096 * max(len(host), 1), "allocated more than the buffers rounded up to pages"
