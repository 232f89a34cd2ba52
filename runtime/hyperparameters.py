"""AdamW's hyperparameters and groups of tensors, as plain data: read from files and options before torch is loaded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Fraction = Annotated[float, Meta(ge=0, lt=1)]


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors treated alike. A tensor belongs to the first group that matches its name."""

    match: Annotated[str, Meta(min_length=1, description="shell pattern of names as in the checkpoint, e.g. *norm* or model.layers.0.*")]
    weight_decay: Annotated[float, Meta(ge=0, le=1e38)] | None = None
    """None: as for tensors of no group"""
    rate_factor: Annotated[float, Meta(ge=0, le=1e38)] = 1.0
    """times the learning rate of the step; 0: frozen, with no gradient, no part of a norm, and moments that stay zero"""


class AdamW(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hyperparameters; decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101) of matrices: norms, biases and embeddings have none."""

    weight_decay: Annotated[float, Meta(ge=0, le=1e38, description="decoupled weight decay of matrices; none for norms, biases and embeddings")] = 0.0
    max_norm: Annotated[float, Meta(gt=0, description="gradient norm above which gradients are scaled down; unused where the plan does not clip")] = 1.0
    betas: Annotated[tuple[Fraction, Fraction], Meta(description="decay of the first and the second moment")] = (0.9, 0.95)
    epsilon: Annotated[float, Meta(gt=0, le=1, description="added to the root of the second moment")] = 1e-8
    groups: Annotated[tuple[Group, ...], Meta(description="tensors with a decay or a rate of their own, by name; the first match counts")] = ()
