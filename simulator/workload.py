"""Workload: how a model is trained."""

from __future__ import annotations

from typing import Literal

import msgspec

from megatrain.simulator.errors import UserError

Dtype = Literal["bf16", "fp32"]
Clipping = Literal["global", "layer", "update", "none"]
DOCUMENTS = "-documents"
"""the end of a shape whose rows may hold several documents"""

_MOST_MICRO_BATCHES = 1024  # a schedule has every micro-batch's ops: at 48 layers this is half a million, half a minute to lower


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it is trained: everything that decides the arithmetic of a step. Two plans of one workload give the same bits."""

    batch: int
    """sequences per micro-batch"""
    sequence: int
    """tokens per sequence"""
    accumulation: int = 1
    """micro-batches per optimizer step"""
    dtype: Dtype = "bf16"
    """what layers compute in and gradients leave them in; the master weights are fp32 always"""
    clipping: Clipping = "global"
    """`global`: gradients by the norm over all of them; `layer`: each layer's gradient by its own norm; `update`: each tensor's learning rate by the
    root of the mean of g^2 / v over its elements (StableAdamW, arXiv 2304.13013, algorithm 2); `none`"""
    compiled: bool = False
    """layers through torch.compile: faster, a third less activations, and other roundings than eager ones"""
    attention: Literal["flash", "cudnn"] | None = None
    """the kernel; each rounds otherwise. None: the one that PyTorch's `scaled_dot_product_attention` takes, cuDNN's or flash on an H200 by its version and mode"""
    loss_chunk: int = 1024
    """tokens whose logits exist at one time; part of the arithmetic, because the head's gradient is summed chunk by chunk"""
    documents: bool = False
    """rows may hold several documents, or padding, and attention stays inside a document. Packing by default: `megatrain plan` says so in its plans, and
    one that does not speak of documents has none"""

    no_dropout: bool = False
    """the dropout that the model's config asks for, and its routers' noise, are left out; otherwise a model with either is refused"""

    def __post_init__(self) -> None:
        for field, most in (("batch", 2**20), ("sequence", 2**24), ("accumulation", _MOST_MICRO_BATCHES), ("loss_chunk", 2**31)):
            if not 1 <= getattr(self, field) <= most:
                raise UserError(f"workload: {field}", found=getattr(self, field), allowed=f"1 to {most}", fix=f"set {field} within these")

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.batch * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.tokens * self.accumulation

    @property
    def token_rows(self) -> int:
        """Numbers a token that are copied to the device: its id, its label and, where rows hold several, its document."""
        return 3 if self.documents else 2

    @property
    def shape(self) -> str:
        compiled, attention = "-compiled" if self.compiled else "", f"-{self.attention}" if self.attention else ""
        return f"{self.batch}x{self.sequence}-{self.dtype}{compiled}{attention}" + (DOCUMENTS if self.documents else "")
