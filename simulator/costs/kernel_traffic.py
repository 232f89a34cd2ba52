"""The traffic of compute ops relative to the formula of `ModelSpec.work`.

That formula counts the bytes which eager PyTorch's elementwise kernels read and write in a dense
layer, at the rate of a copy. Compiled kernels are fused, so they move less. Routing to experts
sorts, gathers and scatters tokens, and multiplies matrices of few tokens each, so it takes longer
than its bytes. So does linear attention in transformers' PyTorch code, which is a loop over chunks
of a sequence; its shares are those of one model, Qwen3-Next, whose layers also have experts. With
kernels of other packages it is faster. Other linear attention, state-space mixers, and layers of
both with a dense MLP have the same shares, although nobody measured them.

The shares are medians over half of 21 families on an H200, with 8,192 and 16,384 tokens a
micro-batch (experiments/results/h200-families, 2026-11-24). The other half was left out, to test
them. They are used for every GPU, in proportion to its rate of a copy. Those of eager dense layers
stay at 1: layers of Qwen2.5-7B and 14B that were measured apart take what the formula says, within
7 % (experiments/published/h200.csv).
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload


class _Shares(NamedTuple):
    """Times the traffic of the formula, by the kind of op."""

    forward: float
    """Also of a recompute."""
    backward: float
    head: float
    """Also of an evaluation's loss."""


_EAGER = _Shares(forward=1.0, backward=1.0, head=1.26)
_COMPILED = _Shares(forward=0.29, backward=0.07, head=0.36)
_EAGER_EXPERTS = _Shares(forward=2.94, backward=1.98, head=1.26)
_LINEAR_ATTENTION = _Shares(forward=4.32, backward=5.95, head=1.26)
_COMPILED_EXPERTS = _Shares(forward=1.46, backward=0.56, head=0.36)


def traffic_share(model: ModelSpec, workload: Workload, kind: str, layer: str) -> float:
    """Returns the traffic of a compute op relative to that of `ModelSpec.work`.

    Args:
        kind: the kind of op.
        layer: the decoder layer; only ops of decoder layers use it.
    """
    if kind in ("embed", "embed_backward"):
        return 1.0
    if kind in ("head", "loss"):
        return (_COMPILED if workload.compiled else _EAGER).head
    spec = model.stack[layer]
    if not spec.compilable:
        shares = _LINEAR_ATTENTION
    elif workload.compiled:
        shares = _COMPILED_EXPERTS if spec.experts else _COMPILED
    else:
        shares = _EAGER_EXPERTS if spec.experts else _EAGER
    return shares.backward if kind == "backward" else shares.forward
