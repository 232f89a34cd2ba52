"""Packed documents in layers with a recurrent state: the gated delta rule of Qwen3-Next and
Qwen3.5, and the Mamba-2 mixer of Falcon-H1.

Each document must begin with an empty state, and its convolution must not read other documents.
transformers' modules pass the keyword arguments of a layer to functions in the file of the module:
a convolution, and a delta rule or a scan. `install` replaces these functions. The replacements
behave differently only if they receive `document_positions`, each token's distance from the start
of its document. In this case:

* The convolution ignores taps before a token's document. It runs once for each number of taps, and
  each token uses the result for its own number of taps.
* The state is multiplied by exp(-30) = 9e-14 before the first token of a document. This is below
  the resolution of fp32. A smaller factor would cost precision, because the delta rule and the scan
  sum the logarithms of the factors over the tokens of a chunk and subtract these sums. With this
  factor, each document that begins in a chunk adds 2e-6 to the relative error of the state in fp32.
* The scan runs in PyTorch code, and the fused kernel of a whole mixer is not used, because the
  kernels of the optional packages do not accept a factor for each token.
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
"""Name of the keyword argument, [batch, sequence] int64."""
STATEFUL = ("linear_attention", "hybrid")
"""Types of the layers that receive this argument."""
_RESET = -30.0
"""Logarithm of the factor on the state before the first token of a document."""


def install(whole: Any) -> None:
    """Makes the recurrent layers of transformers' model `whole` accept `document_positions`. Models
    that do not pass this argument do not change, although the functions are replaced for the whole
    process.
    """
    for name in {type(module).__module__ for module in whole.modules()}:
        file = sys.modules[name]
        for function_name, replacement in _REPLACEMENTS.items():
            function = getattr(file, function_name, None)
            if function is not None and getattr(function, "func", None) is not replacement:
                setattr(file, function_name, functools.partial(replacement, function))


def _convolve(
    function: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    document_positions: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Replaces the causal convolution.

    Args:
        function: transformers' convolution.
        rows: inputs, [batch, channels, sequence].
        weight: weights, [channels, taps]. The last tap is the token itself.
        bias: biases, [channels], or None.
        activation: name of the activation, or None.
        document_positions: each token's distance from the start of its document, or None.

    Returns the outputs, [batch, channels, sequence].
    """
    if document_positions is None:
        return function(rows, weight, bias, activation=activation, **others)
    taps = weight.shape[-1]
    output = function(rows, weight, bias, activation=None, **others)
    for before in range(taps - 1):  # number of earlier tokens in the document
        own = torch.cat(
            [torch.zeros_like(weight[:, : taps - 1 - before]), weight[:, taps - 1 - before :]],
            dim=1,
        )
        output = torch.where(
            document_positions[:, None] == before,
            function(rows, own, bias, activation=None, **others),
            output,
        )
    return output if activation is None else ACT2FN[activation](output)


def _reset(logarithms: torch.Tensor, document_positions: torch.Tensor) -> torch.Tensor:
    """Returns `logarithms` with `_RESET` at the first token of each document. `logarithms` [batch,
    sequence, heads] are the logarithms of the factors on the state before each token.
    """
    begins = document_positions == 0
    # At the first token of a row there is no state to reset.
    begins = torch.cat([torch.zeros_like(begins[:, :1]), begins[:, 1:]], dim=1)
    return logarithms.masked_fill(begins[..., None], _RESET)


def _rule(
    function: Callable[..., Any],
    *tensors: torch.Tensor,
    g: torch.Tensor,
    document_positions: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Replaces the delta rule. `g` [batch, sequence, heads] is the logarithm of the factor on the
    state before each token.
    """
    if document_positions is not None:
        g = _reset(g, document_positions)
    return function(*tensors, g=g, **others)


def _scan(
    function: Callable[..., Any],
    rows: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    document_positions: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Replaces the scan of Mamba-2.

    With documents, the rows are multiplied by their time steps here. The scan then receives time
    steps of 1, and a logarithm `A` for each token and head instead of one for each head.

    Args:
        function: transformers' scan.
        rows: inputs, [batch, sequence, heads, size].
        dt: time steps, [batch, sequence, heads].
        A: logarithm of the factor on the state per unit of time, [heads].
        B: input projection of the state, as for `function`.
        C: output projection of the state, as for `function`.
        document_positions: each token's distance from the start of its document, or None.
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
    output = inspect.unwrap(function)(
        wide * dt[..., None], torch.ones_like(dt), logarithms, B, C, **others
    )
    return output if skip is None else output + skip[..., None] * wide


def _in_parts(
    function: Callable[..., Any],
    *tensors: Any,
    document_positions: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Replaces the fused kernel of a whole mixer. With documents it returns None, which makes the
    mixer call the convolution and the scan.
    """
    return function(*tensors, **others) if document_positions is None else None


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _in_parts,
}
"""Replacements of transformers' functions, by the function's name."""
