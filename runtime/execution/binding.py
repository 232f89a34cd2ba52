"""Turns each op of a schedule into a closure over the tensors of its buffers.

There is one method for each kind of op. The method returns a closure, and its docstring describes
what the closure does. `update_ops.py` binds the ops on gradients and optimizer state.
`buffer_tensors.py` returns the tensors of buffers. The lanes decide the order of the closures and
wait for other ops (`lanes.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from megatrain.runtime.execution.param_groups import param_group
from megatrain.runtime.execution.step_state import HostScalarCopy, StepState
from megatrain.runtime.execution.update_ops import Run, UpdateOps
from megatrain.runtime.layers.functional_layers import FunctionalLayers, layer_tensors
from megatrain.runtime.layers.table_gradient import TableGradient
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.ranks import Ranks
from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.schedule import Op, Schedule, base_buffer, computes_output, parse_id
from megatrain.simulator.schedule.arithmetic import NORM_ROW, micro_batch_of
from megatrain.simulator.schedule.plan import Plan

Gradient = torch.Tensor | TableGradient | None
"""The gradient of a tensor, or None for no gradient."""


class Binder(UpdateOps):
    """Binds the ops of `schedule` to the tensors of `arenas`."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        arenas: Arenas,
        functional_layers: FunctionalLayers,
        settings: AdamW,
        host_workers: optimizer.Workers,
        state: StepState,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """`seed` is the run's seed, for stochastic rounding. `ranks` are the ranks of a plan for
        several GPUs, and None for one GPU.
        """
        rank = ranks.rank if ranks else 0
        super().__init__(plan, schedule, arenas, settings, host_workers, state, seed, rank)
        self._ranks = ranks
        self.functional_layers = functional_layers
        self._head_compiles = plan.workload.compiled
        """Whether the next run of the head compiles it."""
        self._kinds: dict[str, Callable[[Op], Run]] = {
            "load_weights": self._copy,
            "save_gradients": self._copy,
            "load_gradients": self._copy,
            "save_activations": self._copy,
            "load_activations": self._copy,
            "save_attention": self._copy,
            "load_attention": self._copy,
            "load_state": self._move_state,
            "save_state": self._move_state,
            "load_second_moment": self._load_second,
            "embed": self._embed,
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "head": self._head,
            "loss": self._loss,
            "embed_backward": self._embed_backward,
            "accumulate_gradients": self._accumulate_gradients,
            "norm": self._norm,
            "gather_weights": self._gather_weights,
            "exchange_gradients": self._exchange_gradients,
            "sum_rows": self._sum_rows,
            "exchange_sums": self._exchange_sums,
            "encode_gradients": self._encode_gradients,
            "update_ratios": self._ratios,
            "clip": self._clip,
            "update": self._update,
            "cpu_update": self._update,
        }
        """The method that binds each kind of op."""
        if arenas.device.type == "cuda":
            stream = torch.cuda.Stream(arenas.device)
            read = {
                base_buffer(name) for op in schedule.ops if op.lane == "cpu" for name in op.reads
            }
            state.host_scalars = {
                buffer: HostScalarCopy(self._floats(buffer), stream)
                for buffer in sorted(read)
                if schedule.buffer[buffer].place == "device"
            }

    def bind(self, op: Op) -> Run:
        """Returns the function that does the work of `op`."""
        work = self._kinds[op.kind](op)
        read = self._host_copies(op.reads) if op.lane == "cpu" else []
        written = self._host_copies(op.writes)
        if not read and not written:
            return work

        def run() -> None:
            for copy in read:
                copy.wait()
            work()
            for copy in written:
                copy.send()

        return run

    def _host_copies(self, buffers: Sequence[str]) -> list[HostScalarCopy]:
        """Returns the host copies of `buffers`, without buffers that have no copy."""
        copies = self.state.host_scalars
        return [copies[buffer] for buffer in buffers if buffer in copies]

    def _copy(self, op: Op) -> Run:
        """Copies a range of bytes from one buffer to another. With several GPUs, the source may
        hold only this rank's part of a layer. If the target holds the whole layer, the range in the
        target is shifted to this part.
        """
        (source,), (target,) = (map(base_buffer, op.reads), map(base_buffer, op.writes))
        sharded = self.schedule.buffer[source].sharded
        shift = 0
        if sharded and not self.schedule.buffer[target].sharded:
            shift = self._owned(op.layer) * self._dtype(target, op.layer).itemsize
        read = self.arenas.flat(source, torch.uint8, op.bytes, op.offset)
        write = self.arenas.flat(target, torch.uint8, op.bytes, op.offset + shift)
        return lambda: write.copy_(read, non_blocking=True)

    def _move_state(self, op: Op) -> Run:
        """Copies the optimizer state of a chunk between host and device. An op may have several
        sources. The targets are in the order of the sources.
        """
        pairs = [
            pair
            for source, target in zip(op.reads, op.writes, strict=True)
            for pair in zip(self._pieces(source, op), self._pieces(target, op), strict=True)
        ]

        def run() -> None:
            for read, write in pairs:
                write.copy_(read, non_blocking=True)

        return run

    def _load_second(self, op: Op) -> Run:
        """Copies the second moment of a chunk to the device, for `update_ratios`."""
        read, write = (
            self._moments(base_buffer(buffer), op)[1] for buffer in (*op.reads, *op.writes)
        )
        return lambda: write.copy_(read, non_blocking=True)

    def _pieces(self, buffer: str, op: Op) -> list[torch.Tensor]:
        """Returns the elements of `buffer` for the parameters of `op`: one vector or, if `buffer`
        holds moments, one vector for each moment.
        """
        spec = self.schedule.buffer[base_buffer(buffer)]
        if spec.data == "moments":
            return self._planes(spec.id, op)
        return [self._elements(spec.id, op)]

    def _embed(self, op: Op) -> Run:
        """Runs the embedding. This is the first op of a micro-batch."""
        weights, tokens = op.reads
        tensors = self._weights(EMBEDDING, weights)
        output = self._hidden(op.writes[0])
        micro = _micro(op)
        ids, _, *documents = self.tokens(int(self.schedule.buffer[tokens].key))

        def run() -> None:
            self.functional_layers.begin(micro, *documents)
            self.functional_layers.embed(tensors, ids, micro, output)

        return run

    def _forward(self, op: Op) -> Run:
        """Runs the forward pass of a layer. If the op has a second target, it also saves the
        attention output, or all activations, for backward.
        """
        slot, source = op.reads
        target, *kept = op.writes
        weights = self._weights(op.layer, slot)
        x = self._hidden(source)
        output = self._hidden(target)
        layer, micro = self.plan.model.stack[op.layer], _micro(op)
        if kept and self.schedule.buffer[kept[0]].data == "attention":
            attention = self._attention(op.layer, kept[0])

            def run_and_keep_attention() -> None:
                result, computed = self.functional_layers.forward_and_attention(
                    op.layer, weights, x, micro
                )
                output.copy_(result)
                for target, tensor in zip(attention, computed, strict=True):
                    target.copy_(tensor)

            return run_and_keep_attention

        def run() -> None:
            output.copy_(self.functional_layers.forward(op.layer, weights, x, micro))

        def run_and_keep() -> None:
            self.state.saved[kept[0]] = saved = self.functional_layers.keep(
                self.arenas, layer, slot, self._hidden(source), micro
            )
            output.copy_(saved.output.detach())

        return run_and_keep if kept else run

    def _recompute(self, op: Op) -> Run:
        """Runs the forward pass of a layer again, from its input, and saves its activations. Uses
        the saved attention output if the op reads it.
        """
        slot, source, *attention = op.reads
        saved, *outputs = op.writes
        kept = self._attention(op.layer, attention[0]) if attention else None
        layer = self.plan.model.stack[op.layer]
        output = self._hidden(outputs[0]) if outputs else None
        micro = _micro(op)
        read = computes_output(op.shape)

        def run() -> None:
            self.state.saved[saved] = recomputed = self.functional_layers.recompute(
                self.arenas, layer, slot, self._hidden(source), micro, kept, read=read
            )
            if output is not None:
                output.copy_(recomputed.output.detach())

        return run

    def _backward(self, op: Op) -> Run:
        """Runs the backward pass of a layer on its saved activations and frees them."""
        slot, saved, _, gradient = op.reads[:4]
        target, below = op.writes
        upper, lower_gradient = self._hidden(gradient), self._hidden(below)
        put = self._gradient_sink(op.layer, op, target)

        def run() -> None:
            dx, *gradients = self.functional_layers.backward(
                self.state.saved.pop(saved), slot, upper
            )
            assert dx is not None
            lower_gradient.copy_(dx)
            put(gradients)

        return run

    def _head(self, op: Op) -> Run:
        """Runs the head and the loss, forward and backward."""
        slot, source, tokens = op.reads[:3]
        target, below, loss = op.writes
        head, micro = self.plan.model.head, _micro(op)
        labels = self.tokens(int(self.schedule.buffer[tokens].key))[1]
        x = self._hidden(source)
        dx = self._hidden(below)
        total = self.arenas.flat(loss, torch.float32, 1)
        put = self._gradient_sink(head, op, target)

        def run() -> None:
            value, gradients = self.functional_layers.head(
                self._weights(head, slot), x, labels, self.state.scale, dx, micro
            )
            if self._head_compiles:
                # The compiler leaves reference cycles that lead to the frame of the call above, and
                # so to three gradients of the head. They would stay allocated in the backward pass
                # of the last layer, where a step may need the most memory.
                self._head_compiles = False
                gc.collect()
            total[0] = value
            put(gradients)

        return run

    def _loss(self, op: Op) -> Run:
        """Runs the head and the loss, forward only. This is the last op of a micro-batch in an
        evaluation.
        """
        slot, source, tokens = op.reads
        labels = self.tokens(int(self.schedule.buffer[tokens].key))[1]
        x, total = self._hidden(source), self.arenas.flat(op.writes[0], torch.float32, 1)
        head, micro = self.plan.model.head, _micro(op)

        def run() -> None:
            total[0] = self.functional_layers.loss(
                self._weights(head, slot), x, labels, self.state.scale
            )
            self.functional_layers.end(micro)

        return run

    def _embed_backward(self, op: Op) -> Run:
        """Runs the backward pass of the embedding. This is the last op of a micro-batch in a
        step.
        """
        tokens, gradient = op.reads[:2]
        ids, dx = self.tokens(int(self.schedule.buffer[tokens].key))[0], self._hidden(gradient)
        others: list[Gradient] = [None] * (
            len(self.plan.model.stack[EMBEDDING].tensors)
            - len(self.plan.model.tables)
            - len(self.plan.model.positions)
        )
        put, micro = self._gradient_sink(EMBEDDING, op, op.writes[0]), _micro(op)

        def run() -> None:
            put([*self.functional_layers.embed_backward(dx, ids, micro), *others])
            self.functional_layers.end(micro)

        return run

    def _gradient_sink(
        self, layer: str, op: Op, buffer: str
    ) -> Callable[[Sequence[Gradient]], None]:
        """Returns a function that stores the gradients of a layer's tensors in `buffer`, rounded to
        the compute dtype. The gradients must be in the order of the tensors. If `op` reads
        `buffer`, the function adds them to its content, and otherwise overwrites it.

        The gradient of a tensor that is frozen or has no gradient is stored as zeros. So the tensor
        adds nothing to a norm, and its moments stay zero.
        """
        spec, adding = self.plan.model.stack[layer], buffer in op.reads
        dtype = self._dtype(buffer, layer)
        targets = list(layer_tensors(self.arenas, spec, buffer, dtype).values())
        padded = any(tensor.padded != tensor.elements for tensor in spec.tensors)
        flat = self.arenas.flat(buffer, dtype, spec.elements)
        frozen = [param_group(self.settings, spec, tensor).frozen for tensor in spec.tensors]

        def put(gradients: Sequence[Gradient]) -> None:
            if not adding and (
                padded or any(frozen) or any(gradient is None for gradient in gradients)
            ):
                flat.zero_()
            for target, gradient, is_frozen in zip(targets, gradients, frozen, strict=True):
                if gradient is None or is_frozen:
                    continue
                if isinstance(gradient, TableGradient):
                    gradient.store(target, self.dtype, adding=adding)
                else:
                    optimizer.accumulate(target, gradient.to(self.dtype), first=not adding)

        return put

    def _accumulate_gradients(self, op: Op) -> Run:
        """Adds the gradients of a micro-batch to the gradients of the step, or copies them there if
        the op does not read its target.
        """
        staged, target = op.reads[0], op.writes[0]
        read, write = self._elements(staged, op), self._elements(target, op)
        first = target not in op.reads
        workers = self._host_workers if op.lane == "cpu" else None
        return lambda: optimizer.accumulate(write, read, first=first, workers=workers)

    def _parts(self, buffer: str, op: Op) -> torch.Tensor:
        """Returns the layer of `op` in `buffer` as the parts of all ranks, [ranks, part]."""
        dtype = self._dtype(op.reads[0], op.layer)
        return self.arenas.tensor(buffer, dtype, (self.plan.gpus, op.parameters))

    def _gather_weights(self, op: Op) -> Run:
        """Gathers the parts of a layer's weights that all ranks own (all-gather). This rank's part
        may already be in its place in the target.
        """
        assert self._ranks is not None
        ranks, whole = self._ranks, self._parts(op.writes[0], op)
        in_place = op.reads == op.writes
        own = whole[ranks.rank] if in_place else self._elements(op.reads[0], op)
        return lambda: ranks.gather(whole, own)

    def _exchange_gradients(self, op: Op) -> Run:
        """Sums a layer's gradient over all ranks (reduce-scatter): sends each rank its part, and
        sums the received parts in the order of the ranks. If the op reads its target, the sum is
        added to the content of the target. If there are several gradients of the layer, all
        gradients of a rank are added before the gradients of the next rank. Parts are exchanged in
        pieces, so the received pieces take little memory.
        """
        assert self._ranks is not None
        ranks, gpus, (target, workspace) = self._ranks, self.plan.gpus, op.writes
        sent = [self._parts(name, op) for name in op.reads if name != target]
        total, adding = self._elements(target, op), target in op.reads
        pieces = [
            slice(start, min(start + op.elements, op.parameters))
            for start in range(0, op.parameters, op.elements)
        ]
        rooms = [
            self.arenas.tensor(
                workspace,
                sent[0].dtype,
                (len(sent) + (len(pieces) > 1), gpus, piece.stop - piece.start),
            )
            for piece in pieces
        ]

        def run() -> None:
            for piece, room in zip(pieces, rooms, strict=True):
                received = room[: len(sent)]
                for target_rows, gradient in zip(received, sent, strict=True):
                    # collectives need contiguous memory, which only whole parts have
                    own = gradient if len(pieces) == 1 else room[-1].copy_(gradient[:, piece])
                    ranks.exchange(target_rows, own)
                optimizer.sum_parts(total[piece], received.transpose(0, 1), first=not adding)

        return run

    def _sum_rows(self, op: Op) -> Run:
        """Computes the sum of squares of each row of this rank's part of a gradient. Rows past the
        end of the layer get 0.
        """
        layer = self.plan.model.stack[op.layer]
        count = max(min(layer.elements - self._owned(op.layer), op.parameters), 0)
        gradient = self._elements(op.reads[0], op)[:count]
        sums = self.arenas.flat(op.writes[0], torch.float32, op.parameters // NORM_ROW)

        def run() -> None:
            sums.zero_()
            if count:
                optimizer.row_sums(gradient, sums)

        return run

    def _exchange_sums(self, op: Op) -> Run:
        """Computes the sum of squares of each layer from the row sums of all ranks, in the order of
        additions of one GPU. Also gathers the losses of all micro-batches.
        """
        assert self._ranks is not None
        ranks, plan, data = self._ranks, self.plan, self.schedule.buffer
        *targets, workspace = op.writes
        rows = [name for name in op.reads if data[name].data == "row_sums"]
        own = [self._floats(name) for name in rows]
        own += [self._floats(name)[:1] for name in op.reads if data[name].data == "losses"]
        sizes = [len(part) for part in own]
        room = self.arenas.tensor(workspace, torch.float32, (plan.gpus + 1, sum(sizes)))
        sent, received = room[0], room[1:]
        norms = [self._floats(name)[0] for name in targets if data[name].data == "norms"]
        losses = {data[name].key: self._floats(name) for name in targets}
        lengths = [-(-plan.model.stack[data[name].key].elements // NORM_ROW) for name in rows]

        def run() -> None:
            torch.cat(own, out=sent)
            ranks.gather(received, sent)
            parts = received.split(sizes, dim=1)
            for norm, part, length in zip(norms, parts, lengths, strict=False):
                norm.copy_(optimizer.sum_of_rows(part.reshape(-1)[:length]))
            for micro, part in enumerate(parts[len(rows) :]):
                for rank in range(plan.gpus):
                    key = f"all.{micro_batch_of(plan, rank, micro)}"
                    losses[key][:1].copy_(part[rank])

        return run


def _micro(op: Op) -> int:
    """Returns the micro-batch in the id of a compute op, counted from 0."""
    return parse_id(op.id).micro or 0
