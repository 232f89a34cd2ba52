"""Computes lower bounds of a plan's step time without lowering the plan.

A search computes these bounds first, and lowers only the plans that may be faster than the best one
so far. There are two bounds. `compute_ns` is the total duration of all compute ops. `step_ns` is
tighter and is computed in six steps (`_EarliestTimes`):

1. Go through the step in the policy's order: the forward pass of each layer, the head, and the
   backward pass of each block of layers. Do this for at most two groups of micro-batches.
2. For each lane, keep the earliest time at which it can have finished the ops added so far. The
   lanes are compute, copies to the device, copies from it, updates on the device, the host's cores,
   and collectives of several GPUs.
3. For each layer, add its copies, updates and compute ops to their lanes. A lane advances by the
   duration of the ops. The last chunk of a copy or update does not start before its input is ready.
4. Before a compute op, advance the compute lane to the time at which the weights that it reads have
   arrived.
5. Also sum the time that the host's memory needs for the traffic of all copies and updates.
   Compute cannot run before the traffic of the copies that it waits for.
6. Return the latest of these times.

If there are more than two groups, the compute time of the groups between the first and the last is
added to the compute lane after the first group.

The result is a lower bound because a lane never waits for a free gradient or state slot, and lanes
do not slow each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.simulator import policies
from megatrain.simulator.costs import CostModel
from megatrain.simulator.costs.protocol import ContendedCosts
from megatrain.simulator.model.layer import ALIGNMENT, DTYPE_BYTES, EMBEDDING
from megatrain.simulator.planner.assessment import without_unused_inputs
from megatrain.simulator.policies.building.training_step import update_flops
from megatrain.simulator.schedule import SAVED_ACTIVATIONS, Op
from megatrain.simulator.schedule.arithmetic import (
    STATE,
    UPDATED,
    blocks_of,
    cost_keys,
    part_elements,
    stack_contributions,
    stack_state,
    whole_matrices,
)
from megatrain.simulator.schedule.plan import Knobs, Plan

_CODES = {
    "embed": "E",
    "forward": "F",
    "head": "H",
    "recompute": "R",
    "backward": "B",
    "embed_backward": "EB",
}
_Size = tuple[float, float, float]
"""Three times in ns, for several ops of one lane: the duration of all ops, the duration of the last
op, and the time that host memory needs for the traffic of all ops."""


class LowerBound:
    """Computes lower bounds of the step time for one model and workload, under any placement. All
    plans have the same `rebuild_outputs`.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        """`plan` has the model, the workload and `rebuild_outputs`. Its other knobs are not
        used.
        """
        self._plan, self._costs = plan, costs
        self._known: dict[tuple[str, str, bool, bool], int] = {}
        self._copied: dict[tuple[object, ...], _Size] = {}
        self.update_sizes: dict[
            tuple[str | int, int, tuple[bool, ...]], tuple[_Size | None, _Size, _Size | None]
        ] = {}
        """The results of `_EarliestTimes._update_sizes` so far: (name or elements of the layer,
        elements of a chunk, whether each class of its state is on the device) -> times."""
        self._exchanged: dict[tuple[object, ...], int] = {}
        self._micro_batches: dict[tuple[str, str], int] = {}
        """(layers that save activations, layers that save attention, both as in a placement) -> the
        result of `_micro_batch_ns`."""
        self._steps: dict[Knobs, float] = {}
        self._host_bytes_per_s = costs.sharing.capacity if isinstance(costs, ContendedCosts) else 0
        self._signatures = {"": ""} | {
            name: layer.signature for name, layer in plan.model.stack.items()
        }
        self.parts = {layer: part_elements(plan, layer) for layer in plan.model.stack}
        """For each layer, the elements that a rank owns: all of them with one GPU."""

    def compute_ns(self, plan: Plan) -> int:
        """Returns a lower bound of the step time in ns: the durations of all compute ops."""
        return self._micro_batch_ns(plan) * plan.micro_batches

    def step_ns(self, plan: Plan) -> float:
        """Returns a lower bound of the step time in ns, which also considers copies and updates.

        Groups of micro-batches between the first and the last add only their compute time. If the
        policy does not go through the model layer by layer, the result is `compute_ns`. Results are
        cached.
        """
        plan = without_unused_inputs(plan)
        if not policies.find(plan.policy).goes_layer_by_layer:
            return self.compute_ns(plan)
        if plan.knobs not in self._steps:
            group = plan.knobs.micro_batch_group
            groups = plan.micro_batches // group
            further_ns = max(groups - 2, 0) * group * self._micro_batch_ns(plan)
            self._steps[plan.knobs] = _EarliestTimes(self, plan, min(groups, 2)).end_ns(further_ns)
        return self._steps[plan.knobs]

    def _micro_batch_ns(self, plan: Plan) -> int:
        """Returns the total duration of all compute ops of one micro-batch. Results are cached."""
        placement = plan.knobs.placement
        key = placement.saved_activations, placement.saved_attention
        if key not in self._micro_batches:
            self._micro_batches[key] = self._new_micro_batch_ns(plan)
        return self._micro_batches[key]

    def _new_micro_batch_ns(self, plan: Plan) -> int:
        """Returns what `_micro_batch_ns` returns, without its cache."""
        saved, saved_attention = plan.placed("saved_activations"), plan.placed("saved_attention")
        total = sum(self.duration_ns(kind, "") for kind in ("embed", "head", "embed_backward"))
        for layer in self._plan.model.decoders:
            saves = layer.name in saved
            total += self.duration_ns("forward", layer.name, saves=saves)
            total += self.duration_ns("backward", layer.name)
            if not saves:
                kept = layer.name in saved_attention
                total += self.duration_ns("recompute", layer.name, kept=kept)
        return total

    def duration_ns(self, kind: str, layer: str, *, kept: bool = False, saves: bool = False) -> int:
        """Returns the duration of a compute op in ns. Results are cached by layer signature.

        Args:
            kind: `embed`, `forward`, `head`, `recompute`, `backward` or `embed_backward`.
            layer: Name of the decoder layer. Empty for the other kinds.
            kept: Whether the attention output is saved, so that recompute skips attention.
            saves: Whether a forward pass saves the layer's activations.
        """
        key = kind, self._signatures[layer], kept, saves
        if key not in self._known:
            op = Op(
                id=f"{_CODES[kind]}{layer}.m0",
                lane="compute",
                writes=(SAVED_ACTIVATIONS,) if saves else (),
                **cost_keys(self._plan, kind, layer, kept=kept),
            )
            self._known[key] = self._costs.duration_ns(op)
        return self._known[key]

    def exchange_ns(self, op: Op) -> int:
        """Returns the duration of the collective `op` in ns. Results are cached."""
        key = op.id[:2], op.bytes, op.parameters
        if key not in self._exchanged:
            self._exchanged[key] = self._costs.duration_ns(op)
        return self._exchanged[key]

    def chunks_ns(
        self,
        code: str,
        layer: str,
        lane: str,
        elements: int,
        chunk: int,
        per_parameter: float,
        *,
        parameters: bool,
        flops: int = 0,
    ) -> _Size:
        """Returns the times of the copies or updates of one layer, split into chunks.

        Args:
            code: Code of the ops in their ids, such as `W` for loading weights.
            layer: Name of the layer.
            lane: Lane that runs the ops.
            elements: Elements of the layer.
            chunk: Elements of one chunk. The last chunk may be smaller.
            per_parameter: Bytes copied per element. 0 for an update.
            parameters: Whether the cost of an op depends on the number of its parameters.
            flops: FLOPs of matrix products of an update, if it is one op.
        """
        name = layer if not layer.isdigit() else ""
        key = code, name, elements, chunk, per_parameter, flops
        if key not in self._copied:
            whole, rest = divmod(elements, chunk)
            all_ns = last_ns = host_ns = 0.0
            for size, count in ((chunk, whole), (rest, 1)):
                if size and count:
                    op = Op(
                        id=f"{code}{layer}",
                        lane=lane,
                        bytes=int(size * per_parameter),
                        parameters=size if parameters else 0,
                        flops=flops,
                    )
                    last_ns = self._costs.duration_ns(op) + self._costs.dispatch_ns.get(lane, 0)
                    all_ns += count * last_ns
                    demand = self._costs.demand(op) if self._host_bytes_per_s else None
                    if demand:
                        host_ns += (
                            count
                            * demand.traffic
                            * self._costs.duration_ns(op)
                            / self._host_bytes_per_s
                        )
            self._copied[key] = all_ns, last_ns, host_ns
        return self._copied[key]


class _EarliestTimes:
    """Earliest times, in ns, at which each lane can have finished the ops added so far.

    Ops are added in the order in which the policy issues them, or later, but never earlier. If an
    op is added later, compute waits for fewer ops, so the result is still a lower bound.
    """

    def __init__(self, bounds: LowerBound, plan: Plan, groups: int) -> None:
        self.bounds, self.plan, self.stack, self.groups = bounds, plan, plan.model.stack, groups
        self.group = plan.knobs.micro_batch_group
        self.compute = self.loads = self.stores = self.updates = self.host_updates = 0.0
        """Time of each lane: compute, copies to the device, copies from it, updates on the device,
        and updates on the host's cores."""
        self.host = 0.0
        """Time that host memory needs for all copies and updates added so far."""
        self.host_awaited = 0.0
        """The part of `host` for ops that must finish before any copy that compute waits for."""
        self.exchanges = 0.0
        """Time of the lane of collectives, with several GPUs."""
        self.exchanging = ("", 0.0)
        """With several GPUs, the layer whose gradient is exchanged after the next layer's weights
        have been gathered, and the time at which the gradient is complete. The name is empty if
        there is no such layer."""
        self.offloaded_at: dict[str, float] = {}
        """For each layer, the time at which its offloaded input is in host memory."""
        self.width = DTYPE_BYTES[plan.workload.dtype]
        self.chunk = max(plan.knobs.chunk_bytes // self.width // ALIGNMENT, 1) * ALIGNMENT
        self.defers_update = policies.find(plan.policy).defers_update(plan)
        self.on_host = plan.placed("host_updated")
        self.parts = bounds.parts
        self.state = stack_state(plan)
        self.contributions = stack_contributions(plan.model, plan.workload)
        self.matrices = whole_matrices(plan)
        self.resident = {name: plan.placed(name) - self.on_host for name in (*UPDATED, "gradients")}
        self.saved_layers, self.saved_attention, self.offloaded = (
            plan.placed("saved_activations"),
            plan.placed("saved_attention"),
            plan.placed("offloaded_inputs"),
        )
        self.loaded: dict[bool, list[str]] = {True: [], False: []}
        """Layers in the weight slots, least recently used first. True: decoder layers. False:
        embedding and head."""
        self.arrived = dict.fromkeys(self.stack, 0)
        """For each layer, how many gradients have been computed so far."""
        self.updated: set[str] = set()
        """Layers whose deferred update has been added."""
        self.pending = ""
        """Layer whose update is added after the next layer's weights. Empty if there is none."""
        self.complete = 0.0
        """Time at which the gradient of the pending layer is complete."""
        hidden = plan.workload.tokens * plan.model.carried * self.width
        self.inputs = [
            bounds.chunks_ns(code, "0", lane, hidden, hidden, 1, parameters=False)
            for code, lane in (("PL", "h2d"), ("P", "d2h"))
        ]
        """Times of copying a layer's input of one micro-batch to the device, and from it."""

    def end_ns(self, further_ns: float) -> float:
        """Returns the earliest end of the step in ns.

        Args:
            further_ns: Compute time of the groups between the first and the last one. Copies of the
                first group may overlap it.
        """
        blocks = blocks_of(self.plan)
        for group in range(self.groups):
            if group == 1:
                self.compute += further_ns
            self._forward(blocks)
            for block in reversed(blocks):
                self._backward(block)
            self._gradient(EMBEDDING, self.group * self.bounds.duration_ns("embed_backward", ""))
        self._update_pending()
        self._exchange_pending()
        return max(
            self.compute,
            self.loads,
            self.stores,
            self.updates,
            self.host_updates,
            self.exchanges,
            self.host,
        )

    def _forward(self, blocks: Iterable[list[int]]) -> None:
        """Adds the forward pass of one group, and the head's forward and backward pass."""
        bounds, head = self.bounds, self.plan.model.head
        first = {str(block[0]) for block in blocks}
        self._wait_for_weights(EMBEDDING)
        self.compute += self.group * bounds.duration_ns("embed", "")
        for layer in self.plan.model.decoders:
            offloads = (
                layer.name in self.offloaded
                and layer.name in first
                and layer.name not in self.saved_layers
            )
            computed = self.compute
            if offloads:
                # The inputs of earlier micro-batches may be copied before the last is computed.
                self._store(self.inputs[1], computed if self.group == 1 else 0.0)
                self.offloaded_at[layer.name] = self.stores
            self._wait_for_weights(layer.name)
            if offloads:
                # All inputs but the first follow the copies that the layer's weights need.
                for left in reversed(range(self.group - 1)):
                    self._store(self.inputs[1], 0.0 if left else computed)
            saves = layer.name in self.saved_layers
            self.compute += self.group * bounds.duration_ns("forward", layer.name, saves=saves)
        self._wait_for_weights(head)
        self._gradient(head, self.group * bounds.duration_ns("head", ""))

    def _backward(self, block: list[int]) -> None:
        """Adds the recompute and the backward pass of a block of decoder layers."""
        names = [str(index) for index in block]
        if names[0] not in self.saved_layers:
            if names[0] in self.offloaded:
                # This copy waits for the input only if the group has one micro-batch. In a larger
                # group, only the last input may have been saved just before. If an update is
                # pending, its copies may come first, and they wait for no input.
                waits = self.group == 1 and not self.pending
                self._load(self.inputs[0], self.offloaded_at[names[0]] if waits else 0.0)
                self._wait_until(self.loads)
            for name in names:
                self._wait_for_weights(name)
                kept = name in self.saved_attention
                self.compute += self.group * self.bounds.duration_ns("recompute", name, kept=kept)
        for name in reversed(names):
            self._wait_for_weights(name)
            self._gradient(name, self.group * self.bounds.duration_ns("backward", name))
        if names[0] in self.offloaded and names[0] not in self.saved_layers:
            # The inputs of the other micro-batches follow the weights and the stored gradients.
            for _ in range(self.group - 1):
                self._load(self.inputs[0])

    def _size(
        self, code: str, layer: str, lane: str, per_parameter: float, *, parameters: bool = True
    ) -> _Size:
        """Returns the times of the ops `code` on all elements of `layer`, in chunks.

        If the chunks are whole matrices, one op for all elements is timed instead, and the last op
        takes no time.
        """
        elements, by_matrix = self.parts[layer], layer in self.matrices
        chunk = elements if by_matrix else self.chunk
        all_ns, last_ns, host_ns = self.bounds.chunks_ns(
            code, layer, lane, elements, chunk, per_parameter, parameters=parameters
        )
        return all_ns, 0.0 if by_matrix else last_ns, host_ns

    def _load(self, size: _Size, after: float = 0.0) -> None:
        """Adds copies to the device. The last one starts at `after` or later."""
        self.loads, self.host = max(self.loads + size[0], after + size[1]), self.host + size[2]
        # Copies of a lane run in order, so compute that waits for a later copy waits for these.
        self.host_awaited += size[2]

    def _store(self, size: _Size, after: float, last_after: float = 0.0) -> None:
        """Adds copies from the device. All start at `after` or later, the last one at `last_after`
        or later.
        """
        self.stores, self.host = (
            max(max(self.stores, after) + size[0], last_after + size[1]),
            self.host + size[2],
        )

    def _wait_until(self, time: float) -> None:
        """Makes compute wait until `time`, and for the traffic in `host_awaited`."""
        self.compute = max(self.compute, time, self.host_awaited)

    def _wait_for_weights(self, layer: str) -> None:
        """Adds the copies and updates that the layer's weights need, and makes compute wait.

        There are four cases:

        1. If the weights are resident, compute waits only for the layer's deferred update, if any.
        2. If the weights are still in a slot, compute does not wait.
        3. If a deferred update runs on the device, it loads the weights with the rest of the state.
        4. Otherwise the weights are copied, after a deferred update on the host if there is one.

        With several GPUs, layers that are not in a slot are gathered after this (`_gather`).
        """
        deferred = self.defers_update and layer not in self.updated
        self.updated.add(layer)
        if layer in self.resident["weights"] and self.plan.gpus == 1:
            if deferred:
                self._update(layer)
                self._wait_until(self.updates)
            self._update_pending()
            return
        decoder = self.stack[layer].kind == "decoder"
        loaded = self.loaded[decoder]
        if layer in loaded:
            loaded.remove(layer)
            loaded.append(layer)
            self._update_pending()
            self._exchange_pending()
            return
        if len(loaded) == (self.plan.knobs.weight_slots if decoder else 1):
            loaded.pop(0)
        loaded.append(layer)
        if self.plan.gpus > 1:
            self._gather(layer, deferred=deferred)
            self._exchange_pending()
            return
        if deferred and layer not in self.on_host:
            self._update(layer)
            self._wait_until(self.updates)
            return
        if deferred:
            self._update_on_host(layer, 0.0)
        weights = self._size("W", layer, "h2d", self.width, parameters=False)
        self._load(weights, self.host_updates if deferred else 0.0)
        self._wait_until(self.loads)
        self._update_pending()

    def _gather(self, layer: str, *, deferred: bool) -> None:
        """Adds the update or the copy of a rank's part of the layer, and the collective that
        gathers all parts, and makes compute wait.
        """
        ready = 0.0
        if deferred:
            self._update(layer)
            ready = self.updates
        elif layer not in self.resident["weights"]:
            self._load(self._size("W", layer, "h2d", self.width, parameters=False))
            ready = self.loads
        self.exchanges = max(self.exchanges, ready) + self._exchange_ns("GW", layer)
        self._wait_until(self.exchanges)

    def _exchange_ns(self, code: str, layer: str, sources: int = 1) -> int:
        """Returns the duration of the collective `code` on the layer. `sources` is the number of
        gradients of the layer that are exchanged at once.
        """
        width = 4 if code == "GX" and self.plan.workload.sum_group > 1 else self.width
        return self.bounds.exchange_ns(
            Op(
                id=f"{code}{layer}b.m0",
                lane="exchange",
                reads=tuple(f"device.{source}" for source in range(sources)),
                bytes=sources * (self.plan.gpus - 1) * self.parts[layer] * width,
                parameters=self.parts[layer],
                elements=self.parts[layer],
            )
        )

    def _exchanged(self, layer: str, duration: float) -> None:
        """Adds the compute ops that produce a gradient of the layer. The gradient is exchanged
        after the next layer's weights have been gathered. A tied head's gradient is exchanged
        together with that of the embedding.
        """
        self.compute += duration
        if self.arrived[layer] % self._sources(layer):
            return
        self._exchange_pending()
        self.exchanging = layer, self.compute

    def _sources(self, layer: str) -> int:
        """Returns how many gradients of the layer are exchanged at once."""
        return self.contributions[layer] // self.plan.workload.accumulation

    def _exchange_pending(self) -> None:
        """Adds the collective that sums the parts of the gradient of `exchanging`, if there is one,
        with the copies of this rank's part.
        """
        (layer, ready), self.exchanging = self.exchanging, ("", 0.0)
        if not layer:
            return
        streams, sources = layer not in self.resident["gradients"], self._sources(layer)
        if streams and self.arrived[layer] > sources:
            self._load(self._size("GL", layer, "h2d", 4, parameters=False))
            ready = max(ready, self.loads)
        self.exchanges = max(self.exchanges, ready) + self._exchange_ns("GX", layer, sources)
        if streams:
            self._store(self._size("G", layer, "d2h", 4, parameters=False), self.exchanges)

    def _update(self, layer: str, after: float = 0.0) -> None:
        """Adds the layer's update on the device, and the copies of its state.

        The gradient is complete at `after`. A deferred update also loads the weights if they are
        not resident. For an update that is not deferred, they are in a slot already.
        """
        loaded, size, stored = self._update_sizes(layer)
        if loaded:
            self._load(loaded)
        self.updates = max(
            self.updates + size[0], after + size[0], (self.loads if loaded else 0.0) + size[1]
        )
        if stored:
            self._store(stored, 0.0, self.updates)

    def _update_sizes(self, layer: str) -> tuple[_Size | None, _Size, _Size | None]:
        """Returns the times of the layer's update on the device, and of the copies of its state to
        the device and from it. None stands for no copies. Results are cached.
        """
        known, resident = self.bounds.update_sizes, self.resident
        places = tuple([layer in resident[name] for name in STATE])
        key = self._alike(layer), self.chunk, places
        if key not in known:
            known[key] = self._new_update_sizes(layer)
        return known[key]

    def _alike(self, layer: str) -> str | int:
        """Returns the number of elements of a decoder layer whose update may be cut anywhere. Such
        layers with equal numbers have ops of the same sizes. For other layers, returns the name.
        """
        return self.parts[layer] if layer.isdigit() and layer not in self.matrices else layer

    def _new_update_sizes(self, layer: str) -> tuple[_Size | None, _Size, _Size | None]:
        """Returns what `_update_sizes` returns, without its cache."""
        state = self.state[layer]
        streams = [
            name for name in UPDATED if state[name].bytes and layer not in self.resident[name]
        ]
        up = sum([state[name].bytes for name in streams if self.defers_update or name != "weights"])
        if self.defers_update and layer not in self.resident["gradients"]:
            up += state["gradients"].bytes
        loaded = self._size("L", layer, "h2d", up) if up else None
        elements = self.parts[layer]
        size = self.bounds.chunks_ns(
            "U",
            layer,
            "update",
            elements,
            self.chunk if (up or streams) and layer not in self.matrices else elements,
            0,
            parameters=True,
            flops=update_flops(self.plan, layer, 0, elements).get("flops", 0),
        )
        if layer in self.matrices:
            size = (size[0], 0.0, size[2])
        moved = sum([state[name].bytes for name in streams])
        return loaded, size, self._size("S", layer, "d2h", moved) if streams else None

    def _update_on_host(self, layer: str, after: float) -> None:
        """Adds the layer's update on the host's cores. The last part of the gradient is in host
        memory at `after`.
        """
        size = self._size("UC", layer, "cpu", 0)
        self.host_updates, self.host = (
            max(self.host_updates + size[0], after + size[1]),
            self.host + size[2],
        )
        self.host_awaited += size[2] if self.defers_update else 0.0

    def _gradient(self, layer: str, duration: float) -> None:
        """Adds the compute ops that produce a gradient of the layer, and the copies and the update
        that follow. `duration` is the total duration of these compute ops for the group, in ns.
        """
        self.arrived[layer] += 1
        if self.plan.gpus > 1:
            self._exchanged(layer, duration)
            return
        last = (
            self.arrived[layer]
            == self.contributions[layer] * self.groups // self.plan.workload.accumulation
        )
        on_device, streams = layer not in self.on_host, layer not in self.resident["gradients"]
        per_parameter = self.state[layer]["gradients"].bytes
        if streams and self.arrived[layer] > 1:
            self._load(self._size("GL", layer, "h2d", per_parameter, parameters=False))
            self._wait_until(self.loads)
        self.compute += duration
        if last and on_device and not self.defers_update:
            self._update_pending()
            self.pending = layer
            self.complete = self.compute
            return
        if streams:
            self._store(
                self._size("G", layer, "d2h", per_parameter, parameters=False), self.compute
            )
        if last and not self.defers_update:
            self._update_on_host(layer, self.stores)

    def _update_pending(self) -> None:
        """Adds the pending update, if there is one. It is called after the copy of the next layer's
        weights has been added.
        """
        if self.pending:
            layer, self.pending = self.pending, ""
            self._update(layer, self.complete)
