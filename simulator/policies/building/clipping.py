"""Clipping: what a layer's update is multiplied with, from which sums, in which buffers; the same for every policy.

`global` needs the sums of squares of all layers, so one op at the end of a step makes the coefficient of them. `layer` and `update` need what is
the layer's own: its op follows its gradient, and with it the update may. A loss that is not finite stops every update of the step, in every
kind and policy: all losses are known before the first. A norm that is not finite stops every update with `global`; with `layer` and `update`
only its own layer's, whichever policy, so that a step that fails leaves the same bits everywhere.
"""

from __future__ import annotations

from megatrain.simulator.arithmetic import RATIO_ROW, SCALAR_BYTES
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.schedule import OpId


class Clipping:
    """The ops of one step that clip, and their buffers in `place`. `lane`: where norms are; `update_lane`: where `ratios` are, with those of the layers
    `on_host` on the cpu lane, and what follows from them in host memory.
    """

    def __init__(self, builder: Builder, plan: Plan, place: str, lane: str, update_lane: str, on_host: frozenset[str] = frozenset()) -> None:
        self.builder, self.stack, self.kind = builder, plan.model.stack, plan.workload.clipping
        self.lane, by_update = lane, self.kind == "update"
        self.side = {layer: ("host", "cpu") if by_update and layer in on_host else (place, update_lane) for layer in self.stack}
        normed = self.stack if self.kind in ("global", "layer") else ()
        self.norm = {layer: builder.persistent(f"{place}.norm", layer, SCALAR_BYTES, "norms") for layer in normed}
        self.own: dict[str, str] = {}
        self.all = ""  # the buffer that every update reads
        if self.kind in ("global", "none"):
            self.all = builder.persistent(f"{place}.clips", "all", SCALAR_BYTES, "clips")
        else:
            for layer, spec in self.stack.items():
                values = len(spec.tensors) if by_update else 1
                size = -(-4 * values // SCALAR_BYTES) * SCALAR_BYTES
                self.own[layer] = builder.persistent(f"{self.side[layer][0]}.clips", layer, size, "clips")
        for side, _ in dict.fromkeys(self.side.values()) if by_update else ():
            most = max(spec.elements for layer, spec in self.stack.items() if self.side[layer][0] == side)
            builder.slots(f"{side}.ratio_rows", 1, 4 * most // RATIO_ROW, "ratio_sums")
        self.losses: list[str] = []

    def factor(self, layer: str) -> str:
        """The buffer that the layer's update reads."""
        return self.all or self.own[layer]

    def measure(self, layer: str, gradient: str, moments: str) -> None:
        """The layer's `gradient` is complete, and its `moments` are in one buffer: emits what follows from that."""
        spec = self.stack[layer]
        if self.kind == "update":
            rows = self.rows(layer)
            self.ratios(layer, gradient, moments, rows)
            self.clip_by(layer, rows)
        elif self.kind != "none":
            self.builder.op(OpId("norm", layer), self.lane, [gradient], [self.norm[layer]], parameters=spec.elements)
            if self.kind == "layer":
                self.builder.op(OpId("clip", layer), self.lane, [self.norm[layer], *self.losses], [self.own[layer]])

    def rows(self, layer: str) -> str:
        """A slot for the layer's sums of g^2 / v; `clip_by` gives it back."""
        return self.builder.acquire(f"{self.side[layer][0]}.ratio_rows")

    def ratios(self, layer: str, gradient: str, moments: str, rows: str, chunk: tuple[int | None, int, int] | None = None) -> None:
        """Sums of the whole layer, or of a chunk: (number, first parameter, how many)."""
        number, first, count = chunk or (None, 0, self.stack[layer].elements)
        self.builder.op(OpId("ratios", layer, chunk=number), self.side[layer][1], [gradient, moments], [rows], offset=first, parameters=count)

    def clip_by(self, layer: str, rows: str) -> None:
        """The factors of the layer's tensors, from its sums in `rows`."""
        self.builder.op(OpId("clip", layer), self.side[layer][1], [rows, *self.losses], [self.own[layer]], parameters=self.stack[layer].elements)
        self.builder.release(rows)

    def finish(self) -> None:
        """Everything is measured: of what is clipped as a whole, the coefficient."""
        if self.all:
            self.builder.op(OpId("clip"), self.lane, [*self.norm.values(), *self.losses], [self.all])
