"""Sharing: how far ops that run at the same time slow each other, as the cost models tell the engine.

An op makes a `Demand`, and `Sharing.rates` says at what share of its full speed each of the busy ops runs, in whole millionths:

1. pairs. A lane runs at the product, over the other busy lanes, of the factors measured for the two. The two directions of the link have
   a curve where one was measured: small copies disturb each other far more than large ones (16.9 of 38.4 GB/s at 1 MiB, 50.3 of 55.4 at
   256 MiB, H200 over PCIe 5.0). Where both directions of the link and the cpu lane are busy and that was measured, it stands instead of the pairs among them.
2. turns. Where the machine has them, compute and update share the device as `hardware.Turns` says: the shorter an update op, the more of its time is waiting.
3. host DRAM. At full speed the cores ask for the bytes that they read and write a second, a copy for its bytes times `h2d_cost` or
   `d2h_cost`. Where the demands that are left after the pairs add up to more than the machine's `gb_per_s`, they share it by weighted max-min: who
   asks for less than his share gets what he asks for, the others share the rest in proportion to their weights.

With a HostMemory the factors between the link and the cpu lane are left out: DRAM is what they measured. Everything is counted in integers
and rates are rounded down, so that the sum never exceeds what there is. Not modelled: caches, NUMA, the DRAM's own preference for reads.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatrain.simulator.hardware import DRAM_LANES, HostMemory, Turns

PARTS = 1_000_000
"""of full speed; a rate is from 1 to this"""
_OTHER = {"h2d": "d2h", "d2h": "h2d"}
_WEIGHT_PARTS = 1000


class Demand(NamedTuple):
    """What an op asks of what it shares. At one time there is at most one of a lane."""

    lane: str
    traffic: int = 0
    """bytes/s of host DRAM at full speed, counted as the cores' traffic"""
    duplex: int = 0
    """of a copy: rate in millionths while the other direction is busy too; 0 to take the pair's factor"""
    turn: int = 0
    """of an update: its rate in millionths beside compute; of compute: millionths lost for each share that the update lane has; 0 to take the pair's factor"""


class Sharing:
    """What lanes of one machine share."""

    def __init__(
        self, pairs: Mapping[str, Mapping[str, float]], host_memory: HostMemory | None = None, duplex_curve: Sequence[Sequence[float]] = (),
        turns: Turns | None = None,
    ) -> None:  # fmt: skip
        """`pairs`: lane -> other lane, or `h2d+d2h`, -> rate of the first, (0, 1], while those are busy. `duplex_curve`: (bytes, GB/s of each direction while
        both run), bytes ascending.
        """
        dram = {("h2d", "cpu"), ("cpu", "h2d"), ("d2h", "cpu"), ("cpu", "d2h")} if host_memory else set()
        told = dram | ({("compute", "update"), ("update", "compute")} if turns else set())
        self._pairs = {
            (lane, other): round(rate * PARTS) for lane, others in pairs.items() for other, rate in others.items() if rate != 1 and (lane, other) not in told
        }
        self._paired = {name for pair in self._pairs for lanes in pair for name in lanes.split("+")}
        three = {lane: pairs.get(lane, {}).get(others) for lane, others in DRAM_LANES.items()}
        self._of_three = {lane: round(rate * PARTS) for lane, rate in three.items() if rate is not None and not host_memory}
        self._memory = host_memory
        self._capacity = round(host_memory.gb_per_s * 1e9) if host_memory else 0
        self._cost = {"h2d": host_memory.h2d_cost, "d2h": host_memory.d2h_cost} if host_memory else {}
        self._turns = turns
        self._duplex = [(size, size / rate) for size, rate in duplex_curve]  # (bytes, ns)

    @property
    def capacity(self) -> int:
        """Bytes/s of host DRAM, counted as the cores' traffic; 0 where DRAM is not shared."""
        return self._capacity

    def demand(self, lane: str, size: int, duration_ns: int, kind: str = "") -> Demand | None:
        """Of an op of `kind` that copies `size` bytes, or reads and writes so many with the host's cores, in `duration_ns` alone. None where it neither
        disturbs another nor is disturbed. It never asks for more DRAM than there is: alone it ran at full speed.
        """
        if duration_ns <= 0:
            return None
        traffic = duplex = 0
        if self._memory and (lane in self._cost or lane == "cpu"):
            traffic = min(round(self._cost.get(lane, 1.0) * size * 1e9 / duration_ns), self._capacity)
        if self._duplex and lane in _OTHER and size:
            duplex = min(max(round(PARTS * duration_ns / self._duplex_ns(size)), 1), PARTS)
        turn = self._turn(lane, kind, duration_ns)
        return Demand(lane, traffic, duplex, turn) if traffic or duplex or turn or lane in self._paired else None

    def _turn(self, lane: str, kind: str, duration_ns: int) -> int:
        if self._turns is None or lane not in ("compute", "update"):
            return 0
        if lane == "update":
            return max(PARTS * duration_ns // (duration_ns + self._turns.wait_ns), 1)
        return round(PARTS * (self._turns.backward_loss if kind == "backward" else self._turns.forward_loss))

    def _duplex_ns(self, size: int) -> float:
        """Time of a copy while the other direction is busy: linear between the measured sizes, proportional below and beyond them."""
        points = self._duplex
        if size <= points[0][0] or size >= points[-1][0]:
            known, time = points[0] if size <= points[0][0] else points[-1]
            return time * size / known
        right = bisect.bisect_left(points, (size, 0.0))
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        """Millionths of full speed at which each of `busy`, all of different lanes, runs while the others do."""
        caps = [self._cap(demand, busy) for demand in busy]
        if not self._memory or sum(demand.traffic * cap for demand, cap in zip(busy, caps, strict=True)) <= self._capacity * PARTS:
            return tuple(caps)
        return self._fill(busy, caps)

    def _cap(self, demand: Demand, busy: tuple[Demand, ...]) -> int:
        """Millionths that the pairs leave: their product, rounded down once."""
        rate, parts = PARTS, 1
        three = self._of_three.get(demand.lane)
        if three and not {other.lane for other in busy} >= DRAM_LANES.keys():
            three = None
        for other in busy:
            if three and other.lane in DRAM_LANES:
                continue
            own = demand.duplex if other.lane == _OTHER.get(demand.lane) else 0
            if demand.turn and other.turn and other is not demand:
                own = demand.turn if demand.lane == "update" else PARTS - demand.turn * other.turn // PARTS
            factor = own or self._pairs.get((demand.lane, other.lane))
            if factor is not None:
                rate, parts = rate * factor, parts * PARTS
        if three:
            rate, parts = rate * self._beside_two(demand, three), parts * PARTS
        return max(rate // parts, 1)

    def _beside_two(self, demand: Demand, three: int) -> int:
        """Millionths beside the two others of DRAM's lanes. What was measured of the three was of large copies: smaller ones lose more to the other direction."""
        if not demand.duplex:
            return three
        return min(three * demand.duplex // self._pairs.get((demand.lane, _OTHER[demand.lane]), PARTS), demand.duplex)

    def _fill(self, busy: tuple[Demand, ...], caps: list[int]) -> tuple[int, ...]:
        """Weighted max-min: those who want no more than their share are served, until nobody is left who does; the others share the rest."""
        assert self._memory is not None
        cpu = round(self._memory.cpu_weight * _WEIGHT_PARTS)
        weight = {index: cpu if demand.lane == "cpu" else _WEIGHT_PARTS for index, demand in enumerate(busy) if demand.traffic}
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
    """A first estimate of each GPU's rate per direction where `gpus` share one host: (one direction busy on all, both directions on all).

    `alone`, `both`: one GPU's GB/s per direction with one or both of them busy. `total`: GB/s of DMA that the host sustains, all GPUs and
    directions together. Four H200 on one host (H2D 55, both 50.3 each, some 175 in all) measured 43 and 21.7, two 55 and 38.9.

    >>> [tuple(round(rate, 1) for rate in link_gb_per_s(gpus, 55.4, 50.3, 175.0)) for gpus in (1, 2, 4)]
    [(55.4, 50.3), (55.4, 43.8), (43.8, 21.9)]
    """
    return min(alone, total / gpus), min(both, total / (2 * gpus))
