"""measured_shapes: the texts by which a calibration names what it measured.

The shape of an op is `LAYER/BATCHxSEQUENCE-VARIANT`. VARIANT is the dtype, with suffixes for fp8,
compiled layers, the attention kernel, pieces, groups of heads, short recomputes and documents.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import DOCUMENTS, Workload

_SHAPE = re.compile(r"/(\d+)x(\d+)-")


def tokens_of(shape: str) -> tuple[int, int]:
    """Returns (tokens, sequence) of a shape, or zeros if it is not of the usual form."""
    match = _SHAPE.search(shape)
    return (int(match[1]) * int(match[2]), int(match[2])) if match else (0, 0)


def layer_of(shape: str) -> str:
    """Returns LAYER of a shape."""
    return shape.partition("/")[0]


def variant_of(shape: str) -> str:
    """Returns VARIANT of a shape."""
    return shape.rpartition("/")[2].partition("-")[2]


def alike_but_for_tokens(shape: str, other: str) -> bool:
    """Checks whether two shapes differ in nothing but the tokens."""
    return layer_of(shape) == layer_of(other) and variant_of(shape) == variant_of(other)


def other_packing(shape: str) -> str:
    """Returns the shape with the suffix for documents removed if it has one, otherwise added."""
    return shape.removesuffix(DOCUMENTS) if shape.endswith(DOCUMENTS) else shape + DOCUMENTS


class MeasuredHead(NamedTuple):
    """A head that was measured with a loss chunk other than the table's."""

    shape: str
    """Its `Op.shape`."""
    duration_ns: int
    """Its duration with this loss chunk."""
    bytes: int
    """Its bytes as in `Workspace.head`, or 0 if they are unknown."""


def head_with_chunk(table: CostTable, shape: str, chunk: int) -> MeasuredHead | None:
    """Returns a head that was measured with the loss chunk `chunk` and differs from `shape` in
    nothing but the tokens, or None.

    A head with several chunks sums their gradients, and a head with one chunk does not. So the
    micro-batches of both shapes must be larger than `chunk` and than the table's loss chunk.
    """
    most = max(chunk, table.loss_chunk)
    for known, points in table.heads.items():
        if (
            alike_but_for_tokens(known, shape)
            and known in table.compute.get("head", {})
            and min(tokens_of(known)[0], tokens_of(shape)[0]) > most
        ):
            for other, duration, size in points:
                if other == chunk:
                    return MeasuredHead(known, duration, size)
    return None


def measured_chunks(table: CostTable, model: ModelSpec, workload: Workload) -> set[int]:
    """Returns the loss chunks with which the head of `model` was measured. The set has 0 if the
    table does not say its loss chunk, and is empty if no head was measured.
    """
    if not table.compute.get("head"):
        return set()
    shape = f"{model.shape}/{workload.shape}"
    others = {point[0] for points in table.heads.values() for point in points}
    return {table.loss_chunk} | {
        chunk
        for chunk in others
        for wanted in (shape, other_packing(shape))
        if head_with_chunk(table, wanted, chunk)
    }
