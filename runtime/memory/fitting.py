"""Whether a plan fits this machine: said before a weight is read or a byte allocated, with the pool that binds and what would help."""

from __future__ import annotations

from collections import Counter

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.units import format_bytes

LOADING_BYTES = 2**27
"""host memory that loading, saving and exporting take besides the pools: pieces under way, 67 MB as measured; mapped files are the system's to drop"""


def refuse_what_does_not_fit(plan: Plan, schedule: Schedule, *, host_bytes: int | None = None, device_bytes: int | None = None) -> None:
    """Compares the pools, what loading takes and, where the plan has a prediction, its peak with the plan's limits and with what the machine has.

    `host_bytes` and `device_bytes`: of the machine; None where they are not known, or the plan's limit is to be believed. Raises UserError.
    """
    for place, predicted, limit, there in (
        ("device", plan.prediction and plan.prediction.device_peak_bytes, plan.device_limit_bytes, device_bytes),
        ("host", plan.prediction and plan.prediction.host_peak_bytes, plan.host_limit_bytes, host_bytes),
    ):
        pools: Counter[str] = Counter()
        for buffer in schedule.buffers:
            if buffer.place == place and not buffer.dynamic:
                pools[buffer.pool] += buffer.allocated
        needed = max(pools.total(), predicted or 0)
        loading = LOADING_BYTES if place == "host" else 0
        if needed > limit:
            _refuse(place, needed, pools, format_bytes(limit), needed - limit)
        if there is not None and needed + loading > there:
            _refuse(place, needed + loading, pools, f"{format_bytes(there)}, what this machine has", needed + loading - there)


def _refuse(place: str, needed: int, pools: Counter[str], allowed: str, excess: int) -> None:
    ((largest, size),) = pools.most_common(1) or [("no pool", 0)]
    raise UserError(
        f"{place} memory", found=f"a plan whose peak is {format_bytes(needed)}, of which {largest} {format_bytes(size)}", allowed=allowed,
        fix=f"raise the limit by {format_bytes(excess)}, or make a plan for this limit with `megatrain plan`",
    )  # fmt: skip
