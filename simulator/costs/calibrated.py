"""Calibrated: durations read off curves measured on the machine.

    duration(size) = linear between the two measured sizes around it, along the outermost segment beyond them

and, for compute, the duration of the very shape, or between the shapes that were measured of the same layer (`grid.py`), or beyond them that of the
nearest, scaled by FLOPs. A recompute without attention that was not measured is shorter than the one with it by what a token's attention took at the
sequence lengths where both were measured, or it takes of it the share that the datasheet's rates give. So does a layer that was measured with
documents of the one without, and the other way round. Whatever lies outside the measured sizes or shapes is flagged as extrapolated.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping

import msgspec

from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.grid import Point, between
from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.protocol import FIX, Shared
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, LAYER_KINDS, PASS_KINDS, UNMEASURED_KINDS, WIDE_KINDS, CostTable, Workspace
from megatrain.simulator.memory_formulas import workspace_estimate
from megatrain.simulator.schedule import KEPT, Op, is_kept
from megatrain.simulator.sharing import Sharing
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import DOCUMENTS, Workload

_SHAPE = re.compile(r"/(\d+)x(\d+)-")


class Calibrated(Shared):
    """A CostTable, looked up. Passes of other systems, which nobody measures op by op, cost what its `datasheet` rates say, and are flagged; so do
    `ratios` in a table that was measured before there were any.
    """

    def __init__(self, table: CostTable, datasheet: Datasheet | None = None, sharing: Sharing | None = None, elementwise: Elementwise | None = None) -> None:
        """`sharing`: the table's pairs by default. `elementwise`: what the cpu lane's ops ask of host DRAM, needed where that is shared."""
        self.table, self._datasheet = table, datasheet
        self.sharing = sharing or Sharing(table.contention)
        self._elementwise = elementwise
        self.dispatch_ns: Mapping[str, int] = table.dispatch_ns
        self.step_overhead_ns, self.process_bytes = table.step_overhead_ns, table.process_bytes
        self._known: dict[tuple[str, str, bool, int | str], tuple[int, bool]] = {}

    def duration_ns(self, op: Op) -> int:
        return self._look_up(op)[0]

    def touched_bytes(self, op: Op) -> int:
        return (self._elementwise.touched_bytes(op) or 0) if self._elementwise else 0

    def extrapolated(self, op: Op) -> bool:
        return self._look_up(op)[1]

    def _look_up(self, op: Op) -> tuple[int, bool]:
        """(duration, extrapolated) of `op`."""
        kind = op.kind
        unknown = kind in PASS_KINDS or (kind == "ratios" and not any(name.partition("@")[0] == kind for name in self.table.curves))
        if unknown and self._datasheet is not None:
            return self._datasheet.duration_ns(op), True
        size = op.shape or (op.bytes if kind in COPY_KINDS else op.parameters)
        key = (kind, op.lane, op.adds, size) if op.layer.isdigit() else (f"{kind} {op.layer}", op.lane, op.adds, size)
        if key not in self._known:
            if not isinstance(size, str):
                self._known[key] = interpolate(self.table.curves[self._curve(op)], size)
            elif (other := _other_packing(size)) and not self._has(kind, size) and self._has(kind, other):
                self._known[key] = self._as_packed(op, other)
            elif is_kept(size) and size not in self.table.compute.get(kind, {}) and self._datasheet is not None:
                full, share = self._datasheet.whole(op)
                duration, beyond = self._look_up(full)
                saved = self._attention_ns(kind, size)
                self._known[key] = (max(duration - saved, 1), beyond) if saved is not None else (math.ceil(share * duration), True)
            else:
                duration, beyond = self._compute(kind, size, op.amount)
                chunks = self._other_chunks(op)
                self._known[key] = math.ceil(chunks * duration) + self._summing_ns(op), beyond or chunks != 1.0
        return self._known[key]

    def _has(self, kind: str, shape: str) -> bool:
        """Something was measured from which `shape` can be had."""
        return any(_dtype(known) == _dtype(shape) for known in self.table.compute.get("head" if kind in UNMEASURED_KINDS else kind, {}))

    def _as_packed(self, op: Op, shape: str) -> tuple[int, bool]:
        """(duration, extrapolated) of `op` from what it takes with rows packed the other way, as in `shape`. All but the decoder layers take the same."""
        duration, outside = self._look_up(msgspec.structs.replace(op, shape=shape))
        if op.kind not in LAYER_KINDS:
            return duration, outside
        sheet = self._datasheet
        share = sheet.share(op, msgspec.structs.replace(sheet.workload, documents=not sheet.workload.documents)) if sheet else 1.0
        return math.ceil(share * duration), True

    def _other_chunks(self, op: Op) -> float:
        """By what a head takes longer because its loss comes in other chunks than were measured: as the datasheet's rates say."""
        if op.kind not in ("head", "loss") or self._datasheet is None or self.table.loss_chunk in (0, self._datasheet.workload.loss_chunk):
            return 1.0
        measured = msgspec.structs.replace(self._datasheet.workload, loss_chunk=self.table.loss_chunk)
        return self._datasheet.duration_ns(op) / Datasheet(self._datasheet.hardware, self._datasheet.model, measured).duration_ns(op)

    def _attention_ns(self, kind: str, shape: str) -> int | None:
        """What the attention of a recompute takes, from measured shapes of the same layer with and without it; None where they do not tell."""
        measured, found = self.table.compute.get(kind, {}), dict[int, list[tuple[int, int]]]()
        for known, (_, duration) in measured.items():
            full = known.replace(KEPT + "/", "/")
            if full != known and full in measured and (_layer(known), _dtype(known)) == (_layer(shape), _dtype(shape)):
                tokens, sequence = _tokens(known)
                found.setdefault(sequence, []).append((tokens, measured[full][1] - duration))
        tokens, sequence = _tokens(shape)
        picoseconds = tuple((length, round(1000 * statistics.mean(ns / count for count, ns in pairs))) for length, pairs in sorted(found.items()))  # a token
        if not picoseconds or not picoseconds[0][0] <= sequence <= picoseconds[-1][0]:
            return None
        return tokens * interpolate(picoseconds, sequence)[0] // 1000

    def _summing_ns(self, op: Op) -> int:
        """What a compute op takes more where its gradient is one of several."""
        if self._elementwise is None or self._datasheet is None:
            return 0
        return round(self._elementwise.summed_bytes(op) / self._datasheet.hardware.device_gb_per_s)

    def spread(self, op: Op) -> float:
        """Of the measured number nearest to what `op` takes: the interquartile range of its repeats over their median; 0 where none is known."""
        if op.shape:
            name = "head" if op.kind in UNMEASURED_KINDS and op.kind not in self.table.compute else op.kind
            shapes = self.table.compute.get(name, {})
            size = _tokens(op.shape)[0]
            sizes = {known: _tokens(known)[0] for known in shapes if (_layer(known), _dtype(known)) == (_layer(op.shape), _dtype(op.shape))}
        else:
            name = self._curve(op)
            size = op.bytes if op.kind in COPY_KINDS else op.parameters
            sizes = {str(known): known for known, _ in self.table.curves[name]}
        spreads = {known: self.table.spread[f"{name} {known}"] for known in sizes if f"{name} {known}" in self.table.spread}
        return spreads[min(spreads, key=lambda known: abs(sizes[known] - size))] if spreads else 0.0

    def _curve(self, op: Op) -> str:
        """The name of its curve."""
        kind, curves = op.kind, self.table.curves
        if kind in COPY_KINDS:
            kind = "load_weights" if op.lane == "h2d" else "save_gradients"
        wide = self._elementwise is not None and kind in WIDE_KINDS and self._elementwise.wide(op.layer)
        which = ([":add"] if op.adds else []) + ([":wide"] if wide else []) + [""]
        names = [f"{kind}{how}@{op.lane}" for how in which] + [f"{kind}{how}" for how in which]
        name = next((name for name in names if name in curves), None)
        if name is None:
            raise UserError(f"costs of {self.table.measured_on}: curves", found=f"nothing for `{kind}` on lane {op.lane}", allowed=_list(curves), fix=FIX)
        return name

    def _compute(self, kind: str, shape: str, amount: int) -> tuple[int, bool]:
        share = kind in UNMEASURED_KINDS and kind not in self.table.compute  # the loss is the head without its backward: of its time, the share of its FLOPs
        measured = self.table.compute.get("head" if share else kind, {})
        if shape in measured and not share:
            return measured[shape][1], False
        alike = {known: values for known, values in sorted(measured.items()) if _dtype(known) == _dtype(shape) and is_kept(known) == is_kept(shape)}
        points = [Point(*_tokens(known), duration) for known, (_, duration) in alike.items() if _layer(known) == _layer(shape)]
        if len(points) > 1 and not share and (time := between(points, *_tokens(shape), attends=kind in LAYER_KINDS)) is not None:
            return time, False
        candidates = []
        for known, (known_amount, duration) in alike.items():
            if amount and known_amount:
                candidates.append((_layer(known) != _layer(shape), abs(math.log(amount / known_amount)), known, known_amount, duration))
        if not candidates:
            raise UserError(f"costs of {self.table.measured_on}: compute.{kind}", found=f"nothing for {shape}", allowed=_list(measured), fix=FIX)
        _, _, _, known_amount, duration = min(candidates)
        return -(-duration * amount // known_amount), True

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        """Of this model and workload, or of the same model with the nearest tokens, if need be packed the other way: what autograd saves is
        proportional to the tokens. Where scores are written out it is not, and the very same rows alone count.
        """
        known, shape = self.table.activations, f"{model.shape}/{workload.shape}"
        for wanted in (shape, _other_packing(shape)):
            alike = [known[other] for other in sorted(known) if _layer(other) == _layer(wanted) and _dtype(other) == _dtype(wanted)]
            if alike and (wanted in known or not model.writes_scores):
                tokens, size = known.get(wanted) or min(alike, key=lambda point: abs(math.log(point[0] / workload.tokens)))
                return -(-size * workload.tokens // tokens)
        return None

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        """Of this very shape, or of the same layers on a line over the tokens: it has fixed parts, so one point does not scale. A head whose loss comes in
        one chunk sums up no gradients, so it is on a line with its like alone. With rows packed the other way the same, but for the mask. None with other
        chunks of the loss, whose logits are the most of a head's.
        """
        if self.table.loss_chunk not in (0, workload.loss_chunk):
            return None
        shape = f"{model.shape}/{workload.shape}"
        found, beside = (self._workspace(wanted, model, workload) for wanted in (shape, _other_packing(shape)))
        if found or beside is None:
            return found
        more = model.mask_bytes(workload) - model.mask_bytes(msgspec.structs.replace(workload, documents=not workload.documents))
        return msgspec.structs.replace(beside, layer=max(beside.layer + more, 0))

    def _workspace(self, shape: str, model: ModelSpec, workload: Workload) -> Workspace | None:
        known = self.table.workspace
        if shape in known:
            return known[shape]
        if model.writes_scores:
            return None
        points: dict[int, Workspace] = {}
        for other, found in sorted(known.items()):
            if _layer(other) == _layer(shape) and _dtype(other) == _dtype(shape):
                tokens = _tokens(other)[0]
                points[tokens] = _larger(found, points.get(tokens, found))
        if len(points) < 2:
            return None
        line = {field: tuple((tokens, getattr(found, field)) for tokens, found in sorted(points.items())) for field in Workspace.__struct_fields__}
        found = Workspace(**{field: interpolate(values, workload.tokens)[0] for field, values in line.items()})
        return msgspec.structs.replace(found, head=_head_bytes(line["head"], model, workload))


def _head_bytes(points: tuple[tuple[int, int], ...], model: ModelSpec, workload: Workload) -> int:
    """A head's workspace from what was measured at other (tokens, bytes): on a line where two of them have one chunk of the loss, or several, as
    `workload` has; otherwise that of the nearest, and by what the formula differs between the two.
    """
    alike = tuple((tokens, size) for tokens, size in points if (tokens > workload.loss_chunk) == (workload.tokens > workload.loss_chunk))
    if len(alike) > 1:
        return interpolate(alike, workload.tokens)[0]
    nearest, size = min(alike or points, key=lambda point: abs(math.log(point[0] / workload.tokens)))
    then = msgspec.structs.replace(workload, batch=1, sequence=nearest)
    return max(size + workspace_estimate(model, workload).head - workspace_estimate(model, then).head, 0)


def _larger(one: Workspace, other: Workspace) -> Workspace:
    return Workspace(**{field: max(getattr(one, field), getattr(other, field)) for field in Workspace.__struct_fields__})


def _tokens(shape: str) -> tuple[int, int]:
    """(tokens, sequence) of `LAYER/BATCHxSEQUENCE-DTYPE`; zeros of what is none."""
    match = _SHAPE.search(shape)
    return (int(match[1]) * int(match[2]), int(match[2])) if match else (0, 0)


def _layer(shape: str) -> str:
    """Of `LAYER/BATCHxSEQUENCE-DTYPE`."""
    return shape.partition("/")[0]


def _dtype(shape: str) -> str:
    """And what else decides the kernels: compiled or not, a chosen attention."""
    return shape.rpartition("/")[2].partition("-")[2]


def _other_packing(shape: str) -> str:
    """The shape of the same tokens with documents kept apart, or without."""
    return shape.removesuffix(DOCUMENTS) if shape.endswith(DOCUMENTS) else shape + DOCUMENTS


def _list(keys: Mapping[str, object]) -> str:
    return ", ".join(sorted(keys)[:8]) or "nothing measured"
