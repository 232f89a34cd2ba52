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
from megatrain.simulator.schedule import Buffer, DataClass, Schedule
from megatrain.simulator.timeline import Timeline
from megatrain.simulator.units import format_bytes

WORKSPACE = "device.workspace"
PROCESS = "host.process"
"""what the process takes beside its pools"""
PLACES = ("device", "host")
CLASSES = ("weights", "gradients", "moments", "activations", "workspace", "staging")
"""classes of pools in reports"""
_CLASS_OF = {
    "weights": "weights",
    "low": "weights",
    "gradients": "gradients",
    "moments": "moments",
    "hidden": "activations",
    "activations": "activations",
    "saved_activations": "activations",
    "attention": "activations",
}
"""class of data -> class of pools; of the others `workspace`"""


def class_of(kind: Buffer | None) -> str:
    """The class in reports of a pool that has the buffer `kind`, or that is in no schedule."""
    if kind is None:
        return "workspace"
    return "staging" if kind.chunk or kind.staging else _CLASS_OF.get(kind.data, "workspace")


def kinds_of(schedule: Schedule) -> dict[str, Buffer]:
    """One buffer of each pool: the buffers of a pool are alike."""
    return {buffer.pool: buffer for buffer in schedule.buffers}


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one schedule's memory, in bytes."""

    pools: dict[str, int]
    """largest first"""
    kinds: dict[str, Buffer] = {}
    """a buffer of each pool that the schedule has"""
    device_limit_bytes: int
    host_limit_bytes: int
    advice: str = ""
    """the smallest change that would make it fit; empty where it fits"""

    @property
    def classes(self) -> dict[str, dict[str, int]]:
        """Bytes by place and class of pools."""
        found: dict[str, dict[str, int]] = {place: defaultdict(int) for place in PLACES}
        for pool, size in self.pools.items():
            found[pool.partition(".")[0]][class_of(self.kinds.get(pool))] += size
        return {place: {name: sizes[name] for name in CLASSES if sizes.get(name)} for place, sizes in found.items()}

    def held(self, place: str, *data: DataClass) -> int:
        """Bytes of the pools of `place` that keep `data`, without those that it only passes through."""
        kinds = {pool: kind for pool, kind in self.kinds.items() if kind.place == place and class_of(kind) != "staging"}
        return sum(self.pools[pool] for pool, kind in kinds.items() if kind.data in data)

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
    kinds = kinds_of(schedule)
    verdict = Account(pools=ordered, kinds=kinds, device_limit_bytes=device_limit_bytes, host_limit_bytes=host_limit_bytes)
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
        for pool, sizes in slots.items():
            kind = verdict.kinds[pool]
            count = next((count for count in range(1, len(sizes)) if sum(sizes[-count:]) >= excess), None)
            if kind.knob and kind.place == place and count is not None:
                savings.append((sum(sizes[-count:]), f"{kind.knob} = {len(sizes) - count}"))
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
    saved = sum([held_bytes(buffer, activations_bytes) for buffer in schedule.buffers if buffer.data == "activations"])
    updates = any(buffer.data == "moments" and buffer.place == "device" for buffer in schedule.buffers)
    update = workspace.update if updates else 0
    return max(workspace.layer, workspace.head - saved, update - saved)
