"""Everything placed where the plan says, on the device or streamed, and AdamW on the device, hidden behind compute.

Clipping by the global norm needs every gradient before the first update. So a step first applies, in forward order and just ahead of each
layer's forward, the update that the step before owes (its clip coefficient is known by then); the updated high plane is what the forward
computes with. State that lives on the host streams through chunks: up on `h2d`, AdamW on `update` beside `compute`, back on `d2h`. Then head
and backward, which leave gradients and the new norm. No staleness, nothing to roll back; `flush_update` applies the last step's.

Without a global norm a layer is updated inside the backward pass, as soon as its gradient is complete, and the gradient never leaves the device.
Clipping by `update` asks for the second moments of a whole layer before any of it is updated. Where the slots of state hold all chunks of a layer, they
are all loaded, then updated; of a larger layer the second moments are loaded first (4 bytes a parameter), then the whole state for the update. The copies of a layer's state wait for each other; with `weights_ahead` those of
the next layer's weights, which compute waits for, go first.

Layers that are `host_updated` go another way: their gradient goes to the host, where the cores do AdamW in one pass (`cpu_update`, at the same point of
the program), and their weights come up as any that stream, each chunk as soon as it is updated. That spares the link their state, at the cost of the
host's memory bandwidth: for hosts with much of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.simulator.arithmetic import STATE, StateClass, contributions, gradient_bytes, gradient_dtype, state_bytes, state_dtype
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.policies.building.training_step import compute, declare
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import OpId, Schedule
from megatrain.simulator.specs import ALIGNMENT, DTYPE_BYTES
from megatrain.simulator.workload import Dtype

UPDATED: tuple[StateClass, ...] = ("weights", "low", "moments")
"""what an update changes"""


class _State:
    """Buffers of the layers that stay, slots for those that stream."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan, self.stack = builder, plan, plan.model.stack
        self.width = DTYPE_BYTES[plan.workload.dtype]
        self.defers = plan.workload.clipping == "global"
        self.chunk = max(plan.knobs.chunk_bytes // self.width // ALIGNMENT, 1) * ALIGNMENT
        self.chunks: dict[int, list[tuple[int, int, int]]] = {}  # by the elements of a layer: (number, first parameter, how many)
        self.contributions = {layer: contributions(plan, layer) for layer in self.stack}
        self.gradient_bytes = {layer: gradient_bytes(plan, layer) for layer in self.stack}
        self.home: dict[tuple[StateClass, str], str] = {}  # (class, layer) -> the buffer that keeps it
        self.on_host = plan.placed("host_updated")
        self.clipping = Clipping(builder, plan, "device", "update", "update", self.on_host)
        for name in STATE:
            resident = plan.placed(name) - self.on_host
            placed = resident | self.on_host
            for layer, spec in self.stack.items():
                size = state_bytes(plan, name, layer)
                if size and (layer in placed or name != "gradients" or self.defers or self.contributions[layer] > 1):
                    place = "device" if layer in resident else "host"
                    dtype = state_dtype(plan, name, layer)
                    self.home[name, layer] = builder.persistent(f"{place}.{name}", layer, size * spec.elements, name, dtype)
        self._make_slots()
        self.decoders = SlotCache(builder, "device.streamed_weights", plan.knobs.weight_slots)
        self.vocabulary = SlotCache(builder, "device.streamed_vocabulary", 1)
        self.arrived = dict.fromkeys(self.stack, 0)
        self.updated: set[str] = set()
        self.pending: tuple[str, str] | None = None  # the layer whose update waits for the next one's weights to be on their way, and its gradient

    def _streams(self, name: StateClass, layer: str) -> bool:
        return self.home.get((name, layer), "").startswith("host.")

    def _make_slots(self) -> None:
        for name in STATE if self.defers else UPDATED:
            streaming = {layer: spec for layer, spec in self.stack.items() if self._streams(name, layer) and layer not in self.on_host}
            sizes = [state_bytes(self.plan, name, layer) * min(self.chunk, spec.elements) for layer, spec in streaming.items()]
            dtypes = {state_dtype(self.plan, name, layer) for layer in streaming}
            if sizes:
                dtype = dtypes.pop() if len(dtypes) == 1 else "home"
                self.builder.slots(f"device.{name}_chunks", self.plan.knobs.state_slots, max(sizes), name, dtype, chunk=True, knob="state_slots")
        pools: dict[tuple[str, StateClass, Dtype, str], list[tuple[int, int]]] = {}
        for layer, spec in self.stack.items():
            decoder = spec.kind == "decoder"
            if self._streams("weights", layer):
                kind: tuple[str, StateClass, Dtype, str] = (self._weight_pool(layer), "weights", self.plan.workload.dtype, "weight_slots" if decoder else "")
                pools.setdefault(kind, []).append((self.plan.knobs.weight_slots if decoder else 1, self.width * spec.elements))
            if not self.home.get(("gradients", layer), "").startswith("device."):
                count = self.plan.knobs.gradient_slots if decoder else 1
                kind = self._gradient_pool(layer), "gradients", gradient_dtype(self.plan, layer), "gradient_slots" if decoder else ""
                pools.setdefault(kind, []).append((count, self.gradient_bytes[layer] * spec.elements))
        for (pool, name, dtype_, knob), wanted in pools.items():
            self.builder.slots(pool, max(count for count, _ in wanted), max(size for _, size in wanted), name, dtype_, knob=knob)

    def _weight_pool(self, layer: str) -> str:
        return "device.streamed_weights" if self.stack[layer].kind == "decoder" else "device.streamed_vocabulary"

    def _gradient_pool(self, layer: str) -> str:
        """Gradients of one contribution, and fp32 sums of several, have pools of their own."""
        name = "sums" if self.contributions[layer] > 1 else "gradients"
        return f"device.streamed_{name}" if self.stack[layer].kind == "decoder" else f"device.streamed_{name}_vocabulary"

    def _chunks(self, layer: str) -> list[tuple[int, int, int]]:
        """(number, first parameter, how many)"""
        total = self.stack[layer].elements
        if total not in self.chunks:
            self.chunks[total] = [(number, first, min(self.chunk, total - first)) for number, first in enumerate(range(0, total, self.chunk))]
        return self.chunks[total]

    def weights(self, layer: str, phase: str, micro: int) -> str:
        owed = self.defers and layer not in self.updated
        self.updated.add(layer)
        if not self._streams("weights", layer):
            if owed:
                self.apply(layer, self.home["gradients", layer])
            self.settle()
            return self.home["weights", layer]
        cache = self._cache(layer)
        found = cache.find(layer)
        if found is not None:
            self.settle()
            return found
        if self.pending and self.pending[0] == cache.next_to_leave():  # its update reads the old weights there
            self.settle()
        slot = cache.take(layer)
        if owed and layer not in self.on_host:
            self.apply(layer, self.home["gradients", layer], slot)
        else:
            if owed:
                self.apply_on_host(layer)
            self._copies("load_weights", layer, phase, micro, self.home["weights", layer], slot, self.width)
            self.settle()
        return slot

    def _cache(self, layer: str) -> SlotCache:
        """The slots that the layer's weights stream through."""
        return self.decoders if self.stack[layer].kind == "decoder" else self.vocabulary

    def _copies(self, kind: str, layer: str, phase: str, micro: int, source: str, target: str, width: int) -> None:
        """A layer's buffer to or from the host, in chunks. The host's side is named by parts: a chunk waits for its own."""
        up = source.startswith("host.")
        lane, add = "h2d" if up else "d2h", self.builder.op
        for number, first, count in self._chunks(layer):
            read, written = (f"{source}#{number}", target) if up else (source, f"{target}#{number}")
            add(OpId(kind, layer, phase, micro, number), lane, (read,), (written,), offset=width * first, bytes=width * count)

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        home = self.home.get(("gradients", layer), "")
        adding = self.arrived[layer] > 0
        if home.startswith("device."):
            return home, adding
        pool = self._gradient_pool(layer)
        if self.pending and self.plan.knobs.gradient_slots == 1:
            self.settle()
        slot = self.builder.acquire(pool)
        if adding:
            self._copies("load_gradients", layer, phase, micro, home, slot, self.gradient_bytes[layer])
        return slot, adding

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        self.arrived[layer] += 1
        complete = self.arrived[layer] == self.contributions[layer]
        here = layer not in self.on_host
        if complete and (self.defers or not (here or self.clipping.kind == "update")):
            self.clipping.measure(layer, buffer, "")
        if complete and here and not self.defers:
            self.settle()
            self.pending = (layer, buffer)
            if not self.plan.knobs.weights_ahead:
                self.settle()
            return
        home = self.home.get(("gradients", layer), "")
        if buffer != home:
            self._copies("save_gradients", layer, phase, micro, buffer, home, self.gradient_bytes[layer])
            self.builder.release(buffer)
        if complete and not self.defers:
            self.apply_on_host(layer)

    def apply_on_host(self, layer: str) -> None:
        """AdamW on `layer` by the host, whose gradient is there; chunk by chunk, so that its weights need not wait for all of it."""
        chunks = self._chunks(layer)
        if self.clipping.kind == "update":
            rows = self.clipping.rows(layer)
            for chunk in chunks:
                gradient, moments = (f"{home}#{chunk[0]}" for home in (self.home["gradients", layer], self.home["moments", layer]))
                self.clipping.ratios(layer, gradient, moments, rows, chunk)
            self.clipping.clip_by(layer, rows)
        for number, first, count in chunks:
            homes = {name: f"{self.home[name, layer]}#{number}" for name in STATE if (name, layer) in self.home}
            reads = [homes.pop("gradients"), self.clipping.factor(layer)]
            self.builder.op(OpId("cpu_update", layer, chunk=number), "cpu", reads, homes.values(), offset=first, parameters=count)

    def settle(self) -> None:
        """Emits the update that is pending, and gives its gradient's slot back."""
        if self.pending is None:
            return
        (layer, gradient), self.pending = self.pending, None
        measured = self.clipping.kind == "update" and self._streams("moments", layer) and len(self._chunks(layer)) > self.plan.knobs.state_slots
        if measured:
            self._measure_in_chunks(layer, gradient)
        self.apply(layer, gradient, source=self._cache(layer).peek(layer), measured=measured)
        if gradient != self.home.get(("gradients", layer)):
            self.builder.release(gradient)

    def _measure_in_chunks(self, layer: str, gradient: str) -> None:
        """Sums of g^2 / v with the second moments coming up by themselves: all of them are needed before the update of any."""
        rows = self.clipping.rows(layer)
        for chunk in self._chunks(layer):
            number, first, count = chunk
            slot = self.builder.acquire("device.moments_chunks")
            moved = {"offset": first, "parameters": count, "bytes": 4 * count}
            self.builder.op(OpId("load_second", layer, chunk=number), "h2d", [f"{self.home['moments', layer]}#{number}"], [slot], **moved)
            self.clipping.ratios(layer, gradient, slot, rows, chunk)
            self.builder.release(slot)
        self.clipping.clip_by(layer, rows)

    def apply(self, layer: str, gradient: str, copy_to: str | None = None, source: str | None = None, measured: bool = True) -> None:
        """AdamW on `layer`, chunk by chunk where some of its state streams. The new weights also go into the slot `copy_to`; the old ones come
        from the slot `source` where they are on the device already. What its gradient is clipped by is to be found first unless it is `measured`:
        from moments that are in one buffer, or in the slots of all chunks, which there are enough of.
        """
        streamed = [name for name in STATE if self._streams(name, layer) and (name != "gradients" or gradient.startswith("host."))]
        chunks: Sequence[tuple[int | None, int, int]] = self._chunks(layer) if streamed else [(None, 0, self.stack[layer].elements)]
        update = _Update(self, layer, gradient, copy_to, source, streamed)
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
            if not measured and not chunk[0]:  # with the first chunk
                self.clipping.measure(layer, gradient, self.home["moments", layer])
            update.apply(chunk, slots)

    def losses_written(self, losses: list[str]) -> None:
        self.clipping.losses = losses
        if not self.defers:
            self.clipping.finish()

    def update(self) -> None:
        self.settle()
        self.decoders.clear()
        self.vocabulary.clear()
        if self.defers:
            self.clipping.finish()


class _Update:
    """AdamW on one layer by the device: the ops of each of its chunks, (number, first parameter, how many)."""

    def __init__(self, storage: _State, layer: str, gradient: str, copy_to: str | None, source: str | None, streamed: list[StateClass]) -> None:
        self.storage, self.builder, self.layer, self.gradient, self.copy_to, self.source = storage, storage.builder, layer, gradient, copy_to, source
        home = storage.home
        self.home = {name: home[name, layer] for name in STATE if (name, layer) in home}
        self.streamed, self.classes = streamed, [name for name in UPDATED if name in self.home]
        self.pools = {name: f"device.{name}_chunks" for name in streamed}
        self.up = [name for name in streamed if not (name == "weights" and source)]
        self.down = [name for name in streamed if name != "gradients"]
        self.up_bytes, self.down_bytes = (sum([state_bytes(storage.plan, name, layer) for name in names]) for names in (self.up, self.down))
        """a parameter"""

    def load(self, chunk: tuple[int | None, int, int]) -> dict[StateClass, str]:
        """Class of data -> the slot that holds what streams of it, on its way up; the weights are not where they come from `source`."""
        number, first, count = chunk
        slots = {name: self.builder.acquire(pool) for name, pool in self.pools.items()}
        if self.up:
            reads, writes = [f"{self.home[name]}#{number}" for name in self.up], [slots[name] for name in self.up]
            self.builder.op(OpId("load_state", self.layer, chunk=number), "h2d", reads, writes, offset=first, parameters=count, bytes=count * self.up_bytes)
        return slots

    def apply(self, chunk: tuple[int | None, int, int], slots: dict[StateClass, str]) -> None:
        """The update, and the way back of what streams."""
        number, first, count = chunk
        old = [self.source] if self.source and "weights" in self.streamed else []
        reads = [slots.get("gradients", self.gradient), self.storage.clipping.factor(self.layer), *old]
        writes = [slots.get(name, self.home[name]) for name in self.classes] + ([self.copy_to] if self.copy_to else [])
        self.builder.op(OpId("update", self.layer, chunk=number), "update", reads, writes, offset=first, parameters=count)
        if self.down:
            reads, writes = [slots[name] for name in self.down], [f"{self.home[name]}#{number}" for name in self.down]
            self.builder.op(OpId("save_state", self.layer, chunk=number), "d2h", reads, writes, offset=first, parameters=count, bytes=count * self.down_bytes)
        for slot in slots.values():
            self.builder.release(slot)


class Overlapped(Policy):
    """Everything placed where the plan says, streamed or resident; updates run on the device."""

    name = "overlapped"
    knobs = ("weight_slots", "gradient_slots", "state_slots", "checkpoint_interval", "chunk_bytes", "weights_ahead")
    placements = ("weights", "low", "moments", "gradients", "stored", "parked", "attention", "host_updated")

    goes_layer_by_layer = True

    def lower(self, plan: Plan) -> Schedule:
        builder = Builder(plan.policy)
        compute(builder, plan, _State(builder, plan))
        return builder.build()

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """The buffers of `lower`, without its ops."""
        builder = Builder(plan.policy, merged=merged)
        declare(builder, plan, _State(builder, plan))
        return builder.build()

    def defers_update(self, plan: Plan) -> bool:
        """With clipping by the global norm."""
        return plan.workload.clipping == "global"

    def flush_update(self, plan: Plan) -> Schedule | None:
        """The update that a step of `plan` leaves to the next one."""
        if not self.defers_update(plan):
            return None
        builder = Builder(plan.policy)
        state = _State(builder, plan)
        for layer in plan.model.stack:
            if layer in state.on_host:
                state.apply_on_host(layer)
            else:
                state.apply(layer, state.home["gradients", layer])
        return builder.build()
