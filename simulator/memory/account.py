"""Account: the memory that a schedule needs, whether it fits, what limits it, and the smallest
change that would help.

Every pool is allocated once, as a whole. A place (`device` or `host`) needs

    peak = sum of the allocated bytes of all buffers of all pools in the place + workspace

The workspace is only on the device. It is what ops allocate and free while they run, measured or
estimated (`formulas.py`). Saved activations are allocated by the framework while a layer runs. They
are counted like slots, with the measured bytes if there are any.

Fragmentation, the CUDA context, the interpreter and its libraries are not modeled. The argument
`extra` can add them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.model.muon import LIBRARY_BYTES
from megatrain.simulator.model.state_format import CODED_GRADIENT_BYTES, GPU_BLOCK, UPDATE_COSTS
from megatrain.simulator.schedule import Buffer, DataClass, Schedule
from megatrain.simulator.schedule.timeline import Timeline

WORKSPACE = "device.workspace"
PROCESS = "host.process"
"""The pool of the memory that the process needs in addition to the schedule's pools."""
PLACES = ("device", "host")
CLASSES = ("weights", "gradients", "moments", "activations", "workspace", "staging")
"""The classes of pools in reports."""
_CLASS_OF = {
    "weights": "weights",
    "master_low": "weights",
    "gradients": "gradients",
    "moments": "moments",
    "hidden": "activations",
    "activations": "activations",
    "saved_activations": "activations",
    "attention": "activations",
}
"""The class of a pool by the class of data that it holds. All others are `workspace`."""


def class_of(kind: Buffer | None) -> str:
    """Returns the class, in reports, of a pool with buffers like `kind`. None is for a pool that
    the schedule does not have, such as the workspace.
    """
    if kind is None:
        return "workspace"
    return "staging" if kind.chunk or kind.staging else _CLASS_OF.get(kind.data, "workspace")


def kinds_of(schedule: Schedule) -> dict[str, Buffer]:
    """Returns one buffer of each pool, by pool. The buffers of a pool are alike."""
    return {buffer.pool: buffer for buffer in schedule.buffers}


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that one schedule needs, in bytes."""

    pools: dict[str, int]
    """Bytes by pool, largest first."""
    kinds: dict[str, Buffer] = {}
    """One buffer of each pool that the schedule has, by pool."""
    device_limit_bytes: int
    """Device memory that the run may use."""
    host_limit_bytes: int
    """Host memory that the run may use."""
    advice: str = ""
    """The smallest change that would make it fit, or empty if it fits."""

    @property
    def classes(self) -> dict[str, dict[str, int]]:
        """The bytes by place and class of pools."""
        found: dict[str, dict[str, int]] = {place: defaultdict(int) for place in PLACES}
        for pool, size in self.pools.items():
            found[pool.partition(".")[0]][class_of(self.kinds.get(pool))] += size
        return {
            place: {name: sizes[name] for name in CLASSES if sizes.get(name)}
            for place, sizes in found.items()
        }

    def held(self, place: str, *data: DataClass) -> int:
        """Returns the bytes of the pools of `place` that hold classes `data`. Staging buffers and
        chunks do not count.
        """
        kinds = {
            pool: kind
            for pool, kind in self.kinds.items()
            if kind.place == place and class_of(kind) != "staging"
        }
        return sum(self.pools[pool] for pool, kind in kinds.items() if kind.data in data)

    def _peak(self, place: str) -> int:
        start = f"{place}."
        return sum([size for pool, size in self.pools.items() if pool.startswith(start)])

    @property
    def device_peak_bytes(self) -> int:
        """The bytes of all pools on the device."""
        return self._peak("device")

    @property
    def host_peak_bytes(self) -> int:
        """The bytes of all pools in host memory."""
        return self._peak("host")

    @property
    def fits(self) -> bool:
        """Whether both places are within their limits."""
        return self.excess_bytes == 0

    @property
    def excess_bytes(self) -> int:
        """The bytes above the limits, summed over both places."""
        return max(self.device_peak_bytes - self.device_limit_bytes, 0) + max(
            self.host_peak_bytes - self.host_limit_bytes, 0
        )

    @property
    def binding(self) -> str:
        """The largest pool of the place that uses the largest fraction of its limit."""
        fill = {
            "device": self.device_peak_bytes / max(self.device_limit_bytes, 1),
            "host": self.host_peak_bytes / max(self.host_limit_bytes, 1),
        }
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
    """Returns the memory that `schedule` needs, compared with the limits.

    Args:
        activations_bytes: measured bytes of one decoder layer's saved activations. None means the
            schedule's estimate.
        workspace_bytes: bytes of the workspace, from `peak_workspace_bytes`.
        extra: bytes of further pools, by `PLACE.NAME`.
    """
    pools: dict[str, int] = defaultdict(int)
    for buffer in schedule.buffers:
        pools[buffer.pool] += held_bytes(buffer, activations_bytes)
    pools[WORKSPACE] += workspace_bytes
    for pool, size in (extra or {}).items():
        pools[pool] += size
    ordered = dict(sorted(pools.items(), key=lambda item: (-item[1], item[0])))
    kinds = kinds_of(schedule)
    verdict = Account(
        pools=ordered,
        kinds=kinds,
        device_limit_bytes=device_limit_bytes,
        host_limit_bytes=host_limit_bytes,
    )
    if verdict.fits:
        return verdict
    slots: dict[str, list[int]] = defaultdict(list)
    for buffer in schedule.buffers:
        if not buffer.persistent:
            slots[buffer.pool].append(held_bytes(buffer, activations_bytes))
    return msgspec.structs.replace(verdict, advice=_advice(verdict, slots))


def held_bytes(buffer: Buffer, activations_bytes: int | None) -> int:
    """Returns the bytes that the buffer takes in its pool. `activations_bytes`, if it is not None,
    replaces the size of a buffer that the framework allocates.
    """
    return (
        activations_bytes if buffer.dynamic and activations_bytes is not None else buffer.allocated
    )


def _advice(verdict: Account, slots: Mapping[str, list[int]]) -> str:
    """Returns the smallest change that makes the schedule fit. For each place that is too small, it
    is the knob that saves the fewest bytes above the excess, or the memory to add.
    """
    parts, more = [], []
    for place, peak, limit in (
        ("device", verdict.device_peak_bytes, verdict.device_limit_bytes),
        ("host", verdict.host_peak_bytes, verdict.host_limit_bytes),
    ):
        excess = peak - limit
        if excess <= 0:
            continue
        savings = []
        for pool, sizes in slots.items():
            kind = verdict.kinds[pool]
            count = next(
                (count for count in range(1, len(sizes)) if sum(sizes[-count:]) >= excess), None
            )
            if kind.knob and kind.place == place and count is not None:
                savings.append((sum(sizes[-count:]), f"{kind.knob} = {len(sizes) - count}"))
        if savings:
            saved, change = min(savings)
            parts.append(f"{change} would save {format_bytes(saved)}")
        else:
            more.append(f"{format_bytes(excess)} more of {place} memory (--{place}-memory)")
    return "; ".join([*parts, *([f"{' and '.join(more)} would be enough"] if more else [])])


def usage(
    schedule: Schedule, timeline: Timeline, activations_bytes: int | None = None
) -> dict[str, list[tuple[int, int]]]:
    """Returns the bytes in use in each pool during a timeline, as steps (time_ns, bytes from then
    on). The first step is at 0.

    A slot is in use from the start of the op that acquires it to the end of the op that releases
    it. A persistent buffer is always in use.
    """
    base: dict[str, int] = defaultdict(int)
    changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for buffer in schedule.buffers:
        base[buffer.pool] += held_bytes(buffer, activations_bytes) if buffer.persistent else 0
    for op in schedule.ops:
        span = timeline.by_op[op.id]
        for sign, time, names in ((1, span.start_ns, op.acquires), (-1, span.end_ns, op.releases)):
            for name in names:
                changes[schedule.buffer[name].pool][time] += sign * held_bytes(
                    schedule.buffer[name], activations_bytes
                )
    steps: dict[str, list[tuple[int, int]]] = {}
    for pool, level in base.items():
        level += changes[pool].pop(0, 0)
        steps[pool] = [(0, level)]
        for time in sorted(changes[pool]):
            level += changes[pool][time]
            if level != steps[pool][-1][1]:
                steps[pool].append((time, level))
    return steps


def peak_workspace_bytes(
    workspace: Workspace, schedule: Schedule, activations_bytes: int | None
) -> int:
    """Returns the bytes of `device.workspace` that every op's temporary tensors need.

    The ops of a layer run while the activations of a recomputed block are saved. The head and the
    updates run while they are not, so they can use that memory too. The result is therefore
    max(layer, head - saved, update - saved). Layers in `saved_activations` do not count as saved
    here, because their activations remain during the head and the updates.

    If updates multiply matrices, the library that does it needs memory of its own on their stream.
    """
    saved = sum(
        [
            held_bytes(buffer, activations_bytes)
            for buffer in schedule.buffers
            if buffer.data == "activations"
        ]
    )
    updated = {
        buffer.dtype
        for buffer in schedule.buffers
        if buffer.data == "moments" and buffer.place == "device"
    }
    own = [costs.gpu_temporary_bytes for dtype, costs in UPDATE_COSTS.items() if dtype in updated]
    if any(buffer.data == "gradients" and buffer.dtype == "block8" for buffer in schedule.buffers):
        own = [max([0, *own]) + CODED_GRADIENT_BYTES.temporary * GPU_BLOCK]
    update = max(own) + workspace.update if own else 0
    products = any(buffer.matrix_products for buffer in schedule.buffers)
    return max(workspace.layer, workspace.head - saved, update - saved) + (
        LIBRARY_BYTES if products else 0
    )
