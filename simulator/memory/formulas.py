"""Formulas for the memory that the framework allocates in addition to the pools. They are used if
there are no measurements.
"""

from __future__ import annotations

import functools

from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.model.specs import DTYPE_BYTES, ModelSpec
from megatrain.simulator.model.workload import Workload


@functools.lru_cache(maxsize=16)  # a search asks for one workload hundreds of times
def activations_estimate(model: ModelSpec, workload: Workload) -> int:
    """Returns the estimated bytes of the saved activations of one decoder layer.

    They are the tensors that autograd saves, by `ModelSpec.saved_bytes`, and the layer's output,
    which exists until the layer's backward. The estimate is within 0.1 % of the measured bytes of
    four models whose layers ran eager on an H200 (experiments/results). Compiled layers save less.
    """
    return (
        model.max_saved_bytes(workload.tokens, workload.sequence, workload.dtype)
        + workload.tokens * model.carried * DTYPE_BYTES[workload.dtype]
    )


@functools.lru_cache(maxsize=16)
def workspace_estimate(model: ModelSpec, workload: Workload) -> Workspace:
    """Returns the estimated bytes of temporary tensors in ops.

    With b bytes per element, C tokens per loss chunk, vocabulary size V and hidden size d:

    * head: the logits of a chunk and their gradient, each in fp32 and in the compute dtype, take
      C V (4 + 4 + 2 b), and C V b more if the logits have a soft cap, which saves them. Later, the
      gradient of the logits exists together with that of the matrix, C V b + V d b. The larger of
      the two counts. If there are several chunks, the matrix's gradients are summed in fp32, 4 V d,
      and that of the last chunk still exists, V d b. The norm has at most C d (16 + b). If a token
      carries more than d elements, the gradient of a chunk of these is added.
    * layer: `ModelSpec.transient_bytes` plus `ModelSpec.mask_bytes`.
    * update: AdamW works in place. A sum of squares needs 4 bytes per row of 4,096 elements.
    """
    width, tokens = DTYPE_BYTES[workload.dtype], workload.tokens
    chunk = min(workload.loss_chunk, tokens)
    matrix = model.vocabulary * model.hidden
    logits = chunk * model.vocabulary * width
    capped = logits if model.config.get("final_logit_softcapping") else 0
    head = (
        max(chunk * model.vocabulary * (4 + 4 + 2 * width) + capped, logits + matrix * width)
        + (matrix * (4 + width) if tokens > chunk else 0)
        + chunk * model.hidden * (16 + width)
        + (model.carried - model.hidden) * chunk * width
    )
    layer = model.transient_bytes(tokens, workload.sequence, workload.dtype) + model.mask_bytes(
        workload
    )
    return Workspace(
        layer=layer,
        head=head,
        update=4 * -(-max(spec.elements for spec in model.stack.values()) // 4096),
    )
