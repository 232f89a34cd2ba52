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

    They are the tensors that autograd saves, by `ModelSpec.saved_bytes` and `saved_mask_bytes`, and
    the layer's output, which exists until the layer's backward. The estimate is within 0.1 % of the
    measured bytes of four models whose layers ran eager on an H200 (experiments/results). Compiled
    layers save less, and the estimate is the bytes measured on an H200 for one of them, in bf16 and
    in fp8 (`fp8_saved_bytes`).
    """
    compiled = _compiled(model, workload)
    return (
        model.max_saved_bytes(
            workload.tokens, workload.sequence, workload.dtype, workload.piece, compiled=compiled
        )
        + model.saved_mask_bytes(workload)
        + workload.tokens * model.carried * DTYPE_BYTES[workload.dtype]
        + fp8_saved_bytes(model, workload)
    )


def _compiled(model: ModelSpec, workload: Workload) -> bool:
    """Checks whether the formulas for compiled layers apply.

    They are not used for a model some of whose layers always run eagerly.
    """
    return workload.compiled and all(layer.compilable for layer in model.decoders)


def fp8_saved_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes that a decoder layer saves in addition because its products are in fp8, for
    the layer with most of them. It may be negative. 0 without fp8.

    Eager layers save the bf16 operands, as without fp8. Compiled ones save what
    `ModelSpec.fp8_saved_bytes` says. Where the formulas of compiled layers are not used, nothing
    that these compute again is taken off.
    """
    if not (workload.fp8 and workload.compiled):
        return 0
    return max(
        model.fp8_saved_bytes(layer.name, workload) if layer.compilable else 0
        for layer in {layer.signature: layer for layer in model.decoders}.values()
    )


def fp8_temporary_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the most bytes of temporary operands in the fp8 products of one decoder layer. 0
    without fp8.

    In an eager layer they are those of one linear layer. With T tokens, it is the largest of three:
    when the weight is cast, T in + 3 in out; when the second cast of the gradient is made, in out +
    T (in + 5 out); and in the product for the gradient of the weight, T (4 in + 2 out), with the
    gradient of the input.

    A compiled layer makes the gradients of all outputs that have one input in one kernel, such as
    those of gate and up in an MLP, and casts them there. So the casts of all linear layers of a
    module with inputs of one size exist at once: T in, 2.5 T out of each, and 6 T out + in out of
    the largest. On an H200, a layer of Qwen2.5-7B with 32,768 tokens took 2 % less in all
    (experiments/results/h200-qwen2.5-7b-fp8). The factors 2.5 and 6 are those of its tensors, and
    of the tensors of other families in tests/simulator/memory/test_compiled_memory.py.
    """
    if not workload.fp8:
        return 0
    tokens, most = workload.tokens, 0
    for layer in {layer.signature: layer for layer in model.decoders}.values():
        outputs: dict[tuple[str, int], list[int]] = {}
        for name, (target, source) in model.fp8_products(layer.name, workload).items():
            outputs.setdefault((name.rsplit(".", 2)[0], source), []).append(target)
        for (_, source), targets in outputs.items():
            wide = max(targets)
            if workload.compiled and layer.compilable:
                found = tokens * source + 5 * tokens * sum(targets) // 2
                found += (6 * tokens + source) * wide
            else:
                found = max(
                    tokens * source + 3 * source * wide,
                    source * wide + tokens * (source + 5 * wide),
                    tokens * (4 * source + 2 * wide),
                )
            most = max(most, found)
    return most


@functools.lru_cache(maxsize=16)
def workspace_estimate(model: ModelSpec, workload: Workload) -> Workspace:
    """Returns the estimated bytes of temporary tensors in ops.

    With b bytes per element, C tokens per loss chunk, vocabulary size V and hidden size d:

    * head: the logits of a chunk and their gradient, each in fp32 and in the compute dtype, take
      C V (4 + 4 + 2 b), and C V b more if the logits have a soft cap, which saves them. Later, the
      gradient of the logits exists together with that of the matrix, C V b + V d b. The larger of
      the two counts. If there are several chunks, the matrix's gradients are summed in fp32, 4 V d,
      and that of the last chunk still exists, V d b. The norm has at most C d (16 + b). If a token
      carries more than d elements, the gradient of a chunk of these is added, and if the matrix is
      padded (`ModelSpec.projected_rows`), its copy.
    * layer: `ModelSpec.transient_bytes` plus `ModelSpec.mask_bytes`, without the masks that layers
      save (`ModelSpec.added_mask_bytes`), and `fp8_temporary_bytes`.
    * update: AdamW works in place. A sum of squares needs 4 bytes per row of 4,096 elements.
    """
    width, tokens = DTYPE_BYTES[workload.dtype], workload.tokens
    chunk = min(workload.loss_chunk, tokens)
    matrix = model.vocabulary * model.hidden
    logits = chunk * model.vocabulary * width
    capped = logits if model.caps_logits else 0
    head = (
        max(chunk * model.vocabulary * (4 + 4 + 2 * width) + capped, logits + matrix * width)
        + (matrix * (4 + width) if tokens > chunk else 0)
        + chunk * model.hidden * (16 + width)
        + (model.carried - model.hidden) * chunk * width
    )
    if (padded := model.projected_rows(workload)) > model.vocabulary:
        head += padded * model.hidden * width
    layer = (
        model.transient_bytes(
            tokens,
            workload.sequence,
            workload.dtype,
            workload.piece,
            compiled=_compiled(model, workload),
        )
        + model.mask_bytes(workload)
        - model.added_mask_bytes(workload)
        + fp8_temporary_bytes(model, workload)
    )
    return Workspace(
        layer=layer,
        head=head,
        update=4 * -(-max(spec.elements for spec in model.stack.values()) // 4096),
    )
