"""Documents in linear attention (the gated delta rule of Qwen3-Next and Qwen3.5): each begins with an empty state, and its convolution sees itself alone.

transformers' modules hand the arguments of a layer on to two functions of their file, a convolution and the delta rule. `take_over` puts functions in
their place that do the same, unless they are handed `document_positions`, each token's distance from the start of its document. Then

* the convolution leaves out the taps that reach before a token's document: it runs once for each number of taps, and each token takes its own;
* the state is scaled by exp(-30) = 9e-14 before a document's first token, which is less than fp32 resolves. A larger step would cost precision: the
  delta rule sums the logarithms of the scales over the 64 tokens of a chunk, and takes differences of the sums.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.activations import ACT2FN

ARGUMENT = "document_positions"
"""what a layer is handed: [batch, sequence] int64"""
_RESET = -30.0
_CONVOLUTION, _RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


def take_over(whole: Any) -> None:
    """Makes the linear attention of transformers' model `whole` heed `document_positions`. Without them nothing changes, for any model."""
    for module in whole.modules():
        if hasattr(module, "linear_attn"):
            file = sys.modules[type(module.linear_attn).__module__]
            for name, around in ((_CONVOLUTION, _convolve), (_RULE, _rule)):
                function = getattr(file, name)
                if getattr(function, "func", None) is not around:
                    setattr(file, name, functools.partial(around, function))


def _convolve(
    function: Callable[..., torch.Tensor], rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None,
    document_positions: torch.Tensor | None = None, **others: Any,
) -> torch.Tensor:  # fmt: skip
    """`rows` [batch, channels, sequence] convolved with `weight` [channels, taps], of which the last is the token's own; the same shape."""
    if document_positions is None:
        return function(rows, weight, bias, activation=activation, **others)
    taps = weight.shape[-1]
    made = function(rows, weight, bias, activation=None, **others)
    for before in range(taps - 1):  # tokens that a document has before this one
        own = torch.cat([torch.zeros_like(weight[:, : taps - 1 - before]), weight[:, taps - 1 - before :]], dim=1)
        made = torch.where(document_positions[:, None] == before, function(rows, own, bias, activation=None, **others), made)
    return made if activation is None else ACT2FN[activation](made)


def _rule(function: Callable[..., Any], *tensors: torch.Tensor, g: torch.Tensor, document_positions: torch.Tensor | None = None, **others: Any) -> Any:
    """The delta rule; `g` [batch, sequence, heads], the logarithm of what the state is scaled by before each token."""
    if document_positions is not None:
        begins = document_positions == 0
        begins = torch.cat([torch.zeros_like(begins[:, :1]), begins[:, 1:]], dim=1)  # a row's first token finds no state
        g = g.masked_fill(begins[..., None], _RESET)
    return function(*tensors, g=g, **others)
