"""Workload: the batch, the dtype and everything else that decides the arithmetic of a step."""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.field_types import check_types
from megatrain.simulator.model.optimizer import ADAMW, WITH_STATE_FORMATS
from megatrain.simulator.model.state_format import EXACT, FORMATS

Scaling = Literal["rowwise", "tensorwise"]
Dtype = Literal["bf16", "fp32"]
Gradients = Literal["exact", "8bit"]
Kernel = Literal["flash", "cudnn", "flash4"]
Clipping = Literal["global", "layer", "update", "adagc", "none"]
BY_LAYER: tuple[Clipping, ...] = ("layer", "update", "adagc")
"""The kinds of clipping whose factors depend on one layer only."""
BY_TENSOR: tuple[Clipping, ...] = ("update", "adagc")
"""The kinds of clipping with one factor for each tensor."""
DOCUMENTS = "-documents"
"""The suffix of the shape of a workload whose rows may hold several documents."""
_FP8 = "-fp8-"
_PIECES = "-pieces"
_GROUPS = "-groups"
_SHORT = "-short"
_REBUILT = "-rebuilt"
_MOST_PIECE = 2**24
LEAST_PIECE = 2**11
"""The smallest token piece that is tried if none is given. Smaller pieces take more time."""
LONG_SEQUENCE = 2**16
"""Tokens of a sequence from which pieces are tried even if the model fits without them."""
FP8_MULTIPLE = 16
"""The sizes of fp8 matrix products must be multiples of this number."""
MOST_MICRO_BATCHES = 1024
"""The most micro-batches in a step. With 48 layers, the schedule of such a step has half a million
ops, and making it takes half a minute."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is trained: everything that decides the arithmetic of a step. Two plans with the
    same workload give the same bits, in compiled layers with short recomputes only in deterministic
    mode. Raises UserError if a value, or a combination of values, is not allowed.
    """

    batch: int
    """Sequences per micro-batch."""
    sequence: int
    """Tokens per sequence."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    sum_group: int = 1
    """Micro-batches whose gradients are summed before the sum is added to that of earlier groups. A
    divisor of `accumulation`. With 1, all gradients are added in the order of the micro-batches.
    The bits of the sum depend on it. A plan for N GPUs gives whole groups to the ranks in turn."""
    dtype: Dtype = "bf16"
    """The dtype that layers compute in, and the dtype of their gradients. `state` gives that of
    master weights."""
    clipping: Clipping = "global"
    """How gradients are clipped:

    * `global`: by the norm over all gradients
    * `layer`: each layer's gradient by its own norm
    * `update`: each tensor's learning rate by the root of the mean of g^2 / v over its elements
      (StableAdamW, arXiv 2304.13013, algorithm 2)
    * `adagc`: each tensor's gradient by a moving average of its own norm (AdaGC, arXiv 2502.11034)
    * `none`: not at all
    """
    fp8: Scaling | None = None
    """How the operands of fp8 matrix products are scaled (`runtime/layers/fp8_linear.py`). The
    linear layers of decoder layers then multiply in fp8, forward and backward, if their sizes and
    the tokens of a micro-batch are multiples of `FP8_MULTIPLE`. Everything else is in `dtype`,
    which must be bf16. None means that all products are in `dtype`."""
    compiled: bool = False
    """True if layers run through torch.compile. They are faster, save a third less activations, and
    round differently from eager layers."""
    attention: Kernel | None = None
    """The attention kernel (`model/attention_kernel.py`). Each kernel rounds differently. None
    means the kernel that PyTorch's `scaled_dot_product_attention` chooses, or for models with sinks
    (gpt-oss) scores that are written out, as in plans that were made before a kernel could compute
    them. Commands set it for these models, so pass `attention="flash"` in Python to get the same
    workload."""
    head_groups: int | None = None
    """Groups of key-value heads, with their query heads, for which the attention kernels run one
    after another. A divisor of the model's key-value heads. A flash kernel in deterministic mode
    rounds differently with another number. None means one group."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at one time. Their number changes the result, because the head's
    gradient is summed chunk by chunk."""
    token_piece: int | None = None
    """Tokens of a micro-batch that the MLP of a decoder layer, the norm before it and the norm
    before attention compute at one time (`runtime/layers/token_pieces.py`). The number of tokens
    changes the result, because the gradients of weights are summed piece by piece. None means all
    tokens."""
    short_recompute: bool = False
    """True if recomputes leave out the product that projects the output of a dense MLP
    (`ModelSpec.last_products`). No gradient needs its result. A recompute whose output is read is
    always complete. Compiled layers may round differently. It is False by default, as in plans that
    were made before this field existed. Commands set it to True, so pass `short_recompute=True` in
    Python to get the same workload."""
    documents: bool = False
    """True if a row may hold several documents or padding. Attention then stays inside a document.
    It is False by default, because some models and kernels cannot do that
    (`documents_obstacle`). Commands set it to True for all models that can, so pass
    `documents=True` in Python to get the same workload."""
    document_length: int | None = None
    """The length of the documents in a row, in tokens. If the lengths differ, it is the sum of
    their squares divided by their sum, because the time of attention grows with the squares. Only
    predictions depend on it, and no bit does. It is used if `documents` is True and the kernel
    receives the lengths. None means that each row is one document."""
    no_dropout: bool = False
    """True if dropout and router noise in the model's config are ignored. If it is False, a model
    with either is refused."""
    optimizer: str = ADAMW
    """The name of an optimizer, or the path of a `.py` file that defines one
    (`model/optimizer.py`)."""
    state: str = EXACT
    """The name of the format of master weights and moments (`model/state_format.py`)."""
    gradients: Gradients = "exact"
    """How gradients are stored while they wait for the norm of all gradients: `exact` in the dtype
    in which they are summed, or `8bit` in 8-bit codes (`runtime/optimizer/coded_gradients.py`)."""

    def __post_init__(self) -> None:
        check_types(self, "workload")
        if self.clipping == "update" and self.optimizer != ADAMW:
            raise UserError(
                "workload: clipping",
                found=f"update with optimizer {self.optimizer}",
                allowed=f"update with {ADAMW} alone, whose second moment it reads",
                fix="clip by global, layer or adagc, or do not clip",
            )
        self._refuse_state()
        self._refuse_gradients()
        self._refuse_fp8()
        self._refuse_pieces()
        for field, most in (
            ("batch", 2**20),
            ("sequence", 2**24),
            ("accumulation", MOST_MICRO_BATCHES),
            ("loss_chunk", 2**31),
            ("head_groups", 2**10),
            ("document_length", 2**24),
        ):
            found = getattr(self, field)
            if found is not None and not 1 <= found <= most:
                raise UserError(
                    f"workload: {field}",
                    found=found,
                    allowed=f"1 to {most}",
                    fix=f"set {field} within this range",
                )
        if self.sum_group < 1 or self.accumulation % self.sum_group:
            raise UserError(
                "workload: sum_group",
                found=self.sum_group,
                allowed=f"a divisor of the accumulation, {self.accumulation}",
                fix="set sum_group = 1",
            )

    def _refuse_state(self) -> None:
        """Raises UserError if the state format is unknown, or cannot be used with this workload."""
        if self.state not in FORMATS:
            raise UserError(
                "workload: state",
                found=self.state,
                allowed=", ".join(FORMATS),
                fix="use one of these",
            )
        for field, found, able in (
            ("dtype", self.dtype, ("bf16",)),
            ("optimizer", self.optimizer, WITH_STATE_FORMATS),
        ):
            if self.state != EXACT and found not in able:
                raise UserError(
                    "workload: state",
                    found=f"{self.state} with {field} {found}",
                    allowed=f"{self.state} with {field} {' or '.join(able)}",
                    fix=f"use {field} {able[0]}, or state {EXACT}",
                )

    def _refuse_gradients(self) -> None:
        """Raises UserError if gradients in 8 bits cannot be used with this workload."""
        for field, found, only in (
            ("clipping", self.clipping, "global"),
            ("accumulation", self.accumulation, 1),
            ("optimizer", self.optimizer, ADAMW),
        ):
            if self.gradients != "exact" and found != only:
                raise UserError(
                    "workload: gradients",
                    found=f"{self.gradients} with {field} {found}",
                    allowed=f"{self.gradients} with {field} {only}",
                    fix=f"use {field} {only}, or leave out --gradients",
                )

    def _refuse_fp8(self) -> None:
        """Raises UserError if the matrix products cannot be in fp8."""
        if self.fp8 and self.dtype != "bf16":
            raise UserError(
                "workload: fp8",
                found=f"{self.fp8} with dtype {self.dtype}",
                allowed="fp8 products in layers that otherwise compute in bf16",
                fix="use dtype bf16",
            )

    def _refuse_pieces(self) -> None:
        """Raises UserError if layers cannot be computed in pieces of tokens."""
        if self.token_piece is None:
            return
        if not 1 <= self.token_piece <= _MOST_PIECE:
            raise UserError(
                "workload: token_piece",
                found=self.token_piece,
                allowed=f"1 to {_MOST_PIECE}",
                fix="set token_piece within this range",
            )
        if self.fp8:
            raise UserError(
                "workload: token_piece",
                found=f"{self.token_piece} with fp8 products",
                allowed="products in bf16 or fp32",
                fix="use --dtype bf16, or leave out --token-piece",
            )

    @property
    def same_bits(self) -> Workload:
        """The workload with default values in the fields that change no bit of its result. So two
        workloads give the same bits if their `same_bits` are equal. The fields are
        `document_length`, and in eager layers `short_recompute`.
        """
        short = self.short_recompute and self.compiled
        return msgspec.structs.replace(self, short_recompute=short, document_length=None)

    @property
    def whole_rows(self) -> Workload:
        """The workload with rows of one document, as a calibration measures them."""
        return msgspec.structs.replace(self, document_length=None)

    @property
    def piece(self) -> int:
        """Tokens of a piece, or 0 if all tokens of a micro-batch are one piece."""
        return self.token_piece if self.token_piece and self.token_piece < self.tokens else 0

    @property
    def pieces(self) -> int:
        """Pieces per micro-batch."""
        return -(-self.tokens // self.piece) if self.piece else 1

    @property
    def groups(self) -> int:
        """Groups of heads for which the attention kernels run one after another."""
        return 1 if self.head_groups is None else self.head_groups

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.batch * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.tokens * self.accumulation

    @property
    def kernel(self) -> Kernel | None:
        """The attention kernel on a GPU: the one that separates documents by their lengths, or
        `attention`. None means that PyTorch chooses it.
        """
        return (self.attention or "flash") if self.documents else self.attention

    @property
    def token_rows(self) -> int:
        """The number of int64 values that are copied to the device per token: input id, label, and
        with documents the document index.
        """
        return 3 if self.documents else 2

    @property
    def precision(self) -> str:
        """The dtype that layers compute in, in words."""
        return f"{self.dtype} with {self.fp8} fp8 products" if self.fp8 else self.dtype

    @property
    def shape(self) -> str:
        """The workload's part of `Op.shape`, such as `32x1024-bf16-documents`. It contains
        everything in the workload that the duration of a compute op depends on, except
        `document_length`.
        """
        fp8 = f"{_FP8}{self.fp8}" if self.fp8 else ""
        compiled, attention = (
            "-compiled" if self.compiled else "",
            f"-{self.attention}" if self.attention else "",
        )
        pieces = f"{_PIECES}{self.piece}" if self.piece else ""
        groups = f"{_GROUPS}{self.groups}" if self.groups > 1 else ""
        return (
            f"{self.batch}x{self.sequence}-{self.dtype}{fp8}{compiled}{attention}{pieces}{groups}"
            + (DOCUMENTS if self.documents else "")
        )


def has_pieces(shape: str) -> bool:
    """Returns whether `shape` has the suffix for pieces of tokens."""
    return _PIECES in shape


def without_pieces(shape: str) -> str:
    """Returns `shape` without the suffix for pieces of tokens."""
    return re.sub(rf"{_PIECES}\d+", "", shape)


def shortened(shape: str) -> str:
    """Returns `shape` with the suffix for an op that leaves out last products.

    >>> shortened("1x8-bf16-documents")
    '1x8-bf16-short-documents'
    """
    plain = shape.removesuffix(DOCUMENTS)
    return plain + _SHORT + shape[len(plain) :]


def rebuilding(shape: str) -> str:
    """Returns `shape` with the suffix for an op of a layer that rebuilds outputs
    (`Knobs.rebuild_outputs`). It comes before that of `shortened`.

    >>> rebuilding("1x8-bf16-documents")
    '1x8-bf16-rebuilt-documents'
    """
    plain = shape.removesuffix(DOCUMENTS)
    return plain + _REBUILT + shape[len(plain) :]


def is_rebuilding(shape: str) -> bool:
    """Returns whether `shape` has the suffix for an op of a layer that rebuilds outputs."""
    return _REBUILT in shape


def without_rebuilding(shape: str) -> str:
    """Returns `shape` without the suffix for an op of a layer that rebuilds outputs."""
    return shape.replace(_REBUILT, "")


def is_short(shape: str) -> bool:
    """Returns whether `shape` has the suffix for an op that leaves out last products."""
    return shape.removesuffix(DOCUMENTS).endswith(_SHORT)


def without_short(shape: str) -> str:
    """Returns `shape` without the suffix for an op that leaves out last products."""
    return shape.replace(_SHORT, "")


def without_groups(shape: str) -> str:
    """Returns `shape` without the suffix for groups of heads."""
    return re.sub(rf"{_GROUPS}\d+", "", shape)


def without_fp8(shape: str) -> str:
    """Returns `shape` without the suffix for fp8 products."""
    for scaling in get_args(Scaling):
        shape = shape.replace(f"{_FP8}{scaling}", "")
    return shape
