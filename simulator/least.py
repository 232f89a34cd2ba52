"""Least: a lower bound of a plan's step, without lowering it: the work of its compute lane.

A search asks for it first, and lowers only the plans that may be faster than the best so far.
"""

from __future__ import annotations

from megatrain.simulator.costs import CostModel
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._layerwise import cost_keys
from megatrain.simulator.schedule import Op

_CODES = {"forward": "F", "recompute": "R", "backward": "B", "head": "H"}


class Least:
    """The bound for one model and workload, under any placement."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._known: dict[tuple[str, str, bool], int] = {}

    def step_ns(self, plan: Plan) -> int:
        """No step of `plan` takes less: the ops of the layers and of the head, one after the other."""
        stored, kept = plan.placed("stored"), plan.placed("attention")
        total = self._duration_ns("head", "")
        for layer in self._plan.model.decoders:
            total += self._duration_ns("forward", layer.name) + self._duration_ns("backward", layer.name)
            if layer.name not in stored:
                total += self._duration_ns("recompute", layer.name, kept=layer.name in kept)
        return total * self._plan.workload.accumulation

    def _duration_ns(self, kind: str, layer: str, *, kept: bool = False) -> int:
        key = kind, self._plan.model.stack[layer].signature if layer else "", kept
        if key not in self._known:
            op = Op(id=f"{_CODES[kind]}{layer}.m0", lane="compute", **cost_keys(self._plan, kind, layer, kept=kept))
            self._known[key] = self._costs.duration_ns(op)
        return self._known[key]
