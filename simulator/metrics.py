"""What speed means here, defined once.

* tokens/s: tokens of an optimizer step over its wall time; padding never counts.
* tflops_6n = 6 x all parameters x tokens / s, the convention of arXiv 2604.05091; recompute and attention do not count.
* mfu = (6 x parameters that multiply + 3 x causal attention's forward FLOPs per token) x tokens / s over the device's peak. The
  embedding's lookup does not multiply; a tied matrix does, in the head.
"""

from __future__ import annotations

from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload


def tokens_per_second(workload: Workload, step_seconds: float) -> float:
    return workload.step_tokens / step_seconds


def tflops_6n(model: ModelSpec, workload: Workload, step_seconds: float) -> float:
    """In 10^12 a second."""
    return 6 * model.parameters * tokens_per_second(workload, step_seconds) / 1e12


def mfu(model: ModelSpec, workload: Workload, step_seconds: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation, of 1. `peak_tflops`: the device's dense peak in the workload's dtype, 10^12 FLOP/s."""
    layers = sum(model.layer_flops(layer.name, workload.tokens, workload.sequence) for layer in model.decoders)
    forward = layers + model.head_flops(workload.tokens)
    return 3 * forward * workload.accumulation / step_seconds / (peak_tflops * 1e12)
