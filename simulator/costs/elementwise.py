"""Elementwise: the bytes that elementwise ops read and write, on the host or on the device."""

from __future__ import annotations

from megatrain.simulator.hardware.cost_table import PASS_KINDS
from megatrain.simulator.model.muon import GPU_BYTES
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.model.specs import DTYPE_BYTES, EMBEDDING, ModelSpec
from megatrain.simulator.model.state_format import FORMATS, UPDATE_COSTS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.arithmetic import UPDATED, layer_state_of
from megatrain.simulator.schedule.update_layout import update_layout


class Elementwise:
    """The bytes that ops read and write, for one model and workload."""

    def __init__(self, model: ModelSpec, workload: Workload) -> None:
        self._model, self._workload, self._width = model, workload, DTYPE_BYTES[workload.dtype]
        moments = find(workload.optimizer).moments
        state = layer_state_of(workload.dtype, workload.state, moments, False)
        self._updated = 2 * sum(state[name].bytes for name in UPDATED)
        """Bytes of state that the update of a parameter reads and writes."""
        self._update_costs = UPDATE_COSTS[FORMATS[workload.state].moments]
        self._second = state["moments"].bytes / max(moments, 1)
        """Bytes of one of the optimizer's moments of a parameter."""

        self._whole_matrices: dict[str, float] = {}
        """Layer -> bytes of state that the update of a parameter reads and writes, for layers whose
        update needs whole matrices."""
        for layer, spec in model.stack.items() if find(workload.optimizer).by_tensor else ():
            layout = update_layout(workload.optimizer, spec)
            if layout is not None and layout.matrices:
                kept = layer_state_of(workload.dtype, workload.state, layout.least, False)
                self._whole_matrices[layer] = 2 * sum(kept[name].bytes for name in UPDATED)

    def _gradient_width(self, layer: str) -> int:
        """Returns the bytes per element of the layer's gradient of a step. It is fp32 if several
        gradients are summed.
        """
        several = self._workload.accumulation > 1 or (self._model.tied and layer == EMBEDDING)
        return 4 if several else self._width

    def wide(self, layer: str) -> bool:
        """Checks whether the layer's gradient of a step is wider than the compute dtype."""
        return self._gradient_width(layer) > self._width

    def needs_products(self, layer: str) -> bool:
        """Checks whether the update of the layer multiplies matrices."""
        return layer in self._whole_matrices

    def summed_bytes(self, op: Op) -> int:
        """Returns the extra bytes that a compute op moves because its gradient is one of several.
        They are in addition to the bytes with one micro-batch, which calibration measures.

        A gradient is read with b bytes per element, as the layer computes it, and written with w
        bytes. If it is added to another, that one is read too: b + w [+ w].
        """
        layer = {"head": self._model.head, "embed_backward": EMBEDDING}.get(op.kind, op.layer)
        if self._workload.accumulation == 1 or op.kind not in (
            "backward",
            "head",
            "embed_backward",
        ):
            return 0
        shared = self._model.tied and layer == EMBEDDING
        alone = (4 if shared else self._width) + (
            4 if shared and op.kind == "embed_backward" else 0
        )
        return (4 + (4 if op.adds else 0) - alone) * self._model.stack[layer].elements

    def touched_bytes(self, op: Op) -> int | None:
        """Returns the bytes that `op` reads and writes, or None if there is no formula for its
        kind.

        * `norm` reads the gradient.
        * `update_ratios` reads the gradient and the second moment.
        * `accumulate_gradients` reads the staging buffer and writes the gradient. If it adds, it
          also reads the gradient.
        * An update reads and writes the master and the optimizer's moments, and reads the
          gradient. On a GPU without a kernel for it, PyTorch's temporaries are added. Matrix
          products are not: their time is that of their FLOPs.
        """
        kind, gradient = op.kind, self._gradient_width(op.layer)
        if kind in PASS_KINDS:
            return op.bytes
        if kind == "norm":
            return gradient * op.parameters
        if kind == "update_ratios":
            return int((gradient + self._second) * op.parameters)
        if kind == "accumulate_gradients":
            return (self._width + gradient * (2 if op.adds else 1)) * op.parameters
        if kind in ("update", "cpu_update"):
            return int(self._update_bytes(op) * op.parameters)
        return 0 if kind == "clip" else None

    def _update_bytes(self, op: Op) -> float:
        """Returns the bytes per parameter that an update reads and writes. The layout of an
        optimizer that treats tensors differently says how many moments most tensors of the layer
        keep.
        """
        if op.layer in self._whole_matrices:
            return self._whole_matrices[op.layer] + self._gradient_width(op.layer) + GPU_BYTES
        temporaries = self._update_costs.gpu_bytes if op.kind == "update" else 0
        return self._updated + self._gradient_width(op.layer) + temporaries

    def update_share(self, op: Op) -> float:
        """The bytes that the update `op` moves over those of AdamW's with fp32 moments, which is
        what machines are measured with. An update is bound by memory, so it is taken for the share
        of the time, too; nobody measured another one.
        """
        share = self._update_bytes(op) / (24 + self._gradient_width(op.layer))
        return max(share, self._update_costs.host_share) if op.kind == "cpu_update" else share
