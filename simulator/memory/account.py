"""Account: the memory that a schedule needs, whether it fits, what limits it, and the smallest
change that would help.

Every pool is allocated once, as a whole. The peak of a place (`device` or `host`) is

    peak = sum of the allocated bytes of all buffers of all pools in the place + workspace

The workspace exists only on the device. It is the memory that ops allocate and free while they run,
measured or estimated (`formulas.py`). Saved activations are allocated by PyTorch while a layer
runs. They are counted like slots, with the measured bytes if they were measured (`SlotBytes`).

Fragmentation, the CUDA context, the interpreter and its libraries are not modeled. A caller can add
them with the argument `extra`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from megatrain.simulator.base.units import format_at_least, format_bytes
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.model.muon import LIBRARY_BYTES
from megatrain.simulator.model.state_format import CODED_GRADIENT_BYTES, GPU_BLOCK, UPDATE_COSTS
from megatrain.simulator.schedule import Buffer, DataClass, Schedule
from megatrain.simulator.schedule.timeline import Timeline

WORKSPACE = "device.workspace"
"""The pool of temporary tensors of ops."""
PROCESS = "host.process"
"""The pool of host memory that the process needs in addition to the schedule's pools."""
TUNING = "host.tuning"
"""The pool of host memory that the compiler needs while it tunes kernels (`tuning_bytes`)."""
SlotBytes = Mapping[DataClass, int]
"""Class of data -> the bytes of each buffer of this class that PyTorch allocates. They replace the
sizes in the schedule."""
WITHOUT_ACTIVATIONS: SlotBytes = {"activations": 0, "saved_activations": 0}
"""The pools that the plan allocates, without what PyTorch allocates."""
PLACES = ("device", "host")
"""The two memories."""
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
"""Class of data -> the class, in reports, of a pool that holds it. All others are `workspace`."""


def class_of(kind: Buffer | None) -> str:
    """Returns the class, in reports, of a pool with buffers like `kind`. None stands for a pool
    that is not in the schedule, such as the workspace.
    """
    if kind is None:
        return "workspace"
    return "staging" if kind.chunk or kind.staging else _CLASS_OF.get(kind.data, "workspace")


def kinds_of(schedule: Schedule) -> dict[str, Buffer]:
    """Returns one buffer of each pool, by pool. The buffers of a pool are alike."""
    return {buffer.pool: buffer for buffer in schedule.buffers}


class Account(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
    """The smallest change with which the schedule would fit, in words. Empty if it fits."""

    @property
    def classes(self) -> dict[str, dict[str, int]]:
        """Place -> class of pools -> bytes."""
        totals: dict[str, dict[str, int]] = {place: defaultdict(int) for place in PLACES}
        for pool, size in self.pools.items():
            totals[pool.partition(".")[0]][class_of(self.kinds.get(pool))] += size
        return {
            place: {name: sizes[name] for name in CLASSES if sizes.get(name)}
            for place, sizes in totals.items()
        }

    def held(self, place: str, *data: DataClass) -> int:
        """Returns the bytes of the pools of `place` that hold any of the classes `data`, without
        staging buffers and chunks.
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

    @functools.cached_property
    def device_peak_bytes(self) -> int:
        """The bytes of all pools on the device."""
        return self._peak("device")

    @functools.cached_property
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
    slot_bytes: SlotBytes | None,
    workspace_bytes: int,
    extra: Mapping[str, int] | None = None,
    *,
    advise: bool = True,
) -> Account:
    """Returns the memory that `schedule` needs, compared with the limits.

    Args:
        schedule: The schedule. Only its buffers are used.
        device_limit_bytes: Device memory that the run may use.
        host_limit_bytes: Host memory that the run may use.
        slot_bytes: Bytes of saved activations. None uses the sizes in the schedule.
        workspace_bytes: Bytes of the workspace, from `peak_workspace_bytes`.
        extra: Bytes of additional pools, by `PLACE.NAME`.
        advise: Whether to write the advice. A search leaves it out, because it looks at many
            plans that do not fit.
    """
    pools: dict[str, int] = defaultdict(int)
    kinds: dict[str, Buffer] = {}
    for buffer in schedule.buffers:
        pool = buffer.pool
        pools[pool] += held_bytes(buffer, slot_bytes)
        kinds[pool] = buffer
    pools[WORKSPACE] += workspace_bytes
    for pool, size in (extra or {}).items():
        pools[pool] += size
    memory = Account(
        pools=dict(sorted(pools.items(), key=lambda item: (-item[1], item[0]))),
        kinds=kinds,
        device_limit_bytes=device_limit_bytes,
        host_limit_bytes=host_limit_bytes,
    )
    if not advise or memory.fits:
        return memory
    slots: dict[str, list[int]] = defaultdict(list)
    for buffer in schedule.buffers:
        if not buffer.persistent:
            slots[buffer.pool].append(held_bytes(buffer, slot_bytes))
    return msgspec.structs.replace(memory, advice=_advice(memory, slots))


def held_bytes(buffer: Buffer, slot_bytes: SlotBytes | None) -> int:
    """Returns the bytes that the buffer takes in its pool."""
    if slot_bytes is None or not buffer.dynamic:
        return buffer.allocated
    return slot_bytes.get(buffer.data, buffer.allocated)


def _advice(memory: Account, slots: Mapping[str, list[int]]) -> str:
    """Returns the smallest change that makes the schedule fit, in words.

    For each place that is too small, it is the new value of the knob that saves enough bytes, but
    as few as possible. If no knob saves enough, it is the memory to add. `slots` has the sizes of
    the slots of each pool.
    """
    parts, more = [], []
    for place, peak, limit in (
        ("device", memory.device_peak_bytes, memory.device_limit_bytes),
        ("host", memory.host_peak_bytes, memory.host_limit_bytes),
    ):
        excess = peak - limit
        if excess <= 0:
            continue
        savings = []
        for pool, sizes in slots.items():
            kind = memory.kinds[pool]
            count = next(
                (count for count in range(1, len(sizes)) if sum(sizes[-count:]) >= excess), None
            )
            if kind.knob and kind.place == place and count is not None:
                savings.append((sum(sizes[-count:]), f"{kind.knob} = {len(sizes) - count}"))
        if savings:
            saved, change = min(savings)
            parts.append(f"{change} would save {format_bytes(saved)}")
        else:
            more.append(f"{format_at_least(excess)} more of {place} memory (--{place}-memory)")
    return "; ".join([*parts, *([f"{' and '.join(more)} would be enough"] if more else [])])


def usage(
    schedule: Schedule, timeline: Timeline, slot_bytes: SlotBytes | None = None
) -> dict[str, list[tuple[int, int]]]:
    """Returns the bytes in use in each pool during a timeline.

    The result is pool -> list of (time_ns, bytes from that time on), which begins at time 0. A slot
    is in use from the start of the op that acquires it to the end of the op that releases it. A
    persistent buffer is always in use. `slot_bytes` is as in `account`.
    """
    base: dict[str, int] = defaultdict(int)
    changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for buffer in schedule.buffers:
        base[buffer.pool] += held_bytes(buffer, slot_bytes) if buffer.persistent else 0
    for op in schedule.ops:
        span = timeline.by_op[op.id]
        for sign, time, names in ((1, span.start_ns, op.acquires), (-1, span.end_ns, op.releases)):
            for name in names:
                changes[schedule.buffer[name].pool][time] += sign * held_bytes(
                    schedule.buffer[name], slot_bytes
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
    workspace: Workspace, schedule: Schedule, slot_bytes: SlotBytes | None
) -> int:
    """Returns the bytes of `device.workspace` with which the temporary tensors of every op fit.

    The ops of a layer run while the activations of a recomputed block exist. The head and the
    updates run when they do not exist, so they can use that memory, too. The result is
    max(layer, head - saved, update - saved), where `saved` are the bytes of these activations.
    Layers in `saved_activations` do not count as `saved`, because their activations still exist
    during the head and the updates.

    If updates multiply matrices, `LIBRARY_BYTES` are added, because the library for matrix products
    allocates memory for each stream.

    Args:
        workspace: Bytes of temporary tensors in the ops of layers, head and updates.
        schedule: The schedule. Only its buffers are used.
        slot_bytes: As in `account`.
    """
    saved = sum(
        [
            held_bytes(buffer, slot_bytes)
            for buffer in schedule.buffers
            if buffer.data == "activations"
        ]
    )
    updated = {
        buffer.dtype
        for buffer in schedule.buffers
        if buffer.data == "moments" and buffer.place == "device"
    }
    temporaries = [
        costs.gpu_temporary_bytes for dtype, costs in UPDATE_COSTS.items() if dtype in updated
    ]
    if any(buffer.data == "gradients" and buffer.dtype == "block8" for buffer in schedule.buffers):
        temporaries = [max([0, *temporaries]) + CODED_GRADIENT_BYTES.temporary * GPU_BLOCK]
    update = max(temporaries) + workspace.update if temporaries else 0
    products = any(buffer.matrix_products for buffer in schedule.buffers)
    return max(workspace.layer, workspace.head - saved, update - saved) + (
        LIBRARY_BYTES if products else 0
    )
