"""Computes the least memory that a policy needs, and the most tokens that fit in a machine.

Step times are not considered. The algorithm:

1. Take the plans of a policy that need the least memory: the fewest slots, the smallest copies, and
   each checkpoint interval, because the best one depends on the tokens. If the policy can offload
   the inputs of layers, plans that offload some or all of them are also taken. If a step has
   several micro-batches, plans with all of them in one group are also taken (`_footprints`).
2. Lower each plan once. The size of a pool either does not depend on the tokens of a micro-batch or
   is proportional to them. So the memory for any number of tokens follows by scaling the pools.
3. If the host is too small and the policy can keep state on the device, move state there until the
   rest fits in the host (`MemoryFootprint`).
4. Find the most tokens that fit by bisection on 2 and 3 (`largest_batch`, `longest_context`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import group_sizes, plan_account, with_knobs
from megatrain.simulator.planner.filling import CLASSES, ranges
from megatrain.simulator.planner.slot_search import CHUNK_BYTES, ONE_COPY, intervals
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.schedule.plan import Placement, Plan

PASSING = ("weights", "gradients")
"""Classes of state that pass through slots of whole layers if they are not on the device."""


class MemoryFootprint:
    """The memory of one plan, for any number of tokens in a micro-batch.

    Raises UserError if the policy cannot lower the plan.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.plan, self.costs = plan, costs
        places = policy_library.find(plan.policy).places_state
        # Without placement no buffer depends on the bytes of a copy. One copy is lowered faster.
        buffers = policy_library.outline(
            plan if places else with_knobs(plan, chunk_bytes=ONE_COPY)
        ).buffers
        self._merged = _merged(buffers)
        movable = [
            buffer
            for buffer in buffers
            if places and buffer.place == "host" and buffer.persistent and buffer.data in CLASSES
        ]
        self._slots = sum(
            buffer.allocated
            for buffer in buffers
            if buffer.place == "device"
            and not (buffer.persistent or buffer.dynamic or buffer.scales_with_tokens)
        )
        """Bytes of the device that may be free once state has moved there."""

        def needs_large_slots(buffer: Buffer) -> bool:
            return buffer.data in PASSING and plan.model.stack[buffer.key].kind != "decoder"

        self._orders = (
            sorted(movable, key=lambda each: not needs_large_slots(each)),
            sorted(movable, key=lambda each: (each.data not in PASSING, each.data != "weights")),
        )
        """Buffers of layer state in host memory, in two orders in which they may move to the
        device. In the first, weights and gradients of embedding and head are first: on the device
        they need no slots, and their slots are as large as they are. In the second, all weights and
        then all gradients are first: if no layer has any on the host, there are no slots at all."""

    def account(self, workload: Workload | None = None, host_limit: int | None = None) -> Account:
        """Returns the memory of the plan, after state that the host cannot hold has moved to the
        device.

        Args:
            workload: Replaces the plan's workload. It may differ in tokens and loss chunk.
            host_limit: Replaces the plan's limit of host memory, in bytes.
        """
        old, new = self.plan.workload, workload or self.plan.workload
        plan = msgspec.structs.replace(
            self.plan, workload=new, host_limit_bytes=host_limit or self.plan.host_limit_bytes
        )
        found = plan_account(plan, self._outline(new.tokens / old.tokens), self.costs)
        return self._moved(plan, found)[1]

    def _outline(self, factor: float) -> Schedule:
        """Returns a schedule with one buffer for each of `_merged`, with their size for `factor`
        times the tokens of a micro-batch. It has no ops.
        """
        made = []
        for buffer, count in self._merged:
            one = resized(buffer, factor) if factor != 1 else buffer
            made.append(
                one if count == 1 else msgspec.structs.replace(one, bytes=count * one.allocated)
            )
        return Schedule(policy=self.plan.policy, buffers=tuple(made), ops=())

    def _moved(self, plan: Plan, account: Account) -> tuple[list[Buffer], Account]:
        """Returns the buffers to move to the device so that the rest fits in the host, and the
        memory after that. It is the first choice that fits, or the first one if none does.
        """
        excess = account.host_peak_bytes - account.host_limit_bytes
        first, second = self._orders
        found = self._with_moved(_enough(first, excess), plan, account)
        if found[1].fits or not found[0]:
            return found
        for moved in (_enough(second, excess), _closest(second, excess)):
            other = self._with_moved(moved, plan, account)
            if other[1].fits:
                return other
        return found

    def _with_moved(
        self, moved: list[Buffer], plan: Plan, found: Account
    ) -> tuple[list[Buffer], Account]:
        """Returns `moved`, and the memory after these buffers have moved to the device."""
        if not moved:
            return moved, found
        pools, kinds = defaultdict(int, found.pools), dict(found.kinds)
        for buffer in moved:
            there = f"device.{buffer.data}"
            pools[buffer.pool] -= buffer.allocated
            pools[there] += buffer.allocated
            kinds.setdefault(there, buffer)
        after = msgspec.structs.replace(found, pools=dict(pools), kinds=kinds)
        lacking = after.device_peak_bytes - after.device_limit_bytes
        if 0 < lacking <= self._slots and after.host_peak_bytes <= after.host_limit_bytes:
            # The sum above still counts the slots that the moved state no longer needs.
            placed = self._with_on_device(plan, moved)
            after = plan_account(placed, policy_library.outline(placed), self.costs)
        return moved, after

    def placed(self) -> Plan:
        """Returns the plan with the largest copies that fit, and with a placement that keeps on the
        device the state that the host cannot hold.
        """
        larger = (
            MemoryFootprint(with_knobs(self.plan, chunk_bytes=size), self.costs)
            for size in sorted(CHUNK_BYTES, reverse=True)
        )
        return next((footprint for footprint in larger if footprint.account().fits), self)._placed()

    def _placed(self) -> Plan:
        """Returns the plan with its own size of copies, placed as `placed` describes."""
        account = plan_account(self.plan, self._outline(1), self.costs)
        return self._with_on_device(self.plan, self._moved(self.plan, account)[0])

    def _with_on_device(self, plan: Plan, moved: list[Buffer]) -> Plan:
        """Returns `plan` with the state of the buffers `moved` placed on the device."""
        chosen: dict[str, set[str]] = {name: set() for name in CLASSES}
        for buffer in moved:
            chosen[buffer.data].add(buffer.key)
        texts = {
            name: ranges(list(plan.model.stack), layers)
            for name, layers in chosen.items()
            if layers
        }
        return with_knobs(plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts))


def _enough(order: list[Buffer], excess: int) -> list[Buffer]:
    """Returns the first buffers of `order` that have at least `excess` bytes together.

    The last one is the smallest of the rest that is large enough.
    """
    moved: list[Buffer] = []
    for index, buffer in enumerate(order):
        if excess <= 0:
            return moved
        if buffer.allocated >= excess:
            enough = (other for other in order[index:] if other.allocated >= excess)
            buffer = min(enough, key=lambda other: other.allocated)
        moved.append(buffer)
        excess -= buffer.allocated
    return moved


def _closest(order: list[Buffer], excess: int) -> list[Buffer]:
    """Returns buffers of `order` that have at least `excess` bytes together, and few bytes more.

    Weights and gradients come first, as in `order`, and then the others, the largest first. A
    buffer with more bytes than are left is skipped. The last one is the smallest that is enough.
    """
    moved: list[Buffer] = []
    skipped: list[Buffer] = []
    passing = [buffer for buffer in order if buffer.data in PASSING]
    others = [buffer for buffer in order if buffer.data not in PASSING]
    for buffer in (*passing, *sorted(others, key=lambda each: -each.allocated)):
        if buffer.allocated <= excess:
            moved.append(buffer)
            excess -= buffer.allocated
        else:
            skipped.append(buffer)
    if excess > 0 and skipped:
        moved.append(min(skipped, key=lambda each: each.allocated))
    return moved


def _merged(buffers: Iterable[Buffer]) -> list[tuple[Buffer, int]]:
    """Returns buffers that take as much as `buffers`, and how often each of them is there.

    Those of a pool whose size does not depend on the tokens are one buffer. Those that are
    proportional to the tokens are counted by size, because each is rounded to whole pages. Buffers
    that the framework allocates are not merged, because their sizes may be measured.
    """
    fixed: dict[str, int] = defaultdict(int)
    scaling: dict[tuple[str, int], int] = defaultdict(int)
    kinds: dict[str | tuple[str, int], Buffer] = {}
    for buffer in buffers:
        if not buffer.dynamic:
            if buffer.scales_with_tokens:
                kinds.setdefault((buffer.pool, buffer.bytes), buffer)
                scaling[buffer.pool, buffer.bytes] += 1
            else:
                kinds.setdefault(buffer.pool, buffer)
                fixed[buffer.pool] += buffer.allocated
    return [
        *(
            (msgspec.structs.replace(kinds[pool], id=f"{pool}:all", bytes=size), 1)
            for pool, size in fixed.items()
        ),
        *(
            (msgspec.structs.replace(kinds[pool, size], id=f"{pool}:{size}"), count)
            for (pool, size), count in scaling.items()
        ),
        *((buffer, 1) for buffer in buffers if buffer.dynamic),
    ]


def resized(buffer: Buffer, factor: float) -> Buffer:
    """Returns `buffer` with its size for `factor` times the tokens of a micro-batch."""
    if not buffer.scales_with_tokens:
        return buffer
    return msgspec.structs.replace(buffer, bytes=-int(-buffer.bytes * factor // 1))


def least_memory_plans(plan: Plan, costs: CostModel, names: Iterable[str]) -> list[MemoryFootprint]:
    """Returns the plans that need the least memory, for each policy of `names`.

    Model, workload and limits are those of `plan`. Policies of other systems are left out, because
    they have no knobs. Policies that another one of `names` dominates are also left out, because
    they need no less memory.
    """
    chosen = [name for name in names if not policy_library.find(name).prediction_only]
    found = []
    for name in chosen:
        if policy_library.find(name).dominated_by not in chosen:
            found += list(_footprints(msgspec.structs.replace(plan, policy=name), costs))
    return found


def usable(
    plan: Plan, hardware: HardwareSpec, costs: CostModel, names: list[str]
) -> list[MemoryFootprint]:
    """Returns the `least_memory_plans` that make sense on this machine.

    If the machine has one unified memory, only policies that copy nothing are used and nothing is
    offloaded, because a copy would not free any memory.
    """
    names = policy_library.updating(names, plan.workload)
    footprints = least_memory_plans(
        plan, costs, policy_library.sensible(names, unified=hardware.unified)
    )
    return [
        footprint
        for footprint in footprints
        if not (hardware.unified and footprint.plan.knobs.placement.offloaded_inputs)
    ]


def _footprints(plan: Plan, costs: CostModel) -> Iterator[MemoryFootprint]:
    """Yields the plans of one policy that may need the least memory.

    The first ones keep the layer inputs on the device, with each checkpoint interval. The others
    offload the inputs of all layers or, if the policy places state, of the first 1/4, 2/4, 3/4 or
    all but one, for a host that cannot hold them all. Each plan has the fewest slots that the
    policy accepts. If the policy can take all micro-batches in one group, there is each plan with
    and without that.
    """
    model = plan.model
    decoders = [str(index) for index in range(model.layers)]
    counts = (
        {model.layers - 1, *(model.layers * quarters // 4 for quarters in (3, 2, 1))} - {0}
        if policy_library.find(plan.policy).places_state
        else set()
    )
    offloads = [
        "all",
        *(ranges(decoders, set(decoders[:count])) for count in sorted(counts, reverse=True)),
    ]
    # Gradients of one group need no sum in fp32, so a host may hold them that cannot hold the sum.
    # Other sizes of groups take more of the device than 1, and no less of the host.
    groups = dict.fromkeys((1, group_sizes(plan)[-1]))
    for group, (interval, offloaded) in itertools.product(
        groups,
        (*((each, "") for each in intervals(model.layers)), *((1, text) for text in offloads)),
    ):
        for slots, staging in ((1, 0), (1, 1), (2, 0), (2, 1)):
            knobs = {
                "weight_slots": slots,
                "gradient_slots": 1,
                "gradient_staging": staging,
                "state_slots": 1,
                "checkpoint_interval": interval,
                "chunk_bytes": min(CHUNK_BYTES),
                "micro_batch_group": group,
            }
            try:
                yield MemoryFootprint(
                    with_knobs(plan, **knobs, placement=Placement(offloaded_inputs=offloaded)),
                    costs,
                )
            except UserError:  # the policy needs more slots
                continue
            break


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number from 1 to `most` that fits, or 0 if none does.

    If a number fits, all smaller ones must fit.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(
    footprints: list[MemoryFootprint], workload: Workload, host_limit: int | None = None
) -> int:
    """Returns the most sequences per micro-batch that fit with any of the footprints.

    The sequence length is that of `workload`. `host_limit` in bytes replaces the plan's limit.
    Returns 0 if one sequence does not fit.
    """

    def fits(count: int) -> bool:
        work = msgspec.structs.replace(workload, batch=count)
        return any(footprint.account(work, host_limit=host_limit).fits for footprint in footprints)

    return _most(fits, 2**20)


def longest_context(footprints: list[MemoryFootprint], workload: Workload, batch: int = 1) -> int:
    """Returns the most tokens per sequence that fit with any of the footprints.

    A micro-batch has `batch` sequences. Returns 0 if one token does not fit.
    """

    def fits(count: int) -> bool:
        work = msgspec.structs.replace(workload, batch=batch, sequence=count)
        return any(footprint.account(work).fits for footprint in footprints)

    return _most(fits, 2**24)
