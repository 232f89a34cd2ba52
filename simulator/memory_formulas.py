"""Memory formulas: what the framework allocates besides the pools, where nobody measured."""

from __future__ import annotations

from megatrain.simulator.hardware import Workspace
from megatrain.simulator.specs import DTYPE_BYTES, ModelSpec
from megatrain.simulator.workload import Workload


def activations_estimate(model: ModelSpec, workload: Workload) -> int:
    """Saved activations of one decoder layer, where nobody measured: what autograd saves by the formula, and the layer's output, which is there until its
    backward. Of four models whose layers ran eager on an H200 (experiments/results) that is what was measured, to a thousandth; compiled ones keep less.
    """
    return model.most_saved_bytes(workload.tokens, workload.sequence, workload.dtype) + workload.tokens * model.hidden * DTYPE_BYTES[workload.dtype]


def workspace_estimate(model: ModelSpec, workload: Workload) -> Workspace:
    """What ops allocate within themselves, where nobody measured.

    With b bytes an element, C tokens of a loss chunk, V words: the head holds a chunk's logits and their gradient, each in fp32 and in the
    compute dtype, C V (4 + 4 + 2 b); the weights' gradient of a chunk, V d b; and their fp32 sum, 4 V d, where there are several chunks. A
    layer: `ModelSpec.transient_bytes` and, where it has one, `ModelSpec.mask_bytes`. An update works in place; a sum of squares has 4 bytes a row of 4,096.
    """
    width, tokens = DTYPE_BYTES[workload.dtype], workload.tokens
    chunk = min(workload.loss_chunk, tokens)
    matrix = model.vocabulary * model.hidden
    head = chunk * model.vocabulary * (4 + 4 + 2 * width) + matrix * width + (4 * matrix if tokens > chunk else 0)
    layer = model.transient_bytes(tokens, workload.sequence, workload.dtype) + model.mask_bytes(workload)
    return Workspace(layer=layer, head=head, update=4 * -(-max(spec.elements for spec in model.stack.values()) // 4096))
