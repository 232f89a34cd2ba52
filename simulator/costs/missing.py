"""The error for a compute op whose duration cannot be derived from any measurement."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.attention_kernel import KERNELS
from megatrain.simulator.schedule import has_saved_attention

_KINDS = {
    "embed": "the embedding",
    "embed_backward": "the backward pass of the embedding",
    "forward": "the forward pass of a decoder layer",
    "recompute": "the recompute of a decoder layer",
    "backward": "the backward pass of a decoder layer",
    "head": "the head",
    "loss": "the loss of an evaluation",
}
_SHAPE = re.compile(
    r"(?P<family>[^-/]+)-(?P<width>\d+)(c\d+)?x.*/(?P<batch>\d+)x(?P<sequence>\d+)"
    r"-(?P<dtype>[^-]+)(-fp8-(?P<scaling>[^-]+))?(?P<rest>.*)"
)
_WITHOUT_OPTION = {
    r"pieces(\d+)": r"pieces of \1 tokens",
    r"groups(\d+)": r"\1 groups of heads",
    "rebuilt": "outputs rebuilt",
    "short": "last products left out",
}
"""Suffix of a shape for which `megatrain calibrate` takes no option -> the suffix in words. It
measures layers that rebuild outputs or leave out products where a plan may have them, and others
follow from layers that were measured without pieces and groups."""
_MOST = 6


class _ShapeText(NamedTuple):
    """A shape in words."""

    layer: str
    """The family and width of the layer."""
    tokens: str
    """The batch and the sequence length."""
    how: str
    """The dtype, and everything else that the duration depends on."""
    options: str
    """The options of `megatrain calibrate` that measure this shape."""


def missing_measurement(measured_on: str, kind: str, shape: str, known: Iterable[str]) -> UserError:
    """Returns the UserError for an op of `kind` and `shape` if no similar op was measured.

    Args:
        measured_on: the machine of the measurements.
        kind: the kind of op.
        shape: `FAMILY-WIDTHx.../BATCHxSEQUENCE-DTYPE`, with suffixes, as `Op.shape`.
        known: the shapes of this kind that were measured.
    """
    asked = _parsed(shape)
    sizes: dict[str, list[str]] = {}
    for measured in map(_parsed, sorted(known, key=_by_numbers)):
        sizes.setdefault(measured.how, []).append(measured.tokens)
    allowed = "; ".join(
        f"{how}: {', '.join(dict.fromkeys(tokens[:_MOST]))}" for how, tokens in sizes.items()
    )
    return UserError(
        f"measurements of {measured_on}",
        found=f"no time of {_KINDS.get(kind, kind)} of {asked.layer} with {asked.tokens} in"
        f" {asked.how}",
        allowed=f"what was measured: {allowed}" if allowed else "a machine where it was measured",
        fix=f"measure it with `megatrain calibrate MODEL{asked.options} --out hardware.toml`, or"
        " ask for what was measured",
    )


def _by_numbers(shape: str) -> list[str | int]:
    """Returns a sort key that puts 8x1024 before 32x1024."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", shape)]


def _parsed(shape: str) -> _ShapeText:
    """Returns `shape` in words. A shape of an unknown form is not changed."""
    match = _SHAPE.fullmatch(shape)
    if match is None:
        return _ShapeText(shape, "any number of tokens", "any dtype", "")
    batch, sequence, scaling = int(match["batch"]), int(match["sequence"]), match["scaling"]
    suffixes = match["rest"].split("-")[1:]
    how = [f"fp8 ({scaling})" if scaling else match["dtype"]]
    options = [f"--batch {batch} --seq {sequence} --dtype {'fp8' if scaling else match['dtype']}"]
    if scaling:
        options.append(f"--fp8-scaling {scaling}")
    for suffix in suffixes:
        if suffix in KERNELS:
            how.append(f"attention kernel {suffix}")
            options.append(f"--attention {suffix}")
    if "compiled" in suffixes:
        how.append("compiled")
        options.append("--compile")
    how += [
        re.sub(pattern, words, suffix)
        for suffix in suffixes
        for pattern, words in _WITHOUT_OPTION.items()
        if re.fullmatch(pattern, suffix)
    ]
    if "documents" in suffixes:
        how.append("rows of several documents")
    else:
        how.append("rows of one text")
        options.append("--plain-packing")
    if has_saved_attention(shape):
        how.append("attention saved")
    return _ShapeText(
        layer=f"{match['family']} of width {int(match['width']):,}",
        tokens=f"{batch} x {sequence:,} tokens",
        how=", ".join(how),
        options=f" {' '.join(options)}",
    )
