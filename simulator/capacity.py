"""Capacity: the least memory that a policy can do with, and so the most tokens that fit.

A policy needs least with the fewest slots, the smallest copies and the checkpoint interval of the smallest peak; where it can, it parks its
checkpoints on the host. For that plan every pool either does not change with the tokens of a micro-batch or is proportional to them, so one
lowering tells the memory at any number of tokens, and a bisection on it finds the most that fit. Where the host is too small and the policy
can keep state on the device, as much moves there as the host cannot hold, layer by layer. Times play no part here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.assessment import activations_bytes, plan_account, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.errors import UserError
from megatrain.simulator.filling import CLASSES, ranges
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.memory import Account
from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.slot_search import CHUNK_BYTES, ONE_COPY, intervals
from megatrain.simulator.specs import DTYPE_BYTES
from megatrain.simulator.workload import Workload


class Footprint:
    """One plan's memory, for any number of tokens."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        """Raises UserError like `lower`."""
        self.plan, self.costs = plan, costs
        places = policy_library.places(plan.policy)
        buffers = policy_library.outline(plan if places else varied(plan, chunk_bytes=ONE_COPY)).buffers  # of these no buffer hangs on the bytes of a copy
        self._schedule = Schedule(policy=plan.policy, buffers=tuple(_merged(buffers)), ops=())
        movable = [buffer for buffer in buffers if places and buffer.place == "host" and buffer.persistent and buffer.data in CLASSES]
        self._movable = sorted(movable, key=lambda each: each.data not in ("weights", "gradients") or plan.model.stack[each.key].kind == "decoder")
        """state of layers in host memory, first what takes the place of slots of its own: the vocabulary's weights and gradients"""

    def account(self, workload: Workload | None = None, host_limit: int | None = None) -> Account:
        """With a workload of other tokens or another loss chunk, and under another limit of host memory."""
        old, new = self.plan.workload, workload or self.plan.workload
        share = new.tokens / old.tokens
        buffers = self._schedule.buffers
        if share != 1:
            buffers = tuple(resized(buffer, share) for buffer in buffers)
        plan = msgspec.structs.replace(self.plan, workload=new, host_limit_bytes=host_limit or self.plan.host_limit_bytes)
        found = plan_account(plan, msgspec.structs.replace(self._schedule, buffers=buffers), self.costs)
        if moved := self._moved(found):
            pools, kinds = defaultdict(int, found.pools), dict(found.kinds)
            for buffer in moved:
                there = f"device.{buffer.data}"
                pools[buffer.pool] -= buffer.allocated
                pools[there] += buffer.allocated
                kinds.setdefault(there, buffer)
            found = msgspec.structs.replace(found, pools=dict(pools), kinds=kinds)
            if found.device_peak_bytes > found.device_limit_bytes and found.host_peak_bytes <= found.host_limit_bytes:  # what stays needs no slots
                placed = self._keeping(plan, moved)
                found = plan_account(placed, policy_library.outline(placed), self.costs)
        return found

    def _moved(self, account: Account) -> list[Buffer]:
        """The state that the host cannot hold."""
        excess, moved = account.host_peak_bytes - account.host_limit_bytes, list[Buffer]()
        for index, buffer in enumerate(self._movable):
            if excess <= 0:
                break
            if buffer.allocated >= excess:  # the last one: the smallest that is enough
                enough = (other for other in self._movable[index:] if other.allocated >= excess)
                buffer = min(enough, key=lambda other: other.allocated)
            moved.append(buffer)
            excess -= buffer.allocated
        return moved

    def placed(self) -> Plan:
        """The plan, with the largest copies that fit, and a placement that keeps on the device what the host cannot hold."""
        larger = (Footprint(varied(self.plan, chunk_bytes=size), self.costs) for size in sorted(CHUNK_BYTES, reverse=True))
        return next((footprint for footprint in larger if footprint.account().fits), self)._placed()

    def _placed(self) -> Plan:
        still = msgspec.structs.replace(self.plan, host_limit_bytes=2**59)  # nothing moves
        account = plan_account(still, self._schedule, self.costs)
        return self._keeping(self.plan, self._moved(msgspec.structs.replace(account, host_limit_bytes=self.plan.host_limit_bytes)))

    def _keeping(self, plan: Plan, moved: list[Buffer]) -> Plan:
        """`plan` with the state of `moved` on the device."""
        chosen: dict[str, set[str]] = {name: set() for name in CLASSES}
        for buffer in moved:
            chosen[buffer.data].add(buffer.key)
        texts = {name: ranges(list(plan.model.stack), layers) for name, layers in chosen.items() if layers}
        return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts))


def _merged(buffers: Iterable[Buffer]) -> list[Buffer]:
    """One buffer a pool, as large as all of its buffers; those that the framework allocates stay apart, because they may have been measured."""
    pools: dict[str, int] = defaultdict(int)
    kinds: dict[str, Buffer] = {}
    for buffer in buffers:
        if not buffer.dynamic:
            pools[buffer.pool] += buffer.allocated
            kinds.setdefault(buffer.pool, buffer)
    merged = [msgspec.structs.replace(kinds[pool], id=f"{pool}:all", bytes=size) for pool, size in pools.items()]
    return merged + [buffer for buffer in buffers if buffer.dynamic]


def resized(buffer: Buffer, factor: float) -> Buffer:
    """`buffer` for `factor` times the tokens of a micro-batch."""
    if not buffer.scales_with_tokens:
        return buffer
    return msgspec.structs.replace(buffer, bytes=-int(-buffer.bytes * factor // 1))


def frugal(plan: Plan, costs: CostModel, names: Iterable[str]) -> list[Footprint]:
    """The least that each of the policies `names` needs for the model, workload and limits of `plan`. Left out are other systems', which have
    no knobs, and policies that need no less than another of `names`.
    """
    chosen = [name for name in names if not policy_library.is_prediction_only(name)]
    found = []
    for name in chosen:
        if policy_library.dominated_by(name) not in chosen:
            found += list(_footprints(msgspec.structs.replace(plan, policy=name), costs))
    return found


def usable(plan: Plan, hardware: HardwareSpec, costs: CostModel, names: list[str]) -> list[Footprint]:
    """`frugal` on this machine: where there is one memory nothing streams and nothing is parked, which leaves `resident`."""
    footprints = frugal(plan, costs, [name for name in names if name == "resident"] if hardware.unified else names)
    return [footprint for footprint in footprints if not (hardware.unified and footprint.plan.knobs.placement.parked)]


def _footprints(plan: Plan, costs: CostModel) -> Iterator[Footprint]:
    """With checkpoints on the device, and with all or the first of them parked: a host may hold some, and not all."""
    model, work = plan.model, plan.workload
    row = work.tokens * model.hidden * DTYPE_BYTES[work.dtype]
    saved = activations_bytes(model, work, costs)
    best = min(intervals(model.layers), key=lambda interval: -(-model.layers // interval) * row + interval * saved)
    decoders = [str(index) for index in range(model.layers)]
    counts = {model.layers - 1, *(model.layers * quarters // 4 for quarters in (3, 2, 1))} - {0} if policy_library.places(plan.policy) else set()
    parks = ["all", *(ranges(decoders, set(decoders[:count])) for count in sorted(counts, reverse=True))]
    for interval, parked in ((best, ""), *((1, text) for text in parks)):
        for slots, slabs in ((1, 0), (1, 1), (2, 0), (2, 1)):
            knobs = {
                "weight_slots": slots,
                "gradient_slots": 1,
                "gradient_slabs": slabs,
                "state_slots": 1,
                "checkpoint_interval": interval,
                "chunk_bytes": min(CHUNK_BYTES),
            }
            try:
                yield Footprint(varied(plan, **knobs, placement=Placement(parked=parked)), costs)
            except UserError:  # a policy that needs more slots
                continue
            break


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number of 1 to `most` that fits, 0 where none does; all below one that fits fit too."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(footprints: list[Footprint], workload: Workload, host_limit: int | None = None) -> int:
    """Sequences of a micro-batch that fit with one of the footprints, at the workload's sequence length; 0 where one is too many."""

    def fits(count: int) -> bool:
        work = msgspec.structs.replace(workload, batch=count)
        return any(footprint.account(work, host_limit=host_limit).fits for footprint in footprints)

    return _most(fits, 2**20)


def longest_context(footprints: list[Footprint], workload: Workload, batch: int = 1) -> int:
    """Tokens of a sequence that fit, `batch` sequences a micro-batch; 0 where one token is too many."""

    def fits(count: int) -> bool:
        work = msgspec.structs.replace(workload, batch=batch, sequence=count)
        return any(footprint.account(work).fits for footprint in footprints)

    return _most(fits, 2**24)
