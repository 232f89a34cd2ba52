"""DeviceUpdate: emits the ops that update one layer on the device, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.simulator.policies.building.chunked_store import ChunkedStore
from megatrain.simulator.policies.building.clipping import Chunk
from megatrain.simulator.policies.building.training_step import update_flops
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.arithmetic import STATE, UPDATED, StateClass
from megatrain.simulator.schedule.buffer import WIDTH
from megatrain.simulator.schedule.update_layout import update_layout


class DeviceUpdate:
    """Emits the ops of an update of one layer on the device, chunk by chunk."""

    def __init__(
        self,
        store: ChunkedStore,
        layer: str,
        gradient: str,
        copy_to: str | None,
        source: str | None,
        streamed: list[StateClass],
    ) -> None:
        """Prepares the operands of the ops.

        Args:
            store: The parameter store of the step.
            layer: The layer to update, or whose part to update.
            gradient: The buffer with its gradient, on the device or the host.
            copy_to: A weight slot that receives a copy of the new weights.
            source: A weight slot that holds the old weights, which are then not loaded.
            streamed: The classes of data in host memory.
        """
        self.store, self.builder, self.layer = store, store.builder, layer
        self.gradient = gradient
        home = store.home
        self.home = {name: home[name, layer] for name in STATE if (name, layer) in home}
        self.streamed, self.classes = streamed, [name for name in UPDATED if name in self.home]
        self.pools = {name: f"device.{name}_chunks" for name in streamed}
        self.loaded = [name for name in streamed if not (name == "weights" and source)]
        self.saved = [name for name in streamed if name != "gradients"]
        self.load_bytes, self.save_bytes = (
            sum([store.state[layer][name].bytes for name in names])
            for names in (self.loaded, self.saved)
        )
        """Bytes per parameter of a load and of a save, without moments that only some tensors
        keep."""
        self.layout = update_layout(store.plan.workload.optimizer, store.stack[layer])
        # The operands of an update that are the same for all chunks.
        self.factor = store.clipping.factor(layer)
        self.old = [source] if source and "weights" in streamed else []
        self.also_written = [*([copy_to] if copy_to else []), *store.workspace[layer]]

    def load(self, chunk: Chunk) -> dict[StateClass, str]:
        """Emits the copy of the chunk's streamed data, and returns its slots by class of data.

        If the update reads the weights from `source`, they have a slot but are not copied.
        """
        number, first, count = chunk
        slots = {name: self.builder.acquire(pool) for name, pool in self.pools.items()}
        if self.loaded:
            reads, writes = (
                [f"{self.home[name]}#{number}" for name in self.loaded],
                [slots[name] for name in self.loaded],
            )
            self.builder.op(
                OpId("load_state", self.layer, chunk=number),
                "h2d",
                reads,
                writes,
                offset=first,
                parameters=count,
                bytes=self._bytes(chunk, self.loaded, self.load_bytes),
            )
        return slots

    def _bytes(self, chunk: Chunk, names: Sequence[StateClass], per_parameter: float) -> int:
        """Returns the bytes of a load or a save of the classes `names`."""
        _, first, count = chunk
        more = 0.0
        if self.layout is not None and "moments" in names:
            width = WIDTH[self.store.state[self.layer]["moments"].dtype]
            more = width * self.layout.more(first, count)
        return int(count * per_parameter + more)

    def apply(self, chunk: Chunk, slots: dict[StateClass, str]) -> None:
        """Emits the update of the chunk and the copy of its streamed data to the host, and releases
        its slots.
        """
        number, first, count = chunk
        flops = update_flops(self.store.plan, self.layer, first, count) if self.layout else {}
        self.builder.op(
            OpId("update", self.layer, chunk=number),
            "update",
            [slots.get("gradients", self.gradient), self.factor, *self.old],
            [*[slots.get(name, self.home[name]) for name in self.classes], *self.also_written],
            offset=first,
            parameters=count,
            **flops,
        )
        if self.saved:
            self.builder.op(
                OpId("save_state", self.layer, chunk=number),
                "d2h",
                [slots[name] for name in self.saved],
                [f"{self.home[name]}#{number}" for name in self.saved],
                offset=first,
                parameters=count,
                bytes=self._bytes(chunk, self.saved, self.save_bytes),
            )
        for slot in slots.values():
            self.builder.release(slot)
