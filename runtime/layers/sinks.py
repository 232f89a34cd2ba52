"""Sinks of attention: one learned score per head that takes part in the softmax and has no value.

A flash kernel computes attention without sinks, and the log-sum-exp L of the scores. With a sink s,
each share of the softmax is divided by 1 + exp(s - L). So the results with the sink are

    output'      = output x sigmoid(L - s)
    log_sum_exp' = log(exp(L) + exp(s))

The backward kernel computes the shares again as exp(score - log_sum_exp'), and reads the product D
of the output and its gradient. With `output'` and `log_sum_exp'` it returns the exact gradients of
queries, keys and values. The gradient of the sink is the sum over all rows of

    -exp(s - log_sum_exp') x D

The functions below compute in fp32.
"""

from __future__ import annotations

import torch


def add_sinks(
    output: torch.Tensor, log_sum_exp: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of a kernel with sinks, contiguous. Changes `output` in place.

    The output of a kernel may have the layout of the queries, and the output projection would then
    save a copy.

    Args:
        output: output of the kernel, [(batch), rows, heads, size].
        log_sum_exp: log-sum-exp of the scores, [(batch), heads, rows] fp32.
        sinks: the sinks, [heads].
    """
    column = sinks.float()[:, None]
    output.mul_(torch.sigmoid(log_sum_exp - column).transpose(-1, -2)[..., None])
    return output.contiguous(), torch.logaddexp(log_sum_exp, column).contiguous()


def sink_gradient(
    gradient: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    sinks: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    """Returns the gradient of the sinks, [heads], in their dtype.

    Args:
        gradient: gradient of the output, [(batch), rows, heads, size].
        output: output with the sinks, of the same shape.
        log_sum_exp: log-sum-exp with the sinks, [(batch), heads, rows] fp32.
        sinks: the sinks, [heads].
        groups: number of groups of heads that are computed one after another, which limits the
            temporary tensors.
    """
    parts = (
        tensor.chunk(groups, dim)
        for tensor, dim in ((gradient, -2), (output, -2), (log_sum_exp, -2), (sinks, 0))
    )
    found = [_of_group(*group) for group in zip(*parts, strict=True)]
    return torch.cat(found).to(sinks.dtype)


def _of_group(
    gradient: torch.Tensor, output: torch.Tensor, log_sum_exp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of a group of heads, [heads] fp32."""
    # In place, because a product of two 16-bit tensors would be rounded, or need a second copy.
    products = gradient.to(torch.float32, copy=True).mul_(output).sum(-1)
    shares = torch.exp(sinks.float()[:, None] - log_sum_exp)
    # Contiguous, because the order of a sum depends on the layout, which differs between kernels.
    rows = (shares * products.transpose(-1, -2)).contiguous().sum(-1)
    return -(rows.sum(0) if rows.dim() > 1 else rows)
