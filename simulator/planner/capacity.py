"""Computes the least memory that a policy needs, and the most tokens that fit in a machine.

Step times are not considered. The algorithm:

1. Take the plans of a policy that need the least memory: the fewest slots, the smallest copies, and
   each checkpoint interval, because the best one depends on the tokens. If the policy can offload
   the inputs of layers, plans that offload some or all of them are also taken. If a step has
   several micro-batches, plans with all of them in one group are also taken (`_footprints`).
2. Lower each plan once. The size of each pool is either independent of the tokens of a micro-batch
   or proportional to them. So the memory for any number of tokens follows by scaling the pools.
3. If the host is too small and the policy can keep state on the device, move state there until the
   rest fits in the host (`MemoryFootprint`).
4. Find the most tokens that fit by bisection on 2 and 3 (`largest_batch`, `longest_context`).
"""

from __future__ import annotations

import contextlib
import functools
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
from megatrain.simulator.planner.filling import CLASSES, classes_of, host_updating, ranges
from megatrain.simulator.planner.slot_search import CHUNK_BYTES, ONE_COPY, intervals
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.schedule.arithmetic import layer_state
from megatrain.simulator.schedule.plan import Placement, Plan

PASSING = ("weights", "gradients")
"""Classes of state that are copied through slots of whole layers, unless they stay on the device.
The other classes are copied in chunks."""


class MemoryFootprint:
    """The memory of one plan, for any number of tokens in a micro-batch.

    Raises UserError if the policy cannot lower the plan.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.plan, self.costs = plan, costs
        places = policy_library.find(plan.policy).obeys_everything
        # Without placement no buffer depends on the bytes of a copy. One copy is lowered faster.
        buffers = policy_library.outline(
            plan if places else with_knobs(plan, chunk_bytes=ONE_COPY)
        ).buffers
        self._merged = _merged(buffers)
        movable = [
            buffer
            for buffer in buffers
            if places
            and not plan.knobs.placement.host_updated  # the host updates what it holds
            and buffer.place == "host"
            and buffer.persistent
            and buffer.data in CLASSES
        ]
        self._slots = sum(
            buffer.allocated
            for buffer in buffers
            if buffer.place == "device"
            and not (buffer.persistent or buffer.dynamic or buffer.scales_with_tokens)
        )
        """Bytes of the slots on the device. Some of them become free when state moves there."""

        def needs_large_slots(buffer: Buffer) -> bool:
            return buffer.data in PASSING and plan.model.stack[buffer.key].kind != "decoder"

        self._orders = (
            sorted(movable, key=lambda buffer: not needs_large_slots(buffer)),
            sorted(
                movable, key=lambda buffer: (buffer.data not in PASSING, buffer.data != "weights")
            ),
        )
        """Buffers of layer state in host memory, in two orders in which they may move to the
        device. The first order begins with the weights and gradients of embedding and head, because
        each of them frees a slot of its own size. The second begins with all weights, then all
        gradients, because the slots disappear once the host holds none."""

    def account(self, workload: Workload | None = None, host_limit: int | None = None) -> Account:
        """Returns the memory of the plan. State that the host cannot hold is on the device.

        Args:
            workload: Replaces the plan's workload. It may differ in tokens and loss chunk.
            host_limit: Replaces the plan's limit of host memory, in bytes.
        """
        return self._moved(*self._unmoved(workload, host_limit))[1]

    def fits(self, workload: Workload, host_limit: int | None = None) -> bool:
        """Returns whether `account` fits, in less time.

        The arguments are those of `account`.
        """
        plan, memory = self._unmoved(workload, host_limit)
        if self._exceeds_both(memory):
            return False
        return memory.fits or self._moved(plan, memory)[1].fits

    def _exceeds_both(self, memory: Account) -> bool:
        """Returns whether all bytes of `memory` without the slots exceed both limits together.

        If so, no move makes the plan fit. State that moves to the device frees no bytes there
        except those of slots.
        """
        lacking = memory.device_peak_bytes + memory.host_peak_bytes - self._slots
        return lacking > memory.device_limit_bytes + memory.host_limit_bytes

    def _unmoved(self, workload: Workload | None, host_limit: int | None) -> tuple[Plan, Account]:
        """Returns the plan with another workload and limit, and its memory with all movable state
        in host memory.
        """
        old, new = self.plan.workload, workload or self.plan.workload
        plan = msgspec.structs.replace(
            self.plan, workload=new, host_limit_bytes=host_limit or self.plan.host_limit_bytes
        )
        return plan, plan_account(plan, self._outline(new.tokens / old.tokens), self.costs)

    def _outline(self, factor: float) -> Schedule:
        """Returns a schedule with the merged buffers, for `factor` times the tokens of the plan's
        micro-batch. It has no ops.
        """
        buffers = []
        for buffer, count in self._merged:
            if factor != 1:
                buffer = resized(buffer, factor)
            if count != 1:
                buffer = msgspec.structs.replace(buffer, bytes=count * buffer.allocated)
            buffers.append(buffer)
        return Schedule(policy=self.plan.policy, buffers=tuple(buffers), ops=())

    def _moved(self, plan: Plan, account: Account) -> tuple[list[Buffer], Account]:
        """Returns buffers whose move to the device makes the rest fit in the host, and the memory
        after the move.

        Up to five choices of buffers are tried. The result is the first with which the plan fits,
        or the first one if it fits with none.
        """
        excess = account.host_peak_bytes - account.host_limit_bytes
        first_order, second_order = self._orders
        first = self._with_moved(_enough(first_order, excess), plan, account)
        if first[1].fits or not first[0] or self._exceeds_both(account):
            return first
        for moved in (
            _enough(second_order, excess),
            _closest(second_order, excess),
            _prefix(first_order, excess),
            _prefix(second_order, excess),
        ):
            other = self._with_moved(moved, plan, account)
            if other[1].fits:
                return other
        return first

    def _with_moved(
        self, moved: list[Buffer], plan: Plan, account: Account
    ) -> tuple[list[Buffer], Account]:
        """Returns `moved`, and the memory after these buffers have moved to the device."""
        if not moved:
            return moved, account
        pools, kinds = defaultdict(int, account.pools), dict(account.kinds)
        for buffer in moved:
            device_pool = f"device.{buffer.data}"
            pools[buffer.pool] -= buffer.allocated
            pools[device_pool] += buffer.allocated
            kinds.setdefault(device_pool, buffer)
        after = msgspec.structs.replace(account, pools=dict(pools), kinds=kinds)
        lacking = after.device_peak_bytes - after.device_limit_bytes
        if 0 < lacking <= self._slots and after.host_peak_bytes <= after.host_limit_bytes:
            # The sum above still counts the slots that the moved state no longer needs.
            placed = self._with_on_device(plan, moved)
            after = plan_account(placed, policy_library.outline(placed, merged=True), self.costs)
        return moved, after

    def placed(self) -> Plan:
        """Returns the plan with the largest copies that fit.

        Its placement keeps on the device the state that the host cannot hold.
        """
        larger = (
            MemoryFootprint(with_knobs(self.plan, chunk_bytes=size), self.costs)
            for size in sorted(CHUNK_BYTES, reverse=True)
        )
        return next((footprint for footprint in larger if footprint.account().fits), self)._placed()

    def _placed(self) -> Plan:
        """Returns the plan as `placed` does, but with its own size of copies."""
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
    """Returns buffers from the front of `order` with a total of at least `excess` bytes.

    As soon as one buffer can cover the missing bytes, the smallest remaining buffer that covers
    them is taken as the last one.
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


def _prefix(order: list[Buffer], excess: int) -> list[Buffer]:
    """Returns the fewest buffers from the front of `order` with a total of at least `excess` bytes.

    The last one may be much larger than the missing bytes, and free the slots of its class.
    """
    totals = itertools.accumulate(buffer.allocated for buffer in order)
    return order[: sum(total < excess for total in totals) + 1]


def _closest(order: list[Buffer], excess: int) -> list[Buffer]:
    """Returns buffers of `order` whose total is at least `excess` bytes, and little more.

    Weights and gradients are tried first, in the order of `order`, and then the others, the largest
    first. A buffer that is larger than the missing bytes is skipped. If bytes are still missing
    after that, the smallest skipped buffer is added.
    """
    moved: list[Buffer] = []
    skipped: list[Buffer] = []
    passing = [buffer for buffer in order if buffer.data in PASSING]
    others = [buffer for buffer in order if buffer.data not in PASSING]
    for buffer in (*passing, *sorted(others, key=lambda buffer: -buffer.allocated)):
        if buffer.allocated <= excess:
            moved.append(buffer)
            excess -= buffer.allocated
        else:
            skipped.append(buffer)
    if excess > 0 and skipped:
        moved.append(min(skipped, key=lambda buffer: buffer.allocated))
    return moved


def _merged(buffers: Iterable[Buffer]) -> list[tuple[Buffer, int]]:
    """Returns (buffer, count) pairs that take as much memory as `buffers`.

    In each pool, the buffers whose size does not depend on the tokens become one buffer. Buffers
    that are proportional to the tokens are only counted by size, because each is rounded to whole
    pages. Buffers that the framework allocates are not merged, because their sizes may be measured.
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
    """Returns `buffer` with the size that it has for `factor` times the tokens of a micro-batch.

    Bytes are rounded up.
    """
    if not buffer.scales_with_tokens:
        return buffer
    return msgspec.structs.replace(buffer, bytes=-int(-buffer.bytes * factor // 1))


def least_memory_plans(
    plan: Plan, costs: CostModel, names: Iterable[str]
) -> Iterator[MemoryFootprint]:
    """Yields the footprints of the plans that need the least memory, for each policy of `names`.

    Model, workload and limits are those of `plan`. Policies of other systems are left out, because
    they have no knobs. A policy is also left out if a policy of `names` dominates it, because it
    needs no less memory.
    """
    chosen = [name for name in names if not policy_library.find(name).prediction_only]
    for name in chosen:
        if policy_library.find(name).dominated_by not in chosen:
            yield from _footprints(msgspec.structs.replace(plan, policy=name), costs)


def usable(
    plan: Plan, hardware: HardwareSpec, costs: CostModel, names: list[str]
) -> Iterator[MemoryFootprint]:
    """Yields the `least_memory_plans` that make sense on this machine.

    On a machine with one unified memory, these are the plans that neither copy nor offload
    anything, because a copy would not free any memory there.
    """
    names = policy_library.updating(names, plan.workload)
    footprints = least_memory_plans(
        plan, costs, policy_library.sensible(names, unified=hardware.unified)
    )
    for footprint in footprints:
        if not (hardware.unified and footprint.plan.knobs.placement.offloaded_inputs):
            yield footprint


def fitting(
    plan: Plan, hardware: HardwareSpec, costs: CostModel, names: list[str]
) -> MemoryFootprint | None:
    """Returns the first of the `usable` plans that fits, or None if none fits."""
    if state_exceeds_memory(plan):
        return None  # all of them would be too large, and building them takes time
    footprints = usable(plan, hardware, costs, names)
    return next((footprint for footprint in footprints if footprint.account().fits), None)


def state_exceeds_memory(plan: Plan) -> bool:
    """Returns whether weights, masters and moments alone are larger than the limits of both
    memories together. Then no plan fits.
    """
    return _least_state_bytes(plan) > plan.device_limit_bytes + plan.host_limit_bytes


def _least_state_bytes(plan: Plan) -> float:
    """Returns the bytes of weights, masters and moments of a rank. They exist during the whole
    step.
    """
    whole = sum(
        layer_state(plan, layer)[name].whole(spec.elements)
        for layer, spec in plan.model.stack.items()
        for name in classes_of(plan)
        if name != "gradients"
    )
    return whole / plan.gpus


def _footprints(plan: Plan, costs: CostModel) -> Iterator[MemoryFootprint]:
    """Yields the plans of one policy that may need the least memory.

    The first ones keep the layer inputs on the device, with each checkpoint interval. If the policy
    declares `offloaded_inputs`, others offload the inputs of all layers. If it obeys every field of
    the placement, there are also plans that offload the inputs of the first 1/4, 2/4 or 3/4 of the
    layers, or of all layers but one, for a host that cannot hold them all, and a plan that also
    updates its layers on the host, which needs no slots for state on the device. Each plan has the
    fewest slots that the policy accepts. If the policy allows one group of all micro-batches, each
    plan is yielded without and with such a group.
    """
    model = plan.model
    decoders = [str(index) for index in range(model.layers)]
    policy = policy_library.find(plan.policy)
    obeys = policy.obeys_everything
    counts = (
        {model.layers - 1, *(model.layers * quarters // 4 for quarters in (3, 2, 1))} - {0}
        if obeys
        else set()
    )
    offloads = (
        [
            "all",
            *(ranges(decoders, set(decoders[:count])) for count in sorted(counts, reverse=True)),
        ]
        if "offloaded_inputs" in policy.placements
        else []
    )
    # With a single group, gradients need no fp32 sum in host memory. Groups of other sizes need as
    # much host memory as groups of 1, and more device memory.
    groups = dict.fromkeys((1, group_sizes(plan)[-1]))
    for group, (interval, offloaded) in itertools.product(
        groups,
        (
            *((interval, "") for interval in intervals(model.layers)),
            *((1, layers) for layers in offloads),
        ),
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
                "exchange_bytes": 0,
            }
            least = with_knobs(plan, **knobs, placement=Placement(offloaded_inputs=offloaded))
            try:
                yield MemoryFootprint(least, costs)
            except UserError:  # the policy needs more slots
                continue
            if offloaded == "all" and obeys and (other := host_updating(least)) != least:
                with contextlib.suppress(UserError):  # the policy cannot update on the host
                    yield MemoryFootprint(other, costs)
            break


def _most(tests: Iterable[Callable[[int], bool]], most: int) -> int:
    """Returns the largest number from 1 to `most` for which any of `tests` is true, or 0 if there
    is none.

    A test that is true for a number must be true for all smaller ones. Each test is first tried
    with the number after the largest one so far. For most tests, nothing else has to be tried.
    """
    low = 0
    for fits in tests:
        high = low + 1
        while high <= most and fits(high):
            low, high = high, high * 2
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(
    footprints: list[MemoryFootprint], *workloads: Workload, host_limit: int | None = None
) -> int:
    """Returns the most sequences per micro-batch that fit with any of the footprints and any of the
    workloads.

    The sequence lengths are those of the workloads. `host_limit` in bytes replaces the plan's
    limit. Returns 0 if one sequence does not fit.
    """

    def fits(footprint: MemoryFootprint, workload: Workload, count: int) -> bool:
        return footprint.fits(msgspec.structs.replace(workload, batch=count), host_limit)

    pairs = itertools.product(footprints, workloads)
    return _most((functools.partial(fits, *pair) for pair in pairs), 2**20)


def longest_context(footprints: list[MemoryFootprint], *workloads: Workload, batch: int = 1) -> int:
    """Returns the most tokens per sequence that fit with any of the footprints and any of the
    workloads.

    A micro-batch has `batch` sequences. Returns 0 if one token does not fit.
    """

    def fits(footprint: MemoryFootprint, workload: Workload, count: int) -> bool:
        return footprint.fits(msgspec.structs.replace(workload, batch=batch, sequence=count))

    pairs = itertools.product(footprints, workloads)
    return _most((functools.partial(fits, *pair) for pair in pairs), 2**24)
