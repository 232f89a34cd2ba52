"""Cost models that change the durations of another cost model.

How lanes slow each other down and the dispatch time do not change.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.protocol import CostModel
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.costs.several_gpus import OneOfSeveral
from megatrain.simulator.schedule import Op


class Corrected(ScaledCosts):
    """The cost model `costs`, with the time of each op multiplied by the factor that a run measured
    for its kind and lane.
    """

    def __init__(self, costs: CostModel, factors: Mapping[str, float]) -> None:
        """`factors` are those of `HardwareSpec.corrections`. Kinds that were not measured have the
        factor of their lane, and lanes that were not measured have the factor `all`.
        """
        super().__init__(costs, lambda op: op)
        self._factors = factors

    def duration_ns(self, op: Op) -> int:
        keys = (f"{op.kind}@{op.lane}", op.lane, "all")
        factor = next((self._factors[key] for key in keys if key in self._factors), 1.0)
        return round(factor * self.costs.duration_ns(op))

    def extrapolated(self, op: Op) -> bool:
        return self.costs.extrapolated(op)


class WithinSpread(ScaledCosts):
    """The cost model `costs` with every op longer, or every op shorter, by its spread.

    All ops change together, as they do when the host is busy with other work. The spread of a
    number is the interquartile range of its repetitions divided by their median. With normally
    distributed repetitions, 82 % are within one spread of the median. An op has the spread of the
    nearest measured number. If its duration is extrapolated, `uncertainty` is used instead. Ops of
    the lane `cpu` get a factor of `CostTable.host_factors` instead, if these were measured. With n
    factors, it is the one at place (n + 1) / 20 from either end, rounded down and at least 1. A
    further factor is equally likely in each of the n + 1 intervals that n factors make. So it is
    between these two with a probability of at least 90 %, if n is at least 19 and the host later
    varies as it did during the calibration. An extrapolated duration changes by the factor and by
    `uncertainty`.
    """

    def __init__(
        self, costs: Calibrated | OneOfSeveral, uncertainty: float, *, longer: bool
    ) -> None:
        """`uncertainty` is a fraction of the duration, as in `HardwareSpec.uncertainty`. With
        `longer`, durations are multiplied by 1 + spread, otherwise divided by it. `costs` of one of
        several GPUs must have a `calibration`.
        """
        super().__init__(costs, lambda op: op)
        self._calibrated, self._uncertainty, self._longer = costs, uncertainty, longer

        self._host: float | None = None
        one = costs if isinstance(costs, Calibrated) else costs.calibration
        assert one is not None
        if factors := one.table.host_factors:
            place = max((len(factors) + 1) // 20, 1)
            end = factors[-place] if longer else factors[place - 1]
            self._host = end / statistics.fmean(factors)

    def duration_ns(self, op: Op) -> int:
        duration, known = self._calibrated.duration_ns(op), not self._calibrated.extrapolated(op)
        if op.lane == "cpu" and self._host is not None:
            duration = round(duration * self._host)
            if known:
                return duration
        times = 1 + (self._calibrated.spread(op) if known else self._uncertainty)
        return round(duration * times if self._longer else duration / times)
