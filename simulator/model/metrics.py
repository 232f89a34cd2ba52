"""Definitions of the speed metrics.

* tokens/s: tokens of an optimizer step divided by its wall time. Padding counts, because the GPU
  computes it.
* tflops_6n: 6 x all parameters x tokens/s, as in arXiv 2604.05091. Recompute and attention do not
  count.
* mfu: (6 x parameters used in matrix products + 3 x forward FLOPs of causal attention per token) x
  tokens/s, divided by the device's peak in the workload's dtype. With fp8 products it is still
  divided by the peak in bf16, to be comparable, and may exceed 1. The embedding lookup is not a
  matrix product. A tied embedding matrix counts, because the head multiplies with it. Attention
  counts as it is inside documents of `Workload.document_length`.
"""

from __future__ import annotations

from megatrain.simulator.model.attention_masks import document_tokens
from megatrain.simulator.model.op_work import head_flops, layer_flops
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload


def tokens_per_second(workload: Workload, step_seconds: float) -> float:
    """Returns the tokens per second of a step that takes `step_seconds`."""
    return workload.step_tokens / step_seconds


def tflops_6n(model: ModelSpec, workload: Workload, step_seconds: float) -> float:
    """Returns `tflops_6n` in 10^12 FLOP/s."""
    return 6 * model.parameters * tokens_per_second(workload, step_seconds) / 1e12


def mfu(
    model: ModelSpec, workload: Workload, step_seconds: float, peak_tflops: float, gpus: int = 1
) -> float:
    """Returns the model FLOPs utilization as a fraction of 1. `peak_tflops` is the dense peak of
    each of `gpus` devices in the workload's dtype, in 10^12 FLOP/s.
    """
    length = document_tokens(model, workload) or workload.sequence
    layers = sum(
        layer_flops(model, layer.name, workload.tokens, length) for layer in model.decoders
    )
    forward = layers + head_flops(model, workload.tokens)
    return 3 * forward * workload.accumulation / step_seconds / (gpus * peak_tflops * 1e12)
