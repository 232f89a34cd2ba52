"""ChunkedStore: the base of parameter stores that copy layers chunk by chunk."""

from __future__ import annotations

from megatrain.simulator.model.layer import ALIGNMENT, DTYPE_BYTES
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.policies.building.training_step import update_workspace
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.arithmetic import StateClass, part_elements, stack_state
from megatrain.simulator.schedule.plan import Plan


class ChunkedStore:
    """The slots of streamed weights, and copies of layers in chunks. A subclass makes the slots
    and fills `home`.
    """

    clipping: Clipping
    """Emits the ops of clipping."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan, self.stack = builder, plan, plan.model.stack
        self.width = DTYPE_BYTES[plan.workload.dtype]
        """Bytes of an element in the compute dtype."""
        self.chunk = max(plan.knobs.chunk_bytes // self.width // ALIGNMENT, 1) * ALIGNMENT
        """Parameters of a chunk."""
        self._chunks_of: dict[int, list[tuple[int, int, int]]] = {}
        """Parameters of a layer -> its chunks. Cached, since many layers have the same size."""
        self.decoders = SlotCache(builder, "device.streamed_weights", plan.knobs.weight_slots)
        self.vocabulary = SlotCache(builder, "device.streamed_vocabulary", 1)
        self.updated: set[str] = set()
        """Layers whose deferred update this step has applied."""
        self.summing: dict[str, str] = {}
        """Layer -> the gradient slot that the next micro-batch of the group adds to."""
        self.state = stack_state(plan)
        self.home: dict[tuple[StateClass, str], str] = {}
        """(class, layer) -> the persistent buffer, on the device or the host, that keeps this data.
        A gradient that the update reads inside the backward pass has no such buffer."""
        self.workspace = update_workspace(builder, plan)
        """Layer -> a list with the buffer for temporary values of its update, or an empty list."""

    def _streams(self, name: StateClass, layer: str) -> bool:
        """Returns whether this class of the layer's data lives in host memory."""
        return self.home.get((name, layer), "").startswith("host.")

    def _cache(self, layer: str) -> SlotCache:
        """Returns the slots that the layer's weights stream through."""
        return self.decoders if self.stack[layer].kind == "decoder" else self.vocabulary

    def _chunks(self, layer: str) -> list[tuple[int, int, int]]:
        """Returns (number, first parameter, number of parameters) of each chunk of the layer, or of
        the part of the layer that the rank owns.
        """
        total = part_elements(self.plan, layer)
        if total not in self._chunks_of:
            self._chunks_of[total] = [
                (number, first, min(self.chunk, total - first))
                for number, first in enumerate(range(0, total, self.chunk))
            ]
        return self._chunks_of[total]

    def _copies(
        self, kind: str, layer: str, phase: str, micro: int, source: str, target: str, width: float
    ) -> None:
        """Emits the copies of a layer's buffer to or from the host, chunk by chunk.

        `width` is in bytes per parameter. Each op names only its own chunk of the host buffer, so
        it waits only for ops on this chunk.
        """
        up = source.startswith("host.")
        self.builder.in_chunks(
            OpId(kind, layer, phase, micro),
            "h2d" if up else "d2h",
            (source,),
            (target,),
            self._chunks(layer),
            (source if up else target,),
            "bytes",
            width,
        )
