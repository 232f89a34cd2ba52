"""Batch: what one micro-batch is trained on."""

from __future__ import annotations

from typing import NamedTuple

import torch

IGNORED = -100
"""label of a position without loss, as in transformers"""


class Batch(NamedTuple):
    """One micro-batch, in host memory: each tensor [batch, sequence] int64."""

    ids: torch.Tensor
    labels: torch.Tensor
    """the token that follows each position, or IGNORED: shifted already"""
    documents: torch.Tensor | None = None
    """which document of its row a position belongs to, from 0; -1 is padding. A position sees its own document alone, and counts its positions
    from that document's start. None: every row is one document without padding
    """
