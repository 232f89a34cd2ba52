"""Elementwise: the bytes that elementwise ops read and write, on the host or on the device."""

from __future__ import annotations

from megatrain.simulator.hardware.cost_table import PASS_KINDS
from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.model.muon import CODED_GPU_BYTES, GPU_BYTES
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import CODED_GRADIENT_BYTES, FORMATS, UPDATE_COSTS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.arithmetic import UPDATED, layer_state_of
from megatrain.simulator.schedule.update_layout import update_layout


class Elementwise:
    """The bytes that ops read and write, for one model and workload."""

    def __init__(self, model: ModelSpec, workload: Workload, cores: int = 0) -> None:
        """`cores` is the number of CPU cores. With 0, cores do not limit an update."""
        # The number of threads is that of `lane_threads` in the runtime.
        self._threads = max(cores - cores // 8, 1) if cores else 0
        self.state = workload.state
        """The name of the state format."""
        self._model, self._workload, self._width = model, workload, DTYPE_BYTES[workload.dtype]
        moments = find(workload.optimizer).moments
        state = layer_state_of(workload.dtype, workload.state, moments, False, workload.gradients)
        self._updated = 2 * sum(state[name].bytes for name in UPDATED)
        """Bytes of state that the update of a parameter reads and writes."""
        self._update_costs = UPDATE_COSTS[FORMATS[workload.state].moments]
        self._coded = state["gradients"].bytes if workload.gradients == "8bit" else 0
        """Bytes per parameter of a gradient in codes, or 0 if gradients are not in codes."""
        self._second = state["moments"].bytes / max(moments, 1)
        """Bytes per parameter of one of the optimizer's moments."""
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
        """Returns the bytes that a compute op moves in addition because its gradient is one of
        several. Calibration measures the op with one micro-batch. The result may be negative.

        A gradient is read with b bytes per element, as the layer computes it, and written with w
        bytes. If it is added to an earlier sum, the sum is read too: b + w [+ w].
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

        * `norm` and `sum_rows` read the gradient.
        * `encode_gradients` reads the gradient and writes its codes, with PyTorch's temporaries.
        * `update_ratios` reads the gradient and the second moment.
        * `accumulate_gradients` reads the staging buffer or, on the device, the sum of a group of
          micro-batches, and writes the gradient. If it adds, it also reads the gradient.
        * An update reads and writes the master and the optimizer's moments, and reads the
          gradient. Matrix products are not counted, because their time follows from their FLOPs.
        """
        kind, gradient = op.kind, self._gradient_width(op.layer)
        if kind in PASS_KINDS:
            return op.bytes
        if kind in ("norm", "sum_rows"):
            return gradient * op.parameters
        if kind == "encode_gradients":
            return int((gradient + self._coded + CODED_GRADIENT_BYTES.encode) * op.parameters)
        if kind == "update_ratios":
            return int((gradient + self._second) * op.parameters)
        if kind == "accumulate_gradients":
            staged = self._width if op.lane == "cpu" else gradient
            return (staged + gradient * (2 if op.adds else 1)) * op.parameters
        if kind in ("update", "cpu_update"):
            return int(self._update_bytes(op) * op.parameters)
        return 0 if kind == "clip" else None

    def _update_bytes(self, op: Op) -> float:
        """Returns the bytes per parameter that an update reads and writes. On a GPU, an update that
        is limited by arithmetic counts as the bytes that would take as long.
        """
        if op.layer in self._whole_matrices:
            moved = GPU_BYTES
            if FORMATS[self.state].moments != "fp32":
                moved += CODED_GPU_BYTES
            return self._whole_matrices[op.layer] + self._gradient_width(op.layer) + moved
        least = self._update_costs.gpu_least_bytes if op.kind == "update" else 0
        gradient: float = self._gradient_width(op.layer)
        if self._coded:
            gradient = self._coded + CODED_GRADIENT_BYTES.decode
        return max(self._updated, least) + gradient

    def update_ns(self, op: Op, exact_ns: float) -> float:
        """Returns the time of the update `op`, in ns.

        `exact_ns` is the measured time of AdamW with fp32 moments. Memory bandwidth limits that
        update, so the time of another update is proportional to the bytes that it moves. On the
        host, the cores limit an update with more arithmetic instead.
        """
        share = self._update_bytes(op) / (24 + self._gradient_width(op.layer))
        time = exact_ns * share
        core_per_s = self._update_costs.core_per_s
        if op.kind == "update" or not core_per_s or not self._threads:
            return time
        return max(time, op.parameters / (core_per_s * self._threads) * 1e9)
