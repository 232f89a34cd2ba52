"""The memory traffic of compute ops, relative to the formula of `op_work`, and the speed of the
matrix products of backward passes.

The formula counts the bytes that eager PyTorch's elementwise kernels read and write in a dense
layer. Their time is that of a copy of as many bytes. Three kinds of layers differ:

* Compiled kernels are fused, so they move fewer bytes.
* Routing to experts sorts, gathers and scatters tokens, and multiplies matrices of few tokens each.
  This takes longer than a copy of the same bytes. The shares are those of one model,
  Qwen3-30B-A3B, and OLMoE, Mixtral and DeepSeek-V3 test them. Experts that clamp gate and up and
  add biases have shares of their own, those of gpt-oss-20b. No other model tests these.
* Linear attention in transformers' PyTorch code also takes longer. Its shares are those of one
  model, Qwen3-Next, whose layers also have experts. They leave out the first forward of a step,
  which took 21 to 31 ms longer than the next ones, and what the loop over chunks moves, which
  `Part.loop` counts. Other linear attention, state-space mixers, and layers of both with a dense
  MLP use the same shares, but were not measured. With kernels of other packages, linear attention
  is faster.

The shares are medians over half of 21 families on an H200, with 8,192 and 16,384 tokens a
micro-batch (experiments/results/h200-families, 2026-11-24). The other half of the families tests
them. The shares are used for every GPU. Ops beside which an update ran are left out, because
`contention.py` predicts that wait: the first forward of a step took 6 to 10 ms longer than the next
ones in models with experts. Two shares are not these medians:

* Eager dense layers have 1. Their forward passes have 0.92, and measured layers of Qwen2.5-7B and
  14B agree with the formula within 7 % (experiments/published/h200.csv).
* Forward passes of compiled dense layers have 0.29, the median with the first forward of a step.
  Without it, the median is -0.35: matrix products are faster than `linear_efficiency` says, because
  the 21 families are cut to a few layers, so their GPU often pauses and its clock is higher. One
  layer of 7B that computed without pauses took 24.5 ms, where 24.0 to 24.6 are predicted with 0.29
  (experiments/results/h200-sustained-compute).

Compiled layers of a whole model compute without pauses, at the power limit of the GPU. There,
backward passes take longer than `linear_efficiency` of the library says (`products_slowdown`). A
calibration measures its `linear_efficiency` without pauses.
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload


class _Shares(NamedTuple):
    """Traffic relative to the formula, by kind of op."""

    forward: float
    """Traffic of the ops `forward` and `recompute`."""
    backward: float
    """Traffic of the op `backward`."""
    head: float
    """Traffic of the ops `head` and `loss`."""


_EAGER = _Shares(forward=1.0, backward=1.0, head=1.26)
_COMPILED = _Shares(forward=0.29, backward=0.07, head=0.36)
_EAGER_EXPERTS = _Shares(forward=1.98, backward=1.98, head=1.26)
_EAGER_CLAMPED = _Shares(forward=2.23, backward=2.23, head=1.26)
_LINEAR_ATTENTION = _Shares(forward=3.12, backward=3.15, head=1.26)
_COMPILED_EXPERTS = _Shares(forward=0.35, backward=0.56, head=0.36)
_COMPILED_CLAMPED = _Shares(forward=1.21, backward=0.97, head=0.36)
_BACKWARD_PRODUCTS = 1.11
"""The time of the matrix products of a compiled backward pass without experts, relative to
`linear_efficiency`, which describes forward passes. Fitted to one layer of 7B on an H200 that
computed without pauses: 50.6 ms with 32 x 1,024 tokens, where 46.3 are predicted without this
factor (experiments/results/h200-sustained-compute, 2026-11-27). It is used for every GPU. Whole
steps of 7B to 123B on H100s agree with it within 7 % (docs/accuracy.md)."""


def traffic_share(model: ModelSpec, workload: Workload, kind: str, layer: str) -> float:
    """Returns the traffic of a compute op relative to the formula of `op_work`.

    Args:
        model: the model.
        workload: the workload. Only `compiled` is read.
        kind: the kind of op.
        layer: the decoder layer. Only ops of decoder layers use it.
    """
    if kind in ("embed", "embed_backward"):
        return 1.0
    if kind in ("head", "loss"):
        return (_COMPILED if workload.compiled else _EAGER).head
    spec = model.stack[layer]
    if not spec.compilable:
        shares = _LINEAR_ATTENTION
    elif model.part(layer).clamped:
        shares = _COMPILED_CLAMPED if workload.compiled else _EAGER_CLAMPED
    elif spec.experts:
        shares = _COMPILED_EXPERTS if workload.compiled else _EAGER_EXPERTS
    else:
        shares = _COMPILED if workload.compiled else _EAGER
    return shares.backward if kind == "backward" else shares.forward


def products_slowdown(model: ModelSpec, workload: Workload, kind: str, layer: str) -> float:
    """Returns the time of a compute op's matrix products relative to the `linear_efficiency` of a
    machine whose products were measured with pauses, such as those of the library.

    The arguments are those of `traffic_share`.
    """
    spec = model.stack.get(layer)
    sustained = kind == "backward" and workload.compiled
    dense = spec is not None and spec.compilable and not spec.experts
    return _BACKWARD_PRODUCTS if sustained and dense else 1.0
