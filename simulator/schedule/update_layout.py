"""UpdateLayout: where the moments of a layer's tensors are, and where its update may be cut, for an
optimizer that treats tensors differently.

The moments of a layer are stored one plane after the other. Plane k has the moment k of the tensors
that keep more than k, in their order, with their padding. If all tensors keep as many moments, this
is [moments, elements].
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from megatrain.simulator.model.muon import Matrices
from megatrain.simulator.model.optimizer import UpdateRule, find
from megatrain.simulator.model.specs import ALIGNMENT, LayerSpec, ModelSpec


class UpdatePart(NamedTuple):
    """A range of a layer's parameters that is updated by one call."""

    tensor: int
    """The index of its tensor in the layer."""
    first: int
    """Its first parameter in the layer's flat buffer."""
    parameters: int
    """Its parameters. Those of matrices are rounded up to whole blocks of 8-bit codes, into the
    padding of the tensor."""
    matrices: Matrices | None
    """The matrices that it consists of, with their number; None for any other range."""


class UpdateLayout:
    """The layout of one layer."""

    def __init__(self, layer: LayerSpec, update_rules: tuple[UpdateRule, ...]) -> None:
        """`update_rules` has one entry for each tensor of `layer`."""
        self._layer, self._treatments = layer, update_rules
        self.planes = max(update_rule.moments for update_rule in update_rules)
        """The most moments that a tensor keeps."""
        self.least = min(update_rule.moments for update_rule in update_rules)
        """The fewest moments that a tensor keeps."""
        self.matrices = tuple(
            update_rule.matrices for update_rule in update_rules if update_rule.matrices
        )
        """The matrices of each tensor that has some."""
        self._chunks: dict[int, list[tuple[int, int, int]]] = {}
        self._flops: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], int] = {}
        self.values = self.kept(0, layer.elements)
        """The values of all moments."""
        self.workspace = max((sum(found.workspace) for found in self.matrices), default=0)
        """Bytes of the temporary tensors of an update."""

    def start(self, plane: int, first: int) -> int:
        """Returns how many parameters before `first` keep more than `plane` moments."""
        return sum(min(max(first - start, 0), count) for start, count in self.ranges(plane))

    def ranges(self, plane: int) -> list[tuple[int, int]]:
        """Returns the parameters whose moments a plane has, as pairs of the first one and their
        number, in the order of the plane.
        """
        return [
            (offset, tensor.padded)
            for tensor, offset, update_rule in zip(
                self._layer.tensors, self._layer.offsets, self._treatments, strict=True
            )
            if update_rule.moments > plane
        ]

    def lengths(self, first: int, count: int) -> list[int]:
        """Returns the values in each plane for `count` parameters from `first` on."""
        return [
            self.start(plane, first + count) - self.start(plane, first)
            for plane in range(self.planes)
        ]

    def kept(self, first: int, count: int) -> int:
        """Returns the values of all moments for `count` parameters from `first` on."""
        if (first, count) not in self._kept:
            self._kept[first, count] = sum(self.lengths(first, count))
        return self._kept[first, count]

    def more(self, first: int, count: int) -> int:
        """Returns the values of moments that only some of these parameters keep."""
        return self.kept(first, count) - self.least * count

    def parts(self, first: int, count: int) -> list[UpdatePart]:
        """Returns the parts of `count` parameters from `first` on, in order. A group of matrices
        must be in the range as a whole, or not at all.
        """
        found = []
        for index, (tensor, offset, update_rule) in enumerate(
            zip(self._layer.tensors, self._layer.offsets, self._treatments, strict=True)
        ):
            begin, end = max(offset, first), min(offset + tensor.padded, first + count)
            if begin >= end:
                continue
            if update_rule.matrices is None:
                found.append(UpdatePart(index, begin, end - begin, None))
                continue
            every = update_rule.matrices
            for start in range(0, every.number, every.group):
                some = every._replace(number=min(every.group, every.number - start))
                place, size = offset + start * every.size, some.padded
                if begin <= place and place + size <= end:
                    found.append(UpdatePart(index, place, size, some))
        return found

    def flops(self, first: int, count: int) -> int:
        """Returns the FLOPs of matrix products in an update of this range."""
        if (first, count) not in self._flops:
            self._flops[first, count] = sum(
                part.matrices.number * part.matrices.flops
                for part in self.parts(first, count)
                if part.matrices
            )
        return self._flops[first, count]

    def chunks(self, limit: int) -> list[tuple[int, int, int]]:
        """Returns the layer in chunks: (number, first parameter, number of parameters). A chunk has
        at most `limit` parameters, a multiple of ALIGNMENT, unless a group of matrices has more.
        """
        if limit not in self._chunks:
            ends = [0]
            for unit in self._units(limit):
                if len(ends) > 1 and unit - ends[-2] <= limit:
                    ends[-1] = unit
                else:
                    ends.append(unit)
            self._chunks[limit] = [
                (number, first, end - first)
                for number, (first, end) in enumerate(itertools.pairwise(ends))
            ]
        return self._chunks[limit]

    def _units(self, limit: int) -> list[int]:
        """Returns the ends of the smallest pieces that chunks are made of."""
        ends = []
        for tensor, offset, update_rule in zip(
            self._layer.tensors, self._layer.offsets, self._treatments, strict=True
        ):
            found = update_rule.matrices
            step = found.group * found.size if found else limit
            ends += [
                offset + place
                for place in range(step, tensor.elements, step)
                if place % ALIGNMENT == 0
            ]
            ends.append(offset + tensor.padded)
        return ends


@functools.lru_cache(maxsize=1024)
def _layout(optimizer: str, layer: LayerSpec) -> UpdateLayout:
    return _alike(optimizer, LayerSpec(name="", kind=layer.kind, tensors=layer.tensors))


@functools.lru_cache(maxsize=64)
def _alike(optimizer: str, layer: LayerSpec) -> UpdateLayout:
    """Returns the layout that all layers with the same tensors share."""
    treated = find(optimizer)
    return UpdateLayout(
        layer,
        tuple(treated.update_rule(layer.kind, each.name, each.shape) for each in layer.tensors),
    )


def update_layout(optimizer: str, layer: LayerSpec) -> UpdateLayout | None:
    """Returns the layout of `layer` for the optimizer of this name. None if it treats all tensors
    alike and an update may be cut anywhere.
    """
    return _layout(optimizer, layer) if find(optimizer).by_tensor else None


@functools.lru_cache(maxsize=64)
def needing_whole_matrices(optimizer: str, model: ModelSpec) -> frozenset[str]:
    """Returns the layers of `model` whose update by this optimizer needs whole matrices."""
    return frozenset(
        name
        for name, layer in model.stack.items()
        if (layout := update_layout(optimizer, layer)) and layout.matrices
    )
