"""measured_memory: the memory of ops on a calibrated machine, from its measurements."""

from __future__ import annotations

import math

import msgspec

from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.measured_shapes import (
    alike_but_for_tokens,
    head_with_chunk,
    other_packing,
    tokens_of,
)
from megatrain.simulator.hardware.cost_table import CostTable, Workspace
from megatrain.simulator.memory.formulas import (
    fp8_saved_bytes,
    fp8_temporary_bytes,
    workspace_estimate,
)
from megatrain.simulator.model.attention_masks import (
    added_mask_bytes,
    lasting_mask_bytes,
    mask_bytes,
    saved_mask_bytes,
    writes_scores,
)
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import DOCUMENTS, Workload


def activations_bytes(table: CostTable, model: ModelSpec, workload: Workload) -> int | None:
    """Returns the bytes of one decoder layer's saved activations, or None if they are unknown.

    If this workload was not measured, the bytes of the workload with the nearest number of tokens
    are scaled by the tokens, without the masks that layers save. These grow with the square of the
    sequence, so those of this workload are added (`saved_mask_bytes`). If there is no such
    workload, those with the other packing are used in the same way. A model that writes out
    attention scores is not scaled, because its bytes are not proportional to the tokens.

    If no workload with fp8 products was measured, they are the bytes without fp8 products plus
    `fp8_saved_bytes`.
    """
    known, shape = table.activations, f"{model.shape}/{workload.shape}"
    for wanted in (shape, other_packing(shape)):
        alike = [other for other in sorted(known) if alike_but_for_tokens(other, wanted)]
        if alike and (wanted in known or not writes_scores(model, workload)):
            nearest = (
                wanted
                if wanted in known
                else min(alike, key=lambda other: abs(math.log(known[other][0] / workload.tokens)))
            )
            tokens, size = known[nearest]
            size -= saved_mask_bytes(model, _measured_workload(nearest, workload))
            masks = saved_mask_bytes(model, workload)
            return max(-(-size * workload.tokens // tokens), 0) + masks
    plain = msgspec.structs.replace(workload, fp8=None)
    if plain != workload and (without := activations_bytes(table, model, plain)):
        return without + fp8_saved_bytes(model, workload)
    return None


def workspace(table: CostTable, model: ModelSpec, workload: Workload) -> Workspace | None:
    """Returns the peak device bytes of temporary tensors, or None if they are unknown.

    If this workload was not measured, the bytes are interpolated over the tokens of at least two
    measured workloads, without masks, and the masks of this workload are added. One measured
    workload is not enough, because a part of the bytes is fixed. If there are no two, those with
    the other packing are used in the same way.

    If no workload with fp8 products was measured, they are the bytes without fp8 products plus
    `fp8_temporary_bytes`.

    If the table has another loss chunk, and the head was measured with both, the difference of its
    bytes is added. If it was not, the result is None, because the logits of a chunk are most of the
    bytes of a head.
    """
    if table.loss_chunk not in (0, workload.loss_chunk):
        return _other_chunk_workspace(table, model, workload)
    shape = f"{model.shape}/{workload.shape}"
    for wanted in (shape, other_packing(shape)):
        if found := _workspace(table, wanted, model, workload):
            return found
    plain = msgspec.structs.replace(workload, fp8=None)
    if plain == workload:
        return None
    less = workspace(table, model, plain)
    return less and msgspec.structs.replace(
        less, layer=less.layer + fp8_temporary_bytes(model, workload)
    )


def _measured_workload(shape: str, workload: Workload) -> Workload:
    """Returns `workload` with the batch, sequence and packing of a measured shape."""
    tokens, sequence = tokens_of(shape)
    if not sequence:  # not of the usual form
        return workload
    return msgspec.structs.replace(
        workload, batch=tokens // sequence, sequence=sequence, documents=shape.endswith(DOCUMENTS)
    )


def _with_masks(found: Workspace, model: ModelSpec, workload: Workload, sign: int) -> Workspace:
    """Returns `found` with the bytes of the masks of `workload` added, or taken away if `sign` is
    -1. Masks that a layer saves belong to its activations.
    """
    outside = sign * lasting_mask_bytes(model, workload)
    inside = sign * (mask_bytes(model, workload) - added_mask_bytes(model, workload))
    return Workspace(
        layer=max(found.layer + inside, 0),
        head=max(found.head + outside, 0),
        update=max(found.update + outside, 0),
    )


def _other_chunk_workspace(
    table: CostTable, model: ModelSpec, workload: Workload
) -> Workspace | None:
    """Returns `workspace` for a loss chunk other than the table's."""
    shape = f"{model.shape}/{workload.shape}"
    head = head_with_chunk(table, shape, workload.loss_chunk) or head_with_chunk(
        table, other_packing(shape), workload.loss_chunk
    )
    measured = msgspec.structs.replace(workload, loss_chunk=table.loss_chunk)
    then = workspace(table, model, measured)
    if not head or then is None or not head.bytes or head.shape not in table.workspace:
        return None
    more = head.bytes - table.workspace[head.shape].head
    return msgspec.structs.replace(then, head=max(then.head + more, 0))


def _workspace(
    table: CostTable, shape: str, model: ModelSpec, workload: Workload
) -> Workspace | None:
    """Returns the workspace of `workload` from the measurement of `shape`, or interpolated over
    the tokens of shapes that differ only in these. Returns None if there are none.
    """
    known = table.workspace
    if shape in known:
        then = _measured_workload(shape, workload)
        if then == workload:
            return known[shape]
        return _with_masks(_with_masks(known[shape], model, then, -1), model, workload, 1)
    if writes_scores(model, workload):
        return None
    points: dict[int, Workspace] = {}
    for other, found in sorted(known.items()):
        if alike_but_for_tokens(other, shape):
            tokens = tokens_of(other)[0]
            measured = _with_masks(found, model, _measured_workload(other, workload), -1)
            points[tokens] = _larger(measured, points.get(tokens, measured))
    if len(points) < 2:
        return None
    line = {
        field: tuple((tokens, getattr(point, field)) for tokens, point in sorted(points.items()))
        for field in Workspace.__struct_fields__
    }
    on_line = Workspace(
        **{field: _bytes_at(values, workload.tokens) for field, values in line.items()}
    )
    on_line = msgspec.structs.replace(on_line, head=_head_bytes(line["head"], model, workload))
    return _with_masks(on_line, model, workload, 1)


def _head_bytes(points: tuple[tuple[int, int], ...], model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes of a head's workspace from measured points (tokens, bytes).

    A head with several loss chunks also sums gradients. So if `workload` has several chunks, only
    points with several chunks are interpolated, and otherwise only points with one chunk. If there
    are fewer than two such points, the nearest point is used, and the difference that
    `workspace_estimate` gives is added.
    """
    alike = tuple(
        (tokens, size)
        for tokens, size in points
        if (tokens > workload.loss_chunk) == (workload.tokens > workload.loss_chunk)
    )
    if len(alike) > 1:
        return _bytes_at(alike, workload.tokens)
    nearest, size = min(
        alike or points, key=lambda point: abs(math.log(point[0] / workload.tokens))
    )
    then = msgspec.structs.replace(workload, batch=1, sequence=nearest)
    return max(
        size + workspace_estimate(model, workload).head - workspace_estimate(model, then).head, 0
    )


def _bytes_at(points: tuple[tuple[int, int], ...], tokens: int) -> int:
    """Returns the bytes for a number of tokens on the line through measured points (tokens, bytes).
    Beyond the last point they are at least its bytes, because kernels may have needed a little less
    there than at the point before.
    """
    most, size = points[-1]
    found = interpolate(points, tokens)[0]
    return max(found, size) if tokens > most else found


def _larger(one: Workspace, other: Workspace) -> Workspace:
    """Returns a Workspace with the larger value of each field."""
    return Workspace(
        **{
            field: max(getattr(one, field), getattr(other, field))
            for field in Workspace.__struct_fields__
        }
    )
