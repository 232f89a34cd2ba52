"""ScaledCosts: changes the sizes of ops or the rate of the link in another cost model.

It estimates setups for which no policy makes a schedule, such as optimizer state in another
precision, or state that is sharded among several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatrain.simulator.costs.contention import PARTS, Demand
from megatrain.simulator.costs.protocol import CostModel
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Op, Schedule, Sizes


class ScaledCosts:
    """The cost model `costs`, with each op replaced by `change(op)`, and its time multiplied by the
    factor of its lane in `slower`. All durations count as extrapolated.
    """

    def __init__(
        self,
        costs: CostModel,
        change: Callable[[Op], Op],
        slower: Mapping[str, float] | None = None,
        both_slower: Mapping[str, float] | None = None,
    ) -> None:
        """Makes the cost model.

        Args:
            costs: The cost model to change.
            change: Returns the op whose cost is used instead of an op's own.
            slower: Lane -> factor on the time of its ops. A missing lane has the factor 1.
            both_slower: Lane -> additional factor on the time of its copies while both directions
                of the link are busy. A missing lane has the factor 1.
        """
        self.costs, self.change, self.slower, self.both_slower = (
            costs,
            change,
            slower or {},
            both_slower or {},
        )
        self.dispatch_ns, self.step_overhead_ns, self.process_bytes = (
            costs.dispatch_ns,
            costs.step_overhead_ns,
            costs.process_bytes,
        )
        self.library_bytes = costs.library_bytes
        self.host_factors = costs.host_factors

    def sizes(self, schedule: Schedule) -> Sizes:
        return self.costs.sizes(schedule)

    def collective_bytes(self, gpus: int) -> int:
        return self.costs.collective_bytes(gpus)

    def duration_ns(self, op: Op) -> int:
        return round(self.costs.duration_ns(self.change(op)) * self.slower.get(op.lane, 1.0))

    def demand(self, op: Op) -> Demand | None:
        return self.costs.demand(self.change(op))

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        rates = self.costs.rates(busy)
        if not self.both_slower or not {"h2d", "d2h"} <= {demand.lane for demand in busy}:
            return rates
        return tuple(
            min(max(round(rate / self.both_slower.get(demand.lane, 1.0)), 1), PARTS)
            for demand, rate in zip(busy, rates, strict=True)
        )

    def extrapolated(self, op: Op) -> bool:
        return True

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        return self.costs.activations_bytes(model, workload)

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        return self.costs.workspace(model, workload)
