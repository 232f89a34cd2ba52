"""The device memory that a decoder layer saves for its backward pass, and takes in it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatrain.simulator.model.families import Kept, Part
from megatrain.simulator.model.layer import DTYPE_BYTES, LayerSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

TILE = 128
"""Rows of a tile in the products of experts, of which a GPU computes whole ones, and the rows that
a kernel adds for each document if it receives their lengths."""
_ROUTER_LOSS_BYTES = (4, 20)
"""Bytes of each logit that a router loss keeps from forward to backward, the logit in fp32 at most,
and in the backward pass: the probabilities, their fp32 copy, and three gradients."""
_SEEDS = 2 * 512
"""Bytes of the random generator's state that an attention kernel returns: two blocks of PyTorch's
allocator."""


def rebuilt_bytes(model: ModelSpec, layer: str, workload: Workload) -> int:
    """Returns the bytes of the outputs that a decoder layer does not save if it rebuilds them,
    or 0 if it cannot.

    With T tokens and b bytes per element, it is T b for each element of `Compiled.rebuilt`: the
    outputs of norms that projections read, and the product of gate and up. All of them exist
    again in the backward pass, so the peak of this pass is that of a layer that saves them.

    tests/simulator/memory/test_rebuilt_memory.py compares both with the compiler's choice.
    """
    if not model.rebuilding_products(layer, workload):
        return 0
    rebuilt = model.part(layer).in_compiled.rebuilt
    return rebuilt * workload.tokens * DTYPE_BYTES[workload.dtype]


def added_fp8_bytes(model: ModelSpec, layer: str, workload: Workload) -> int:
    """Returns the bytes that a compiled decoder layer saves in addition because its products
    are in fp8. It may be negative.

    The layer saves its weights in fp8, because the compiler does not know that they stay in
    their slot, and at most 8 bytes per token and product for scales. If all products are in
    fp8, it does not save the outputs of norms and activation functions (`Compiled.rebuilt`),
    because it recomputes the operands in fp8 from the inputs of these functions.

    tests/simulator/memory/test_compiled_memory.py compares it with the compiler's choice.
    """
    part, products = model.part(layer), model.fp8_products(layer, workload)
    weights = sum(map(math.prod, products.values()))
    rebuilt = part.in_compiled.rebuilt if weights == part.active else 0
    width = DTYPE_BYTES[workload.dtype]
    return weights + workload.tokens * (8 * len(products) - rebuilt * width)


def saved_bytes(model: ModelSpec, layer: str, workload: Workload) -> int:
    """Returns the bytes that autograd saves in a decoder layer from its forward to its
    backward.

    They are the sum over the parts of the layer (`families/part.py`). A norm saves its input
    in fp32 if that is a copy, the normalized row and its output. Attention saves q, k, v and
    its output, and its score matrix only if the family writes it out. A gated MLP saves gate,
    up, the activation and their product. If the workload names a flash kernel for
    scores with sinks (`ModelSpec.fuses_scores`), they are not written out.

    With pieces of tokens, the MLP and the norm before it save only their input, and the
    norm before attention saves only its output, which projections read. With a router loss, a
    layer with experts keeps the logits of its router.

    If the workload has compiled layers, they save the tensors that the compiler's partitioner
    chooses. Elementwise kernels run again in the backward pass, so mainly the operands and
    results of matrix products are saved: input and output of a norm, and gate, up and product
    of a gated MLP. With S tokens per sequence and heads of size k, 4 S k bytes are added for a
    tensor that is computed once from the positions.

    tests/simulator/memory/test_compiled_memory.py compares it with the compiler's choice.
    """
    part, width = model.computed_part(layer, workload), DTYPE_BYTES[workload.dtype]
    kept, scores, once = part.kept, part.scores.kept, 0
    if workload.compiled:
        kept, scores = part.in_compiled.kept, part.scores.compiled[0]
        once = _SEEDS + 4 * workload.sequence * model.heads.size
        once += 4 * part.in_compiled.cast if width < 4 else 0
    saved = kept.bytes(width) + _ROUTER_LOSS_BYTES[0] * model.router_logits(layer)
    pieces = model.layer_pieces(layer, compiled=workload.compiled)
    if workload.piece and pieces:
        hidden = model.hidden * width
        chain = pieces.chain.in_compiled.kept if workload.compiled else pieces.chain.kept
        saved -= chain.bytes(width) - (hidden if pieces.norm else 0)
        saved -= pieces.first.kept.bytes(width) - hidden if pieces.first else 0
    return workload.tokens * (saved + workload.sequence * scores.bytes(width)) + once


def max_saved_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the largest `saved_bytes` of all decoder layers."""
    return max(saved_bytes(model, layer.name, workload) for layer in _different(model))


def transient_bytes(model: ModelSpec, workload: Workload) -> int:
    """Returns the largest `backward_bytes` of all decoder layers, minus the largest
    `saved_bytes`: the bytes of temporary tensors in the backward pass.
    """
    most = max(backward_bytes(model, layer, workload) for layer in _different(model))
    return most - max_saved_bytes(model, workload)


def _different(model: ModelSpec) -> Iterable[LayerSpec]:
    """Returns one decoder layer for each signature."""
    return {layer.signature: layer for layer in model.decoders}.values()


def backward_bytes(model: ModelSpec, layer: LayerSpec, workload: Workload) -> int:
    """Returns the peak device bytes of a decoder layer's backward pass, saved activations
    included.

    The formulas use P parameters, T tokens, b bytes per element, and the hidden size d. The
    peak is at one of four points. The saved activations exist at all of them, and in addition:

    * When the MLP begins: the gradients of its last weights, and the tensors in `Part.early`.
    * When the MLP ends: the gradients of all its weights, and the tensors in `Part.middle`.
    * In the norm before the MLP: the same gradients, and the tensors in `Part.between`, without
      `Part.freed`, which the MLP has freed.
    * In attention: all weight gradients, P b, and the tensors in `Part.late`, without
      `Part.freed`.

    If a token carries C elements more than the hidden size, all weight gradients and three
    gradients of these elements, 3 T C b, may exist before anything is freed. If scores are
    written out, their temporary tensors are added in attention. In a compiled layer they are
    added to the largest of the four, because it does not free in the order of these parts.

    With pieces of p tokens, let P' be the parameters of the MLP and the norm before it. The
    peak is then at one of three points. In addition to the saved activations there are:

    * In a piece: the gradient of the input, T d b, the fp32 sums of the gradients of weights,
      4 P', the gradients of weights of the piece, P' b, and the piece's input, output and their
      gradients, 4 p d b. The largest of the first three points above is added for p tokens,
      without weight gradients, and with the activations that the piece saves.
    * In attention and in the norm before it: all weight gradients, P b, and the tensors in
      `Part.late`. The gradient of the residual takes the place of the saved input of the MLP.
      If no norm belongs to its chain, there are two such gradients, 2 T d b.
    * In a norm after the MLP or after attention, which is not computed in pieces: all weight
      gradients, the tensors of the norm, and two gradients, 2 T d b.

    With several groups of heads, the attention kernel's own tensors in `Part.late` exist for
    one group at a time (`KernelMemory.bytes`). A flash kernel that
    computes scores with sinks receives lengths, so its own tensors have more rows (`_padding`).

    A compiled layer differs in these points:

    * Some gradients of norms' weights are computed last, so the gradients in `Compiled.longer`
      exist in attention, at least two of the hidden states, 2 T d b.
    * Norms have no temporary tensors, so only the attention kernel's entry of `Part.late`
      counts. While the kernel runs, the gradients of the weights in `Part.inputs` do not exist.
      When they do, only the kernel's results are left.
    * The compiler uses the memory of a freed tensor for a later one of the same size, and does
      not free it in between. If a gradient in `Part.gradients` has the size of `Part.joined`,
      it exists in attention. It has in DeepSeek-V3, for example. If T = d, activations have the
      size of gradients of weights. Then the gradients of the weights in `Part.inputs` are
      counted throughout, if the layer is `Part.parallel` or its MLP has a bias. Counts of other
      layers are below the formula without them.
    * If attention and MLP are `Part.parallel`, attention may begin before the MLP has freed its
      saved activations. Then there are the gradients of the last weights of both, and the
      attention kernel's tensors, without `Compiled.gone`. With pieces, attention may end before
      the first piece, so the gradients of all other weights are added in a piece.

    tests/simulator/memory/test_counted_memory.py compares it with the runtime's layers, and
    tests/simulator/memory/test_compiled_memory.py with compiled layers.
    """
    if workload.piece and model.layer_pieces(layer.name):
        return _backward_in_pieces(model, layer, workload)
    part, width = model.computed_part(layer.name, workload), DTYPE_BYTES[workload.dtype]
    tokens, compiled = workload.tokens, workload.compiled

    def held(*states: Kept) -> int:
        return tokens * max((kept.bytes(width) for kept in states), default=0)

    carried = model.carried - model.hidden
    early, freed, scores, longer = part.early, part.freed, part.scores.held, 0
    if compiled:
        early, freed = part.in_compiled.early, part.in_compiled.freed
        scores, longer = part.scores.compiled[1], _longer(model, part, tokens, width)
    written = tokens * workload.sequence * scores.bytes(width)
    late = tokens * _late(part, width, workload.groups, compiled)
    parts = [
        width * part.down + held(*early),
        width * part.projections + held(part.middle),
        width * part.projections + held(*part.between) - held(freed),
        width * layer.elements + late + _padding(model, part, workload) - held(freed) + longer,
    ]
    if compiled:
        if part.parallel:
            output = part.attended.low * model.hidden  # elements of attention's last weight
            parts.append(width * (part.down + output) + late - held(part.in_compiled.gone))
        biases = {name.replace(".weight", ".bias") for name, _ in part.last}
        biased = any(name in biases for name, _ in part.tensors)
        reusing = tokens == model.hidden and (biased or part.parallel)
        if part.kernel and not reusing:
            parts[3] = max(
                parts[3] - width * part.inputs,
                width * layer.elements + held(part.kernel.results) - held(freed) + longer,
            )
        parts = [each + written for each in parts]
    else:
        parts[3] += written
    if carried:
        parts.append(width * layer.elements + 3 * tokens * carried * width + written)
    return (
        saved_bytes(model, layer.name, workload)
        + max(parts)
        + tokens * _ROUTER_LOSS_BYTES[1] * model.router_logits(layer.name)
        + 24 * workload.sequence * model.heads.size
    )


def _padding(model: ModelSpec, part: Part, workload: Workload) -> int:
    """Returns the bytes of the rows that a kernel that receives lengths adds to its own fp32
    sums: `TILE` rows for each row of the micro-batch. 0 unless the kernel computes scores with
    sinks.

    Packed documents have more. They are not counted, as in families whose kernel receives
    lengths only for documents.
    """
    if part.kernel is None or not model.fuses_scores(workload):
        return 0
    return 4 * TILE * workload.batch * part.kernel.inside.wide


def _longer(model: ModelSpec, part: Part, tokens: int, width: int) -> int:
    """Returns the bytes of tensors that exist in attention, although other layers than compiled
    ones have freed them (`backward_bytes`).
    """
    reused = part.joined if part.joined in part.gradients else 0
    return tokens * width * (max(2 * model.hidden, part.in_compiled.longer) + reused)


def _backward_in_pieces(model: ModelSpec, layer: LayerSpec, workload: Workload) -> int:
    """Returns `backward_bytes` of a layer that is computed in pieces of tokens."""
    part, width = model.computed_part(layer.name, workload), DTYPE_BYTES[workload.dtype]
    tokens, compiled = workload.tokens, workload.compiled
    pieces = model.layer_pieces(layer.name, compiled=compiled)
    assert pieces is not None
    chain, row = pieces.chain, model.hidden * width
    kept, early, freed, scores, longer = (chain.kept, chain.early, chain.freed, part.scores.held, 0)
    if compiled:
        inner = chain.in_compiled
        kept, early, freed = inner.kept, inner.early, inner.freed
        scores = part.scores.compiled[1]
        longer = tokens * (2 * row + width * (part.in_compiled.longer - inner.longer))

    def held(*states: Kept) -> int:
        return max((state.bytes(width) for state in states), default=0)

    after = held(*chain.between, *chain.late) - held(freed)
    in_piece = kept.bytes(width) + max(held(*early), held(chain.middle), after, 0) + 4 * row
    parameters = elements_of(chain)
    norms = tuple(state for state in part.early if state not in chain.early)
    others = width * (layer.elements - parameters) if compiled and part.parallel else 0
    around = max(
        tokens * row + workload.piece * in_piece + (4 + width) * parameters + others,
        width * layer.elements
        + tokens * (_late(part, width, workload.groups, compiled) + (0 if pieces.norm else 2 * row))
        + _padding(model, part, workload)
        + longer,
        width * layer.elements + tokens * (held(*norms) + 2 * row) if norms else 0,
    )
    return (
        saved_bytes(model, layer.name, workload)
        + around
        + tokens * _ROUTER_LOSS_BYTES[1] * model.router_logits(layer.name)
        + tokens * workload.sequence * scores.bytes(width)
        + 24 * workload.sequence * model.heads.size
    )


def elements_of(part: Part) -> int:
    """Returns the number of parameters of `part`."""
    return sum(math.prod(shape) for _, shape in part.tensors)


def _late(part: Part, width: int, groups: int, compiled: bool) -> int:
    """Returns the largest number of bytes per token of the entries of `part.late`, with attention
    in `groups` groups of heads.

    In a `compiled` layer it is the attention kernel's entry, if there is one, because the norms of
    queries and keys have no temporary tensors.
    """
    if compiled and part.kernel:
        return part.kernel.bytes(width, groups)
    return max(
        (
            part.kernel.bytes(width, groups)
            if part.kernel and state == part.kernel.whole
            else state.bytes(width)
            for state in part.late
        ),
        default=0,
    )
