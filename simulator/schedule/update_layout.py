"""UpdateLayout: where the moments of a layer's tensors are, and where its update may be cut, for an
optimizer that treats tensors differently.

The moments of a layer are stored one plane after the other. Plane k has moment k of each tensor
that keeps more than k moments, in the order of the tensors, with their padding. If all tensors keep
the same number of moments, the shape is [moments, elements].
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from megatrain.simulator.base import plugins
from megatrain.simulator.model.layer import ALIGNMENT, LayerSpec
from megatrain.simulator.model.muon import Matrices
from megatrain.simulator.model.optimizer import UpdateRule, find
from megatrain.simulator.model.specs import ModelSpec


class UpdatePart(NamedTuple):
    """A range of a layer's parameters that is updated by one call."""

    tensor: int
    """The index of its tensor in the layer."""
    first: int
    """Its first parameter in the layer's flat buffer."""
    parameters: int
    """The number of its parameters. For matrices it is rounded up to whole blocks of 8-bit codes,
    which may include padding of the tensor."""
    matrices: Matrices | None
    """The matrices that it consists of; None for any other range."""


class UpdateLayout:
    """The layout of the moments of one layer, and the ranges in which it may be updated."""

    def __init__(self, layer: LayerSpec, update_rules: tuple[UpdateRule, ...]) -> None:
        """`update_rules` has one entry for each tensor of `layer`."""
        self._layer, self._rules = layer, update_rules
        self.planes = max(rule.moments for rule in update_rules)
        """The most moments that a tensor keeps."""
        self.least = min(rule.moments for rule in update_rules)
        """The fewest moments that a tensor keeps."""
        self.matrices = tuple(rule.matrices for rule in update_rules if rule.matrices)
        """The matrices of each tensor whose update needs them whole."""
        self._chunks: dict[int, list[tuple[int, int, int]]] = {}
        self._flops: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], int] = {}
        self.values = self.kept(0, layer.elements)
        """The number of moment values of the layer."""
        self.workspace = max((sum(matrices.workspace) for matrices in self.matrices), default=0)
        """Bytes of the temporary tensors of an update."""

    def start(self, plane: int, first: int) -> int:
        """Returns the position of parameter `first` in a plane: the number of parameters before it
        that keep more than `plane` moments.
        """
        return sum(min(max(first - start, 0), count) for start, count in self.ranges(plane))

    def ranges(self, plane: int) -> list[tuple[int, int]]:
        """Returns the ranges of parameters whose moments are in a plane, as (first parameter,
        number of parameters), in the order of the plane.
        """
        return [
            (offset, tensor.padded)
            for tensor, offset, rule in zip(
                self._layer.tensors, self._layer.offsets, self._rules, strict=True
            )
            if rule.moments > plane
        ]

    def lengths(self, first: int, count: int) -> list[int]:
        """Returns the number of values in each plane for `count` parameters from `first` on."""
        return [
            self.start(plane, first + count) - self.start(plane, first)
            for plane in range(self.planes)
        ]

    def kept(self, first: int, count: int) -> int:
        """Returns the number of moment values for `count` parameters from `first` on."""
        if (first, count) not in self._kept:
            self._kept[first, count] = sum(self.lengths(first, count))
        return self._kept[first, count]

    def more(self, first: int, count: int) -> int:
        """Returns the number of moment values for these parameters in addition to the `least`
        moments that every parameter keeps.
        """
        return self.kept(first, count) - self.least * count

    def parts(self, first: int, count: int) -> list[UpdatePart]:
        """Returns the parts of `count` parameters from `first` on, in order. A group of matrices
        must be in the range as a whole, or not at all.
        """
        parts = []
        for index, (tensor, offset, rule) in enumerate(
            zip(self._layer.tensors, self._layer.offsets, self._rules, strict=True)
        ):
            begin, end = max(offset, first), min(offset + tensor.padded, first + count)
            if begin >= end:
                continue
            matrices = rule.matrices
            if matrices is None:
                parts.append(UpdatePart(index, begin, end - begin, None))
                continue
            for start in range(0, matrices.number, matrices.group):
                group = matrices._replace(number=min(matrices.group, matrices.number - start))
                place, size = offset + start * matrices.size, group.padded
                if begin <= place and place + size <= end:
                    parts.append(UpdatePart(index, place, size, group))
        return parts

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
        for tensor, offset, rule in zip(
            self._layer.tensors, self._layer.offsets, self._rules, strict=True
        ):
            matrices = rule.matrices
            step = matrices.group * matrices.size if matrices else limit
            ends += [
                offset + place
                for place in range(step, tensor.elements, step)
                if place % ALIGNMENT == 0
            ]
            ends.append(offset + tensor.padded)
        return ends


@plugins.cached(maxsize=1024)
def _layout(optimizer: str, layer: LayerSpec) -> UpdateLayout:
    return _shared_layout(optimizer, LayerSpec(name="", kind=layer.kind, tensors=layer.tensors))


@plugins.cached(maxsize=64)
def _shared_layout(optimizer: str, layer: LayerSpec) -> UpdateLayout:
    """Returns the layout that all layers with the same tensors share."""
    update_rule = find(optimizer).update_rule
    return UpdateLayout(
        layer, tuple(update_rule(layer.kind, tensor.name, tensor.shape) for tensor in layer.tensors)
    )


def update_layout(optimizer: str, layer: LayerSpec) -> UpdateLayout | None:
    """Returns the layout of `layer` for the optimizer of this name. None if the optimizer treats
    all tensors alike, so that an update may be cut anywhere.
    """
    return _layout(optimizer, layer) if find(optimizer).by_tensor else None


@plugins.cached(maxsize=64)
def needing_whole_matrices(optimizer: str, model: ModelSpec) -> frozenset[str]:
    """Returns the layers of `model` whose update by this optimizer needs whole matrices."""
    return frozenset(
        name
        for name, layer in model.stack.items()
        if (layout := update_layout(optimizer, layer)) and layout.matrices
    )
