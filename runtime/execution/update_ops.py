"""Turns ops on gradients and optimizer state into closures: norms, clipping factors and updates.

There is one method for each kind of op. The method returns a closure, and its docstring describes
what the closure does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatrain.runtime.execution.buffer_tensors import BufferTensors
from megatrain.runtime.execution.param_groups import ParamGroup, group_slices, param_group
from megatrain.runtime.execution.step_state import StepState
from megatrain.runtime.memory.arenas import Arenas, length_of
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer import blockwise, coded_gradients, moving_norms, muon, outside
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.optimizer import ADAMW, MUON
from megatrain.simulator.model.workload import BY_TENSOR
from megatrain.simulator.schedule import DataClass, Op, Schedule, base_buffer
from megatrain.simulator.schedule.arithmetic import RATIO_ROW
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.update_layout import UpdateLayout, update_layout

Run = Callable[[], object]
"""Does the work of an op."""


class _UpdateCall(NamedTuple):
    """One call of an update function on a range of an op's parameters."""

    apply: Callable[..., None]
    """The update function."""
    part: slice
    """The range. It counts from the op's first parameter."""
    moments: torch.Tensor | list[torch.Tensor]
    """The moments of the range."""
    group: ParamGroup
    """The parameter group of the range."""
    arguments: dict[str, Any]
    """Further keyword arguments."""


class UpdateOps(BufferTensors):
    """Binds the ops on gradients and optimizer state to the tensors of their buffers."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        arenas: Arenas,
        settings: AdamW,
        host_workers: optimizer.Workers,
        state: StepState,
        seed: int,
        rank: int,
    ) -> None:
        """`seed` is the run's seed, for stochastic rounding. `rank` is the rank of this process; 0
        with one GPU.
        """
        super().__init__(plan, schedule, arenas, rank)
        self.settings, self.state = settings, state
        self._host_workers, self._seed = host_workers, seed
        sizes = [layer.elements for layer in plan.model.stack.values()]
        starts = itertools.accumulate(sizes, initial=0)
        self._first = dict(zip(plan.model.stack, starts, strict=False))
        """Index of the first element of each layer among all elements of the model."""

    def _workers(self, op: Op) -> optimizer.Workers:
        return self._host_workers if op.lane == "cpu" else optimizer.ALONE

    def _norm(self, op: Op) -> Run:
        """Computes the sum of squares of a layer's gradient or, with clipping by `adagc`, of the
        gradient of each tensor of the layer.
        """
        gradient, workers = self._elements(op.reads[0], op), self._workers(op)
        sizes = [op.parameters]
        if self.plan.workload.clipping == "adagc":
            sizes = [tensor.padded for tensor in self.plan.model.stack[op.layer].tensors]
        sums = self.arenas.flat(op.writes[0], torch.float32, len(sizes))
        parts = gradient.split(sizes)

        def run() -> None:
            # One kernel for all tensors, because each kernel waits beside compute.
            torch.stack([optimizer.sum_of_squares(part, workers) for part in parts], out=sums)

        return run

    def _encode_gradients(self, op: Op) -> Run:
        """Encodes a layer's gradient in 8 bits."""
        gradient, stored = self._elements(op.reads[0], op), self._elements(op.writes[0], op)
        index = self._first[op.layer]
        return lambda: coded_gradients.encode(
            gradient, stored, self._seed, self.state.number, index
        )

    def _ratios(self, op: Op) -> Run:
        """Computes the sums of a layer or chunk for clipping by `update` (`adamw.ratio_sums`)."""
        gradient, moments = map(base_buffer, op.reads)
        coded = self.schedule.dtype_of(moments, op.layer) == "block8"
        measure = blockwise.ratio_sums if coded else optimizer.ratio_sums
        g, second = self._elements(gradient, op), self._moments(moments, op)[1]
        sums = self.arenas.flat(
            op.writes[0], torch.float32, op.parameters // RATIO_ROW, 4 * op.offset // RATIO_ROW
        )
        workers = self._workers(op)

        def run() -> None:
            if self.state.update_at is not None:
                measure(
                    g,
                    second,
                    sums,
                    settings=self.settings,
                    number=self.state.update_at[1],
                    workers=workers,
                )

        return run

    def _values(self, op: Op, buffer: str, count: int) -> torch.Tensor:
        """Returns the first `count` fp32 values of `buffer`, in memory that the lane of `op` can
        read: for the `cpu` lane, the host copy of `buffer` if there is one.
        """
        return (
            self.state.host_scalars[buffer].landed
            if op.lane == "cpu" and buffer in self.state.host_scalars
            else self._floats(buffer)
        )[:count]

    def _scalars(self, op: Op, data: DataClass) -> list[torch.Tensor]:
        """Returns the first value of each buffer of `data` that `op` reads, 0-dimensional."""
        return [
            self._values(op, buffer, 1)[0]
            for buffer in op.reads
            if self.schedule.buffer[buffer].data == data
        ]

    def _clip(self, op: Op) -> Run:
        """Computes the clipping factors of the step or of a layer. If a loss is not finite, the
        factors are NaN, which stops the updates.
        """
        losses, sums = self._scalars(op, "losses"), self._scalars(op, "norms")
        if op.layer and self.plan.workload.clipping == "update":
            return self._scales(op, losses)
        if op.layer and self.plan.workload.clipping == "adagc":
            return self._clip_by_moving_norms(op, losses)
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
        """Computes the factor on the learning rate of each tensor, for clipping by `update`."""
        tensors = self.plan.model.stack[op.layer].tensors
        rows = self.arenas.flat(op.reads[0], torch.float32, op.parameters // RATIO_ROW).split(
            [tensor.padded // RATIO_ROW for tensor in tensors]
        )
        result = self.arenas.flat(op.writes[0], torch.float32, len(tensors))
        elements = torch.tensor(
            [tensor.elements for tensor in tensors], dtype=torch.float32, device=result.device
        )
        workers = self._workers(op)
        return lambda: result.copy_(
            optimizer.update_scales(rows, elements, workers) * optimizer.finite_or_nan(losses)
        )

    def _clip_by_moving_norms(self, op: Op, losses: list[torch.Tensor]) -> Run:
        """Computes the factor on the gradient of each tensor of a layer, for clipping by `adagc`.
        Also updates the moving norms, except those of a layer whose update is stopped.
        """
        count = len(self.plan.model.stack[op.layer].tensors)
        sums, moving, result = (
            self.arenas.flat(buffer, torch.float32, count)
            for buffer in (*op.reads[:2], op.writes[0])
        )

        def run() -> None:
            if self.state.update_at is not None:
                factors, later = moving_norms.clip(
                    sums, moving, settings=self.settings, number=self.state.update_at[1]
                )
                result.copy_(factors * optimizer.finite_or_nan(losses))
                moving.copy_(torch.where(result.isnan(), moving, later))

        return run

    def _elementwise_slices(
        self, op: Op, factor: str
    ) -> list[tuple[slice, ParamGroup, torch.Tensor | None, torch.Tensor | None]]:
        """Splits the elements of `op` into slices that an elementwise optimizer updates with the
        same arguments.

        Returns for each slice its parameter group, the clipping factor on its gradient, and the
        factor on its learning rate. A factor is None if this kind of clipping does not have it.
        """
        layer, kind = self.plan.model.stack[op.layer], self.plan.workload.clipping
        if kind not in BY_TENSOR:
            clip = self._values(op, factor, 1)[0]
            return [
                (part, group, clip, None)
                for part, group in group_slices(
                    self.settings, layer, self._owned(op.layer) + op.offset, op.parameters
                )
            ]
        slices: list[tuple[slice, ParamGroup, torch.Tensor | None, torch.Tensor | None]] = []
        factors = self._values(op, factor, len(layer.tensors))
        for tensor, offset, value in zip(layer.tensors, layer.offsets, factors, strict=True):
            start = offset - op.offset
            part = slice(max(start, 0), min(start + tensor.padded, op.parameters))
            if part.start < part.stop:
                both = (None, value) if kind == "update" else (value, None)
                slices.append((part, param_group(self.settings, layer, tensor), *both))
        return slices

    def _update(self, op: Op) -> Run:
        """Updates a layer or a chunk of a layer. If the op reads a weight slot, the old weights are
        copied from this slot first. If it writes a weight slot, the new weights are also written to
        this slot.
        """
        layout = update_layout(self.plan.workload.optimizer, self.plan.model.stack[op.layer])
        gradient, factor, *sources = map(base_buffer, op.reads)
        target, *rest = map(base_buffer, op.writes)
        others = {self.schedule.buffer[buffer].data: buffer for buffer in rest}
        low, copy_to = (
            self._elements(others[name], op) if name in others else None
            for name in ("master_low", "weights")
        )
        kept = others.get("moments")
        dtype = self.schedule.dtype_of(kept, op.layer) if kept else "fp32"
        weights, stored_gradient = self._elements(target, op), self._elements(gradient, op)
        coded = self.schedule.dtype_of(gradient, op.layer) == "block8"

        def gradient_of(part: slice) -> torch.Tensor:
            if not coded:
                return stored_gradient[part]
            first, end = blockwise.records(part.start), blockwise.records(part.stop)
            return coded_gradients.decoded(stored_gradient[first:end])

        source = self._elements(sources[0], op) if sources else None
        workers = self._workers(op)
        if layout is not None:
            assert kept is not None
            workspace = others.get("workspace")
            planes = self._planes(kept, op)
            calls = self._calls_by_tensor(op, factor, layout, planes, dtype, workspace)
        else:
            moments = (
                self._moments(kept, op)
                if kept
                else torch.empty(0, op.parameters, device=self.arenas.device)
            )
            calls = [
                _UpdateCall(
                    self._rule(dtype, self._first[op.layer] + op.offset + part.start),
                    part,
                    moments[:, length_of(dtype, part.start) : length_of(dtype, part.stop)],
                    group,
                    {"clip": clip, "scale": scale, "workers": workers},
                )
                for whole, group, clip, scale in self._elementwise_slices(op, factor)
                for part in (self._decoded_slices(whole, weights.device) if coded else [whole])
            ]

        def run() -> None:
            if source is not None:
                weights.copy_(source)
            if self.state.update_at is not None:
                rate, number = self.state.update_at
                for apply, part, moments, group, arguments in calls:
                    apply(
                        weights[part],
                        None if low is None else low[part],
                        moments,
                        gradient_of(part),
                        settings=self.settings,
                        rate=rate * group.rate_factor,
                        number=number,
                        weight_decay=group.weight_decay,
                        copy_to=None if copy_to is None else copy_to[part],
                        **arguments,
                    )
            elif copy_to is not None:
                copy_to.copy_(weights)

        return run

    def _decoded_slices(self, whole: slice, device: torch.device) -> list[slice]:
        """Splits `whole` into slices whose gradients are decoded at one time."""
        size = coded_gradients.block_size(device)
        return [
            slice(start, min(start + size, whole.stop))
            for start in range(whole.start, whole.stop, size)
        ]

    def _calls_by_tensor(
        self,
        op: Op,
        factor: str,
        layout: UpdateLayout,
        planes: list[torch.Tensor],
        dtype: str,
        workspace: str | None,
    ) -> list[_UpdateCall]:
        """Returns the calls of an optimizer that updates some tensors as whole matrices. `planes`
        are the moments of the op's parameters, one vector for each moment, in `dtype`. `workspace`
        is the buffer for updates of matrices.
        """
        layer, calls = self.plan.model.stack[op.layer], list[_UpdateCall]()
        by_tensor = self.plan.workload.clipping in BY_TENSOR
        factors = self._values(op, factor, len(layer.tensors) if by_tensor else 1)
        workers = self._workers(op)
        starts = [layout.start(plane, op.offset) for plane in range(layout.planes)]
        for tensor, first, count, matrices in layout.parts(op.offset, op.parameters):
            stored = [
                plane[length_of(dtype, layout.start(index, first) - start) :][
                    : length_of(dtype, length)
                ]
                for index, (plane, start, length) in enumerate(
                    zip(planes, starts, layout.lengths(first, count), strict=True)
                )
            ]
            part = slice(first - op.offset, first - op.offset + count)
            group = param_group(self.settings, layer, layer.tensors[tensor])
            clip = factors[tensor if by_tensor else 0]
            if matrices is None:
                arguments: dict[str, Any] = {"clip": clip, "workers": workers}
                rule = self._rule(dtype, self._first[op.layer] + first)
                calls.append(_UpdateCall(rule, part, stored, group, arguments))
            else:
                assert workspace is not None
                size = self.schedule.buffer[workspace].bytes
                room = self.arenas.flat(workspace, torch.uint8, size)
                arguments = {"clip": clip, "matrices": matrices, "workspace": room}
                arguments |= {"seed": self._seed, "index": self._first[op.layer] + first}
                calls.append(_UpdateCall(muon.update, part, stored[0], group, arguments))
        return calls

    def _rule(self, dtype: str, index: int) -> Callable[..., None]:
        """Returns the elementwise update function for moments in `dtype`. `index` is the index in
        the model of the first element to update.
        """
        if dtype == "block8":
            return functools.partial(blockwise.update, seed=self._seed, index=index)
        if self.plan.workload.optimizer in (ADAMW, MUON):
            return optimizer.update
        return functools.partial(outside.update, self._optimizer)
