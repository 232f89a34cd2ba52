"""Within the spread: a measured machine as slow, or as fast, as its own repeats say it may be.

A spread is the interquartile range of a number's repeats over their median: of normally distributed repeats 82 % lie within one of it to either side. All
ops are taken to be long together, or short together, as they are where the host or its neighbours are. Only what they take is varied, not how lanes slow
each other, nor dispatch.
"""

from __future__ import annotations

from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.schedule import Op


class WithinSpread(Changed):
    """`costs`, with every op longer, or shorter, by the spread of the measured number nearest to it; by `uncertainty` where it is extrapolated."""

    def __init__(self, costs: Calibrated, uncertainty: float, *, longer: bool) -> None:
        super().__init__(costs, lambda op: op)
        self._calibrated, self._uncertainty, self._longer = costs, uncertainty, longer

    def duration_ns(self, op: Op) -> int:
        duration, known = self._calibrated.duration_ns(op), not self._calibrated.extrapolated(op)
        times = 1 + (self._calibrated.spread(op) if known else self._uncertainty)
        return round(duration * times if self._longer else duration / times)
