"""Remembered: a cost model that is asked once for the cost of each size of op."""

from __future__ import annotations

from megatrain.simulator.costs.contention import Demand
from megatrain.simulator.costs.protocol import ContendedCosts, CostModel
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.schedule import Op


def costs_sizes(costs: CostModel) -> bool:
    """Returns whether ops of one size have the same cost in `costs`, whatever their ids are."""
    while isinstance(costs, ScaledCosts):
        costs = costs.costs
    return getattr(type(costs), "sizes", None) is ContendedCosts.sizes


class Remembered(ScaledCosts):
    """The cost model `costs`, with the results for each size of op remembered.

    Most ops of the plans of a search have sizes that earlier plans have had.
    """

    def __init__(self, costs: CostModel) -> None:
        """`costs` must be a cost model for which `costs_sizes` is true."""
        super().__init__(costs, lambda op: op)
        self._durations: dict[tuple[object, ...], int] = {}
        self._demands: dict[tuple[object, ...], Demand | None] = {}

    def duration_ns(self, op: Op) -> int:
        size = op.size
        if size not in self._durations:
            self._durations[size] = self.costs.duration_ns(op)
        return self._durations[size]

    def demand(self, op: Op) -> Demand | None:
        size = op.size
        if size not in self._demands:
            self._demands[size] = self.costs.demand(op)
        return self._demands[size]

    def extrapolated(self, op: Op) -> bool:
        return self.costs.extrapolated(op)
