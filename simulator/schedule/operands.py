"""The operands of each kind of op: classes of data in order, and checks of dtypes and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.schedule.buffer import DTYPES_OF, WIDTH, Buffer
from megatrain.simulator.schedule.op import Op, ScheduleError, base_buffer, computes_output

KeptMoments = Callable[[str, int, int], int]
"""A function (layer, first parameter, number of parameters) -> the number of moment values that the
optimizer keeps for these parameters."""
_MOVES = ("load_state", "save_state")
_COPIES = {
    "load_weights": "weights",
    "load_gradients": "gradients",
    "save_gradients": "gradients",
    "load_activations": "hidden",
    "save_activations": "hidden",
    "load_attention": "attention",
    "save_attention": "attention",
    "load_second_moment": "moments",
}
"""The class of data that each kind of copy reads and writes."""
OPERANDS = {
    **{kind: (data, data) for kind, data in _COPIES.items()},
    **dict.fromkeys(_MOVES, ("(weights|master_low|moments|gradients| )+",) * 2),
    "embed": ("weights tokens", "hidden"),
    "forward": ("weights hidden", "hidden( saved_activations| attention)?"),
    "head": ("weights hidden tokens( gradients)?", "gradients hidden losses"),
    "loss": ("weights hidden tokens", "losses"),
    "recompute": ("weights hidden( attention)?", "activations( hidden)?"),
    "backward": (
        "weights (saved_)?activations hidden hidden( attention)?( gradients)?",
        "gradients hidden",
    ),
    "embed_backward": ("tokens hidden( gradients)?", "gradients"),
    "accumulate_gradients": ("gradients( gradients)?", "gradients"),
    "norm": ("gradients", "norms"),
    "encode_gradients": ("gradients", "gradients"),
    "gather_weights": ("weights", "weights"),
    "exchange_gradients": ("gradients( gradients){0,2}", "gradients workspace"),
    "sum_rows": ("gradients", "row_sums"),
    "exchange_sums": ("(row_sums|losses| )+", "(norms|losses| )+ workspace"),
    "update_ratios": ("gradients moments", "ratio_sums"),
    "clip": ("(norms|moving_norms|ratio_sums|losses| )*", "clips( moving_norms)?"),
    **dict.fromkeys(
        ("update", "cpu_update"),
        ("gradients clips( weights)?", "weights( master_low)?( moments)?( weights)?( workspace)?"),
    ),
}
"""Kind of op -> two regular expressions: one for the classes of data that the op reads, in order,
and one for those that it writes. Kinds that can only be predicted are absent."""
_PATTERNS = {
    kind: (re.compile(reads), re.compile(writes)) for kind, (reads, writes) in OPERANDS.items()
}
_PER_PARAMETER = ("update_ratios", "update", "cpu_update", *_MOVES, "load_second_moment")
"""Kinds that work on `parameters` elements, starting at `offset`."""
_WHOLE = ("norm", "accumulate_gradients", "encode_gradients", "sum_rows")
"""Kinds that work on the gradient of a whole layer, or on a rank's part of it."""
_EXCHANGED = ("gather_weights", "exchange_gradients")
"""Collectives on a layer. `parameters` is the size of the part that each rank owns. `bytes` is the
size of all other parts, which a rank receives. With tied embeddings, two gradients of a layer are
exchanged at once."""


def check_buffer(buffer: Buffer) -> None:
    """Raises ScheduleError if the class of data of `buffer` cannot have its dtype."""
    only = DTYPES_OF.get(buffer.data)
    coded = ("block8",) if buffer.data == "gradients" else ()
    if buffer.dtype not in (only or ("bf16", "fp32", "home", "mixed", *coded)):
        allowed = " or ".join(only or ("bf16", "fp32"))
        raise ScheduleError(
            f"{buffer.id}: {buffer.data} in {buffer.dtype}",
            allowed=allowed,
            fix=f"pass this dtype to {_maker(buffer)}",
        )
    if buffer.dtype == "home" and not buffer.chunk:
        raise ScheduleError(
            f"{buffer.id}: dtype home in a buffer that is no chunk",
            allowed="a chunk, which takes its dtype from its layer's buffer",
            fix=f"pass another dtype or chunk=True to {_maker(buffer)}",
        )


def _maker(buffer: Buffer) -> str:
    """Returns the method that makes such a buffer."""
    return "Builder.persistent" if buffer.persistent else "Builder.slots"


def check_operands(
    op: Op, buffers: Mapping[str, Buffer], dtype_of: Callable[[str, str], str], kept: KeptMoments
) -> None:
    """Checks the operands of `op`.

    Args:
        buffers: the schedule's buffers by id.
        dtype_of: `Schedule.dtype_of`, the dtype of a layer's data in a buffer.
        kept: the number of moment values that the optimizer keeps for a range of parameters.

    Raises:
        ScheduleError: an operand holds another class of data than the kind of op takes, has another
            dtype than the operand that it is combined with, or is too small.
    """
    kind = op.kind
    if kind not in _PATTERNS:
        return
    for side, names, pattern in zip(
        ("reads", "writes"), (op.reads, op.writes), _PATTERNS[kind], strict=True
    ):
        classes = " ".join([buffers[base_buffer(name)].data for name in names])
        if not pattern.fullmatch(classes):
            expected = OPERANDS[kind][0 if side == "reads" else 1]
            raise ScheduleError(
                f"{op.id}: {side} {classes or 'nothing'} ({', '.join(names)})",
                allowed=f"{kind} {side} {expected}",
                fix=f"pass buffers of these classes of data as {side} to Builder.op",
            )
    dtypes = {name: dtype_of(name, op.layer) for name in op.buffers}
    for group in _alike(op, buffers):
        if len({dtypes[name] for name in group}) > 1:
            found = ", ".join(f"{name} {dtypes[name]}" for name in group)
            raise ScheduleError(
                f"{op.id}: {found}: the dtypes differ",
                allowed="one dtype, because the op combines these buffers",
                fix="make the buffers with the same dtype, such as plan.workload.dtype",
            )
    for name in op.writes:
        if (
            buffers[base_buffer(name)].data == "gradients"
            and name in op.reads
            and dtypes[name] != "fp32"
        ):
            raise ScheduleError(
                f"{op.id}: adds to {name} in {dtypes[name]}",
                allowed="fp32, in which sums are kept",
                fix=f"pass fp32 to {_maker(buffers[base_buffer(name)])}, or do not read {name}",
            )
    if kind in ("update", "cpu_update"):
        written: dict[str, str] = {
            buffers[base_buffer(name)].data: dtypes[name] for name in op.writes
        }
        values = kept(op.layer, op.offset, op.parameters)
        if values and "moments" not in written:
            raise ScheduleError(
                f"{op.id}: writes no moments, but the optimizer keeps {values:,} values of them",
                allowed="a buffer of moments among the writes",
                fix="take the operands from update_operands",
            )
        _check_planes(op, written)
    if kind in ("backward", "head", "embed_backward", "norm", "encode_gradients"):
        coded = [
            name
            for name in (op.reads if kind in ("norm", "encode_gradients") else op.writes)
            if buffers[base_buffer(name)].data == "gradients" and dtypes[name] == "block8"
        ]
        if coded:
            raise ScheduleError(
                f"{op.id}: {coded[0]} is in codes, which only updates read",
                allowed="a gradient in bf16 or fp32",
                fix="pass the gradient that encode_gradients reads",
            )
    if kind == "recompute" and len(op.writes) > 1 and not computes_output(op.shape):
        raise ScheduleError(
            f"{op.id}: writes {op.writes[1]}, but {op.shape} does not compute this output",
            allowed="activations, or a shape that computes the output",
            fix="leave out this buffer, or take the shape from cost_keys with read=True",
        )
    if kind == "encode_gradients" and dtypes[op.writes[0]] != "block8":
        raise ScheduleError(
            f"{op.id}: writes codes to {op.writes[0]}, in {dtypes[op.writes[0]]}",
            allowed="block8",
            fix=f"pass this dtype to {_maker(buffers[base_buffer(op.writes[0])])}",
        )
    if kind == "gather_weights":
        source, slot = (buffers[base_buffer(name)] for name in (op.reads[0], op.writes[0]))
        if slot.sharded or not (source.sharded or source == slot):
            raise ScheduleError(
                f"{op.id}: gathers {source.id} into {slot.id}, not a part into a whole layer",
                allowed="a buffer with sharded=True, or the slot itself, into one without",
                fix=f"pass sharded to {_maker(source)}",
            )
    if kind == "exchange_gradients":
        target = buffers[base_buffer(op.writes[0])]
        if not target.sharded or dtypes[op.writes[0]] != "fp32":
            raise ScheduleError(
                f"{op.id}: {target.id} is not the fp32 part that a rank owns",
                allowed="a buffer of gradients in fp32 with sharded=True",
                fix=f"pass both to {_maker(target)}",
            )
    _check_sizes(op, buffers, dtypes, kept)


def _check_planes(op: Op, written: Mapping[str, str]) -> None:
    """Raises ScheduleError if no state format has the planes that an update writes. `written` maps
    their class of data to their dtype.
    """
    weights, low = written["weights"], written.get("master_low")
    moments = written.get("moments", "fp32")
    known = {(state_format.low, state_format.moments) for state_format in FORMATS.values()}
    if (low, moments) not in (known if weights == "bf16" else {(None, "fp32")}):
        raise ScheduleError(
            f"{op.id}: weights in {weights} {f'with {low}' if low else 'without'} low halves and"
            f" {moments} moments: no state format has these",
            allowed=f"the parts of one state format: {', '.join(FORMATS)}",
            fix="make a layer's buffers from layer_state, and pass all to update_operands",
        )


def _alike(op: Op, buffers: Mapping[str, Buffer]) -> list[Sequence[str]]:
    """Returns groups of operands. All operands of a group must have the same dtype."""
    if op.kind in _COPIES or op.kind in _MOVES:
        return [(source, target) for source, target in zip(op.reads, op.writes, strict=True)]
    computed = [
        name for name in op.buffers if buffers[base_buffer(name)].data in ("weights", "hidden")
    ]
    return [computed]


def exchanged(op: Op) -> int:
    """Returns how many buffers of a layer a collective exchanges.

    These are the buffers that `exchange_gradients` reads, without a buffer that it adds to.
    `gather_weights` exchanges one.
    """
    return max(sum(name not in op.writes for name in op.reads), 1)


def pieces(op: Op) -> int:
    """Returns in how many pieces an op exchanges gradients, and 1 for other ops."""
    return -(-op.parameters // op.elements) if op.kind == "exchange_gradients" else 1


def exchange_kernels(op: Op) -> int:
    """Returns how many kernels an exchange of gradients launches, one after the other, and 1 for
    other ops. For each piece, these are an all-to-all for each gradient of the layer, and one sum
    of all parts. If there are several pieces, each is copied before it is sent.
    """
    if op.kind != "exchange_gradients":
        return 1
    number = pieces(op)
    return number * (exchanged(op) * (2 if number > 1 else 1) + 1)


def exchange_room(op: Op, width: float) -> int:
    """Returns the bytes of workspace that `exchange_gradients` needs. `width` is the bytes of an
    element of the gradient that it sends.

    A piece of each part is received at a time. If a piece is not the whole part, the pieces that
    are sent are copied to the workspace, too, because they are not contiguous in the gradient.
    """
    sources = exchanged(op)
    ranks = 1 + round(op.bytes / (sources * width * op.parameters))
    return int(ranks * op.elements * width) * (sources + (op.elements < op.parameters))


def _check_sizes(
    op: Op, buffers: Mapping[str, Buffer], dtypes: Mapping[str, str], kept: KeptMoments
) -> None:
    """Raises ScheduleError if an operand is too small for the bytes or parameters of `op`."""
    for name in op.buffers:
        buffer = buffers[base_buffer(name)]
        if op.kind in _PER_PARAMETER and buffer.data in (
            "weights",
            "master_low",
            "moments",
            "gradients",
        ):
            first, count = (
                (op.offset, op.parameters) if buffer.chunk else (0, op.offset + op.parameters)
            )
            values = kept(op.layer, first, count) if buffer.data == "moments" else count
            needed = int(values * WIDTH[dtypes[name]])
        elif op.kind in _COPIES:
            needed = op.offset + op.bytes
        elif op.kind in _EXCHANGED:
            if buffer.data == "workspace":
                needed = exchange_room(op, WIDTH[dtypes[op.reads[0]]])
            else:
                needed = int(op.parameters * WIDTH[dtypes[name]])
                if not buffer.sharded:
                    needed += op.bytes // exchanged(op)
        elif op.kind in _WHOLE and buffer.data == "gradients":
            needed = int(op.parameters * WIDTH[dtypes[name]])
        else:
            continue
        if needed > buffer.bytes:
            raise ScheduleError(
                f"{op.id}: {name} has {buffer.bytes:,} bytes",
                allowed=f"{needed:,} bytes or more, for the size of this op",
                fix=f"pass a larger size to {_maker(buffer)}, or a smaller one to Builder.op",
            )
