"""ShardedStore: the `ParameterStore` of a plan for several GPUs, of one host or of several.

Each of the N GPUs has its own process, a rank, and all ranks execute the same schedule. Rank r owns
part r of each layer: weights, low halves, moments and gradients of 1/N of its elements
(`part_elements`). The plan's placement says which of these it keeps on its GPU. The others are in
its own host memory. If all state is in host memory, a step is:

    for each layer, first to last:
        the update of the rank's part that the step before deferred, chunk by chunk:
            load_state, update, save_state; the new weights go to the rank's part of a slot
        gather_weights: receives the other parts from the other ranks
        forward
    head with loss, forward and backward
    for each layer, last to first:
        load_weights and gather_weights, if the layer is no longer in a slot
        for the layer above: exchange_gradients sends each rank its part, and adds the parts that
            arrive, rank 0's first (a tied head's gradient is exchanged together with the
            embedding's); sum_rows of the sum, and a copy of the sum to host memory
        recompute, backward
    exchange_gradients of the embedding, as above
    exchange_sums: the norms of all layers and the losses of all micro-batches, on every rank
    clip: the coefficient, from the norms

State on the device is neither loaded nor saved. Whole layers are gathered from the part of their
weights on the device into a slot, just ahead of use, and `exchange_gradients` adds to the part of
the gradient in its place. If all state is on the device, a step is that of plain sharded training.

The result has the same bits as on one GPU. The micro-batches of a step are divided into groups
whose gradients are summed first (`Workload.sum_group`). Ranks take these groups in turn, so the
exchange adds them in the order of the step. A part is a whole number of `NORM_ROW` elements, so the
sums of rows are the same as on one GPU, and every rank adds them in the same order.

All collectives are on the lane `exchange`, in the same order on every rank, so ranks cannot
deadlock. It is enough to prove the schedule of each rank free of races by itself, because a
collective ends on a rank only when the rank's own buffers can be used again.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import ALIGNMENT
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.chunked_store import ChunkedStore
from megatrain.simulator.policies.building.clipping import Chunk, Clipping
from megatrain.simulator.policies.building.device_update import DeviceUpdate
from megatrain.simulator.policies.building.slot_cache import pool_of
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.arithmetic import NORM_ROW, SCALAR_BYTES, STATE, part_elements
from megatrain.simulator.schedule.plan import Plan


def refuse_sharded(plan: Plan) -> None:
    """Raises UserError if the plan has a setting that is not supported with several GPUs yet."""
    work, knobs = plan.workload, plan.knobs
    for where, found, only, fix in (
        ("workload: clipping", work.clipping, "global", "clip by global"),
        ("workload: optimizer", work.optimizer, "adamw", "use optimizer adamw"),
        ("workload: state", work.state, "exact", "use state exact"),
        ("workload: gradients", work.gradients, "exact", "use gradients exact"),
        ("workload: fp8", work.fp8, None, "use --dtype bf16"),
        (
            "knobs.placement: host_updated",
            knobs.placement.host_updated or None,
            None,
            "leave it empty (`megatrain plan --from` with --set host_updated=)",
        ),
        (
            "knobs: micro_batch_group",
            knobs.micro_batch_group,
            work.sum_group,
            f"set micro_batch_group = {work.sum_group}, the workload's sum_group",
        ),
        (
            "knobs: checkpoint_interval",
            knobs.checkpoint_interval if work.sum_group > 1 else 1,
            1,
            "set checkpoint_interval = 1",
        ),
    ):
        if found != only:
            raise UserError(
                f"plan for {plan.gpus} GPUs: {where}",
                found=found,
                allowed="nothing" if only is None else only,
                fix=f"{fix}, or plan for one GPU",
            )


class ShardedStore(ChunkedStore):
    """The parameter store of one rank's step."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        refuse_sharded(plan)
        super().__init__(builder, plan)
        self.group = plan.workload.sum_group
        self.sent_width = 4 if self.group > 1 else self.width
        """Bytes of an element of the gradients that are exchanged. A sum of several is fp32."""
        self.parts = {layer: part_elements(plan, layer) for layer in self.stack}
        self.clipping = Clipping(builder, plan, "device", "update", "update")
        for name in STATE:
            resident = plan.placed(name)
            for layer, elements in self.parts.items():
                part = self.state[layer][name]
                if part.bytes:
                    self.home[name, layer] = builder.persistent(
                        f"device.{name}" if layer in resident else f"host.{name}",
                        layer,
                        part.of(elements),
                        name,
                        part.dtype,
                        sharded=True,
                        per_gpu=True,
                    )
        self.sources = {
            layer: 2 if plan.model.tied and spec.kind != "decoder" else 1
            for layer, spec in self.stack.items()
        }
        """Layer -> gradients of a micro-batch: two for a head that is tied to the embedding."""
        self._make_slots()
        rows = {layer: elements // NORM_ROW for layer, elements in self.parts.items()}
        self.row_sums = {
            layer: builder.persistent("device.row_sums", layer, 4 * count, "row_sums")
            for layer, count in rows.items()
        }
        self.losses = {
            micro: builder.persistent("device.all_losses", f"all.{micro}", SCALAR_BYTES, "losses")
            for micro in range(plan.workload.accumulation)
        }
        """Micro-batch of the step, of any rank -> the buffer with its loss."""
        scalars = sum(rows.values()) + plan.micro_batches
        self.sums_bytes = 4 * scalars
        """Bytes that a rank sends in `exchange_sums`."""
        self.pieces = {layer: self._piece(layer) for layer in self.stack}
        """Layer -> the elements of a part of its gradient that are exchanged at a time."""
        received = max(
            self.pieces[layer] * (self.sources[layer] + (self.pieces[layer] < part))
            for layer, part in self.parts.items()
        )
        self.inbox = builder.persistent(
            "device.exchange_workspace",
            "all",
            max(plan.gpus * self.sent_width * received, (plan.gpus + 1) * self.sums_bytes),
            "workspace",
        )
        """The buffer for the data that a collective receives, before it is added."""
        self.own_losses: list[str] = []
        """The buffers with the losses of this rank's micro-batches."""
        self.pending: tuple[str, str, int, list[str]] | None = None
        """The layer, the phase, the micro-batch and the slots of a gradient that is complete and
        whose exchange was not emitted yet."""
        self.tied: list[str] = []
        """The slot with the gradient of a head that is tied to the embedding, until the gradient of
        the embedding is complete too."""

    def _piece(self, layer: str) -> int:
        """Returns the elements of a part of the layer's gradient that are exchanged at a time.

        The workspace has room for the pieces that a rank receives and, if they are not whole parts,
        for the pieces that it sends (`operands.exchange_room`). Without `exchange_bytes`, the
        pieces that a rank receives have the size of a chunk.
        """
        part, knobs = self.parts[layer], self.plan.knobs
        elements = self.chunk // self.plan.gpus
        if knobs.exchange_bytes:
            room = knobs.exchange_bytes // (self.plan.gpus * self.sent_width)
            if room >= self.sources[layer] * part:
                return part
            elements = room // (self.sources[layer] + 1)
        return min(part, max(elements // ALIGNMENT, 1) * ALIGNMENT)

    def _make_slots(self) -> None:
        """Makes the slots for chunks of state, for whole layers, and for parts of gradients."""
        knobs, work, slots = self.plan.knobs, self.plan.workload, self.builder.slots
        for name in STATE:
            streamed = [layer for layer in self.stack if self._streams(name, layer)]
            if streamed:
                part = self.state[streamed[0]][name]
                longest = min(self.chunk, max(self.parts[layer] for layer in streamed))
                slots(
                    f"device.{name}_chunks",
                    knobs.state_slots,
                    part.of(longest),
                    name,
                    part.dtype,
                    chunk=True,
                    knob="state_slots",
                )
        for suffix, decoder, counts, named in (
            ("", True, (knobs.weight_slots, knobs.gradient_slots), True),
            ("_vocabulary", False, (1, 1), False),
        ):
            layers = [
                layer for layer, spec in self.stack.items() if (spec.kind == "decoder") == decoder
            ]
            whole = self.plan.gpus * max(self.parts[layer] for layer in layers)
            dtype, pool = work.dtype, self.decoders.pool if decoder else self.vocabulary.pool
            slots(
                pool,
                counts[0],
                self.width * whole,
                "weights",
                dtype,
                knob="weight_slots" if named else "",
            )
            knob = "gradient_slots" if named else ""
            slots(
                f"device.streamed_gradients{suffix}",
                max(counts[1], 1 if decoder else max(self.sources.values())),
                self.sent_width * whole,
                "gradients",
                "fp32" if self.group > 1 else dtype,
                knob=knob,
            )
            streamed = [layer for layer in layers if self._streams("gradients", layer)]
            if streamed:
                slots(
                    f"device.gradient_parts{suffix}",
                    counts[1],
                    4 * max(self.parts[layer] for layer in streamed),
                    "gradients",
                    "fp32",
                    sharded=True,
                    knob=knob,
                )

    def _received(self, layer: str, width: int) -> int:
        """Returns the bytes that a rank receives if it exchanges the layer."""
        return (self.plan.gpus - 1) * self.parts[layer] * width

    def weights(self, layer: str, phase: str, micro: int) -> str:
        slot = self._cache(layer).find(layer) or self._gathered(layer, phase, micro)
        self._exchange()
        return slot

    def _gathered(self, layer: str, phase: str, micro: int) -> str:
        """Gathers the layer's weights, and returns their slot."""
        slot, home = self._cache(layer).take(layer), self.home["weights", layer]
        streamed = self._streams("weights", layer)
        if layer not in self.updated:
            self.updated.add(layer)
            self.apply_deferred(layer, slot if streamed else None)
        elif streamed:
            self._copies("load_weights", layer, phase, micro, home, slot, self.width)
        self.builder.op(
            OpId("gather_weights", layer, phase, micro),
            "exchange",
            [slot if streamed else home],
            [slot],
            bytes=self._received(layer, self.width),
            parameters=self.parts[layer],
        )
        return slot

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        if layer in self.summing:
            return self.summing.pop(layer), True
        return self.builder.acquire(pool_of("device.streamed_gradients", self.stack[layer])), False

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        """Exchanges the sum of a group of micro-batches, and adds the parts that arrive to the sum
        of earlier groups.

        The weights of the next layer are gathered before the exchange, because compute needs them
        first. The gradient of a tied head waits for the gradient of the embedding, because one GPU
        adds both gradients of a micro-batch before those of the next micro-batch.
        """
        if (micro + 1) % self.group:
            self.summing[layer] = buffer
            return
        if phase == "h" and self.sources[layer] > 1:
            self.tied = [buffer]
            return
        sent = [buffer]
        if self.sources[layer] > 1:
            sent, self.tied = [*self.tied, buffer], []
        self._exchange()
        self.pending = layer, phase, micro, sent

    def _exchange(self) -> None:
        """Emits the exchange of the gradient that was written last, if it was not emitted yet."""
        if self.pending is None:
            return
        (layer, phase, micro, sent), self.pending = self.pending, None
        home, adding = self.home["gradients", layer], micro >= self.group
        streamed, part = self._streams("gradients", layer), home
        if streamed:
            part = self.builder.acquire(pool_of("device.gradient_parts", self.stack[layer]))
        if streamed and adding:
            self._copies("load_gradients", layer, phase, micro, home, part, 4)
        self.builder.op(
            OpId("exchange_gradients", layer, phase, micro),
            "exchange",
            [*sent, part] if adding else sent,
            [part, self.inbox],
            bytes=len(sent) * self._received(layer, self.sent_width),
            parameters=self.parts[layer],
            elements=self.pieces[layer],
        )
        for slot in sent:
            self.builder.release(slot)
        if micro == self.plan.micro_batches - 1:
            self.builder.op(
                OpId("sum_rows", layer),
                "update",
                [part],
                [self.row_sums[layer]],
                parameters=self.parts[layer],
            )
        if streamed:
            self._copies("save_gradients", layer, phase, micro, part, home, 4)
            self.builder.release(part)

    def losses_written(self, losses: list[str]) -> None:
        self.own_losses = losses

    def update(self) -> None:
        """Ends the step: computes the clip coefficient for the next step."""
        self._exchange()
        self.decoders.clear()
        self.vocabulary.clear()
        plan, norms = self.plan, self.clipping.norm
        self.builder.op(
            OpId("exchange_sums"),
            "exchange",
            [*self.row_sums.values(), *self.own_losses],
            [*norms.values(), *self.losses.values(), self.inbox],
            bytes=(plan.gpus - 1) * self.sums_bytes,
        )
        self.clipping.losses = list(self.losses.values())
        self.clipping.finish()

    def apply_deferred(self, layer: str, slot: str | None = None) -> None:
        """Emits the update of the rank's part of `layer` that the step before deferred, chunk by
        chunk if any of its state streams. The new weights are also written to the rank's part of
        `slot`, if it is given.
        """
        streamed = [name for name in STATE if self._streams(name, layer)]
        update = DeviceUpdate(self, layer, self.home["gradients", layer], slot, None, streamed)
        chunks: Sequence[Chunk] = (
            self._chunks(layer) if streamed else [(None, 0, self.parts[layer])]
        )
        for chunk in chunks:
            update.apply(chunk, update.load(chunk))
