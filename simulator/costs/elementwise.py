"""Elementwise: bytes that the elementwise ops read and write, on either side of the link."""

from __future__ import annotations

from megatrain.simulator.hardware import PASS_KINDS
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING, ModelSpec
from megatrain.simulator.workload import Workload


class Elementwise:
    """Bytes by op, for one model and workload."""

    def __init__(self, model: ModelSpec, workload: Workload) -> None:
        self._model, self._workload, self._width = model, workload, DTYPE_BYTES[workload.dtype]

    def _gradient_width(self, layer: str) -> int:
        """Bytes an element of the layer's step gradient: fp32 where several are summed."""
        several = self._workload.accumulation > 1 or (self._model.tied and layer == EMBEDDING)
        return 4 if several else self._width

    def wide(self, layer: str) -> bool:
        """Its step gradient is wider than what layers compute in."""
        return self._gradient_width(layer) > self._width

    def summed_bytes(self, op: Op) -> int:
        """What a compute op moves because its gradient is one of several, besides what it moves with one micro-batch, as calibration measures it.

        A gradient is read as the layer leaves it, b bytes, and written with w; where it is added, w more are read: b + w [+ w].
        """
        layer = {"head": self._model.head, "embed_backward": EMBEDDING}.get(op.kind, op.layer)
        if self._workload.accumulation == 1 or op.kind not in ("backward", "head", "embed_backward"):
            return 0
        shared = self._model.tied and layer == EMBEDDING
        alone = (4 if shared else self._width) + (4 if shared and op.kind == "embed_backward" else 0)
        return (4 + (4 if op.adds else 0) - alone) * self._model.stack[layer].elements

    def touched_bytes(self, op: Op) -> int | None:
        """The sum of squares reads the gradient, that of g^2 / v also the second moment; an accumulation reads the slab, writes the gradient, and reads it
        where it adds; AdamW reads and writes master (4) and moments (8) and reads the gradient. None for a kind without a formula.
        """
        kind, gradient = op.kind, self._gradient_width(op.layer)
        if kind in PASS_KINDS:
            return op.bytes
        if kind == "norm":
            return gradient * op.parameters
        if kind == "ratios":
            return (gradient + 4) * op.parameters
        if kind == "accumulate_gradients":
            return (self._width + gradient * (2 if op.adds else 1)) * op.parameters
        if kind in ("update", "cpu_update"):
            return (24 + gradient) * op.parameters
        return 0 if kind == "clip" else None
