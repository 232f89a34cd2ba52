"""Fit: the host's DRAM as a HostMemory, from rates that copies and cores reach alone and together.

Minimised is the sum of squared log ratios of what `Sharing` gives to what was measured, over every rate of every combination, by a pattern search:
every parameter a step up, down or not at all (they pull together: more memory looks like cheaper copies), the step halved where no such move helps. What the
rates do not tell stays near HostMemory's defaults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatrain.simulator.hardware import HostMemory
from megatrain.simulator.sharing import PARTS, Demand, Sharing

_SHORT = 0.95  # copies that keep more of their speed than this beside the cores tell nothing about DRAM
_WORST = 0.15  # relative error of a rate beyond which DRAM is not what explains it
_PRIOR = 1e-5
_STARTS = (1.0, 1.25, 1.6)  # of the cores' own traffic
_SMALLEST_STEP = 1e-3
_BOUNDS = {"gb_per_s": (1e-3, 1e6), "h2d_cost": (0.5, 8.0), "d2h_cost": (0.5, 8.0), "cpu_weight": (0.05, 20.0)}
_DIRECTIONS = tuple(itertools.product((-1, 0, 1), repeat=len(_BOUNDS)))


class HostRates(NamedTuple):
    """GB/s of what runs at one time: copies in bytes copied, the cores in bytes read and written; 0 for what is idle."""

    h2d: float = 0.0
    d2h: float = 0.0
    cpu: float = 0.0


def fit_host_memory(alone: HostRates, together: Sequence[HostRates], duplex: float) -> HostMemory | None:
    """From rates alone and in combinations that contain the cores. `duplex`: rate of a direction, of its own alone, while only the other is busy too.

    None where copies are hardly slower beside the cores, or where DRAM explains the rates badly: then the measured pairs say more.
    """
    pairs = {"h2d": {"d2h": duplex}, "d2h": {"h2d": duplex}}
    alone_of: dict[str, float] = alone._asdict()
    measured = [{lane: rate for lane, rate in rates._asdict().items() if rate} for rates in together]

    def expected(rates: Mapping[str, float], lane: str) -> float:
        return alone_of[lane] * (duplex if {"h2d", "d2h"} <= rates.keys() else 1.0)

    if not any(rates[lane] < _SHORT * expected(rates, lane) for rates in measured for lane in ("h2d", "d2h") if lane in rates):
        return None
    measured.append({"h2d": duplex * alone.h2d, "d2h": duplex * alone.d2h})  # the memory must leave them that
    candidates = [_search(HostMemory(gb_per_s=start * alone.cpu), alone, measured, pairs) for start in _STARTS]
    best = min(candidates, key=lambda memory: _loss(memory, alone, measured, pairs))
    worst = max(abs(ratio) for ratio in _log_ratios(best, alone_of, measured, pairs))
    return best if worst <= math.log1p(_WORST) else None


def together(memory: HostMemory, alone: HostRates, lanes: Sequence[str], duplex: float) -> HostRates:
    """What `lanes` reach together, in GB/s as in HostRates, if this is the host's memory."""
    return HostRates(**_predicted(memory, alone._asdict(), lanes, {"h2d": {"d2h": duplex}, "d2h": {"h2d": duplex}}))


def _predicted(memory: HostMemory, alone: Mapping[str, float], lanes: Sequence[str], pairs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    sharing = Sharing(pairs, memory)
    busy = [sharing.demand(lane, round(alone[lane] * 1e9), 10**9) or Demand(lane) for lane in lanes]
    return {lane: alone[lane] * rate / PARTS for lane, rate in zip(lanes, sharing.rates(tuple(busy)), strict=True)}


def _log_ratios(
    memory: HostMemory, alone: Mapping[str, float], measured: Sequence[Mapping[str, float]], pairs: Mapping[str, Mapping[str, float]]
) -> list[float]:
    found = []
    for rates in measured:
        predicted = _predicted(memory, alone, list(rates), pairs)
        found += [math.log(predicted[lane] / rate) for lane, rate in rates.items()]
    return found


def _loss(memory: HostMemory, alone: HostRates, measured: Sequence[Mapping[str, float]], pairs: Mapping[str, Mapping[str, float]]) -> float:
    usual = HostMemory(gb_per_s=alone.cpu)
    prior = sum(math.log(getattr(memory, field) / getattr(usual, field)) ** 2 for field in _BOUNDS)
    return sum(ratio**2 for ratio in _log_ratios(memory, alone._asdict(), measured, pairs)) + _PRIOR * prior


def _search(memory: HostMemory, alone: HostRates, measured: Sequence[Mapping[str, float]], pairs: Mapping[str, Mapping[str, float]]) -> HostMemory:
    bounds = {**_BOUNDS, "gb_per_s": (alone.cpu, _BOUNDS["gb_per_s"][1])}  # the cores alone reached that much
    least, step = _loss(memory, alone, measured, pairs), 0.25
    while step > _SMALLEST_STEP:
        found = memory
        for signs in _DIRECTIONS:
            values = {
                field: min(max(getattr(memory, field) * (1 + step) ** sign, low), high)
                for sign, (field, (low, high)) in zip(signs, bounds.items(), strict=True)
            }
            loss = _loss(HostMemory(**values), alone, measured, pairs)
            if loss < least:
                found, least = HostMemory(**values), loss
        if found is memory:
            step /= 2
        memory = found
    return HostMemory(**{name: round(getattr(memory, name), 3) for name in _BOUNDS})
