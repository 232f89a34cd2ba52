"""Corrected: a cost model whose durations are multiplied by what a run measured of them."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.simulator.costs.protocol import CostModel
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.schedule import Op


class Corrected(ScaledCosts):
    """The cost model `costs`, with the time of each op multiplied by the factor of its kind and
    lane. Only durations change, not how lanes slow each other down and not the dispatch time.
    """

    def __init__(self, costs: CostModel, factors: Mapping[str, float]) -> None:
        """`factors` are those of `HardwareSpec.corrections`. Kinds that were not measured have the
        factor of their lane, and lanes that were not measured have that of all ops.
        """
        super().__init__(costs, lambda op: op)
        self._factors = factors

    def duration_ns(self, op: Op) -> int:
        keys = (f"{op.kind}@{op.lane}", op.lane, "all")
        factor = next((self._factors[key] for key in keys if key in self._factors), 1.0)
        return round(factor * self.costs.duration_ns(op))

    def extrapolated(self, op: Op) -> bool:
        return self.costs.extrapolated(op)
