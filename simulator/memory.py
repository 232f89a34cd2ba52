"""Memory: bytes of every pool of a schedule, whether they fit, what binds, and the smallest change that would help.

Every pool is allocated once, whole, so a place needs

    peak = sum over its pools of (sum over the pool's buffers of their allocated bytes), and on the device the workspace

Saved activations are allocated by the framework while a layer runs; they are counted like slots, with the bytes measured on the machine
where somebody measured. The workspace is what ops allocate and free within themselves: measured, or estimated (`memory_formulas.py`). Not
modelled: fragmentation, the CUDA context, the interpreter and its libraries; `extra` takes those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from megatrain.simulator.hardware import Workspace
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.timeline import Timeline
from megatrain.simulator.units import format_bytes

WORKSPACE = "device.workspace"
ACTIVATIONS = "device.activations"
"""of layers that are recomputed"""
PROCESS = "host.process"
"""what the process takes beside its pools"""
PLACES = ("device", "host")
_KNOBS = {"device.weights": "weight_slots", "device.gradients": "gradient_slots", "host.slabs": "gradient_slabs", ACTIVATIONS: "checkpoint_interval"}


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one schedule's memory, in bytes."""

    pools: dict[str, int]
    """largest first"""
    device_limit_bytes: int
    host_limit_bytes: int
    advice: str = ""
    """the smallest change that would make it fit; empty where it fits"""

    def _peak(self, place: str) -> int:
        return sum(size for pool, size in self.pools.items() if pool.startswith(f"{place}."))

    @property
    def device_peak_bytes(self) -> int:
        return self._peak("device")

    @property
    def host_peak_bytes(self) -> int:
        return self._peak("host")

    @property
    def fits(self) -> bool:
        return self.excess_bytes == 0

    @property
    def excess_bytes(self) -> int:
        """Bytes above the limits, both places together."""
        return max(self.device_peak_bytes - self.device_limit_bytes, 0) + max(self.host_peak_bytes - self.host_limit_bytes, 0)

    @property
    def binding(self) -> str:
        """The largest pool of the place that is fullest against its limit."""
        fill = {"device": self.device_peak_bytes / max(self.device_limit_bytes, 1), "host": self.host_peak_bytes / max(self.host_limit_bytes, 1)}
        place = max(PLACES, key=fill.__getitem__)
        return next((pool for pool in self.pools if pool.startswith(f"{place}.")), place)


def account(
    schedule: Schedule,
    device_limit_bytes: int,
    host_limit_bytes: int,
    activations_bytes: int | None,
    workspace_bytes: int,
    extra: Mapping[str, int] | None = None,
) -> Account:
    """The memory of `schedule` under the limits.

    `activations_bytes`: measured saved activations of one decoder layer, None to take the schedule's estimate. `workspace_bytes`: what
    `workspace_beside` says. `extra`: further pools, `PLACE.NAME` -> bytes.
    """
    pools: dict[str, int] = defaultdict(int)
    for buffer in schedule.buffers:
        pools[buffer.pool] += held_bytes(buffer, activations_bytes)
    pools[WORKSPACE] += workspace_bytes
    for pool, size in (extra or {}).items():
        pools[pool] += size
    ordered = dict(sorted(pools.items(), key=lambda item: (-item[1], item[0])))
    verdict = Account(pools=ordered, device_limit_bytes=device_limit_bytes, host_limit_bytes=host_limit_bytes)
    if verdict.fits:
        return verdict
    slots: dict[str, list[int]] = defaultdict(list)
    for buffer in schedule.buffers:
        if not buffer.persistent:
            slots[buffer.pool].append(held_bytes(buffer, activations_bytes))
    return msgspec.structs.replace(verdict, advice=_advice(verdict, slots))


def held_bytes(buffer: Buffer, activations_bytes: int | None) -> int:
    """What the buffer takes in its pool."""
    return activations_bytes if buffer.dynamic and activations_bytes is not None else buffer.allocated


def _advice(verdict: Account, slots: Mapping[str, list[int]]) -> str:
    """Per place that is too small: the knob whose slots cover the excess with the fewest bytes given up, or the memory to add."""
    parts, more = [], []
    for place, peak, limit in (
        ("device", verdict.device_peak_bytes, verdict.device_limit_bytes), ("host", verdict.host_peak_bytes, verdict.host_limit_bytes),
    ):  # fmt: skip
        excess = peak - limit
        if excess <= 0:
            continue
        savings = []
        for pool, knob in _KNOBS.items():
            sizes = slots.get(pool, [])
            count = next((count for count in range(1, len(sizes)) if sum(sizes[-count:]) >= excess), None)
            if pool.startswith(f"{place}.") and count is not None:
                savings.append((sum(sizes[-count:]), f"{knob} = {len(sizes) - count}"))
        if savings:
            saved, change = min(savings)
            parts.append(f"{change} would save {format_bytes(saved)}")
        else:
            more.append(f"{format_bytes(excess)} more of {place} memory (--{place}-memory)")
    return "; ".join([*parts, *([f"{' and '.join(more)} would be enough"] if more else [])])


def usage(schedule: Schedule, timeline: Timeline, activations_bytes: int | None = None) -> dict[str, list[tuple[int, int]]]:
    """Bytes held in each pool over a timeline: steps (time_ns, bytes from then on), the first at 0.

    A slot is held from the start of the op that acquires it to the end of the op that releases it; persistent buffers always.
    """
    base: dict[str, int] = defaultdict(int)
    changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for buffer in schedule.buffers:
        base[buffer.pool] += held_bytes(buffer, activations_bytes) if buffer.persistent else 0
    for op in schedule.ops:
        span = timeline.by_op[op.id]
        for sign, time, names in ((1, span.start_ns, op.acquires), (-1, span.end_ns, op.releases)):
            for name in names:
                changes[schedule.buffer[name].pool][time] += sign * held_bytes(schedule.buffer[name], activations_bytes)
    steps: dict[str, list[tuple[int, int]]] = {}
    for pool, level in base.items():
        level += changes[pool].pop(0, 0)
        steps[pool] = [(0, level)]
        for time in sorted(changes[pool]):
            level += changes[pool][time]
            if level != steps[pool][-1][1]:
                steps[pool].append((time, level))
    return steps


def workspace_beside(workspace: Workspace, schedule: Schedule, activations_bytes: int | None) -> int:
    """Bytes of `device.workspace` that together with the saved activations hold every op's peak.

    A layer's ops run beside the saved activations of a recomputed block, the head's and the updates beside none: max(layer, head - saved,
    update - saved). Those of stored layers are there all the while.
    """
    saved = sum([held_bytes(buffer, activations_bytes) for buffer in schedule.buffers if buffer.id.startswith(f"{ACTIVATIONS}:")])
    update = workspace.update if any(buffer.id.startswith(("device.moments:", "device.moments_chunks:")) for buffer in schedule.buffers) else 0
    return max(workspace.layer, workspace.head - saved, update - saved)
