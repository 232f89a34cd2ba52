"""The policy `overlapped`: copies and AdamW run while the GPU computes.

The plan's placement says which layers keep their weights, optimizer state and gradients on the
device. Everything else lives in host memory and streams through a few device buffers (slots). AdamW
runs on the device, on a CUDA stream of its own, next to forward and backward. Like every policy,
this one writes a step as a sequential program. The builder derives the dependencies from the
buffers, and the lanes give the overlap.

With clipping by the global norm (`clipping = "global"`), a step is:

    for each layer, first to last:
        the update that the step before deferred: load_state, update, save_state, chunk by chunk
        forward
    head with loss, forward and backward
    for each layer, last to first:
        recompute, backward, save the gradient, compute its norm
    clip: the coefficient, from the norms of all layers

The coefficient depends on every gradient, so no update can start before the backward pass is over.
A step therefore defers its update to the next step, which updates each layer just before its
forward pass. Every forward pass reads updated weights, never stale ones. `flush_update` applies the
update that the last step deferred.

If gradients are stored in 8 bits (`gradients = "8bit"`), `encode_gradients` comes between the norm
and the copy of a gradient. The gradient is copied and stored in codes, and the deferred update
reads these codes.

With any other clipping, a layer is updated inside the backward pass, as soon as its gradient is
complete. The gradient of a layer that the device updates never leaves the device.

* `clipping = "update"` needs the sums of g^2 / v of a whole layer before any of it is updated. If
  the state slots hold all chunks of the layer, its state is loaded once. In a larger layer, the
  second moments are loaded first, and all state again for the update.
* `weights_ahead` changes the order on the `h2d` lane. Compute waits for the weights of the next
  layer, but not for the state of the layer before it. With `weights_ahead = 1`, these weights are
  loaded before that state.

With several micro-batches in a group (`micro_batch_group`), the weights of a layer are loaded once
for the whole group, and the sum of the group's gradients stays in its slot until it is complete. So
the copies of a step grow with the number of groups, not with the number of micro-batches. With
`checkpoint_interval` above 1, the gradients of each micro-batch are copied.

Layers in `host_updated` are updated by the CPU at the same point of the program (`cpu_update`).
Their gradients are copied to the host and only their weights are copied back, each chunk as soon as
it is updated. This avoids the copies of their state but uses host memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.chunked_store import ChunkedStore
from megatrain.simulator.policies.building.clipping import Chunk, Clipping
from megatrain.simulator.policies.building.device_update import DeviceUpdate
from megatrain.simulator.policies.building.parameter_store_policy import ParameterStorePolicy
from megatrain.simulator.policies.building.sharded import ShardedStore
from megatrain.simulator.policies.building.slot_cache import pool_of
from megatrain.simulator.schedule import Buffer, BufferDtype, OpId, Schedule
from megatrain.simulator.schedule.arithmetic import (
    STATE,
    UPDATED,
    StateClass,
    refuse_on_host,
    stack_contributions,
    state_sizes,
    sums_on_device,
    whole_matrices,
)
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.update_layout import update_layout


def _refuse_groups(plan: Plan) -> None:
    """Raises UserError if the plan cannot sum groups of micro-batches first (`sum_group`)."""
    group, knobs = plan.workload.sum_group, plan.knobs
    for where, found, only in (
        ("workload: clipping", plan.workload.clipping, "global"),
        ("model: tied embeddings", plan.model.tied, False),
        ("knobs: micro_batch_group", knobs.micro_batch_group, group),
        ("knobs: checkpoint_interval", knobs.checkpoint_interval, 1),
    ):
        if found != only:
            raise UserError(
                f"workload: sum_group {group}: {where}",
                found=found,
                allowed=only,
                fix="change it, or set sum_group = 1",
            )


class _Homes(NamedTuple):
    """The persistent buffers of one class of state."""

    buffers: tuple[Buffer, ...]
    """What a builder has to keep."""
    ids: dict[tuple[StateClass, str], str]
    """(class, layer) -> the id of its buffer."""
    streaming: frozenset[str]
    """Layers whose buffer is in host memory."""


@plugins.cached(maxsize=1024)
def _homes(
    kind: type[Builder],
    model: ModelSpec,
    work: Workload,
    name: StateClass,
    resident: frozenset[str],
    temporary: frozenset[str],
) -> _Homes:
    """Returns the buffers of the class `name`: on the device for layers in `resident`, none for
    layers in `temporary`, and in host memory for the others.

    `kind` is the kind of builder that they are for. Cached because the plans of a search place each
    class in few ways.
    """
    builder = kind("")
    sizes = [entry for entry in state_sizes(model, work)[name] if entry[0] not in temporary]
    ids = {
        (name, layer): builder.persistent(
            f"{'device' if layer in resident else 'host'}.{name}", layer, size, name, dtype
        )
        for layer, size, dtype in sizes
    }
    streaming = frozenset([layer for layer, _, _ in sizes if layer not in resident])
    return _Homes(builder.build().buffers, ids, streaming)


@plugins.cached(maxsize=1024)
def _distinct(
    model: ModelSpec, work: Workload, streamed: frozenset[str], resident: frozenset[str]
) -> tuple[str, ...]:
    """Returns one layer of each group of layers that need the same slots.

    Args:
        model: The model.
        work: The workload.
        streamed: Layers whose weights are in host memory.
        resident: Layers whose gradients stay on the device.
    """
    summed = stack_contributions(model, work)
    groups = {
        (spec.kind, spec.elements, summed[layer], layer in streamed, layer in resident): layer
        for layer, spec in model.stack.items()
    }
    return tuple(groups.values())


class _OverlappedStore(ChunkedStore):
    """The `ParameterStore` of one step: buffers for resident layers, slots for streamed layers.

    `compute` asks the store for weights and gradient buffers, layer by layer. The store emits the
    copies and updates that have to come first.
    """

    def __init__(self, builder: Builder, plan: Plan) -> None:
        super().__init__(builder, plan)
        self.defers = plan.workload.clipping == "global"
        self.encodes = plan.workload.gradients == "8bit"
        """Whether a complete gradient is stored in codes. A layer then has only one gradient in a
        step, because the workload does not accumulate."""
        self.grouped = 1 < plan.workload.sum_group < plan.workload.accumulation
        """Whether groups of micro-batches are summed before they are added to earlier ones."""
        if self.grouped:
            _refuse_groups(plan)
        self.contributions = stack_contributions(plan.model, plan.workload)
        self.matrices = whole_matrices(plan)
        """Layers that are cut between matrices only."""
        self.streaming: dict[StateClass, frozenset[str]] = {}
        """Class -> the layers that keep it in host memory."""
        self.on_host = plan.placed("host_updated")
        refuse_on_host(
            plan, self.on_host, "knobs.placement: host_updated", "leave out the decoder layers"
        )
        self.clipping = Clipping(builder, plan, "device", "update", "update", self.on_host)
        for name in STATE:
            resident, temporary = plan.placed(name) - self.on_host, frozenset[str]()
            if name == "gradients" and not self.defers:
                summed = {layer for layer in self.stack if sums_on_device(plan, layer)}
                temporary = frozenset(summed - resident - self.on_host)
            homes = _homes(type(builder), plan.model, plan.workload, name, resident, temporary)
            builder.keep(homes.buffers)
            self.home |= homes.ids
            self.streaming[name] = homes.streaming
        self._make_slots()
        self.arrived = dict.fromkeys(self.stack, 0)
        """Layer -> gradient contributions that the step has written so far."""
        self.pending: tuple[str, str] | None = None
        """(layer, gradient buffer) of an update that waits until the copies of the next layer's
        weights are emitted."""

    def _streams(self, name: StateClass, layer: str) -> bool:
        """Returns whether this class of the layer's data lives in host memory."""
        return layer in self.streaming[name]

    def _make_slots(self) -> None:
        """Makes the slots for chunks of state, for streamed weights and for gradients."""
        for name in STATE if self.defers else UPDATED:
            # Layers of one kind need the same slots, so one of them is enough.
            alike = {
                (spec.kind, spec.elements, spec.signature): layer
                for layer in self.streaming[name] - self.on_host
                for spec in (self.stack[layer],)
            }
            streaming = {
                (self.state[layer][name], self._longest_chunk(layer)) for layer in alike.values()
            }
            dtypes = {part.dtype for part, _ in streaming}
            if streaming:
                self.builder.slots(
                    f"device.{name}_chunks",
                    self.plan.knobs.state_slots,
                    max(part.whole(longest) for part, longest in streaming),
                    name,
                    dtypes.pop() if len(dtypes) == 1 else "home",
                    chunk=True,
                    knob="state_slots",
                )
        pools: dict[tuple[str, StateClass, BufferDtype, str], list[tuple[int, int]]] = {}
        streamed, kept = self.streaming["weights"], self.plan.placed("gradients") - self.on_host
        for layer in _distinct(self.plan.model, self.plan.workload, streamed, kept):
            spec = self.stack[layer]
            decoder = spec.kind == "decoder"
            if layer in streamed:
                cache = self._cache(layer)
                kind: tuple[str, StateClass, BufferDtype, str] = (
                    cache.pool,
                    "weights",
                    self.plan.workload.dtype,
                    "weight_slots" if decoder else "",
                )
                pools.setdefault(kind, []).append((cache.slots, self.width * spec.elements))
            count = self.plan.knobs.gradient_slots if decoder else 1
            if self.grouped:  # one slot for the sum of a group, one for the sum of earlier groups
                count = max(count, 2)
            part, knob = self.state[layer]["gradients"], "gradient_slots" if decoder else ""
            if layer not in kept or self.grouped:
                pool = self._coded_pool(layer) if self.encodes else self._gradient_pool(layer)
                kind = (pool, "gradients", part.dtype, knob)
                pools.setdefault(kind, []).append((count, part.of(spec.elements)))
            if self.encodes:
                kind = (self._gradient_pool(layer), "gradients", self.plan.workload.dtype, knob)
                pools.setdefault(kind, []).append((count, self.width * spec.elements))
        for (pool, name, dtype_, knob), needs in pools.items():
            self.builder.slots(
                pool,
                max(count for count, _ in needs),
                max(size for _, size in needs),
                name,
                dtype_,
                knob=knob,
            )

    def _gradient_pool(self, layer: str) -> str:
        """Returns the pool of slots for the layer's gradient.

        Single gradients and fp32 sums of several gradients have different dtypes, so they have
        separate pools.
        """
        name = "sums" if self.contributions[layer] > 1 else "gradients"
        return pool_of(f"device.streamed_{name}", self.stack[layer])

    def _coded_pool(self, layer: str) -> str:
        """Returns the pool of slots for the codes of the layer's gradient, on their way out."""
        return pool_of("device.coded_gradients", self.stack[layer])

    def _chunks(self, layer: str) -> list[tuple[int, int, int]]:
        if layer not in self.matrices:
            return super()._chunks(layer)
        layout = update_layout(self.plan.workload.optimizer, self.stack[layer])
        assert layout
        return layout.chunks(self.chunk)

    def _longest_chunk(self, layer: str) -> int:
        """Returns the parameters of the layer's longest chunk."""
        if layer in self.matrices:
            return max(count for _, _, count in self._chunks(layer))
        return min(self.chunk, self.stack[layer].elements)

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """Returns a device buffer with the layer's weights, updated if an update was deferred.

        Emits the deferred update at the layer's first use in the step, and the copy of streamed
        weights that are not in a slot. An update on the device writes the new weights into the
        slot, so they need no copy.
        """
        deferred = self.defers and layer not in self.updated
        self.updated.add(layer)
        if not self._streams("weights", layer):
            if deferred:
                self.apply_deferred(layer)
            self.emit_pending_update()
            return self.home["weights", layer]
        cache = self._cache(layer)
        slot = cache.find(layer)
        if slot is not None:
            self.emit_pending_update()
            return slot
        if self.pending and self.pending[0] == cache.next_to_leave():
            # The pending update reads its old weights from the slot that is about to be reused.
            self.emit_pending_update()
        slot = cache.take(layer)
        if deferred:
            self.apply_deferred(layer, slot)
        if not deferred or layer in self.on_host:
            self._copies(
                "load_weights", layer, phase, micro, self.home["weights", layer], slot, self.width
            )
            self.emit_pending_update()
        return slot

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        """Returns a device buffer for the layer's gradient, and whether the op adds to its content.

        Emits the copy of the sum of earlier contributions if it is in host memory.
        """
        home = self.home.get(("gradients", layer), "")
        adding = self.arrived[layer] > 0
        grouping = self.grouped and self.arrived[layer] >= self.plan.workload.sum_group
        if home.startswith("device.") and not (self.encodes or grouping):
            return home, adding
        if layer in self.summing:
            return self.summing.pop(layer), True
        pool = self._gradient_pool(layer)
        if self.pending and self.plan.knobs.gradient_slots == 1:
            self.emit_pending_update()
        slot = self.builder.acquire(pool)
        if self.grouped:
            return slot, False
        if adding:
            width = self.state[layer]["gradients"].bytes
            self._copies("load_gradients", layer, phase, micro, home, slot, width)
        return slot, adding

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        """Takes over the gradient in `buffer`.

        A complete gradient, with all contributions, is measured for clipping. If updates are not
        deferred, the layer is then updated: at once, or with `weights_ahead` after the copies of
        the next layer's weights. A gradient that is needed later is copied to its persistent
        buffer.
        """
        self.arrived[layer] += 1
        group = self.plan.workload.sum_group
        if self.grouped and self.arrived[layer] > group and self.arrived[layer] % group == 0:
            buffer = self._added(layer, phase, micro, buffer)
        complete = self.arrived[layer] == self.contributions[layer]
        on_device = layer not in self.on_host
        if complete and (self.defers or not (on_device or self.clipping.kind == "update")):
            self.clipping.measure(layer, buffer, "")
        if complete and on_device and not self.defers:
            self.emit_pending_update()
            self.pending = (layer, buffer)
            if not self.plan.knobs.weights_ahead:
                self.emit_pending_update()
            return
        home = self.home.get(("gradients", layer), "")
        knobs = self.plan.knobs
        if (micro + 1) % knobs.micro_batch_group and knobs.checkpoint_interval == 1:
            # The next micro-batch of the group adds to this slot. With a checkpoint interval above
            # 1, each layer of a block would need such a slot.
            if buffer != home:
                self.summing[layer] = buffer
            return
        if self.encodes:
            buffer = self._encoded(layer, buffer, home)
        if buffer != home:
            width = self.state[layer]["gradients"].bytes
            self._copies("save_gradients", layer, phase, micro, buffer, home, width)
            self.builder.release(buffer)
        if complete and not self.defers:
            self.apply_on_host(layer)

    def _added(self, layer: str, phase: str, micro: int, buffer: str) -> str:
        """Emits the op that adds the sum of a group of micro-batches, in `buffer`, to the sum of
        earlier groups. Returns the buffer with the result: a slot, or the layer's gradient on the
        device.
        """
        total = home = self.home["gradients", layer]
        if self._streams("gradients", layer):
            total = self.builder.acquire(self._gradient_pool(layer))
            width = self.state[layer]["gradients"].bytes
            self._copies("load_gradients", layer, phase, micro, home, total, width)
        self.builder.op(
            OpId("accumulate_gradients", layer, phase, micro),
            "update",
            [buffer, total],
            [total],
            parameters=self.stack[layer].elements,
        )
        self.builder.release(buffer)
        return total

    def _encoded(self, layer: str, gradient: str, home: str) -> str:
        """Emits the op that encodes the gradient, and releases the gradient's slot. Returns the
        buffer with the codes: `home` if it is on the device, otherwise a slot.
        """
        resident = home.startswith("device.")
        coded = home if resident else self.builder.acquire(self._coded_pool(layer))
        self.builder.op(
            OpId("encode_gradients", layer),
            "update",
            [gradient],
            [coded],
            parameters=self.stack[layer].elements,
        )
        self.builder.release(gradient)
        return coded

    def apply_deferred(self, layer: str, slot: str | None = None) -> None:
        """Emits the update of `layer` that the step before deferred. An update on the device also
        writes the new weights to `slot`, if it is given.
        """
        if layer in self.on_host:
            self.apply_on_host(layer)
        else:
            self.apply(layer, self.home["gradients", layer], slot)

    def apply_on_host(self, layer: str) -> None:
        """Emits AdamW on `layer` by the CPU, from a gradient in host memory.

        The update runs chunk by chunk, so copies of the new weights can start before all chunks are
        updated.
        """
        chunks = self._chunks(layer)
        if self.clipping.kind == "update":
            rows = self.clipping.rows(layer)
            for chunk in chunks:
                gradient, moments = (
                    f"{home}#{chunk[0]}"
                    for home in (self.home["gradients", layer], self.home["moments", layer])
                )
                self.clipping.ratios(layer, gradient, moments, rows, chunk)
            self.clipping.clip_by(layer, rows)
        homes = {name: self.home[name, layer] for name in STATE if (name, layer) in self.home}
        parted = tuple(homes.values())
        self.builder.in_chunks(
            OpId("cpu_update", layer),
            "cpu",
            [homes.pop("gradients"), self.clipping.factor(layer)],
            homes.values(),
            chunks,
            parted,
            "parameters",
        )

    def emit_pending_update(self) -> None:
        """Emits the pending update, if there is one, and releases its gradient's slot."""
        if self.pending is None:
            return
        (layer, gradient), self.pending = self.pending, None
        measured = (
            self.clipping.kind == "update"
            and self._streams("moments", layer)
            and len(self._chunks(layer)) > self.plan.knobs.state_slots
        )
        if measured:
            self._measure_in_chunks(layer, gradient)
        self.apply(layer, gradient, source=self._cache(layer).peek(layer), measured=measured)
        if gradient != self.home.get(("gradients", layer)):
            self.builder.release(gradient)

    def _measure_in_chunks(self, layer: str, gradient: str) -> None:
        """Emits the sums of g^2 / v of a layer whose chunks do not all fit in the state slots.

        Only the second moments are loaded for this. The update loads them again, because it can
        start only after the sums of all chunks.
        """
        rows = self.clipping.rows(layer)
        for chunk in self._chunks(layer):
            number, first, count = chunk
            slot = self.builder.acquire("device.moments_chunks")
            size = self.state[layer]["moments"].of(count) // 2  # AdamW keeps two moments
            moved = {"offset": first, "parameters": count, "bytes": size}
            self.builder.op(
                OpId("load_second_moment", layer, chunk=number),
                "h2d",
                [f"{self.home['moments', layer]}#{number}"],
                [slot],
                **moved,
            )
            self.clipping.ratios(layer, gradient, slot, rows, chunk)
            self.builder.release(slot)
        self.clipping.clip_by(layer, rows)

    def apply(
        self,
        layer: str,
        gradient: str,
        copy_to: str | None = None,
        source: str | None = None,
        measured: bool = True,
    ) -> None:
        """Emits AdamW on `layer` by the device, chunk by chunk if any of its state streams.

        Args:
            layer: The layer to update.
            gradient: The buffer with its gradient, on the device or the host.
            copy_to: A weight slot that receives a copy of the new weights.
            source: A weight slot that holds the old weights, which are then not loaded.
            measured: Whether the ops that compute the layer's clip factor have been emitted. If
                not, they are emitted here. The moments must then be in one buffer, or the state
                slots must hold all chunks.
        """
        streamed = [
            name
            for name in STATE
            if self._streams(name, layer) and (name != "gradients" or gradient.startswith("host."))
        ]
        chunks: Sequence[Chunk] = (
            self._chunks(layer) if streamed else [(None, 0, self.stack[layer].elements)]
        )
        update = DeviceUpdate(self, layer, gradient, copy_to, source, streamed)
        if not measured and self.clipping.kind == "update" and "moments" in streamed:
            rows, held = self.clipping.rows(layer), []
            for chunk in chunks:
                held.append(update.load(chunk))
                self.clipping.ratios(layer, gradient, held[-1]["moments"], rows, chunk)
            self.clipping.clip_by(layer, rows)
            for chunk, slots in zip(chunks, held, strict=True):
                update.apply(chunk, slots)
            return
        for chunk in chunks:
            slots = update.load(chunk)
            if not measured and not chunk[0]:  # once, with the first chunk
                self.clipping.measure(layer, gradient, self.home.get(("moments", layer), ""))
            update.apply(chunk, slots)

    def losses_written(self, losses: list[str]) -> None:
        self.clipping.losses = losses
        if not self.defers:
            self.clipping.finish()

    def update(self) -> None:
        """Ends the step. With clipping by the global norm, it emits the op that computes the clip
        coefficient for the next step.
        """
        self.emit_pending_update()
        self.decoders.clear()
        self.vocabulary.clear()
        if self.defers:
            self.clipping.finish()


class Overlapped(ParameterStorePolicy):
    """Keeps or streams each class of data as the plan places it, and updates next to compute."""

    name = "overlapped"
    knobs = (
        "weight_slots",
        "gradient_slots",
        "state_slots",
        "checkpoint_interval",
        "chunk_bytes",
        "weights_ahead",
        "micro_batch_group",
        "rebuild_outputs",
        "exchange_bytes",
    )
    placements = (
        "weights",
        "master_low",
        "moments",
        "gradients",
        "saved_activations",
        "offloaded_inputs",
        "saved_attention",
        "offloaded_attention",
        "host_updated",
    )
    goes_layer_by_layer = True
    shards = True

    def storage(self, builder: Builder, plan: Plan) -> _OverlappedStore | ShardedStore:
        return _OverlappedStore(builder, plan) if plan.gpus == 1 else ShardedStore(builder, plan)

    def defers_update(self, plan: Plan) -> bool:
        """Returns True with clipping by the global norm."""
        return plan.workload.clipping == "global"

    def flush_update(self, plan: Plan) -> Schedule | None:
        """Returns the update that a step of `plan` defers, or None if it defers none."""
        if not self.defers_update(plan):
            return None
        builder = Builder(plan.policy)
        store = self.storage(builder, plan)
        for layer in plan.model.stack:
            store.apply_deferred(layer)
        return builder.build()
