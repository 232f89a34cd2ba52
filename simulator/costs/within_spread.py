"""WithinSpread: a measured machine that is as slow, or as fast, as its repeated measurements allow.

The spread of a number is the interquartile range of its repetitions divided by their median. With
normally distributed repetitions, 82 % are within one spread of the median. All ops become longer
together or shorter together, as they do when the host is busy with other work. Only durations
change, not how lanes slow each other down and not the dispatch time.
"""

from __future__ import annotations

from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.schedule import Op


class WithinSpread(ScaledCosts):
    """The cost model `costs` with every op longer or shorter by its spread.

    The spread of an op is that of the nearest measured number. If the op's duration is
    extrapolated, `uncertainty` is used in its place.
    """

    def __init__(self, costs: Calibrated, uncertainty: float, *, longer: bool) -> None:
        super().__init__(costs, lambda op: op)
        self._calibrated, self._uncertainty, self._longer = costs, uncertainty, longer

    def duration_ns(self, op: Op) -> int:
        duration, known = self._calibrated.duration_ns(op), not self._calibrated.extrapolated(op)
        times = 1 + (self._calibrated.spread(op) if known else self._uncertainty)
        return round(duration * times if self._longer else duration / times)
