"""What each kind of op may read and write: classes of data in order, their dtypes and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from megatrain.simulator.schedule.buffer import DTYPE_OF, WIDTH, Buffer
from megatrain.simulator.schedule.op import Op, ScheduleError, whole

_MOVES = ("load_state", "save_state")
_COPIES = {
    "load_weights": "weights",
    "load_gradients": "gradients",
    "save_gradients": "gradients",
    "load_activations": "hidden",
    "save_activations": "hidden",
    "load_second": "moments",
}
"""kind of copy -> the class of data on both sides"""
OPERANDS = {
    **{kind: (data, data) for kind, data in _COPIES.items()},
    **dict.fromkeys(_MOVES, ("(weights|low|moments|gradients| )+",) * 2),
    "embed": ("weights tokens", "hidden"),
    "forward": ("weights hidden", "hidden( saved_activations| attention)?"),
    "head": ("weights hidden tokens( gradients)?", "gradients hidden losses"),
    "loss": ("weights hidden tokens", "losses"),
    "recompute": ("weights hidden( attention)?", "activations( hidden)?"),
    "backward": ("weights (saved_)?activations hidden hidden( attention)?( gradients)?", "gradients hidden"),
    "embed_backward": ("tokens hidden( gradients)?", "gradients"),
    "accumulate_gradients": ("gradients( gradients)?", "gradients"),
    "norm": ("gradients", "norms"),
    "ratios": ("gradients moments", "ratio_sums"),
    "clip": ("(norms|ratio_sums|losses| )*", "clips"),
    **dict.fromkeys(("update", "cpu_update"), ("gradients clips( weights)?", "weights( low)? moments( weights)?")),
}
"""kind -> patterns of what it reads and of what it writes, by class of data; kinds that only predict are left out"""
_PATTERNS = {kind: (re.compile(reads), re.compile(writes)) for kind, (reads, writes) in OPERANDS.items()}
_PER_PARAMETER = ("ratios", "update", "cpu_update", *_MOVES, "load_second")
"""kinds whose operands hold `parameters` elements from `offset` on"""


def check_buffer(buffer: Buffer) -> None:
    """Raises ScheduleError where the buffer's dtype is none that its class of data can have."""
    only = DTYPE_OF.get(buffer.data)
    if buffer.dtype != only if only else buffer.dtype not in ("bf16", "fp32", "home", "mixed"):
        allowed = only or "bf16 or fp32"
        raise ScheduleError(f"{buffer.id}: {buffer.data} in {buffer.dtype}, not in {allowed}")
    if buffer.dtype == "home" and not buffer.chunk:
        raise ScheduleError(f"{buffer.id}: only a chunk takes its dtype from its layer's buffer")


def check_operands(op: Op, buffers: Mapping[str, Buffer], dtype_of: Callable[[str, str], str]) -> None:
    """Raises ScheduleError where an operand of `op` holds other data than its kind takes, has another
    dtype than the operand that it is copied to, added to or computed with, or is too small.
    """
    kind = op.kind
    if kind not in _PATTERNS:
        return
    for side, names, pattern in zip(("reads", "writes"), (op.reads, op.writes), _PATTERNS[kind], strict=True):
        classes = " ".join([buffers[whole(name)].data for name in names])
        if not pattern.fullmatch(classes):
            expected = OPERANDS[kind][0 if side == "reads" else 1]
            raise ScheduleError(f"{op.id}: {kind} {side} {classes or 'nothing'} ({', '.join(names)}), not {expected}")
    dtypes = {name: dtype_of(name, op.layer) for name in op.buffers}
    for group in _alike(op, buffers):
        if len({dtypes[name] for name in group}) > 1:
            found = ", ".join(f"{name} {dtypes[name]}" for name in group)
            raise ScheduleError(f"{op.id}: {found}: the dtypes differ")
    for name in op.writes:
        if buffers[whole(name)].data == "gradients" and name in op.reads and dtypes[name] != "fp32":
            raise ScheduleError(f"{op.id}: adds to {name} in {dtypes[name]}; sums are kept in fp32")
    if kind in ("update", "cpu_update"):
        low = any(buffers[whole(name)].data == "low" for name in op.writes)
        if low != (dtypes[op.writes[0]] == "bf16"):
            raise ScheduleError(f"{op.id}: weights in {dtypes[op.writes[0]]} {'with' if low else 'without'} a low half")
    _check_sizes(op, buffers, dtypes)


def _alike(op: Op, buffers: Mapping[str, Buffer]) -> list[Sequence[str]]:
    """Groups of operands that have one dtype."""
    if op.kind in _COPIES or op.kind in _MOVES:
        return [(source, target) for source, target in zip(op.reads, op.writes, strict=True)]
    computed = [name for name in op.buffers if buffers[whole(name)].data in ("weights", "hidden")]
    return [computed]


def _check_sizes(op: Op, buffers: Mapping[str, Buffer], dtypes: Mapping[str, str]) -> None:
    """Raises ScheduleError where the bytes or parameters of `op` do not fit into an operand."""
    for name in op.buffers:
        buffer = buffers[whole(name)]
        if op.kind in _COPIES and op.kind != "load_second":
            needed = op.offset + op.bytes
        elif op.kind in _PER_PARAMETER and buffer.data in ("weights", "low", "moments", "gradients"):
            elements = op.parameters + (0 if buffer.chunk else op.offset)
            needed = elements * WIDTH[dtypes[name]] * (2 if buffer.data == "moments" else 1)
        elif op.kind in ("norm", "accumulate_gradients") and buffer.data == "gradients":
            needed = op.parameters * WIDTH[dtypes[name]]
        else:
            continue
        if needed > buffer.bytes:
            raise ScheduleError(f"{op.id}: needs {needed} bytes of {name}, which has {buffer.bytes}")
