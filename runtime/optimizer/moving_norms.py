"""Clipping of each tensor's gradient by a moving average of its own norm (AdaGC, arXiv 2502.11034).

With the gradient g of a tensor and its moving norm m, after the warm-up:

    h = min(1, factor * m / |g|)
    g = h g
    m = decay * m + (1 - decay) * h |g|

In the warm-up, h = min(1, max_norm / |g|), and m is the smallest h |g| so far. The paper and the
authors' code (github.com/lishuai-97/AdaGC) clip by the norm of all gradients in the warm-up. This
would require storing all gradients of a step before any of them is used, which clipping by tensor
avoids. So here the warm-up also clips each tensor by its own norm.

Two cases are not in the paper. A gradient of zeros, for example of a frozen tensor, does not change
m, because with m = 0 every later gradient would be clipped to zero. A tensor without a moving norm
is clipped as in the warm-up.

Each fp32 operation rounds its result, and norms are summed in a fixed order. So the result does not
depend on the plan or the device.
"""

from __future__ import annotations

import torch

from megatrain.runtime.optimizer.adamw import rounded_sqrt
from megatrain.runtime.optimizer.settings import AdamW


def clip(
    sums: torch.Tensor, moving: torch.Tensor, *, settings: AdamW, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the factors on the gradients of a layer's tensors, and their moving norms after this
    step, both [tensors] fp32.

    If any norm is not finite, all factors and moving norms are NaN.

    Args:
        sums: [tensors] fp32, the sum of squares of each gradient.
        moving: [tensors] fp32, the moving norms before this step; 0 for a tensor without one.
        settings: The hyperparameters. Reads `max_norm` and the fields that begin with `adagc_`.
        number: The number of this step, counted from 1.
    """
    norms, known = rounded_sqrt(sums), moving > 0
    warming = number <= settings.adagc_warm_up
    highest = torch.full_like(moving, settings.max_norm)
    limits = highest if warming else torch.where(known, moving * settings.adagc_factor, highest)
    factors = torch.where(norms > limits, limits / norms, torch.ones_like(norms))
    clipped = torch.minimum(norms, limits)
    if warming:
        later = torch.minimum(moving, clipped)
    else:
        later = moving * settings.adagc_decay + clipped * (1 - settings.adagc_decay)
    later = torch.where(norms > 0, torch.where(known, later, clipped), moving)
    bad = (norms * 0).sum()
    return factors + bad, later + bad
