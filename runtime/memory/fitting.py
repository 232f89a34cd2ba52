"""Checks whether a plan fits this machine, before weights are read or memory is allocated."""

from __future__ import annotations

from collections import Counter

from megatrain.simulator.base.errors import DoesNotFit
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan

LOADING_BYTES = 2**27
"""Host memory that loading, saving and exporting need in addition to the pools; 67 MB were
measured. Mapped files are not counted, because the system can drop their pages."""

_HAS = "{}, what this machine has"
_PLAN_FOR_THIS = "make a plan for this machine with `megatrain calibrate` and `megatrain plan`"


def refuse_what_does_not_fit(
    plan: Plan,
    schedule: Schedule,
    *,
    host_bytes: int | None = None,
    device_bytes: int | None = None,
    on_cpu: bool = False,
) -> None:
    """Raises DoesNotFit if `plan` needs more memory than its limits allow or than the machine has.

    The needed memory is the total size of the pools or the predicted peak of the plan, whichever is
    higher. `LOADING_BYTES` are added to the host memory before the comparison with the machine.

    Args:
        plan: The plan to check.
        schedule: The schedule of `plan`.
        host_bytes: Host memory of the machine, or None to compare only with the plan's limit.
        device_bytes: Device memory of the machine, or None to compare only with the plan's limit.
        on_cpu: Whether the device pools are in host memory, too. Then the pools of both are also
            compared with `host_bytes`.
    """
    for place, predicted, limit, machine_bytes in (
        (
            "device",
            plan.prediction and plan.prediction.device_peak_bytes,
            plan.device_limit_bytes,
            device_bytes,
        ),
        (
            "host",
            plan.prediction and plan.prediction.host_peak_bytes,
            plan.host_limit_bytes,
            host_bytes,
        ),
    ):
        pools = _pools(schedule, place)
        needed = max(pools.total(), predicted or 0)
        loading = LOADING_BYTES if place == "host" else 0
        if needed > limit:
            raise _refusal(
                place,
                needed,
                pools,
                allowed=format_bytes(limit),
                fix=(
                    f"raise the limit by {format_bytes(needed - limit)}, or make a plan for this"
                    " limit with `megatrain plan`"
                ),
            )
        if machine_bytes is not None and needed + loading > machine_bytes:
            raise _refusal(
                place,
                needed + loading,
                pools,
                allowed=_HAS.format(format_bytes(machine_bytes)),
                fix=_PLAN_FOR_THIS,
            )
    both = _pools(schedule, "device", "host")
    if on_cpu and host_bytes is not None and both.total() + LOADING_BYTES > host_bytes:
        raise _refusal(
            "device and host",
            both.total() + LOADING_BYTES,
            both,
            allowed=_HAS.format(format_bytes(host_bytes)),
            fix=_PLAN_FOR_THIS,
        )


def little_memory_note(schedule: Schedule, free_bytes: int, *, on_cpu: bool = False) -> str:
    """Returns a warning if the pools of `schedule` and loading need more host memory than
    `free_bytes`, the host memory that is free now. Otherwise returns an empty string. With
    `on_cpu`, the device pools are in host memory, too.

    This is a warning, not an error, because a virtual machine may get memory only when it uses it.
    """
    needed = LOADING_BYTES + sum(
        buffer.allocated
        for buffer in schedule.buffers
        if (on_cpu or buffer.place == "host") and not buffer.dynamic
    )
    if needed <= free_bytes:
        return ""
    return (
        f"warning: the plan needs {format_bytes(needed)} of host memory, and"
        f" {format_bytes(free_bytes)} are free now: close other programs, or plan with"
        f" --host-memory {free_bytes // 2**30}GiB, or the system may end this run"
    )


def _pools(schedule: Schedule, *places: str) -> Counter[str]:
    """Returns the bytes of each pool in `places`."""
    pools: Counter[str] = Counter()
    for buffer in schedule.buffers:
        if buffer.place in places and not buffer.dynamic:
            pools[buffer.pool] += buffer.allocated
    return pools


def _refusal(place: str, needed: int, pools: Counter[str], *, allowed: str, fix: str) -> DoesNotFit:
    """Returns the error for a plan that needs `needed` bytes in `place`."""
    ((largest, size),) = pools.most_common(1) or [("no pool", 0)]
    return DoesNotFit(
        f"{place} memory",
        found=(
            f"a plan that needs {format_bytes(needed)}, the largest pool being {largest}"
            f" {format_bytes(size)}"
        ),
        allowed=allowed,
        fix=fix,
    )
