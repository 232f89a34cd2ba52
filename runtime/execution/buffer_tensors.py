"""The tensors of a schedule's buffers, with the shapes and dtypes in which ops use them."""

from __future__ import annotations

import torch

from megatrain.runtime.layers.attention import Attention
from megatrain.runtime.layers.functional_layers import layer_tensors
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas, length_of
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.schedule.arithmetic import part_elements
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.update_layout import update_layout


class BufferTensors:
    """Returns the tensors of the buffers of `schedule` in `arenas`. Nothing is copied."""

    def __init__(self, plan: Plan, schedule: Schedule, arenas: Arenas, rank: int) -> None:
        """`rank` is the rank of this process; 0 with one GPU."""
        self.plan, self.schedule, self.arenas, self.rank = plan, schedule, arenas, rank
        self.dtype = TORCH_DTYPE[plan.workload.dtype]
        self._optimizer = find(plan.workload.optimizer)

    def tokens(self, micro: int) -> torch.Tensor:
        """Returns the tokens of a micro-batch on the device: [2 or 3, batch, sequence] int64. They
        are ids, labels and, if the workload has documents, document numbers.
        """
        work = self.plan.workload
        return self.arenas.tensor(
            self.schedule.state["tokens", str(micro)],
            torch.int64,
            (work.token_rows, work.batch, work.sequence),
        )

    def _owned(self, layer: str) -> int:
        """Returns the index of the first element of `layer` that this rank owns; 0 with one GPU."""
        return self.rank * part_elements(self.plan, layer)

    def _start(self, buffer: str, op: Op) -> int:
        """Returns the index in `buffer` of the first parameter of `op`. With several GPUs, the
        offset of an op counts from the first element that the rank owns.
        """
        spec = self.schedule.buffer[buffer]
        if spec.chunk:
            return 0
        return op.offset if spec.sharded else self._owned(op.layer) + op.offset

    def _dtype(self, buffer: str, layer: str) -> torch.dtype:
        """Returns the dtype in which `buffer` holds the data of `layer`."""
        return TORCH_DTYPE[self.schedule.dtype_of(buffer, layer)]

    def _hidden(self, buffer: str) -> torch.Tensor:
        """Returns hidden states or their gradient: [batch, sequence, carried] in the compute dtype.
        In most models, `ModelSpec.carried` is the hidden size.
        """
        work = self.plan.workload
        return self.arenas.tensor(
            buffer, self.dtype, (work.batch, work.sequence, self.plan.model.carried)
        )

    def _attention(self, layer: str, buffer: str) -> Attention:
        """Returns the saved attention output of `layer` in `buffer`, [batch, sequence, heads, head
        size] in the compute dtype, and its log-sum-exp, [batch, heads, sequence] fp32.
        """
        model, work = self.plan.model, self.plan.workload
        part = model.kept_attention(layer, work)
        heads = part.log_sum_exp // (4 * work.tokens)
        size = part.output // (heads * work.tokens * self.dtype.itemsize)
        return Attention(
            self.arenas.tensor(buffer, self.dtype, (work.batch, work.sequence, heads, size)),
            self.arenas.tensor(
                buffer, torch.float32, (work.batch, heads, work.sequence), part.offset
            ),
        )

    def _weights(self, layer: str, buffer: str) -> dict[str, torch.Tensor]:
        """Returns the weights of `layer` in `buffer` by tensor name."""
        return layer_tensors(self.arenas, self.plan.model.stack[layer], buffer, self.dtype)

    def _elements(self, buffer: str, op: Op) -> torch.Tensor:
        """Returns the elements of `buffer` for the parameters of `op` as a vector. If the buffer is
        in 8 bits (`block8`), it is a vector of their records, uint8. `buffer` holds a whole layer
        or one chunk.
        """
        name, dtype = self.schedule.dtype_of(buffer, op.layer), self._dtype(buffer, op.layer)
        length, start = (length_of(name, op.parameters), length_of(name, self._start(buffer, op)))
        return self.arenas.flat(buffer, dtype, length, start * dtype.itemsize)

    def _moments(self, buffer: str, op: Op) -> torch.Tensor:
        """Returns all moments of the parameters of `op`: [moments, parameters] fp32 or, in 8 bits
        (`block8`), [moments, bytes of the records] uint8. `buffer` holds a whole layer or one
        chunk. The optimizer must keep the same number of moments for every tensor of the layer.
        """
        count, dtype = self._optimizer.moments, self.schedule.dtype_of(buffer, op.layer)
        whole, start = (
            (op.parameters, 0)
            if self.schedule.buffer[buffer].chunk
            else (part_elements(self.plan, op.layer), op.offset)
        )
        tensor = self.arenas.tensor(buffer, TORCH_DTYPE[dtype], (count, length_of(dtype, whole)))
        return tensor[:, length_of(dtype, start) : length_of(dtype, start + op.parameters)]

    def _planes(self, buffer: str, op: Op) -> list[torch.Tensor]:
        """Returns one vector for each moment of the parameters of `op`. If tensors of the layer
        keep different numbers of moments, the vector of a moment covers only the tensors that keep
        this moment (`schedule/update_layout.py`).
        """
        layer, dtype = self.plan.model.stack[op.layer], self.schedule.dtype_of(buffer, op.layer)
        layout = update_layout(self.plan.workload.optimizer, layer)
        if layout is None:
            return list(self._moments(buffer, op))
        torch_dtype = TORCH_DTYPE[dtype]
        lengths = layout.lengths(op.offset, op.parameters)
        chunk = self.schedule.buffer[buffer].chunk
        sizes = lengths if chunk else layout.lengths(0, layer.elements)
        planes, start = [], 0
        for plane, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            first = start + (0 if chunk else layout.start(plane, op.offset))
            place = torch_dtype.itemsize * length_of(dtype, first)
            planes.append(self.arenas.flat(buffer, torch_dtype, length_of(dtype, length), place))
            start += size
        return planes

    def _floats(self, buffer: str) -> torch.Tensor:
        """Returns a whole buffer of losses, norms or clipping factors, as fp32."""
        return self.arenas.flat(buffer, torch.float32, self.schedule.buffer[buffer].bytes // 4)
