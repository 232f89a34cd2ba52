"""ContentionModel: how much ops that run at the same time slow each other down.

Each op has a `Demand`. `ContentionModel.rates` returns the speed of each busy op, in millionths of
its full speed. Three effects are combined:

1. Pairs. A lane runs at the product of the factors for the other busy lanes. The two directions of
   the link may have a measured curve, because small copies slow each other down more than large
   ones (on an H200, 16.9 of 38.4 GB/s are left at 1 MiB, and 50.3 of 55.4 at 256 MiB). If both
   directions of the link and the lane `cpu` are busy, one factor may replace the pairs among them.
2. Turns. If the machine has a KernelInterleaving, it says how compute shares the device with
   updates and collectives. The shorter their kernels are, the larger is the share of the time that
   they wait. The longer the matrix products of a layer are, the longer is the wait. An op of high
   priority takes the whole device, and compute waits. If several GPUs were measured together, their
   SeveralGpus says how compute and collectives share the device.
3. Host DRAM. At full speed, the traffic of the cores is the bytes that they read and write, and the
   traffic of a copy is its bytes times `h2d_cost` or `d2h_cost`. If the traffic at the rates that
   follow from the pairs is more than the machine's `gb_per_s`, the lanes share the bandwidth by
   weighted max-min fairness: a lane that needs less than its share gets what it needs, and the
   others share the rest in proportion to their weights.

With a HostMemorySpec, the factors between the link and the lane `cpu` are not used, because they
measure the same effect of DRAM. All arithmetic is in integers and rates are rounded down, so the
sum never exceeds the bandwidth. Caches, NUMA and the DRAM's preference for reads are not modeled.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatrain.simulator.hardware.cost_table import HostMemorySpec, KernelInterleaving
from megatrain.simulator.hardware.limits import DRAM_LANES
from megatrain.simulator.hardware.several_gpus import SeveralGpus

PARTS = 1_000_000
"""Full speed, in millionths. A rate is between 1 and this."""
_OTHER = {"h2d": "d2h", "d2h": "h2d"}
_WEIGHT_PARTS = 1000
_SHARE = {"norm": 1.0, "sum_rows": 1.0, "clip": 1.0, "exchange_gradients": 0.5}
"""Kind of op -> the time that a kernel of it waits beside compute, divided by the time of the
longest matrix product of the layer. Fitted to steps of 7B to 123B. Norms waited 32, 39 and 6 ms
beside products of 31, 21 and 6 ms, and clipping factors 31 and 23 ms
(experiments/results/h100-x4-large-models). Each kernel of an exchange waited 2.8 to 3.3 ms beside
products of 6.3 and 6.6 ms (experiments/results/h200-x4)."""
_USUAL = 0.4
"""The same for other kinds of ops. Updates beside forward passes of 7B and 14B on four GPUs waited
0.6 to 1.0 of a product, in the mean (experiments/results/h200-x4), and on one GPU, beside products
of 0.9, 2.7 and 5.3 ms, 0.1, 0.3 and 0.5 of it (experiments/results/h200-16-cores-link). With 0.7,
steps whose updates run beside backward passes are predicted up to 7 % too slow
(experiments/results/h200-qwen2.5-7b-batches)."""
_HELD = 80_000
"""The speed that compute loses to a collective, in millionths. A kernel of a collective keeps some
multiprocessors from its launch until it has the data of all ranks. Fitted to four H100
(experiments/results/h100-x4-large-models): backward passes of 32B lose 6.5 % while gradients are
exchanged, recomputes 11 %, and forward passes of 7B lose 5 % while weights are gathered."""


class Demand(NamedTuple):
    """The shared resources that an op needs. Each lane has at most one op at a time."""

    lane: str
    """The lane of the op."""
    traffic: int = 0
    """DRAM traffic at full speed, in bytes per second. A copied byte counts as several bytes of the
    cores' traffic (`HostMemorySpec`)."""
    duplex: int = 0
    """For a copy: its rate in millionths while the other direction is busy. 0 means that the factor
    of the pair is used."""
    turn: int = 0
    """For an update or a collective: its rate in millionths while compute is busy. For a compute
    op: the speed that it would lose to one at full speed, in millionths. 0 means that the factor of
    the pair is used."""
    high_priority: bool = False
    """Whether compute waits while the op runs (`Op.high_priority`)."""
    held: int = 0
    """For a collective: the speed that compute loses to it, in millionths."""


class ContentionModel:
    """The resources that the lanes of one machine share."""

    def __init__(
        self,
        pairs: Mapping[str, Mapping[str, float]],
        host_memory: HostMemorySpec | None = None,
        duplex_curve: Sequence[Sequence[float]] = (),
        turns: KernelInterleaving | None = None,
        *,
        high_priority: bool = False,
        product_ns: float = 0.0,
        several: SeveralGpus | None = None,
    ) -> None:
        """Makes the sharing of one machine.

        Args:
            pairs: lane -> other lane -> the share of its full speed, (0, 1], that the lane keeps
                while the other lane is busy. The key for two other lanes is like `h2d+d2h`.
            host_memory: the host's DRAM. It replaces the pairs of the link and the lane `cpu`.
            duplex_curve: points (bytes, GB/s of each direction while both are busy), in ascending
                order of bytes. It replaces the pairs of the two directions.
            turns: the sharing of the device. It replaces the pairs of compute and update.
            high_priority: whether schedules have ops of high priority.
            product_ns: the time of the longest matrix product of a layer, or 0 if it is unknown.
                Kernels of other lanes wait for a part of it (`_SHARE`), and as long as `turns`
                says if it is unknown. Collectives wait at least as long.
            several: what was measured of compute beside collectives. It replaces `turns` and the
                constants for collectives.
        """
        dram = (
            {("h2d", "cpu"), ("cpu", "h2d"), ("d2h", "cpu"), ("cpu", "d2h")}
            if host_memory
            else set()
        )
        replaced = dram | ({("compute", "update"), ("update", "compute")} if turns else set())
        self._pairs = {
            (lane, other): round(rate * PARTS)
            for lane, others in pairs.items()
            for other, rate in others.items()
            if rate != 1 and (lane, other) not in replaced
        }
        self._paired = {name for pair in self._pairs for lanes in pair for name in lanes.split("+")}
        three = {lane: pairs.get(lane, {}).get(others) for lane, others in DRAM_LANES.items()}
        self._of_three = {
            lane: round(rate * PARTS)
            for lane, rate in three.items()
            if rate is not None and not host_memory
        }
        self._memory = host_memory
        self._capacity = round(host_memory.gb_per_s * 1e9) if host_memory else 0
        self._cost = (
            {"h2d": host_memory.h2d_cost, "d2h": host_memory.d2h_cost} if host_memory else {}
        )
        self._turns, self._high_priority = turns, high_priority
        self._product_ns = round(product_ns)
        self._several = several
        self._duplex = [(size, size / rate) for size, rate in duplex_curve]  # (bytes, ns)
        self._rates: dict[tuple[Demand, ...], tuple[int, ...]] = {}
        """The results of `rates` so far. They are cached, because a search asks for the same rates
        with each plan."""

    @property
    def capacity(self) -> int:
        """Bandwidth of the host's DRAM in bytes per second, or 0 without a HostMemorySpec."""
        return self._capacity

    def demand(
        self,
        lane: str,
        size: int,
        duration_ns: int,
        kind: str = "",
        *,
        high_priority: bool = False,
        kernels: int = 1,
    ) -> Demand | None:
        """Returns the demand of an op, or None if it neither slows another op nor is slowed.

        The traffic in the demand is at most the DRAM bandwidth, so that an op which runs alone runs
        at full speed.

        Args:
            lane: the lane of the op.
            size: the bytes that the op copies, or that the host's cores read and write in it.
            duration_ns: the time that the op takes while nothing else runs.
            kind: the kind of the op.
            high_priority: `Op.high_priority`.
            kernels: how many kernels of the op wait for their turn, one after the other.
        """
        if duration_ns <= 0:
            return None
        traffic = duplex = 0
        if self._memory and (lane in self._cost or lane == "cpu"):
            traffic = min(
                round(self._cost.get(lane, 1.0) * size * 1e9 / duration_ns), self._capacity
            )
        if self._duplex and lane in _OTHER and size:
            duplex = min(max(round(PARTS * duration_ns / self._duplex_ns(size)), 1), PARTS)
        turn = self._turn(lane, kind, duration_ns, kernels)
        held = self._held(kind) if turn and lane == "exchange" else 0
        return (
            Demand(lane, traffic, duplex, turn, high_priority, held)
            if traffic
            or duplex
            or turn
            or lane in self._paired
            or (self._high_priority and lane in ("compute", "update"))
            else None
        )

    def _turn(self, lane: str, kind: str, duration_ns: int, kernels: int) -> int:
        """Returns the field `turn` of an op's demand."""
        if lane == "exchange" and self._several:
            return self._beside(duration_ns, kernels * self._several.wait(kind) * self._product_ns)
        if lane not in ("compute", "update", "exchange"):
            return 0
        if self._turns is None:
            # Compute loses speed to a collective that was measured, and nothing to an update.
            return int(lane == "compute" and self._several is not None)
        if lane != "compute":
            wait = _SHARE.get(kind, _USUAL) * self._product_ns or self._turns.wait_ns
            if lane == "exchange":  # measured only beside long products
                wait = max(wait, self._turns.wait_ns)
            return self._beside(duration_ns, kernels * wait)
        loss = self._turns.backward_loss if kind == "backward" else self._turns.forward_loss
        return max(round(PARTS * loss), 1)  # other lanes wait even if compute loses nothing

    @staticmethod
    def _beside(duration_ns: int, wait_ns: float) -> int:
        """Returns the rate of an op that takes `wait_ns` longer beside compute."""
        return max(PARTS * duration_ns // (duration_ns + round(wait_ns)), 1)

    def _held(self, kind: str) -> int:
        """Returns the field `held` of the demand of a collective of `kind`."""
        return round(PARTS * (1 - self._several.compute_beside(kind))) if self._several else _HELD

    def _duplex_ns(self, size: int) -> float:
        """Returns the time in ns of a copy of `size` bytes while the other direction is busy. It is
        linear between the measured sizes and proportional to the size outside of them.
        """
        points = self._duplex
        if size <= points[0][0] or size >= points[-1][0]:
            known, time = points[0] if size <= points[0][0] else points[-1]
            return time * size / known
        right = bisect.bisect_left(points, (size, 0.0))
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        """Returns the speed of each op in `busy`, in millionths of its full speed, while all of
        them run at the same time. The ops are on different lanes.
        """
        if busy not in self._rates:
            self._rates[busy] = self._shared(busy)
        return self._rates[busy]

    def _shared(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        """Returns what `rates` returns, without its cache."""
        caps = [self._cap(demand, busy) for demand in busy]
        if (
            not self._memory
            or sum(demand.traffic * cap for demand, cap in zip(busy, caps, strict=True))
            <= self._capacity * PARTS
        ):
            return tuple(caps)
        return self._fill(busy, caps)

    def _cap(self, demand: Demand, busy: tuple[Demand, ...]) -> int:
        """Returns the rate of an op by pairs and turns, before DRAM is shared: the product of the
        factors, rounded down once.
        """
        rate, parts = PARTS, 1
        three = self._of_three.get(demand.lane)
        if three and not {other.lane for other in busy} >= DRAM_LANES.keys():
            three = None
        for other in busy:
            if three and other.lane in DRAM_LANES:
                continue
            if demand.high_priority and other.lane == "compute":
                continue
            if other.high_priority and demand.lane == "compute":
                return 1
            own = demand.duplex if other.lane == _OTHER.get(demand.lane) else 0
            if demand.turn and other.turn:
                if demand.lane == "compute" and other.lane == "exchange":
                    own = PARTS - other.held
                elif demand.lane == "compute" != other.lane:
                    own = PARTS - demand.turn * other.turn // PARTS
                elif other.lane == "compute" != demand.lane:
                    own = demand.turn
            factor = own or self._pairs.get((demand.lane, other.lane))
            if factor is not None:
                rate, parts = rate * factor, parts * PARTS
        if three:
            rate, parts = rate * self._three_busy(demand, three), parts * PARTS
        return max(rate // parts, 1)

    def _three_busy(self, demand: Demand, three: int) -> int:
        """Returns the factor of an op while both other lanes of `DRAM_LANES` are busy. `three` was
        measured with large copies. Smaller copies lose more to the other direction of the link.
        """
        if not demand.duplex:
            return three
        return min(
            three * demand.duplex // self._pairs.get((demand.lane, _OTHER[demand.lane]), PARTS),
            demand.duplex,
        )

    def _fill(self, busy: tuple[Demand, ...], caps: list[int]) -> tuple[int, ...]:
        """Returns the rates by weighted max-min sharing of the DRAM bandwidth. `caps` are the rates
        before sharing. Ops that need at most their share get what they need, until there is no such
        op. The others share the rest.
        """
        assert self._memory is not None
        cpu = round(self._memory.cpu_weight * _WEIGHT_PARTS)
        weight = {
            index: cpu if demand.lane == "cpu" else _WEIGHT_PARTS
            for index, demand in enumerate(busy)
            if demand.traffic
        }
        want = {index: busy[index].traffic * caps[index] for index in weight}
        left, rates = self._capacity * PARTS, list(caps)
        while True:
            total = sum(weight.values())
            served = [index for index in weight if want[index] * total <= weight[index] * left]
            if not served:
                break
            for index in served:
                left -= want[index]
                del weight[index]
        for index, share in weight.items():
            rates[index] = max(left * share // (total * busy[index].traffic), 1)
        return tuple(rates)


def link_gb_per_s(gpus: int, alone: float, both: float, total: float) -> tuple[float, float]:
    """Returns an estimate of the link rates of each of several GPUs in one host, in GB/s per
    direction: the rate if one direction is busy on all GPUs, and the rate if both are.

    Measured on one host: 43 and 21.7 GB/s with four H200, 55 and 38.9 GB/s with two.

    Args:
        gpus: The number of GPUs.
        alone: The rate of a single GPU with one direction busy, in GB/s.
        both: The rate per direction of a single GPU with both directions busy, in GB/s.
        total: The rate that the host sustains for all GPUs and directions together, in GB/s.

    >>> for gpus in (1, 2, 4):
    ...     print([round(rate, 1) for rate in link_gb_per_s(gpus, 55.4, 50.3, 175.0)])
    [55.4, 50.3]
    [55.4, 43.8]
    [43.8, 21.9]
    """
    return min(alone, total / gpus), min(both, total / (2 * gpus))
