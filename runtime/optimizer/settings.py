"""AdamW's hyperparameters and parameter groups as plain data. This module does not import PyTorch,
because they are read from files and options before PyTorch is loaded.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Fraction = Annotated[float, Meta(ge=0, lt=1)]
"""A number from 0 to less than 1."""


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter group. A tensor belongs to the first group whose pattern matches its name."""

    match: Annotated[
        str,
        Meta(
            min_length=1,
            description=(
                "shell pattern for tensor names in the checkpoint, e.g. *norm* or model.layers.0.*"
            ),
        ),
    ]
    weight_decay: Annotated[float, Meta(ge=0, le=1e38)] | None = None
    """Weight decay of the group. None means the weight decay of tensors without a group."""
    rate_factor: Annotated[float, Meta(ge=0, le=1e38)] = 1.0
    """Factor on the learning rate. 0 freezes the group: its gradients are zero, so they add nothing
    to a norm, and its moments stay zero."""


class AdamW(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW's hyperparameters (Loshchilov and Hutter, arXiv 1711.05101)."""

    weight_decay: Annotated[
        float,
        Meta(
            ge=0,
            le=1e38,
            description="decoupled weight decay of matrices; none for norms, biases and embeddings",
        ),
    ] = 0.0
    max_norm: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "with clipping global, layer or adagc: gradient norm above which gradients are"
                " scaled down"
            ),
        ),
    ] = 1.0
    adagc_factor: Annotated[
        float,
        Meta(
            gt=0,
            description=(
                "with clipping by adagc: gradients of a tensor are scaled down above this factor"
                " times their moving norm"
            ),
        ),
    ] = 1.05
    adagc_decay: Annotated[
        Fraction, Meta(description="with clipping by adagc: decay rate of a moving norm")
    ] = 0.98
    adagc_warm_up: Annotated[
        int,
        Meta(
            ge=0,
            le=10**8,
            description=(
                "with clipping by adagc: first steps, in which each tensor is clipped by max_norm"
            ),
        ),
    ] = 100
    betas: Annotated[
        tuple[Fraction, Fraction],
        Meta(description="decay rates of the first and the second moment"),
    ] = (0.9, 0.95)
    epsilon: Annotated[
        float, Meta(gt=0, le=1, description="added to the root of the second moment")
    ] = 1e-8
    groups: Annotated[
        tuple[GroupSettings, ...],
        Meta(
            description=(
                "tensors with their own weight decay or learning rate, by name; the first match"
                " counts"
            )
        ),
    ] = ()
