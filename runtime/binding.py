"""Binding: what each op does, as a closure over the tensors that its buffers are. One method a kind; nothing here waits or orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.runtime import optimizer
from megatrain.runtime.groups import Treatment, stretches, treatment
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.layers.attention import Attention
from megatrain.runtime.layers.templates import Saved, Templates, layer_tensors
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas
from megatrain.runtime.memory.mirror import Mirror
from megatrain.simulator.arithmetic import RATIO_ROW
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Op, Schedule, parse_id, whole
from megatrain.simulator.specs import EMBEDDING

Run = Callable[[], object]


@dataclass
class StepState:
    """What ops need to know of the step that they run in."""

    scale: float = 0.0
    """of every token's loss: one over the labelled tokens of the step"""
    update_at: tuple[float, int] | None = None
    """learning rate and number of the step whose update is applied; None where nothing is owed"""
    saved: dict[str, Saved] = field(default_factory=dict)
    """buffer of activations -> the graph that was kept"""
    mirrors: dict[str, Mirror] = field(default_factory=dict)
    """buffer of losses, norms or factors that ops of the host read -> the host's copy"""


class Binder:
    """Turns ops of `schedule` into closures."""

    def __init__(
        self, plan: Plan, schedule: Schedule, arenas: Arenas, templates: Templates, settings: AdamW, host_workers: optimizer.Workers, state: StepState
    ) -> None:
        self.plan, self.schedule, self.arenas, self.templates, self.settings, self.state = plan, schedule, arenas, templates, settings, state
        self.dtype = TORCH_DTYPE[plan.workload.dtype]
        self._host_workers = host_workers
        self._kinds: dict[str, Callable[[Op], Run]] = {
            "load_weights": self._copy,
            "save_gradients": self._copy,
            "load_gradients": self._copy,
            "save_activations": self._copy,
            "load_activations": self._copy,
            "load_state": self._move_state,
            "save_state": self._move_state,
            "load_second": self._load_second,
            "embed": self._embed,
            "forward": self._forward,
            "recompute": self._recompute,
            "backward": self._backward,
            "head": self._head,
            "loss": self._loss,
            "embed_backward": self._embed_backward,
            "accumulate_gradients": self._accumulate_gradients,
            "norm": self._norm,
            "ratios": self._ratios,
            "clip": self._clip,
            "update": self._update,
            "cpu_update": self._update,
        }
        """kind of op -> what binds it"""
        read = {whole(buffer) for op in schedule.ops if op.lane == "cpu" for buffer in op.reads}
        on_device = {buffer for buffer in read if schedule.buffer[buffer].place == "device"}
        stream = torch.cuda.Stream(arenas.device) if arenas.device.type == "cuda" else None
        self._mirrors = state.mirrors = {buffer: Mirror(self._floats(buffer), stream) for buffer in sorted(on_device)} if stream else {}

    def bind(self, op: Op) -> Run:
        """What `op` does."""
        work = self._kinds[op.kind](op)
        read, written = (self._mirrored(op.reads), []) if op.lane == "cpu" else ([], self._mirrored(op.writes))
        if not read and not written:
            return work

        def run() -> None:
            for mirror in read:
                mirror.wait()
            work()
            for mirror in written:
                mirror.send()

        return run

    def _mirrored(self, buffers: Sequence[str]) -> list[Mirror]:
        return [self._mirrors[buffer] for buffer in buffers if buffer in self._mirrors]

    def tokens(self, micro: int) -> torch.Tensor:
        """[2 or 3, batch, sequence] int64: ids, labels and, where the workload has them, documents of a micro-batch, on the device."""
        work = self.plan.workload
        return self.arenas.tensor(self.schedule.state["tokens", str(micro)], torch.int64, (work.token_rows, work.batch, work.sequence))

    def _dtype(self, buffer: str, layer: str) -> torch.dtype:
        """The dtype of the data of `layer` in `buffer`."""
        return TORCH_DTYPE[self.schedule.dtype_of(buffer, layer)]

    def _hidden(self, buffer: str) -> torch.Tensor:
        work = self.plan.workload
        return self.arenas.tensor(buffer, self.dtype, (work.batch, work.sequence, self.plan.model.hidden))

    def _attention(self, layer: str, buffer: str) -> Attention:
        """The attention that is kept of `layer`, in its buffer."""
        model, work = self.plan.model, self.plan.workload
        part = model.kept_attention(layer, work.tokens, work.dtype)
        heads = part.log_sum_exp // (4 * work.tokens)
        size = part.output // (heads * work.tokens * self.dtype.itemsize)
        return Attention(
            self.arenas.tensor(buffer, self.dtype, (work.batch, work.sequence, heads, size)),
            self.arenas.tensor(buffer, torch.float32, (work.batch, heads, work.sequence), part.offset),
        )

    def _weights(self, layer: str, buffer: str) -> dict[str, torch.Tensor]:
        return layer_tensors(self.arenas, self.plan.model.stack[layer], buffer, self.dtype)

    def _copy(self, op: Op) -> Run:
        (source,), (target,) = (map(whole, op.reads), map(whole, op.writes))
        read, write = (self.arenas.flat(buffer, torch.uint8, op.bytes, op.offset) for buffer in (source, target))
        return lambda: write.copy_(read, non_blocking=True)

    def _move_state(self, op: Op) -> Run:
        pairs = [
            pair for source, target in zip(op.reads, op.writes, strict=True) for pair in zip(self._pieces(source, op), self._pieces(target, op), strict=True)
        ]

        def run() -> None:
            for read, write in pairs:
                write.copy_(read, non_blocking=True)

        return run

    def _load_second(self, op: Op) -> Run:
        read, write = (self._moments(whole(buffer), op)[1] for buffer in (*op.reads, *op.writes))
        return lambda: write.copy_(read, non_blocking=True)

    def _pieces(self, buffer: str, op: Op) -> list[torch.Tensor]:
        """The stretches of `buffer` that hold the parameters of `op`, a chunk of its layer: one, or for moments two."""
        held = self.schedule.buffer[whole(buffer)]
        if held.data == "moments":
            return list(self._moments(held.id, op))
        return [self._elements(held.id, op)]

    def _elements(self, buffer: str, op: Op) -> torch.Tensor:
        """The parameters of `op` in a buffer of the whole layer, or of chunks."""
        dtype, first = self._dtype(buffer, op.layer), 0 if self.schedule.buffer[buffer].chunk else op.offset
        return self.arenas.flat(buffer, dtype, op.parameters, first * dtype.itemsize)

    def _moments(self, buffer: str, op: Op) -> torch.Tensor:
        """Both moments [2, parameters] fp32, likewise."""
        if self.schedule.buffer[buffer].chunk:
            return self.arenas.tensor(buffer, torch.float32, (2, op.parameters))
        elements = self.plan.model.stack[op.layer].elements
        return self.arenas.tensor(buffer, torch.float32, (2, elements))[:, op.offset : op.offset + op.parameters]

    def _embed(self, op: Op) -> Run:
        weights, tokens = op.reads
        tensors, output, micro = self._weights(EMBEDDING, weights), self._hidden(op.writes[0]), _micro(op)
        ids, _, *documents = self.tokens(int(self.schedule.buffer[tokens].key))

        def run() -> None:
            self.templates.begin(micro, *documents)
            output.copy_(self.templates.embed(tensors, ids, micro))

        return run

    def _forward(self, op: Op) -> Run:
        slot, source = op.reads
        target, *kept = op.writes
        weights, x, output = self._weights(op.layer, slot), self._hidden(source), self._hidden(target)
        layer, micro = self.plan.model.stack[op.layer], _micro(op)
        if kept and self.schedule.buffer[kept[0]].data == "attention":
            attention = self._attention(op.layer, kept[0])

            def run_and_keep_attention() -> None:
                made, left = self.templates.forward_and_attention(op.layer, weights, x, micro)
                output.copy_(made)
                for place, tensor in zip(attention, left, strict=True):
                    place.copy_(tensor)

            return run_and_keep_attention

        def run() -> None:
            output.copy_(self.templates.forward(op.layer, weights, x, micro))

        def run_and_keep() -> None:
            self.state.saved[kept[0]] = made = self.templates.keep(self.arenas, layer, slot, self._hidden(source), micro)
            output.copy_(made.output.detach())

        return run_and_keep if kept else run

    def _recompute(self, op: Op) -> Run:
        slot, source, *attention = op.reads
        saved, *outputs = op.writes
        kept = self._attention(op.layer, attention[0]) if attention else None
        layer, output, micro = self.plan.model.stack[op.layer], self._hidden(outputs[0]) if outputs else None, _micro(op)

        def run() -> None:
            self.state.saved[saved] = made = self.templates.recompute(self.arenas, layer, slot, self._hidden(source), micro, kept)
            if output is not None:
                output.copy_(made.output.detach())

        return run

    def _backward(self, op: Op) -> Run:
        slot, saved, _, gradient = op.reads[:4]
        target, below = op.writes
        upper, lower_gradient = self._hidden(gradient), self._hidden(below)
        put = self._gradient_sink(op.layer, op, target)

        def run() -> None:
            dx, *gradients = self.templates.backward(self.state.saved.pop(saved), slot, upper)
            assert dx is not None
            lower_gradient.copy_(dx)
            put(gradients)

        return run

    def _head(self, op: Op) -> Run:
        slot, source, tokens = op.reads[:3]
        target, below, loss = op.writes
        head, micro = self.plan.model.head, _micro(op)
        labels = self.tokens(int(self.schedule.buffer[tokens].key))[1]
        x, dx, total = self._hidden(source), self._hidden(below), self.arenas.flat(loss, torch.float32, 1)
        put = self._gradient_sink(head, op, target)

        def run() -> None:
            value, gradients = self.templates.head(self._weights(head, slot), x, labels, self.state.scale, dx, micro)
            total[0] = value
            put(gradients)

        return run

    def _loss(self, op: Op) -> Run:
        slot, source, tokens = op.reads
        labels = self.tokens(int(self.schedule.buffer[tokens].key))[1]
        x, total = self._hidden(source), self.arenas.flat(op.writes[0], torch.float32, 1)
        head, micro = self.plan.model.head, _micro(op)

        def run() -> None:
            total[0] = self.templates.loss(self._weights(head, slot), x, labels, self.state.scale)
            self.templates.end(micro)

        return run

    def _embed_backward(self, op: Op) -> Run:
        tokens, gradient = op.reads[:2]
        ids, dx = self.tokens(int(self.schedule.buffer[tokens].key))[0], self._hidden(gradient)
        others: list[torch.Tensor | None] = [None] * (len(self.plan.model.stack[EMBEDDING].tensors) - 1 - len(self.plan.model.positions))
        put, micro = self._gradient_sink(EMBEDDING, op, op.writes[0]), _micro(op)

        def run() -> None:
            put([*self.templates.embed_backward(dx, ids, micro), *others])
            self.templates.end(micro)

        return run

    def _gradient_sink(self, layer: str, op: Op, buffer: str) -> Callable[[Sequence[torch.Tensor | None]], None]:
        """Where the layer's gradients go, in the order of its tensors: rounded to the compute dtype, then written or, if `op` reads `buffer`, added.

        What has none, or is frozen, has zeros: no part of a norm, and moments that stay zero.
        """
        spec, adding = self.plan.model.stack[layer], buffer in op.reads
        dtype = self._dtype(buffer, layer)
        targets = list(layer_tensors(self.arenas, spec, buffer, dtype).values())
        padded = any(tensor.padded != tensor.elements for tensor in spec.tensors)
        flat = self.arenas.flat(buffer, dtype, spec.elements)
        frozen = [treatment(self.settings, spec, tensor).frozen for tensor in spec.tensors]

        def put(gradients: Sequence[torch.Tensor | None]) -> None:
            if not adding and (padded or any(frozen) or any(gradient is None for gradient in gradients)):
                flat.zero_()
            for target, gradient, still in zip(targets, gradients, frozen, strict=True):
                if gradient is not None and not still:
                    optimizer.accumulate(target, gradient.to(self.dtype), first=not adding)

        return put

    def _accumulate_gradients(self, op: Op) -> Run:
        slab, target = op.reads[0], op.writes[0]
        read, write = self.arenas.flat(slab, self._dtype(slab, op.layer), op.parameters), self._gradient(op.layer, target)
        first = target not in op.reads
        workers = self._host_workers if op.lane == "cpu" else None
        return lambda: optimizer.accumulate(write, read, first=first, workers=workers)

    def _gradient(self, layer: str, buffer: str) -> torch.Tensor:
        """The layer's step gradient [elements]."""
        return self.arenas.flat(buffer, self._dtype(buffer, layer), self.plan.model.stack[layer].elements)

    def _workers(self, op: Op) -> optimizer.Workers:
        return self._host_workers if op.lane == "cpu" else optimizer.ALONE

    def _norm(self, op: Op) -> Run:
        gradient, total = self._gradient(op.layer, op.reads[0]), self.arenas.flat(op.writes[0], torch.float32, 1)
        workers = self._workers(op)
        return lambda: total.copy_(optimizer.sum_of_squares(gradient, workers))

    def _ratios(self, op: Op) -> Run:
        gradient, moments = map(whole, op.reads)
        g, second = self._elements(gradient, op), self._moments(moments, op)[1]
        sums = self.arenas.flat(op.writes[0], torch.float32, op.parameters // RATIO_ROW, 4 * op.offset // RATIO_ROW)
        workers = self._workers(op)

        def run() -> None:
            if self.state.update_at is not None:
                optimizer.ratio_sums(g, second, sums, settings=self.settings, number=self.state.update_at[1], workers=workers)

        return run

    def _floats(self, buffer: str) -> torch.Tensor:
        """All of a buffer of losses, norms or factors, fp32."""
        return self.arenas.flat(buffer, torch.float32, self.schedule.buffer[buffer].bytes // 4)

    def _values(self, op: Op, buffer: str, count: int) -> torch.Tensor:
        """The first `count` of them, where `op` computes."""
        return (self._mirrors[buffer].landed if op.lane == "cpu" and buffer in self._mirrors else self._floats(buffer))[:count]

    def _clip(self, op: Op) -> Run:
        scalars = {buffer: self._values(op, buffer, 1)[0] for buffer in op.reads}
        losses = [scalar for buffer, scalar in scalars.items() if self.schedule.buffer[buffer].data == "losses"]
        if op.layer and self.plan.workload.clipping == "update":
            return self._scales(op, losses)
        sums = [scalar for buffer, scalar in scalars.items() if self.schedule.buffer[buffer].data == "norms"]
        result = self.arenas.flat(op.writes[0], torch.float32, 2)

        def run() -> None:
            factor = optimizer.finite_or_nan(losses)
            if sums:
                clip, norm = optimizer.clip_coefficient(sums, self.settings.max_norm)
                result.copy_(torch.stack([factor * clip, norm]))
            else:
                result[0] = factor

        return run

    def _scales(self, op: Op, losses: list[torch.Tensor]) -> Run:
        """Of a layer: each tensor's factor on the learning rate."""
        tensors = self.plan.model.stack[op.layer].tensors
        rows = self.arenas.flat(op.reads[0], torch.float32, op.parameters // RATIO_ROW).split([tensor.padded // RATIO_ROW for tensor in tensors])
        result = self.arenas.flat(op.writes[0], torch.float32, len(tensors))
        elements = torch.tensor([tensor.elements for tensor in tensors], dtype=torch.float32, device=result.device)
        workers = self._workers(op)
        return lambda: result.copy_(optimizer.update_scales(rows, elements, workers) * optimizer.finite_or_nan(losses))

    def _runs(self, op: Op, factor: str) -> list[tuple[slice, Treatment, torch.Tensor | None, torch.Tensor | None]]:
        """Elements of `op` that are treated alike, and how: decay and rate, the factor on their gradient, and on their learning rate."""
        layer = self.plan.model.stack[op.layer]
        if self.plan.workload.clipping != "update":
            clip = self._values(op, factor, 1)[0]
            return [(part, treated, clip, None) for part, treated in stretches(self.settings, layer, op.offset, op.parameters)]
        start = -op.offset
        made: list[tuple[slice, Treatment, torch.Tensor | None, torch.Tensor | None]] = []
        for tensor, scale in zip(layer.tensors, self._values(op, factor, len(layer.tensors)), strict=True):
            part = slice(max(start, 0), min(start + tensor.padded, op.parameters))
            if part.start < part.stop:
                made.append((part, treatment(self.settings, layer, tensor), None, scale))
            start += tensor.padded
        return made

    def _update(self, op: Op) -> Run:
        """A layer, or a chunk of it. Old weights may come from a weight slot, and new ones be left in one as well."""
        gradient, factor, *sources = map(whole, op.reads)
        target, *rest = map(whole, op.writes)
        low = self._elements(rest.pop(0), op) if self.schedule.buffer[rest[0]].data == "low" else None
        moments = self._moments(rest.pop(0), op)
        copy_to = self._elements(rest[0], op) if rest else None
        weights, g = self._elements(target, op), self._elements(gradient, op)
        source = self._elements(sources[0], op) if sources else None
        workers = self._workers(op)
        runs = self._runs(op, factor)

        def run() -> None:
            if source is not None:
                weights.copy_(source)
            if self.state.update_at is not None:
                rate, number = self.state.update_at
                for part, treated, clip, scale in runs:
                    optimizer.update(
                        weights[part], None if low is None else low[part], moments[:, part], g[part], settings=self.settings,
                        rate=rate * treated.rate_factor, number=number, clip=clip, scale=scale, workers=workers, weight_decay=treated.weight_decay,
                        copy_to=None if copy_to is None else copy_to[part],
                    )  # fmt: skip
            elif copy_to is not None:
                copy_to.copy_(weights)

        return run


def _micro(op: Op) -> int:
    """The micro-batch of a compute op."""
    return parse_id(op.id).micro or 0
