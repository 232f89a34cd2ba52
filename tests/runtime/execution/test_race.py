"""Tests with a deliberate race: a schedule without one of its dependencies.

`check` reports the race, and a run has other bits if the op that should be waited for is late. With
all dependencies, no delay on any lane changes a bit.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from megatrain.runtime.execution.lanes import Task
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, Schedule, ScheduleError
from megatrain.simulator.schedule.plan import Plan

LATE_SECONDS = 0.05


def without(schedule: Schedule, op: str, dependency: str) -> Schedule:
    """Returns `schedule` in which `op` no longer waits for `dependency`."""
    ops = [
        msgspec.structs.replace(
            each, after=tuple(other for other in each.after if (each.id, other) != (op, dependency))
        )
        for each in schedule.ops
    ]
    return Schedule(policy=schedule.policy, buffers=schedule.buffers, ops=tuple(ops))


def delay(tasks: Mapping[str, Task], seconds: Mapping[str, float]) -> None:
    """Delays the start of each named op by its number of seconds."""

    def late(run: Callable[[], object], wait: float) -> Callable[[], object]:
        return lambda: (time.sleep(wait), run())

    for op, wait in seconds.items():
        tasks[op].run = late(tasks[op].run, wait)


def exchange(tasks: Mapping[str, Task], op: str, dependency: str) -> None:
    """Makes `dependency` run after `op`, which must not wait for it, in every step."""
    done, first, second = threading.Semaphore(0), tasks[op].run, tasks[dependency].run
    tasks[op].run = lambda: (first(), done.release())
    tasks[dependency].run = lambda: (done.acquire(timeout=60), second())


def first_with_dependency(schedule: Schedule, wanted: Callable[[Op, Op], bool]) -> tuple[str, str]:
    """Returns the first (op, dependency) for which `wanted` is true."""
    return next(
        (op.id, other)
        for op in schedule.ops
        for other in op.after
        if wanted(op, schedule.by_id[other])
    )


def touching(buffer: str, first: str, second: str) -> Callable[[Op, Op], bool]:
    """Returns a predicate of (op, dependency).

    It is true if the op has the kind `second`, the dependency has the kind `first`, and both use
    the same buffer of the pool.
    """

    def wanted(op: Op, other: Op) -> bool:
        shared = set(op.buffers) & set(other.buffers)
        return (
            op.kind == second
            and other.kind == first
            and any(name.startswith(f"{buffer}:") for name in shared)
        )

    return wanted


RACES = {
    "a weight slot is overwritten before its layer has computed": touching(
        "device.weights", "backward", "load_weights"
    ),
    "a layer computes before its weights are there": touching(
        "device.weights", "load_weights", "forward"
    ),
    "a gradient slot is overwritten before it is saved": touching(
        "device.gradients", "save_gradients", "backward"
    ),
    "a gradient is saved before it is computed": touching(
        "device.gradients", "backward", "save_gradients"
    ),
    "a staging buffer is overwritten before it is accumulated": touching(
        "host.gradient_staging", "accumulate_gradients", "save_gradients"
    ),
    "a staging buffer is accumulated before it has arrived": touching(
        "host.gradient_staging", "save_gradients", "accumulate_gradients"
    ),
}


@pytest.mark.parametrize("race", RACES)
def test_a_dependency_removed_is_reported_and_changes_bits(
    executable: Callable[..., Plan], session: Callable[..., Any], race: str
) -> None:
    plan = executable(gradient_slots=1, gradient_staging=1, chunk_bytes=2**20)
    schedule = lower(plan)
    op, dependency = first_with_dependency(schedule, RACES[race])
    broken = without(schedule, op, dependency)
    with pytest.raises(ScheduleError, match=f"^race on .*: nothing orders .* before {op}$"):
        broken.check()
    with session(plan) as undisturbed:
        want = undisturbed.bits()
    with session(plan) as running:
        delay(running.tasks, {dependency: LATE_SECONDS})
        assert running.bits() == want, f"{op} does not wait for {dependency}"
    with session(plan, schedule=broken) as running:
        exchange(running.tasks, op, dependency)
        assert running.bits() != want, f"{op} still waits for {dependency}"


@pytest.mark.parametrize("policy", ["double_buffer", "k_buffer", "resident"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "gradient_slots": 1, "checkpoint_interval": 3},
        {"tied": True, "clipping": "none"},
    ],
)
def test_no_dependency_is_superfluous(
    executable: Callable[..., Plan], policy: str, changes: dict[str, Any]
) -> None:
    """Removing any single dependency causes a race, because policies derive the fewest.

    Only `sequential` has more.
    """
    schedule = lower(executable(policy, weight_slots=2, chunk_bytes=2**20, **changes))
    assert any(op.after for op in schedule.ops)
    for op in schedule.ops:
        for dependency in op.after:
            with pytest.raises(ScheduleError, match=r"race on|may still be using"):
                without(schedule, op.id, dependency).check()


@pytest.mark.parametrize("policy", ["sequential", "double_buffer", "k_buffer", "resident"])
def test_delays_on_all_lanes_change_no_bit(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str
) -> None:
    plan = executable(
        policy,
        accumulation=2,
        gradient_slots=1,
        gradient_staging=1,
        checkpoint_interval=2,
        chunk_bytes=16_384,
    )
    with session(plan) as undisturbed:
        want = undisturbed.bits()
    for seed in range(3):
        source = random.Random(seed)
        slow = source.choice(list(lower(plan).lanes))  # one whole lane, and single ops of all lanes
        seconds = {
            op.id: source.random() * (0.004 if op.lane == slow else 0.001)
            for op in lower(plan).ops
            if op.lane == slow or source.random() < 0.3
        }
        with session(plan) as delayed:
            delay(delayed.tasks, seconds)
            assert delayed.bits() == want, f"seed {seed}, {slow} is slow"
