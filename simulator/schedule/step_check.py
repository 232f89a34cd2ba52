"""check_step: checks that a schedule computes the optimizer step of its plan.

`Schedule.check` proves that the order of the program cannot be broken, and that operands have the
right class, dtype and size. This module follows the data through the program in order: whose
weights a slot holds, which gradients were added to a buffer, and what each update reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.schedule.arithmetic import (
    part_elements,
    stack_contributions,
    whole_matrices,
)
from megatrain.simulator.schedule.buffer import WIDTH
from megatrain.simulator.schedule.op import Op, ScheduleError, base_buffer
from megatrain.simulator.schedule.operands import OPERANDS
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.schedule import Schedule
from megatrain.simulator.schedule.update_layout import update_layout

_PRODUCERS = ("backward", "head", "embed_backward")
_USERS = ("embed", "forward", "head", "recompute", "backward")
"""Kinds that compute with a layer's weights, their first operand."""
_UPDATES = ("update", "cpu_update")
_OF_NO_LAYER = (
    *("embed", "head", "loss", "embed_backward", "clip", "exchange_sums"),
    *("cpu_adam", "host_pass", "thread_pass", "device_pass"),
)
"""Kinds whose ids may name no layer."""
_LANE_OF = {
    **{kind: "h2d" for kind in OPERANDS if kind.startswith("load_")},
    **{kind: "d2h" for kind in OPERANDS if kind.startswith("save_")},
    **dict.fromkeys(("embed", "forward", "head", "loss", "recompute"), "compute"),
    **dict.fromkeys(("backward", "embed_backward"), "compute"),
    **dict.fromkeys(("update", "encode_gradients"), "update"),
    "cpu_update": "cpu",
}
"""Kind -> the only lane that runs it. `compute`, `update` and `cpu` run the other kinds."""
_EARLIER = "the step before"
"""The content of a gradient at the start of a step."""


class _Piece(NamedTuple):
    """What one op wrote to a buffer of weights or gradients."""

    first: int
    """The first parameter, counted from the start of the buffer."""
    length: int
    """The number of parameters."""
    layer: str
    """The layer that the data belongs to."""
    parts: frozenset[str]
    """For gradients: the ids of the ops whose results were added up."""
    writer: int
    """The op that wrote it, as its index in program order."""


def check_step(plan: Plan, schedule: Schedule, flush: Schedule | None) -> None:
    """Checks that `schedule`, which has passed `Schedule.check`, is a step of `plan`.

    For several GPUs, checks that they exchange what each needs of the others, and that each updates
    its own part of every layer. For one GPU, checks that

    * each op is on a lane that runs its kind and reaches its buffers
    * each compute op reads the whole, latest weights of its own layer
    * each norm reads a complete gradient of this step, and a `clip` reads all norms and losses
    * each parameter is updated once, with a complete gradient and its clip coefficient
    * all updates belong to this step, or if `flush` is given, all belong to the step before
    * matrices that the optimizer needs whole are updated whole, on the GPU, with workspace
    * no slot is released before an op reads what was written to it last

    Args:
        plan: The plan.
        schedule: The schedule of its step.
        flush: The schedule of the deferred update, or None if no update is deferred.

    Raises:
        ScheduleError: One of these does not hold.
    """
    if not schedule.is_typed:
        return
    if plan.gpus > 1:
        _check_shared(plan, schedule)
    else:
        _Check(plan, schedule, flush).run()
        whole = whole_matrices(plan)
        for layer in (layer for layer in plan.model.stack if layer in whole):
            for each in (schedule, flush):
                if each is not None:
                    _check_matrices(plan, each, layer)


def check_layers(plan: Plan, schedule: Schedule) -> None:
    """Raises ScheduleError if an op names a layer that the model of `plan` does not have, or no
    layer where its kind needs one.
    """
    layers = plan.model.stack
    for op in schedule.ops:
        if op.layer not in layers and (op.layer or op.kind not in _OF_NO_LAYER):
            raise ScheduleError(
                f"{op.id}: {f'layer {op.layer}' if op.layer else 'no layer'}",
                allowed=f"a layer of the model: {', '.join(layers)}",
                fix="name the layer in OpId",
            )


def check_copies(schedule: Schedule) -> None:
    """Raises ScheduleError if a copy is on another lane than that of its direction. Cost models
    take the rates of a copy from its lane.
    """
    for op in schedule.sizes.ops:
        only = _LANE_OF.get(op.kind)
        if only in ("h2d", "d2h") and op.lane != only:
            raise _wrong_lane(op, f"{op.kind} {op.id}", (only,))


def _wrong_lane(op: Op, name: str, allowed: Sequence[str]) -> ScheduleError:
    return ScheduleError(
        f"{name}: on lane {op.lane}",
        allowed=f"lane {' or '.join(allowed)}",
        fix="name this lane in Builder.op",
    )


def _check_shared(plan: Plan, schedule: Schedule) -> None:
    """Raises ScheduleError unless a rank takes part in all collectives of a step, and updates its
    own part of each layer.
    """
    seen = {(op.kind, op.layer) for op in schedule.ops}
    missing = [
        f"{kind} of layer {layer}"
        for layer in plan.model.stack
        for kind in ("gather_weights", "exchange_gradients")
        if (kind, layer) not in seen
    ]
    if ("exchange_sums", "") not in seen:
        missing.append("exchange_sums")
    if missing:
        raise ScheduleError(
            f"no {missing[0]} in a step of {plan.gpus} GPUs",
            allowed="gather_weights and exchange_gradients of each layer, and exchange_sums",
            fix="emit these ops, or set shards = False and plan for one GPU",
        )
    for layer in plan.model.stack:
        part = part_elements(plan, layer)
        updated = sum(
            op.parameters for op in schedule.ops if op.kind in _UPDATES and op.layer == layer
        )
        if updated != part:
            raise ScheduleError(
                f"{updated} parameters of layer {layer} are updated by each of {plan.gpus} GPUs",
                allowed=f"{part}, the part that each of them owns",
                fix="update part_elements parameters of each layer, or set shards = False",
            )


def _check_matrices(plan: Plan, schedule: Schedule, layer: str) -> None:
    """Raises ScheduleError unless each matrix of `layer` that the optimizer needs whole is updated
    whole, on the GPU, with enough workspace.
    """
    name = plan.workload.optimizer
    layout = update_layout(name, plan.model.stack[layer])
    assert layout is not None, "an optimizer that needs whole matrices has a layout"
    whole = 0
    for op in schedule.ops:
        if op.kind not in _UPDATES or op.layer != layer:
            continue
        matrices = [
            each for part in layout.parts(op.offset, op.parameters) if (each := part.matrices)
        ]
        if op.kind == "cpu_update":
            raise ScheduleError(
                f"{op.id}: layer {layer} updated on the CPU with optimizer {name}",
                allowed="updates of its matrices on the GPU, which orthogonalises them",
                fix="use policy overlapped, and set updates_on_host = True in this one",
            )
        room = max(
            (
                schedule.buffer[base_buffer(written)].bytes
                for written in op.writes
                if schedule.buffer[base_buffer(written)].data == "workspace"
            ),
            default=0,
        )
        needed = max((sum(each.workspace) for each in matrices), default=0)
        if room < needed:
            raise ScheduleError(
                f"{op.id}: {room:,} bytes of workspace for the matrices of layer {layer}",
                allowed=f"{needed:,}, which optimizer {name} needs",
                fix="let the op write the buffer of update_workspace (building.training_step)",
            )
        whole += sum(each.number for each in matrices)
    if whole != (number := sum(each.number for each in layout.matrices)):
        raise ScheduleError(
            f"{whole} of {number} matrices of layer {layer} are updated whole",
            allowed=f"all of them, as optimizer {name} needs",
            fix="update the layer in the chunks of UpdateLayout.chunks",
        )


class _Check:
    """Follows the data of one step."""

    def __init__(self, plan: Plan, schedule: Schedule, flush: Schedule | None) -> None:
        self.plan, self.schedule, self.stack = plan, schedule, plan.model.stack
        self.needed = stack_contributions(plan.model, plan.workload)
        self.deferred = None if flush is None else _updated(flush)
        self.pieces: dict[str, list[_Piece]] = {}
        """Buffer -> what it holds, if it holds weights or gradients."""
        for (data, layer), name in schedule.state.items():
            if data in ("weights", "gradients"):
                held = _Piece(0, self.stack[layer].elements, layer, frozenset((_EARLIER,)), -1)
                self.pieces[name] = [held]
        self.updates: dict[str, list[tuple[int, int, int]]] = {layer: [] for layer in self.stack}
        """Layer -> (first parameter, number of parameters, index) of each update op so far."""
        self.fresh: set[str] = set()
        """Norms and clip coefficients that this step has computed."""
        self.unread: dict[str, Op] = {}
        """Slot -> the op that wrote it, if no op has read it since."""

    def run(self) -> None:
        """Raises ScheduleError if a rule is broken."""
        for index, op in enumerate(self.schedule.ops):
            kind = op.kind
            self.refuse_lane(op)
            if kind in _USERS:
                self.uses_weights(op)
            if kind in _PRODUCERS:
                self.produces(op, index)
            elif kind in ("load_weights", "save_gradients", "load_gradients"):
                self.copies(op, index)
            elif kind == "load_state":
                self.loads(op, index)
            elif kind in ("accumulate_gradients", "encode_gradients"):
                parts = frozenset().union(*[self.parts(op, name) for name in op.reads])
                self.write(op.writes[0], op, _Piece(0, self.size(op), op.layer, parts, index))
            elif kind == "norm":
                self.refuse_incomplete(op, op.reads[0])
                self.fresh.add(op.writes[0])
            elif kind == "clip":
                self.clips(op)
            elif kind in _UPDATES:
                self.updates_layer(op, index)
            self.follow_slots(op)
        for layer, done in self.updates.items():
            self.refuse_gaps(layer, sorted(done))

    def refuse_lane(self, op: Op) -> None:
        """Raises ScheduleError if a lane does not run this kind of op, or cannot reach its
        buffers: copies go between host and device, and the GPU computes in device memory.
        """
        only = _LANE_OF.get(op.kind)
        allowed = (only,) if only else ("compute", "update", "cpu")
        if op.lane not in allowed:
            raise _wrong_lane(op, op.id, allowed)
        sides = {"h2d": ("host", "device"), "d2h": ("device", "host"), "cpu": ("", "host")}
        for names, place in zip(
            (op.reads, op.writes), sides.get(op.lane, ("device", "device")), strict=True
        ):
            wrong = next((name for name in names if not name.startswith(place)), None)
            if wrong is not None:
                raise ScheduleError(
                    f"{op.id}: {wrong} on lane {op.lane}",
                    allowed=f"a buffer in {place} memory there",
                    fix=f"make this pool as {place}.NAME, or use another lane",
                )

    def layer(self, op: Op) -> str:
        """Returns the layer whose weights or gradient `op` works on."""
        if op.layer:
            return op.layer
        return self.plan.model.head if op.kind in ("head", "loss") else EMBEDDING

    def size(self, op: Op) -> int:
        """Returns the number of parameters of the layer of `op`."""
        return self.stack[self.layer(op)].elements

    def width(self, name: str, op: Op) -> float:
        """Returns the bytes of a parameter in a buffer."""
        return WIDTH[self.schedule.dtype_of(name, self.layer(op))]

    def write(self, name: str, op: Op, piece: _Piece) -> None:
        """Records a piece. It replaces what the same parameters of the buffer held."""
        base, end = base_buffer(name), piece.first + piece.length
        held = [] if base in op.acquires else self.pieces.get(base, [])
        kept = [one for one in held if one.first + one.length <= piece.first or one.first >= end]
        for one in held:
            if one.first < piece.first < one.first + one.length:
                kept.append(one._replace(length=piece.first - one.first))
            if one.first < end < one.first + one.length:
                kept.append(one._replace(first=end, length=one.first + one.length - end))
        self.pieces[base] = [*kept, piece]

    def covering(self, name: str, first: int, count: int) -> list[_Piece]:
        """Returns the pieces of a buffer that have some of these parameters, in order. Empty if a
        parameter is in no piece.
        """
        held = sorted(self.pieces.get(base_buffer(name), []))
        found = [
            one for one in held if one.first < first + count and first < one.first + one.length
        ]
        reached = first
        for one in found:
            if one.first > reached:
                return []
            reached = one.first + one.length
        return found if reached >= first + count else []

    def uses_weights(self, op: Op) -> None:
        """Raises ScheduleError unless a compute op reads the latest weights of its own layer."""
        layer, name = self.layer(op), op.reads[0]
        found = self.covering(name, 0, self.size(op))
        wrong = {one.layer for one in found} - {layer}
        if wrong:
            raise ScheduleError(
                f"{op.id}: reads the weights of layer {min(wrong)} in {name}",
                allowed=f"weights of layer {layer}",
                fix=f"return the slot of layer {layer}, and load it from the buffer of its weights",
            )
        if not found:
            raise ScheduleError(
                f"{op.id}: {name} has only a part of the weights of layer {layer}",
                allowed=f"all {self.size(op)} parameters",
                fix="give the loads of the layer offsets and bytes that cover it",
            )
        for one in found:
            late = [
                self.schedule.ops[index].id
                for first, count, index in self.updates[layer]
                if one.writer < index
                and first < one.first + one.length
                and one.first < first + count
            ]
            if late and not self.schedule.buffer[base_buffer(name)].persistent:
                raise ScheduleError(
                    f"{op.id}: {name} was loaded before {late[0]} updated layer {layer}",
                    allowed="the latest weights",
                    fix="load the layer after its update",
                )

    def produces(self, op: Op, index: int) -> None:
        """Records the gradient that a compute op writes or adds to."""
        name, parts = op.writes[0], frozenset((op.id,))
        if name in op.reads:
            parts |= self.parts(op, name)
        self.write(name, op, _Piece(0, self.size(op), self.layer(op), parts, index))

    def copies(self, op: Op, index: int) -> None:
        """Records a copy of weights or gradients of whole layers."""
        (source,), (target,) = op.reads, op.writes
        width = self.width(source, op)
        # A chunk may end within a parameter. The next chunk then has the rest of it.
        first = int(op.offset / width)
        count = min(math.ceil((op.offset + op.bytes) / width), self.size(op)) - first
        if count <= 0:
            raise ScheduleError(
                f"{op.id}: copies {op.bytes} bytes", "> 0", "pass the bytes to Builder.op"
            )
        for one in self.covering(source, first, count):
            begin = max(one.first, first)
            length = min(one.first + one.length, first + count) - begin
            self.write(target, op, one._replace(first=begin, length=length, writer=index))
        if not self.covering(target, first, count):
            raise ScheduleError(
                f"{op.id}: copies parameters {first} to {first + count} of {source}, which no op"
                " has written",
                allowed="data that an earlier op has written",
                fix="emit the op that writes them before this one, or correct offset and bytes",
            )

    def loads(self, op: Op, index: int) -> None:
        """Records the chunk of weights or gradients that `load_state` copies."""
        for source, target in zip(op.reads, op.writes, strict=True):
            for one in self.covering(source, op.offset, op.parameters):
                begin = max(one.first, op.offset)
                length = min(one.first + one.length, op.offset + op.parameters) - begin
                moved = one._replace(first=begin - op.offset, length=length, writer=index)
                self.write(target, op, moved)

    def parts(self, op: Op, name: str, first: int = 0, count: int | None = None) -> frozenset[str]:
        """Returns the ops whose gradients were added up in all of these parameters of a buffer: by
        default, the whole layer of `op`. Gradients of other layers do not count.
        """
        found = self.covering(name, first, self.size(op) if count is None else count)
        own = [one.parts if one.layer == self.layer(op) else frozenset[str]() for one in found]
        return frozenset.intersection(*own) if own else frozenset()

    def refuse_incomplete(
        self, op: Op, name: str, first: int = 0, count: int | None = None
    ) -> None:
        """Raises ScheduleError unless a buffer has the sum of all gradients of the op's layer."""
        layer, parts = self.layer(op), self.parts(op, name, first, count)
        have, needed = len(parts - {_EARLIER}), self.needed[layer]
        if have != needed or _EARLIER in parts:
            raise ScheduleError(
                f"{op.id}: {name} has {have} of the {needed} gradients of layer {layer}",
                allowed="the sum of all gradients of the step",
                fix="add the gradient of each micro-batch, and emit this op after the last of them;"
                " a policy whose step leaves its update to the next one defines defers_update and"
                " flush_update",
            )

    def clips(self, op: Op) -> None:
        """Records a clip coefficient. Raises ScheduleError if the op reads an old norm, or not
        every norm and loss that it needs.
        """
        data = self.schedule.buffer
        losses = {name for name, one in data.items() if one.data == "losses"}
        layers = [op.layer] if op.layer else list(self.stack)
        state = self.schedule.state
        norms = {state["norms", layer] for layer in layers if ("norms", layer) in state}
        missing = sorted((losses | norms) - {*op.reads})
        stale = [name for name in op.reads if data[name].data == "norms" and name not in self.fresh]
        if missing:
            raise ScheduleError(
                f"{op.id}: does not read {', '.join(missing[:3])}",
                allowed="every loss of the step and every norm that the coefficient is made of",
                fix="set Clipping.losses in losses_written, and call finish after every measure",
            )
        if stale:
            raise ScheduleError(
                f"{op.id}: reads {stale[0]} before this step has computed it",
                allowed="norms of this step",
                fix="emit this op after the norm of each layer",
            )
        self.fresh.update(name for name in op.writes if data[name].data == "clips")

    def updates_layer(self, op: Op, index: int) -> None:
        """Records an update, and the weights that it writes.

        Raises ScheduleError if its gradient or clip coefficient is not the one that it needs.
        """
        layer, (gradient, factor) = op.layer, op.reads[:2]
        chunk = self.schedule.buffer[base_buffer(gradient)].chunk
        first = 0 if chunk else op.offset
        if not op.parameters:
            raise ScheduleError(
                f"{op.id}: updates 0 parameters", "> 0", "pass the parameters to Builder.op"
            )
        if self.deferred is None:
            self.refuse_incomplete(op, gradient, first, op.parameters)
            if factor not in self.fresh:
                raise ScheduleError(
                    f"{op.id}: reads {factor} before this step has computed it",
                    allowed="the clip coefficient of this step",
                    fix="emit it after Clipping.measure and Clipping.finish; a policy whose step"
                    " leaves its update to the next one defines defers_update and flush_update",
                )
        elif factor in self.fresh or self.parts(op, gradient, first, op.parameters) != {_EARLIER}:
            raise ScheduleError(
                f"{op.id}: updates layer {layer} with a gradient or clip coefficient of this step",
                allowed="those of the step before, for every layer, since flush_update returns a"
                " deferred update",
                fix="defer the update of every layer, or of none",
            )
        self.updates[layer].append((op.offset, op.parameters, index))
        for name in op.writes:
            buffer = self.schedule.buffer[base_buffer(name)]
            if buffer.data == "weights":
                begin = 0 if buffer.chunk else op.offset
                self.write(name, op, _Piece(begin, op.parameters, layer, frozenset(), index))

    def refuse_gaps(self, layer: str, done: list[tuple[int, int, int]]) -> None:
        """Raises ScheduleError unless the updates of a layer change each of its parameters once."""
        reached = 0
        for first, count, _ in done:
            if first != reached:
                break
            reached += count
        else:
            if reached == self.stack[layer].elements:
                if self.deferred is None or self.deferred.get(layer) == [one[:2] for one in done]:
                    return
                raise ScheduleError(
                    f"flush_update does not update layer {layer} as the step does",
                    allowed="the same updates, of every layer",
                    fix="emit the update of every layer in flush_update",
                )
        ops = ", ".join(self.schedule.ops[index].id for *_, index in done[:3]) or "no op"
        raise ScheduleError(
            f"{ops}: not every parameter of layer {layer} is updated once",
            allowed=f"one update of parameters 0 to {self.stack[layer].elements}, or of chunks that"
            " make them up",
            fix="emit cpu_update or update for the whole layer, with its parameters",
        )

    def follow_slots(self, op: Op) -> None:
        """Raises ScheduleError if `op` releases a slot that was written and then not read."""
        for name in op.reads:
            self.unread.pop(base_buffer(name), None)
        if op.kind not in _UPDATES:
            self.unread.update((base_buffer(name), op) for name in op.writes)
        for slot in op.releases:
            if slot in self.unread:
                raise ScheduleError(
                    f"{self.unread.pop(slot).id}: no op reads what it writes to {slot}",
                    allowed="ops whose results are read",
                    fix="leave out this op, or emit the op that reads its result before the slot is"
                    " released",
                )


def _updated(flush: Schedule) -> dict[str, list[tuple[int, int]]]:
    """Returns layer -> (first parameter, number of parameters) of each update of it, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for op in flush.ops:
        if op.kind in _UPDATES:
            found.setdefault(op.layer, []).append((op.offset, op.parameters))
    return {layer: sorted(ranges) for layer, ranges in found.items()}
