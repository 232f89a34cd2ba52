"""Calibrated: a cost model that reads durations from curves measured on the machine.

The duration of a copy or an elementwise op is linear between the two nearest measured sizes, and
continues such a line beyond the outermost sizes (`interpolate`).

The duration of a compute op is the first of these that is known:

1. the duration of the same shape, if it was measured
2. an interpolation between measured shapes of the same layer (`interpolation.py`)
3. the duration of the same layer with other tokens, scaled by the tokens. In a decoder layer, the
   time of attention is replaced (`Datasheet.scaled`), because its share depends on the length
4. the duration that the datasheet's formula gives with the rates of this machine. FLOPs are no
   measure for the layers of other families (docs/accuracy.md). Only the ops of the embedding, which
   mostly wait for their launch, are scaled from the nearest measured embedding

If a recompute that skips attention was not measured, the time of the attention is subtracted from
the duration of the full recompute. The time of attention per token is known if both kinds of
recompute were measured at shorter and longer sequences, or if the attention kernel was measured by
itself. In a shorter sequence than these, it takes no longer per token than in the shortest of them.
Otherwise the duration of the full recompute is multiplied by the ratio of the two datasheet
times.

The duration of a decoder layer is also multiplied by a ratio of datasheet times in these cases:

* The layer was measured only with documents, and the workload has none, or the other way round.
* The layer was measured only in bf16, and the workload multiplies in fp8.
* The layer was measured only without pieces of tokens, and the workload has pieces.
* The layer rebuilds outputs (`Knobs.rebuild_outputs`). A calibration measures layers that do not.

A calibration measures rows of one document. If `Workload.document_length` is less than a row, the
time of the attention in a row is replaced by that in documents of this length (`_in_documents`).

Other compute ops do not depend on documents, fp8, pieces and rebuilt outputs.

A decoder layer's op that was not measured takes at least the time in which the host calls the
functions of a loop over chunks of a row (`Datasheet.calls_ns`).

A duration outside the measured sizes or shapes is flagged as extrapolated. Rebuilt outputs alone
are no reason for it, because they change a duration by a few percent.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from typing import Any

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import measured_memory
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.interpolation import Point, between, fixed_ns, interpolate
from megatrain.simulator.costs.measured_shapes import (
    alike_but_for_tokens,
    head_with_chunk,
    layer_of,
    other_packing,
    tokens_of,
    variant_of,
)
from megatrain.simulator.costs.missing import missing_measurement
from megatrain.simulator.costs.protocol import FIX, ContendedCosts
from megatrain.simulator.hardware.cost_table import (
    COPY_KINDS,
    EVALUATION_KINDS,
    EXCHANGE_KINDS,
    LAYER_KINDS,
    PASS_KINDS,
    WIDE_KINDS,
    CostTable,
    Workspace,
)
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import (
    DOCUMENTS,
    Workload,
    has_pieces,
    is_short,
    shortened,
    without_fp8,
    without_groups,
    without_pieces,
    without_rebuilding,
    without_short,
)
from megatrain.simulator.schedule import (
    SAVED_ATTENTION_SUFFIX,
    WHOLE_SUFFIX,
    Op,
    OpId,
    has_saved_attention,
    saves_activations,
)

_STEADY = 1.01
"""The CPU's speed counts as constant if its slower and its faster half differ by less than this
factor."""


class Calibrated(ContendedCosts):
    """Durations from a CostTable.

    The passes of other systems and the collectives of several GPUs are not measured op by op. Their
    durations come from `datasheet`, and are flagged as extrapolated, except collectives whose rates
    were measured (`HardwareSpec.several`). The same holds for
    `update_ratios` and `encode_gradients` if the table does not have them, and for updates that
    multiply matrices.
    """

    def __init__(
        self,
        table: CostTable,
        datasheet: Datasheet | None = None,
        sharing: ContentionModel | None = None,
        elementwise: Elementwise | None = None,
        documents: Datasheet | None = None,
    ) -> None:
        """Makes a cost model of one machine, model and workload.

        Args:
            table: The measured durations.
            datasheet: The datasheet model of the same machine, for ops that were not measured.
            sharing: The resources that lanes share. By default it has only the pairs of `table`.
            elementwise: The bytes that elementwise ops read and write. Without it, ops of the lane
                `cpu` have no DRAM traffic.
            documents: The datasheet model of the same machine for rows of several documents, if
                their length is known. The other arguments are for rows of one document, which are
                measured.
        """
        self.table, self._datasheet, self._documents = table, datasheet, documents
        self.sharing = sharing or ContentionModel(table.contention)
        self._elementwise = elementwise
        self.dispatch_ns: Mapping[str, int] = table.dispatch_ns
        self.step_overhead_ns, self.process_bytes = table.step_overhead_ns, table.process_bytes
        self.library_bytes = datasheet.library_bytes if datasheet else 0
        # The time of the CPU's ops is the mean over the factors, and `host_factors` are relative to
        # it. Then one simulation is close to the expected step, and lower bounds hold for both.
        self._host_mean = statistics.fmean(table.host_factors or (1.0,))
        self.host_factors = _few(table.host_factors)
        # A search asks for the memory of the same model and workload hundreds of times.
        remembering = functools.lru_cache(maxsize=16)
        self._activations = remembering(functools.partial(measured_memory.activations_bytes, table))
        self._workspace = remembering(functools.partial(measured_memory.workspace, table))
        self._known: dict[tuple[str, str, bool, int | str], tuple[int, bool]] = {}
        """(kind, lane, whether the op adds to a buffer or saves activations, size or shape) ->
        (duration in ns, extrapolated). For ops outside of decoder layers, the kind is followed by
        the layer."""
        self._others: dict[Workload, tuple[Datasheet, Calibrated]] = {}
        """Other workloads from whose ops durations are derived -> their cost models, without and
        with measurements."""

    def collective_bytes(self, gpus: int) -> int:
        return self._datasheet.collective_bytes(gpus) if self._datasheet else 0

    def duration_ns(self, op: Op) -> int:
        duration = self._look_up(op)[0]
        if self._documents is not None and op.kind in LAYER_KINDS:
            return self._in_documents(op, duration, self._documents)
        if op.lane != "cpu" or self._host_mean == 1:
            return duration
        return round(self._host_mean * duration)

    def _in_documents(self, op: Op, duration: int, documents: Datasheet) -> int:
        """Returns the duration in ns of a decoder layer's `op` in rows of several documents.
        `duration` is that in rows of one document.
        """
        assert self._datasheet is not None
        whole = self._datasheet.attention_ns(op.kind, op.layer)
        if has_saved_attention(op.shape) or not whole:
            return duration
        shorter = 1 - documents.attention_ns(op.kind, op.layer) / whole
        # The attention kernel and the op were measured separately, so the kernel alone may take
        # longer than the op that contains it.
        return round(duration - min(whole, duration) * max(shorter, 0.0))

    def touched_bytes(self, op: Op) -> int:
        return (self._elementwise.touched_bytes(op) or 0) if self._elementwise else 0

    def extrapolated(self, op: Op) -> bool:
        return self._look_up(op)[1]

    def _look_up(self, op: Op) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op`."""
        kind = op.kind
        unmeasured = (
            kind in (*PASS_KINDS, *EXCHANGE_KINDS, "sum_rows")
            or (kind == "accumulate_gradients" and op.lane != "cpu")
            or (
                kind in ("update_ratios", "encode_gradients")
                and not any(name.partition("@")[0] == kind for name in self.table.curves)
            )
            or (
                kind == "update"
                and self._elementwise is not None
                and self._elementwise.needs_products(op.layer)
            )
        )
        if unmeasured and self._datasheet is not None:
            known = kind in EXCHANGE_KINDS and self._datasheet.several is not None
            return self._datasheet.duration_ns(op), not known
        size = op.shape or (op.bytes if kind in COPY_KINDS else op.parameters)
        saves = kind == "forward" and saves_activations(op.writes)
        key = (
            (kind, op.lane, op.adds or saves, size)
            if op.layer.isdigit()
            else (f"{kind} {op.layer}", op.lane, op.adds, size)
        )
        if key not in self._known:
            duration, beyond = (
                self._from_shapes(op, size, saves=saves)
                if isinstance(size, str)
                else self._on_curve(op, size)
            )
            if self._datasheet is not None and size not in self.table.compute.get(kind, {}):
                duration = max(duration, self._datasheet.calls_ns(kind, op.layer))
            self._known[key] = duration, beyond
        return self._known[key]

    def _from_shapes(self, op: Op, shape: str, *, saves: bool) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op`, a compute op with this shape, from the
        measured shapes. `saves` says whether it is a forward pass that saves activations.
        """
        kind, sheet = op.kind, self._datasheet
        if sheet is not None and self._is_of_other_layers(op):
            return max(sheet.duration_ns(op) + self._summing_ns(op), 0), True
        if saves:
            return self._saving(op)
        if (plain := without_rebuilding(shape)) != shape:
            return self._rebuilding(op, plain)
        if (other := self._other_products(kind, shape)) is not None:
            return self._changed(op, other, short_recompute=is_short(other))
        known = self._has(kind, shape)
        if not known and without_pieces(shape) != shape:
            plain = self._without_pieces(kind, shape)
            return self._changed(op, plain, token_piece=None, short_recompute=is_short(plain))
        if not known and (plain := without_groups(shape)) != shape:
            return self._changed(op, plain, head_groups=None)
        if not known and self._has(kind, other_packing(shape)):
            return self._as_packed(op, other_packing(shape))
        measured = shape in self.table.compute.get(kind, {})
        if sheet is not None and has_saved_attention(shape) and not measured:
            full, share = sheet.whole(op)
            duration, beyond = self._look_up(full)
            saved, most = self._attention_ns(kind, shape)
            if saved is None and sheet.knows_attention:
                saved, beyond = round(min(sheet.attention_ns(kind, op.layer), most)), True
            if saved is None:
                return math.ceil(share * duration), True
            return max(duration - saved, 1), beyond
        if not known and (plain := without_fp8(shape)) != shape:
            return self._changed(op, plain, fp8=None)
        duration, beyond = self._compute(op, shape)
        # `_summing_ns` may be negative, with a larger magnitude than the duration.
        return max(duration + self._summing_ns(op), 0), beyond

    def _on_curve(self, op: Op, size: int) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op` with `size` bytes or parameters.

        AdamW is always measured in the state format `exact`. If the plan's format was not measured
        too, the time of its update is derived from this time and flagged as extrapolated.
        Raises UserError for an update that multiplies matrices, which has no curve.
        """
        if op.flops:
            raise UserError(
                f"costs of {self.table.measured_on}: {op.id}",
                found="an update with matrix products, and no peak rate for the workload's dtype",
                allowed="a machine with a peak rate",
                fix=FIX,
            )
        curve = self._curve(op)
        duration, beyond = interpolate(self.table.curves[curve], size)
        if op.kind not in ("update", "cpu_update") or self._elementwise is None:
            return duration, beyond
        if curve.startswith(f"{op.kind}:{self._elementwise.state}"):
            return duration, beyond
        derived = self._elementwise.update_ns(op, duration)
        return (duration, beyond) if derived == duration else (math.ceil(derived), True)

    def _other_products(self, kind: str, shape: str) -> str | None:
        """Returns the shape to use for an op of `kind` if only the other kind of recompute was
        measured: the full one for a short `shape`, and the short one for a full `shape`. Returns
        None if `shape` was measured with some number of tokens, or if neither was.
        """
        other = without_short(shape) if is_short(shape) else shortened(shape)
        wanted, instead = (
            any(self._has(kind, packed) for packed in (each, other_packing(each)))
            for each in (shape, other)
        )
        return other if instead and not wanted else None

    def _without_pieces(self, kind: str, shape: str) -> str:
        """Returns `shape` without pieces of tokens. A recompute leaves out last products if only
        such recomputes were measured.
        """
        plain = without_short(without_pieces(shape).replace(WHOLE_SUFFIX, ""))
        return self._other_products(kind, plain) or plain

    def _is_of_other_layers(self, op: Op) -> bool:
        """Checks whether `op` belongs to a decoder layer of which no duration was measured."""
        assert self._datasheet is not None
        if op.kind not in LAYER_KINDS:
            return False
        layer = self._datasheet.model.stack[op.layer]
        return not self.table.workloads_of(layer.signature, op.kind)

    def _has(self, kind: str, shape: str) -> bool:
        """Checks whether a duration for `shape` can be derived from the measured shapes of
        `kind`.
        """
        return any(
            variant_of(known) == variant_of(shape)
            for known in self.table.compute.get("head" if kind in EVALUATION_KINDS else kind, {})
        )

    def _as_packed(self, op: Op, shape: str) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op`, derived from the duration of `shape`, the
        same shape with the other packing. Only decoder layers have another duration.
        """
        sheet = self._datasheet
        if op.kind in LAYER_KINDS and sheet is not None:
            return self._changed(op, shape, documents=not sheet.workload.documents)
        duration, outside = self._look_up(msgspec.structs.replace(op, shape=shape))
        return duration, outside or op.kind in LAYER_KINDS

    def _rebuilding(self, op: Op, shape: str) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op`, which belongs to a layer that rebuilds
        outputs. `shape` is the same shape for a layer that saves them.
        """
        saving = msgspec.structs.replace(op, shape=shape)
        duration, beyond = self._look_up(saving)
        sheet = self._datasheet
        return (
            (duration, beyond)
            if sheet is None
            else (math.ceil(sheet.share(op, saving, sheet) * duration), beyond)
        )

    def _saving(self, op: Op) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op`, a forward pass that saves activations.

        It computes the same as a recompute of the whole layer. In a compiled layer with experts,
        both take longer than a forward pass that saves nothing (docs/lab_notes.md, "Forward passes
        that save"). So such a layer takes the time of the recompute, if that was measured and is
        longer. Other layers show no clear difference.
        """
        found, sheet = self._look_up(msgspec.structs.replace(op, writes=())), self._datasheet
        if (
            sheet is None
            or not sheet.workload.compiled
            or not sheet.model.stack[op.layer].experts
            or has_pieces(op.shape)
        ):
            return found
        # A recompute with fp8 products is derived from one without, as a forward pass is.
        known = (op.shape, without_fp8(op.shape))
        if not any(self._has("recompute", each) for each in (*known, *map(other_packing, known))):
            return found
        recompute = str(OpId("recompute", op.layer, micro=0))
        return max(found, self._look_up(msgspec.structs.replace(op, id=recompute, writes=())))

    def _changed(self, op: Op, shape: str, **changes: Any) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of `op`, derived from the duration of `shape`, the
        same shape for a workload with `changes`. Only decoder layers have another duration.

        The duration of `shape` is that of the cost model of the other workload. It may be derived
        from a third one, and what an op computes depends on the workload.
        """
        other, sheet = msgspec.structs.replace(op, shape=shape), self._datasheet
        if op.kind not in LAYER_KINDS or sheet is None:
            return self._look_up(other)
        work = msgspec.structs.replace(sheet.workload, **changes)
        if work not in self._others:
            changed = Datasheet(sheet.hardware, sheet.model, work)
            costs = Calibrated(self.table, changed, self.sharing, self._elementwise)
            self._others[work] = changed, costs
        changed, costs = self._others[work]
        if "short_recompute" in changes:  # groups of heads and fp8 do not change the FLOPs
            other = changed.with_flops(other)
        duration, _ = costs._look_up(other)
        return math.ceil(sheet.share(op, other, changed) * duration), True

    def _other_chunks(self, op: Op) -> tuple[float, bool]:
        """Returns the factor on the duration of a head because its loss chunk is not the table's,
        and whether the factor is derived from the datasheet. It is measured if the head was
        measured with both loss chunks. Otherwise it is derived from the largest measured loss chunk
        that is not larger, or else from the table's.
        """
        if (
            op.kind not in ("head", "loss")
            or self._datasheet is None
            or self.table.loss_chunk in (0, self._datasheet.workload.loss_chunk)
        ):
            return 1.0, False
        workload, usual = self._datasheet.workload, self.table.loss_chunk
        factor, nearest = 1.0, usual
        if op.kind == "head":
            known = {point[0] for points in self.table.heads.values() for point in points} | {usual}
            for chunk in sorted(chunk for chunk in known if chunk <= workload.loss_chunk):
                if chunk == usual:
                    factor, nearest = 1.0, usual
                elif head := head_with_chunk(self.table, op.shape, chunk):
                    nearest = chunk
                    factor = head.duration_ns / self.table.compute["head"][head.shape][1]
        if nearest == workload.loss_chunk:
            return factor, False
        measured = msgspec.structs.replace(workload, loss_chunk=nearest)
        factor *= self._datasheet.duration_ns(op) / Datasheet(
            self._datasheet.hardware, self._datasheet.model, measured
        ).duration_ns(op)
        return factor, factor != 1.0

    def _attention_ns(self, kind: str, shape: str) -> tuple[int | None, float]:
        """Returns the time of the attention in a recompute, in ns, from measured shapes of the same
        layer with and without attention, or None if they do not cover the sequence length.

        The second result is the most that it can take, or infinity if that is not known: a token of
        a shorter sequence attends to fewer tokens. The kernel alone, measured at longer sequences,
        says little about short ones, where it mostly waits for its start.
        """
        measured = self.table.compute.get(kind, {})
        # sequence length -> (tokens, ns of attention) of each measurement
        lengths: dict[int, list[tuple[int, int]]] = {}
        for known, (_, duration) in measured.items():
            full = known.replace(SAVED_ATTENTION_SUFFIX + "/", "/")
            if full != known and full in measured and alike_but_for_tokens(known, shape):
                tokens, sequence = tokens_of(known)
                lengths.setdefault(sequence, []).append((tokens, measured[full][1] - duration))
        tokens, sequence = tokens_of(shape)
        picoseconds = tuple(  # per token, by sequence length
            (length, round(1000 * statistics.mean(ns / count for count, ns in pairs)))
            for length, pairs in sorted(lengths.items())
        )
        if not picoseconds or sequence > picoseconds[-1][0]:
            return None, math.inf
        if sequence < picoseconds[0][0]:
            return None, max(tokens * picoseconds[0][1] / 1000, 0)
        return tokens * interpolate(picoseconds, sequence)[0] // 1000, math.inf

    def _summing_ns(self, op: Op) -> int:
        """Returns the extra time of a compute op whose gradient is one of several, in ns. It may be
        negative.
        """
        if self._elementwise is None or self._datasheet is None:
            return 0
        return round(self._elementwise.summed_bytes(op) / self._datasheet.hardware.device_gb_per_s)

    def spread(self, op: Op) -> float:
        """Returns the spread of the measured number that is nearest in size to `op`: the
        interquartile range of its repetitions divided by their median, or 0 if it is unknown.

        A share of the time that documents save is added, which is the machine's `uncertainty`. This
        time is computed and not measured, and steps differ in their documents.
        """
        saved = 0.0
        if self._documents is not None and self._datasheet is not None and op.kind in LAYER_KINDS:
            duration = self.duration_ns(op)
            saved = (self._look_up(op)[0] - duration) / max(duration, 1)
            saved *= self._datasheet.hardware.uncertainty
        return self._measured_spread(op) + saved

    def _measured_spread(self, op: Op) -> float:
        """Returns `spread` for rows of one document."""
        if shape := without_rebuilding(op.shape):
            name = (
                "head"
                if op.kind in EVALUATION_KINDS and op.kind not in self.table.compute
                else op.kind
            )
            shapes = self.table.compute.get(name, {})
            size = tokens_of(shape)[0]
            sizes = {
                known: tokens_of(known)[0] for known in shapes if alike_but_for_tokens(known, shape)
            }
        else:
            name = self._curve(op)
            size = op.bytes if op.kind in COPY_KINDS else op.parameters
            sizes = {str(known): known for known, _ in self.table.curves[name]}
        spreads = {
            known: self.table.spread[f"{name} {known}"]
            for known in sizes
            if f"{name} {known}" in self.table.spread
        }
        return spreads[min(spreads, key=lambda known: abs(sizes[known] - size))] if spreads else 0.0

    def _curve(self, op: Op) -> str:
        """Returns the key of the curve of `op`. Raises UserError if the table has none."""
        kind, curves = op.kind, self.table.curves
        if kind in COPY_KINDS:
            kind = "load_weights" if op.lane == "h2d" else "save_gradients"
        wide = (
            self._elementwise is not None
            and kind in WIDE_KINDS
            and self._elementwise.wide(op.layer)
        )
        suffixes = ([":add"] if op.adds else []) + ([":wide"] if wide else []) + [""]
        names = [f"{kind}{suffix}@{op.lane}" for suffix in suffixes]
        names += [f"{kind}{suffix}" for suffix in suffixes]
        if kind == "cpu_update" and self._elementwise is not None:
            names = [f"{kind}:{self._elementwise.state}{suffix}" for suffix in suffixes] + names
        name = next((name for name in names if name in curves), None)
        if name is None:
            raise UserError(
                f"measurements of {self.table.measured_on}",
                found=f"no times of the operation {kind} on the lane {op.lane}",
                allowed=f"what was measured: {_list(curves)}",
                fix=FIX,
            )
        return name

    def _compute(self, op: Op, shape: str) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of a compute op. Raises UserError if there is
        neither a measurement that can be scaled nor a datasheet.
        """
        if (found := self._from_measured(op, shape)) is not None:
            chunks, derived = self._other_chunks(op)
            return math.ceil(chunks * found[0]), found[1] or derived
        if self._datasheet is None:
            kind = "head" if self._is_part_of_head(op) else op.kind
            known = self.table.compute.get(kind, {})
            raise missing_measurement(self.table.measured_on, op.kind, shape, known)
        return self._datasheet.duration_ns(op), True

    def _is_part_of_head(self, op: Op) -> bool:
        """Checks whether `op` is a loss whose duration must be derived from the head's, which also
        has a backward pass.
        """
        return op.kind in EVALUATION_KINDS and op.kind not in self.table.compute

    def _from_measured(self, op: Op, shape: str) -> tuple[int, bool] | None:
        """Returns (duration in ns, extrapolated) of a compute op with the loss chunk of the table,
        or None if no measurement can be scaled.
        """
        kind, amount = op.kind, op.amount
        from_head = self._is_part_of_head(op)
        measured = self.table.compute.get("head" if from_head else kind, {})
        if shape in measured and not from_head:
            return measured[shape][1], False
        alike = {
            known: values
            for known, values in sorted(measured.items())
            if variant_of(known) == variant_of(shape)
            and has_saved_attention(known) == has_saved_attention(shape)
        }
        points = [
            Point(*tokens_of(known), duration)
            for known, (_, duration) in alike.items()
            if layer_of(known) == layer_of(shape)
        ]
        if (
            len(points) > 1
            and not from_head
            and (time := between(points, *tokens_of(shape), attends=kind in LAYER_KINDS))
            is not None
        ):
            return time, False
        if points and op.layer.isdigit() and self._datasheet:
            return self._scaled(op, points), True
        of_tables = kind in ("embed", "embed_backward")
        candidates = [
            (layer_of(known) != layer_of(shape), abs(math.log(amount / size)), duration / size)
            for known, (size, duration) in alike.items()
            if amount and size and (of_tables or layer_of(known) == layer_of(shape))
        ]
        return (math.ceil(min(candidates)[2] * amount), True) if candidates else None

    def _scaled(self, op: Op, points: list[Point]) -> int:
        """Returns the duration of a decoder layer's op in ns, from a measurement of the same layer
        with other tokens. It is the measurement with the nearest number of tokens, and if there are
        several, with the nearest sequence length. `points` have the same packing as `op.shape`.

        With fewer tokens than were measured, the part of the time that does not depend on the
        tokens (`fixed_ns`) is kept. In a layer with a loop over the chunks of a row, it is shorter
        in shorter rows.
        """
        sheet = self._datasheet
        assert sheet
        packed = msgspec.structs.replace(sheet.workload, documents=op.shape.endswith(DOCUMENTS))
        if packed != sheet.workload:
            sheet = Datasheet(sheet.hardware, sheet.model, packed)
        tokens, sequence = sheet.workload.tokens, sheet.workload.sequence

        def distance(point: Point) -> tuple[float, float]:
            return (abs(math.log(point.tokens / tokens)), abs(math.log(point.sequence / sequence)))

        nearest = min(points, key=distance)
        measured = msgspec.structs.replace(
            sheet.workload, batch=nearest.tokens // nearest.sequence, sequence=nearest.sequence
        )
        duration = sheet.scaled(op, measured, nearest.duration_ns)
        if tokens < nearest.tokens:
            fixed = fixed_ns(points, nearest)
            if sheet.calls_ns(op.kind, op.layer):  # a loop over the chunks of a row
                fixed *= min(sequence / nearest.sequence, 1)
            duration += fixed * (1 - tokens / nearest.tokens)
        return max(math.ceil(duration), 1)

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        return self._activations(model, workload)

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        return self._workspace(model, workload)


def _few(factors: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the means of the lower and the upper half of `factors`, which are ascending, divided
    by the mean of all.

    Two simulations then give the expected step time. Returns nothing if the halves differ by less
    than 1 %.

    >>> _few((0.9, 1.0, 1.1, 1.4))
    (0.8636, 1.1364)
    """
    half = len(factors) // 2
    if not half:
        return ()
    low, high = (statistics.fmean(part) for part in (factors[:half], factors[-half:]))
    mean = (low + high) / 2
    return (round(low / mean, 4), round(high / mean, 4)) if high > _STEADY * low else ()


def _list(keys: Mapping[str, object]) -> str:
    """Returns up to eight keys for an error text."""
    return ", ".join(sorted(keys)[:8]) or "nothing measured"
