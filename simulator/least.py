"""Least: lower bounds of a plan's step, without lowering it.

A search asks for them first, and lowers only the plans that may be faster than the best so far. `compute_ns` is the work of the compute lane.
`step_ns` follows a step layer by layer: when the copies, the host's cores, the device's updates and compute are done with each layer at the earliest, if slots
were never short and lanes did not slow each other. What the host's memory has to move by then bounds it too, whoever moves it.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.simulator import policies
from megatrain.simulator.arithmetic import blocks_of, contributions, cost_keys, gradient_bytes
from megatrain.simulator.costs import CostModel
from megatrain.simulator.costs.protocol import Shared
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import ALIGNMENT, DTYPE_BYTES, EMBEDDING

_CODES = {"forward": "F", "recompute": "R", "backward": "B", "head": "H"}
_STATE = ("weights", "low", "moments")
_Size = tuple[float, float, float]
"""of ops of one lane, in ns: all of them, the last one, and what host memory needs for all of them"""
_NOTHING: _Size = (0.0, 0.0, 0.0)


class Least:
    """The bounds for one model and workload, under any placement."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._known: dict[tuple[str, str, bool], int] = {}
        self._copied: dict[tuple[object, ...], _Size] = {}
        self._host_bytes_per_s = costs.sharing.capacity if isinstance(costs, Shared) else 0

    def compute_ns(self, plan: Plan) -> int:
        """No step of `plan` takes less: the ops of the layers and of the head, one after the other."""
        return self._micro_batch_ns(plan) * self._plan.workload.accumulation

    def step_ns(self, plan: Plan) -> float:
        """No step of `plan` takes less, where the policy goes layer by layer; of others `compute_ns`. Of more than two micro-batches, each after the
        second counts with its compute alone.
        """
        if not policies.find(plan.policy).goes_layer_by_layer:
            return self.compute_ns(plan)
        flow = _Flow(self, plan, min(plan.workload.accumulation, 2))
        return flow.end_ns() + max(plan.workload.accumulation - 2, 0) * self._micro_batch_ns(plan)

    def _micro_batch_ns(self, plan: Plan) -> int:
        stored, kept = plan.placed("stored"), plan.placed("attention")
        total = self.duration_ns("head", "")
        for layer in self._plan.model.decoders:
            total += self.duration_ns("forward", layer.name) + self.duration_ns("backward", layer.name)
            if layer.name not in stored:
                total += self.duration_ns("recompute", layer.name, kept=layer.name in kept)
        return total

    def duration_ns(self, kind: str, layer: str, *, kept: bool = False) -> int:
        """Of a compute op."""
        key = kind, self._plan.model.stack[layer].signature if layer else "", kept
        if key not in self._known:
            op = Op(id=f"{_CODES[kind]}{layer}.m0", lane="compute", **cost_keys(self._plan, kind, layer, kept=kept))
            self._known[key] = self._costs.duration_ns(op)
        return self._known[key]

    def chunks_ns(self, code: str, layer: str, lane: str, elements: int, chunk: int, per_parameter: int, *, parameters: bool) -> _Size:
        """Of the ops `code` on a layer of so many elements, `chunk` of them at a time, `per_parameter` bytes of each copied."""
        key = code, layer if not layer.isdigit() else "", elements, chunk, per_parameter
        if key not in self._copied:
            whole, rest = divmod(elements, chunk)
            all_ns = last_ns = host_ns = 0.0
            for size, count in ((chunk, whole), (rest, 1)):
                if size and count:
                    count_of = size if parameters else 0
                    op = Op(id=f"{code}{layer}", lane=lane, bytes=size * per_parameter, parameters=count_of)
                    last_ns = self._costs.duration_ns(op) + self._costs.dispatch_ns.get(lane, 0)
                    all_ns += count * last_ns
                    demand = self._costs.demand(op) if self._host_bytes_per_s else None
                    if demand:
                        host_ns += count * demand.traffic * self._costs.duration_ns(op) / self._host_bytes_per_s
            self._copied[key] = all_ns, last_ns, host_ns
        return self._copied[key]


class _Flow:
    """When each lane is done with what it was given so far, at the earliest, in ns. Ops are given in the policy's order, or later."""

    def __init__(self, least: Least, plan: Plan, micro_batches: int) -> None:
        self.least, self.plan, self.stack, self.micro_batches = least, plan, plan.model.stack, micro_batches
        self.compute = self.up = self.down = self.updates = self.cores = 0.0
        self.host = self.host_awaited = 0.0  # what host memory needs for all copies and updates, and for those that compute waits for when it waits next
        self.parked_at: dict[str, float] = {}
        self.width = DTYPE_BYTES[plan.workload.dtype]
        self.chunk = max(plan.knobs.chunk_bytes // self.width // ALIGNMENT, 1) * ALIGNMENT
        self.owes = policies.defers_update(plan)
        self.on_host = plan.placed("host_updated")
        self.resident = {name: plan.placed(name) - self.on_host for name in (*_STATE, "gradients")}
        self.stored, self.kept, self.parked = plan.placed("stored"), plan.placed("attention"), plan.placed("parked")
        self.loaded: dict[bool, list[str]] = {True: [], False: []}  # decoder or not -> layers in weight slots, least recently used first
        self.arrived = dict.fromkeys(self.stack, 0)
        self.updated: set[str] = set()
        self.pending = ""
        hidden = plan.workload.tokens * plan.model.hidden * self.width
        self.hidden = [least.chunks_ns(code, "0", lane, hidden, hidden, 1, parameters=False) for code, lane in (("PL", "h2d"), ("P", "d2h"))]

    def end_ns(self) -> float:
        """The earliest end of the step."""
        blocks = blocks_of(self.plan)
        for _ in range(self.micro_batches):
            self._forward(blocks)
            for block in reversed(blocks):
                self._backward(block)
            self._gradient(EMBEDDING, 0.0)
        self._settle()
        return max(self.compute, self.up, self.down, self.updates, self.cores, self.host)

    def _forward(self, blocks: Iterable[list[int]]) -> None:
        least, head = self.least, self.plan.model.head
        first = {str(block[0]) for block in blocks}
        self._weights(EMBEDDING)
        for layer in self.plan.model.decoders:
            if layer.name in self.parked and layer.name in first and layer.name not in self.stored:
                self._down(self.hidden[1], self.compute)
                self.parked_at[layer.name] = self.down
            self._weights(layer.name)
            self.compute += least.duration_ns("forward", layer.name)
        self._weights(head)
        self._gradient(head, least.duration_ns("head", ""))

    def _backward(self, block: list[int]) -> None:
        names = [str(index) for index in block]
        if names[0] not in self.stored:
            if names[0] in self.parked:
                self._up(self.hidden[0], self.parked_at[names[0]])
                self._wait(self.up)
            for name in names:
                self._weights(name)
                self.compute += self.least.duration_ns("recompute", name, kept=name in self.kept)
        for name in reversed(names):
            self._weights(name)
            self._gradient(name, self.least.duration_ns("backward", name))

    def _size(self, code: str, layer: str, lane: str, per_parameter: int, *, parameters: bool = True) -> _Size:
        return self.least.chunks_ns(code, layer, lane, self.stack[layer].elements, self.chunk, per_parameter, parameters=parameters)

    def _up(self, size: _Size, after: float = 0.0) -> None:
        """Copies to the device of which the last one may start at `after`."""
        self.up, self.host = max(self.up + size[0], after + size[1]), self.host + size[2]
        self.host_awaited += size[2]  # copies run in order, so compute that waits for a later one waits for these

    def _down(self, size: _Size, after: float, last_after: float = 0.0) -> None:
        """Copies from the device that may start at `after`, the last one at `last_after`."""
        self.down, self.host = max(max(self.down, after) + size[0], last_after + size[1]), self.host + size[2]

    def _wait(self, time: float) -> None:
        self.compute = max(self.compute, time, self.host_awaited)

    def _weights(self, layer: str) -> None:
        """What the next compute op waits for to have the layer's weights."""
        owed = self.owes and layer not in self.updated
        self.updated.add(layer)
        if layer in self.resident["weights"]:
            if owed:
                self._apply(layer)
                self._wait(self.updates)
            self._settle()
            return
        decoder = self.stack[layer].kind == "decoder"
        loaded = self.loaded[decoder]
        if layer in loaded:
            loaded.remove(layer)
            loaded.append(layer)
            self._settle()
            return
        if len(loaded) == (self.plan.knobs.weight_slots if decoder else 1):
            loaded.pop(0)
        loaded.append(layer)
        if owed and layer not in self.on_host:
            self._apply(layer)
            self._wait(self.updates)
            return
        if owed:
            self._apply_on_host(layer, 0.0)
        self._up(self._size("W", layer, "h2d", self.width, parameters=False), self.cores if owed else 0.0)
        self._wait(self.up)
        self._settle()

    def _apply(self, layer: str, after: float = 0.0) -> None:
        """AdamW on the device, of a gradient that is complete at `after`; weights are in a slot where they do not come with the state."""
        widths = {"weights": self.width, "low": 4 - self.width, "moments": 8}
        streams = [name for name in _STATE if widths[name] and layer not in self.resident[name]]
        up = sum(widths[name] for name in streams if self.owes or name != "weights")
        if self.owes and layer not in self.resident["gradients"]:
            up += gradient_bytes(self.plan, layer)
        if up:
            self._up(self._size("L", layer, "h2d", up))
        elements = self.stack[layer].elements
        size = self.least.chunks_ns("U", layer, "update", elements, self.chunk if up or streams else elements, 0, parameters=True)
        self.updates = max(self.updates + size[0], after + size[0], (self.up if up else 0.0) + size[1])
        if streams:
            self._down(self._size("S", layer, "d2h", sum(widths[name] for name in streams)), 0.0, self.updates)

    def _apply_on_host(self, layer: str, after: float) -> None:
        """AdamW by the host's cores, of a gradient whose last part is there at `after`."""
        size = self._size("UC", layer, "cpu", 0)
        self.cores, self.host = max(self.cores + size[0], after + size[1]), self.host + size[2]
        self.host_awaited += size[2] if self.owes else 0.0

    def _gradient(self, layer: str, duration: float) -> None:
        """The op that makes the layer's gradient, and where that goes."""
        self.arrived[layer] += 1
        last = self.arrived[layer] == contributions(self.plan, layer) * self.micro_batches // self.plan.workload.accumulation
        here, streams = layer not in self.on_host, layer not in self.resident["gradients"]
        per_parameter = gradient_bytes(self.plan, layer)
        if streams and self.arrived[layer] > 1:
            self._up(self._size("GL", layer, "h2d", per_parameter, parameters=False))
            self._wait(self.up)
        self.compute += duration
        if last and here and not self.owes:
            self._settle()
            self.pending = layer
            self.complete = self.compute
            return
        if streams:
            self._down(self._size("G", layer, "d2h", per_parameter, parameters=False), self.compute)
        if last and not self.owes:
            self._apply_on_host(layer, self.down)

    def _settle(self) -> None:
        """The update that waits for the next layer's weights to be on their way."""
        if self.pending:
            layer, self.pending = self.pending, ""
            self._apply(layer, self.complete)
