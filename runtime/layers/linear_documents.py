"""Documents in layers with a state (the gated delta rule of Qwen3-Next and Qwen3.5, the Mamba-2 mixer of Falcon-H1): each document begins with an empty
state, and its convolution sees itself alone.

transformers' modules hand the arguments of a layer on to functions of their file: a convolution, and a delta rule or a scan. `take_over` puts functions in
their place that do the same, unless they are handed `document_positions`, each token's distance from the start of its document. Then

* the convolution leaves out the taps that reach before a token's document: it runs once for each number of taps, and each token takes its own;
* the state is scaled by exp(-30) = 9e-14 before a document's first token, which is less than fp32 resolves. A larger step would cost precision: the
  delta rule and the scan sum the logarithms of the scales over the tokens of a chunk, and take differences of the sums: each document that begins
  in a chunk adds 2e-6 to the relative error of the state in fp32;
* the scan is PyTorch's, and the kernel that computes a whole mixer is not used: neither of the packages' kernels takes a scale for each token.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.activations import ACT2FN

ARGUMENT = "document_positions"
"""what a layer is handed: [batch, sequence] int64"""
STATEFUL = ("linear_attention", "hybrid")
"""the types of the layers that are handed it"""
_RESET = -30.0


def take_over(whole: Any) -> None:
    """Makes the layers with a state of transformers' model `whole` heed `document_positions`. Without them nothing changes, for any model."""
    for name in {type(module).__module__ for module in whole.modules()}:
        file = sys.modules[name]
        for function_name, around in _AROUND.items():
            function = getattr(file, function_name, None)
            if function is not None and getattr(function, "func", None) is not around:
                setattr(file, function_name, functools.partial(around, function))


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


def _reset(logarithms: torch.Tensor, document_positions: torch.Tensor) -> torch.Tensor:
    """The logarithms of what the state is scaled by before each token [batch, sequence, heads], with documents' first tokens made to forget it."""
    begins = document_positions == 0
    begins = torch.cat([torch.zeros_like(begins[:, :1]), begins[:, 1:]], dim=1)  # a row's first token finds no state
    return logarithms.masked_fill(begins[..., None], _RESET)


def _rule(function: Callable[..., Any], *tensors: torch.Tensor, g: torch.Tensor, document_positions: torch.Tensor | None = None, **others: Any) -> Any:
    """The delta rule; `g` [batch, sequence, heads], the logarithm of what the state is scaled by before each token."""
    if document_positions is not None:
        g = _reset(g, document_positions)
    return function(*tensors, g=g, **others)


def _scan(
    function: Callable[..., Any], rows: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *,
    document_positions: torch.Tensor | None = None, **others: Any,
) -> Any:  # fmt: skip
    """Mamba-2's scan of `rows` [batch, sequence, heads, size] with steps `dt` [batch, sequence, heads].

    With documents, rows are scaled by their steps here, and the scan is given steps of 1 and a logarithm `A` for each token instead of each head.
    """
    if document_positions is None:
        return function(rows, dt, A, B, C, **others)
    skip, bias, (least, most) = others.pop("D"), others.pop("dt_bias"), others.pop("dt_limit")
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if others.pop("dt_softplus"):
        dt = torch.nn.functional.softplus(dt)
    dt, wide = dt.clamp(least, most).float(), rows.float()
    logarithms = _reset(A.float() * dt, document_positions)
    made = inspect.unwrap(function)(wide * dt[..., None], torch.ones_like(dt), logarithms, B, C, **others)
    return made if skip is None else made + skip[..., None] * wide


def _in_parts(function: Callable[..., Any], *tensors: Any, document_positions: torch.Tensor | None = None, **others: Any) -> Any:
    """A kernel for a whole mixer; with documents there is none, and the mixer calls the convolution and the scan."""
    return function(*tensors, **others) if document_positions is None else None


_AROUND: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _rule, "mamba2_chunk_scan": _scan, "mamba2_split_conv1d_scan_combined": _in_parts,
}  # fmt: skip
"""what takes the place of a function of transformers, by the function's name"""
