"""Formulas for the memory that PyTorch allocates in addition to the pools, for machines on which it
was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.model.attention_masks import added_mask_bytes, mask_bytes, saved_mask_bytes
from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING, LayerSpec
from megatrain.simulator.model.layer_memory import (
    added_fp8_bytes,
    backward_bytes,
    rebuilt_bytes,
    saved_bytes,
    transient_bytes,
)
from megatrain.simulator.model.op_work import projected_rows
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.arithmetic import summed_columns


@plugins.cached(maxsize=16)  # a search asks for one workload hundreds of times
def activation_estimates(model: ModelSpec, workload: Workload) -> Mapping[str, int]:
    """Returns decoder layer -> the estimated bytes of its saved activations for one micro-batch.

    The activations are the tensors that autograd saves, by `saved_bytes`, `saved_mask_bytes` and
    `fp8_saved_bytes`, and the layer's output, which exists until the layer's backward pass. On an
    H200, the estimate is within 0.1 % of the measured bytes for four models with eager layers
    (experiments/results). For one model with compiled layers, which save less, it equals them in
    bf16 and in fp8.
    """
    alike = dict[str, int]()
    others = (
        saved_mask_bytes(model, workload)
        + workload.tokens * model.carried * DTYPE_BYTES[workload.dtype]
        + fp8_saved_bytes(model, workload)
    )
    for layer in model.decoders:
        if layer.signature not in alike:
            own = saved_bytes(model, layer.name, _as_layer_runs(layer, workload))
            alike[layer.signature] = own + others
    return {layer.name: alike[layer.signature] for layer in model.decoders}


@plugins.cached(maxsize=16)
def activations_estimate(model: ModelSpec, workload: Workload) -> int:
    """Returns the largest of `activation_estimates`."""
    return max(activation_estimates(model, workload).values())


@plugins.cached(maxsize=16)
def added_transients(model: ModelSpec, workload: Workload) -> Mapping[str, int]:
    """Returns decoder layer -> the estimated bytes by which the temporary tensors of its backward
    pass exceed those in the workspace, or 0. The workspace has room for the temporary tensors of
    the layer with the highest peak, beside the largest activations (`transient_bytes`). Those of a
    layer that saves less may be larger.
    """
    alike, usual = dict[str, int](), transient_bytes(model, _as_run(model, workload))
    for layer in model.decoders:
        if layer.signature not in alike:
            run = _as_layer_runs(layer, workload)
            own = backward_bytes(model, layer, run) - saved_bytes(model, layer.name, run)
            alike[layer.signature] = max(own - usual, 0)
    return {layer.name: alike[layer.signature] for layer in model.decoders}


@plugins.cached(maxsize=16)
def rebuilt_estimate(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes that a decoder layer saves less for one micro-batch if it rebuilds outputs
    (`rebuilt_bytes`). If layers differ, it is the smallest number. 0 if layers cannot.
    """
    layers = {layer.signature: layer.name for layer in model.decoders}.values()
    return min(rebuilt_bytes(model, layer, workload) for layer in layers)


def _as_layer_runs(layer: LayerSpec, workload: Workload) -> Workload:
    """Returns the workload without compiled layers if `layer` always runs eagerly."""
    return msgspec.structs.replace(workload, compiled=workload.compiled and layer.compilable)


def _as_run(model: ModelSpec, workload: Workload) -> Workload:
    """Returns the workload without compiled layers if some layers of the model always run eagerly.
    The formulas for compiled layers then do not apply.
    """
    compiled = workload.compiled and all(layer.compilable for layer in model.decoders)
    return msgspec.structs.replace(workload, compiled=compiled)


def fp8_saved_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the additional bytes that a decoder layer saves because its products are in fp8.

    Compiled layers save `added_fp8_bytes`, which may be negative. Eager layers save 0,
    because they save the bf16 operands with and without fp8. The result is the largest number of
    all layers, and 0 without fp8.
    """
    if not (workload.fp8 and workload.compiled):
        return 0
    return max(
        added_fp8_bytes(model, layer.name, workload) if layer.compilable else 0
        for layer in {layer.signature: layer for layer in model.decoders}.values()
    )


def fp8_temporary_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the peak bytes of temporary operands in the fp8 products of one decoder layer.

    The result is the largest number of all layers, and 0 without fp8. The formulas are for T tokens
    and a linear layer with `in` inputs and `out` outputs.

    An eager layer computes one linear layer at a time. The peak is the largest of three numbers:

    * T in + 3 in out, while the weight is cast.
    * in out + T (in + 5 out), while the gradient of the output is cast for the second time.
    * T (4 in + 2 out), in the product for the gradient of the weight. This includes the gradient of
      the input.

    A compiled layer computes and casts the gradients of several outputs in one kernel, if they have
    the same input, such as those of gate and up in an MLP. So the casts of all linear layers of a
    module with equal `in` exist at once. They take T in, plus 2.5 T out for each linear layer, plus
    6 T out + in out for the largest. The factors 2.5 and 6 were counted in the tensors of
    Qwen2.5-7B and of other families (tests/simulator/memory/test_compiled_memory.py). On an H200, a
    layer of Qwen2.5-7B with 32,768 tokens took 2 % less in all
    (experiments/results/h200-qwen2.5-7b-fp8).
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
                peak = tokens * source + 5 * tokens * sum(targets) // 2
                peak += (6 * tokens + source) * wide
            else:
                peak = max(
                    tokens * source + 3 * source * wide,
                    source * wide + tokens * (source + 5 * wide),
                    tokens * (4 * source + 2 * wide),
                )
            most = max(most, peak)
    return most


def embedding_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the peak bytes of temporary tensors in the backward pass of the embedding.

    With T tokens, D elements of a token's rows in all tables, P elements in tables of positions and
    b bytes per element, it is the maximum of two peaks, plus the sorting of the tokens, ten vectors
    of 8 T bytes:

    * The gradients of the rows. If they are scaled, or if there are several tables, the rows, their
      gradients and two more tensors exist, 4 T D b. They are counted for all models. With tables of
      positions, five tensors of this size are in fp32, and two of the size of these tables,
      20 T D + 8 P, as counted for GPT-2 and OPT.
    * The sums by token. c columns (`summed_columns`) of a table are summed at one time. Three
      tensors in fp32 exist together: the gradients of the tokens, their sums, and on a GPU at most
      1.1 T rows of partial sums, 12.4 T c. The gradients of all rows exist, too: T D b, or with
      tables of positions 4 T D + 4 P.
    """
    shapes = {tensor.name: tensor.shape for tensor in model.stack[EMBEDDING].tensors}
    tables, tokens = model.table_shapes, workload.tokens
    width = DTYPE_BYTES[workload.dtype]
    rows = tokens * sum(columns for _, columns in tables)
    summed = max(min(summed_columns(tokens), columns) for _, columns in tables)
    of_rows, kept = 4 * width * rows, width * rows
    if model.positions:
        positions = sum(math.prod(shapes[name]) for name in model.positions)
        of_rows, kept = 20 * rows + 8 * positions, 4 * rows + 4 * positions
    return max(of_rows, 62 * tokens * summed // 5 + kept) + 80 * tokens * len(tables)


@plugins.cached(maxsize=16)
def workspace_estimate(model: ModelSpec, workload: Workload) -> Workspace:
    """Returns the estimated bytes of temporary tensors in ops.

    With b bytes per element, C tokens per loss chunk, vocabulary size V and hidden size d:

    * head: the sum of these parts, or the bytes of `embedding_bytes` if these are more.

      * Logits and gradients. In eager execution it is the larger of two numbers. The first is
        C V (4 + 4 + 2 b), for the logits of a chunk and their gradient, each in fp32 and in the
        compute dtype. If the logits have a soft cap, which saves its input, it is C V b more. The
        second is C V b + V d b, for the gradients of the logits and of the matrix. A compiled head
        makes no logits in fp32, and writes their gradient over them. So only the second number
        remains, or 3 C V b with a soft cap if this is larger.
      * 4 V d + V d b if there are several chunks, for the fp32 sum of the matrix's gradients and
        the gradient of the last chunk.
      * C d (16 + b) for the norm at most, or 2 C d b if it is compiled.
      * (D - d) C b if a token carries D > d elements, for the gradient of a chunk of them.
      * The bytes of the padded matrix, if its rows are padded to a multiple of 8
        (`projected_rows`). A compiler pads by itself. It may hold padded copies of the
        matrix, of its gradient, and of the gradient of the logits.

    * layer: `transient_bytes` plus `mask_bytes` and `fp8_temporary_bytes`,
      without the masks that layers save (`added_mask_bytes`).
    * update: AdamW works in place. A sum of squares needs 4 bytes per row of 4,096 elements of the
      largest layer.
    """
    width, tokens = DTYPE_BYTES[workload.dtype], workload.tokens
    chunk = min(workload.loss_chunk, tokens)
    matrix = model.vocabulary * model.hidden
    logits = chunk * model.vocabulary * width
    capped = logits if model.caps_logits else 0
    gradients = logits + matrix * width
    if workload.compiled:
        head = max(gradients, 3 * capped) + 2 * chunk * model.hidden * width
    else:
        first = chunk * model.vocabulary * (4 + 4 + 2 * width) + capped
        head = max(first, gradients) + chunk * model.hidden * (16 + width)
    if tokens > chunk:
        head += matrix * (4 + width)
    head += (model.carried - model.hidden) * chunk * width
    if workload.compiled and model.vocabulary % 8:
        head += logits + 2 * matrix * width
    elif (padded := projected_rows(model, workload)) > model.vocabulary:
        head += padded * model.hidden * width
    head = max(head, embedding_bytes(model, workload))
    layer = (
        transient_bytes(model, _as_run(model, workload))
        + mask_bytes(model, workload)
        - added_mask_bytes(model, workload)
        + fp8_temporary_bytes(model, workload)
    )
    return Workspace(
        layer=layer,
        head=head,
        update=4 * -(-max(spec.elements for spec in model.stack.values()) // 4096),
    )


@plugins.cached(maxsize=16)
def tuning_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the bytes of host memory that the compiler may take while it tunes kernels, and keep.

    The compiler runs a kernel several times to find its fastest form. If the kernel changes a
    tensor in place, the tensor is first copied. If the copy would raise the peak of the GPU's
    memory, it is in page-locked host memory, which PyTorch rounds up to a power of two and does not
    free (`copy_args_to_cpu_if_needed` in PyTorch's `triton_heuristics`). The largest such tensor is
    the input of the MLP's last product, T x width, where T are the tokens of a piece.

    The result is 0 if layers are not compiled. It is an upper bound: nothing is copied if the GPU
    has memory left, or if the kernels have been tuned before.
    """
    if not workload.compiled:
        return 0
    width = 0
    for layer in {layer.signature: layer for layer in model.decoders}.values():
        if layer.compilable:
            width = max(width, model.mlp_width(layer.name))
    size = width * (workload.piece or workload.tokens) * DTYPE_BYTES[workload.dtype]
    return 1 << (size - 1).bit_length() if size else 0
