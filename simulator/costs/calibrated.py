"""Calibrated: durations read off curves measured on the machine.

    duration(size) = linear between the two measured sizes around it, along the outermost segment beyond them

and, for compute, the duration of the very shape, or of the nearest measured shape scaled by FLOPs. Whatever lies outside the
measured sizes or shapes is flagged as extrapolated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.protocol import FIX
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, CostTable, Workspace
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import ModelSpec


class Calibrated:
    """A CostTable, looked up."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.contention: Mapping[str, Mapping[str, float]] = table.contention
        self.dispatch_ns: Mapping[str, int] = table.dispatch_ns
        self.step_overhead_ns = table.step_overhead_ns
        self._known: dict[tuple[str, str, bool, int | str], tuple[int, bool]] = {}

    def duration_ns(self, op: Op) -> int:
        return self._look_up(op)[0]

    def extrapolated(self, op: Op) -> bool:
        return self._look_up(op)[1]

    def _look_up(self, op: Op) -> tuple[int, bool]:
        """(duration, extrapolated) of `op`."""
        kind = op.kind
        size = op.shape or (op.bytes if kind in COPY_KINDS else op.parameters)
        key = (kind, op.lane, op.adds, size)
        if key not in self._known:
            self._known[key] = self._compute(kind, size) if isinstance(size, str) else interpolate(self._curve(op), size)
        return self._known[key]

    def _curve(self, op: Op) -> tuple[tuple[int, int], ...]:
        kind, curves = op.kind, self.table.curves
        names = ([f"{kind}:add@{op.lane}", f"{kind}:add"] if op.adds else []) + [f"{kind}@{op.lane}", kind]
        name = next((name for name in names if name in curves), None)
        if name is None:
            raise UserError(f"costs of {self.table.measured_on}: curves", found=f"nothing for `{kind}` on lane {op.lane}", allowed=_list(curves), fix=FIX)
        return curves[name]

    def _compute(self, kind: str, shape: str) -> tuple[int, bool]:
        durations = self.table.compute.get(kind, {})
        if shape in durations:
            return durations[shape], False
        model, _, workload = shape.partition("/")
        wanted = work(kind, shape)
        candidates = []
        for known in sorted(durations):
            amount = work(kind, known)
            if wanted and amount and known.rpartition("-")[2] == workload.rpartition("-")[2]:
                candidates.append((known.partition("/")[0] != model, abs(math.log(wanted / amount)), known, amount))
        if wanted is None or not candidates:
            raise UserError(f"costs of {self.table.measured_on}: compute.{kind}", found=f"nothing for {shape}", allowed=_list(durations), fix=FIX)
        _, _, nearest, amount = min(candidates)
        return -(-durations[nearest] * wanted // amount), True

    def activations_bytes(self, shape: str) -> int | None:
        """Of this shape, or of the same model with other tokens: what autograd saves is proportional to the tokens."""
        known = self.table.activations
        if shape in known:
            return known[shape]
        tokens, (model, _, workload) = _tokens(shape), shape.partition("/")
        for other in sorted(known):
            other_tokens, (other_model, _, other_workload) = _tokens(other), other.partition("/")
            if tokens and other_tokens and other_model == model and other_workload.rpartition("-")[2] == workload.rpartition("-")[2]:
                return -(-known[other] * tokens // other_tokens)
        return None

    def workspace(self, shape: str) -> Workspace | None:
        """Of this very shape only: it has fixed parts, so it does not scale."""
        return self.table.workspace.get(shape)


def _list(keys: Mapping[str, object]) -> str:
    return ", ".join(sorted(keys)[:8]) or "nothing measured"


_SHAPE = re.compile(
    r"(?P<family>\w+)-(?P<hidden>\d+)x(?P<ffn>\d+)-(?P<heads>\d+):(?P<kv>\d+)x(?P<dim>\d+)-v(?P<vocabulary>\d+)/(?P<batch>\d+)x(?P<sequence>\d+)-(?P<dtype>\w+)"
)
_SHARES = {"forward": 1, "recompute": 1, "backward": 2, "head": 3}


def _tokens(shape: str) -> int | None:
    match = _SHAPE.fullmatch(shape)
    return int(match["batch"]) * int(match["sequence"]) if match else None


def work(kind: str, shape: str) -> int | None:
    """What the duration of a compute op of this shape is proportional to: FLOPs, for the embedding elements; None for an unreadable shape.

    >>> work("embed", "qwen2-2048x11008-16:2x128-v151936/32x1024-bf16")
    67108864
    """
    match = _SHAPE.fullmatch(shape)
    if match is None:
        return None
    hidden, ffn, heads, kv, dim, vocabulary, batch, sequence = (
        int(match[key]) for key in ("hidden", "ffn", "heads", "kv", "dim", "vocabulary", "batch", "sequence")
    )
    if kind not in _SHARES:
        return batch * sequence * hidden
    model = ModelSpec(
        name=shape, family=match["family"], layers=1, hidden=hidden, intermediate=ffn, heads=heads, kv_heads=kv, head_dim=dim, vocabulary=vocabulary, tied=False
    )
    tokens = batch * sequence
    return _SHARES[kind] * (model.head_flops(tokens) if kind == "head" else model.layer_flops(tokens, sequence))
