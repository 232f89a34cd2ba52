"""Work: the FLOPs and the memory traffic of compute ops."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatrain.simulator.model.attention_masks import (
    document_attention,
    is_masked,
    layer_writes_scores,
)
from megatrain.simulator.model.families import Part
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.layer_memory import TILE, elements_of, rebuilt_bytes
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

LENGTHS = "-lengths"
"""The end of an `attention_shape` whose kernel receives the lengths of documents."""

_PASSES = {"forward": 1, "recompute": 1, "backward": 2}


class Work(NamedTuple):
    """The FLOPs and the memory traffic of an op."""

    linear_flops: int
    """FLOPs of matrix products with weights: 2 per token and matrix element."""
    attention_flops: int
    """FLOPs of attention without masked pairs. For linear attention, the FLOPs of its convolution
    and recurrence."""
    moved_bytes: int
    """Bytes of device memory that elementwise kernels read and write, plus the bytes of the weights
    read and the weight gradients written."""
    fp8_flops: int = 0
    """The part of `linear_flops` that is computed in fp8."""
    unfused_bytes: int = 0
    """The part of `moved_bytes` that compiled and eager layers have in common, and to which
    `traffic_share` does not apply: casts to fp8, weights and their gradients once more for each
    piece of tokens, the sum of the head's gradients over several loss chunks, and loops over chunks
    of a row (`Part.loop`). In a compiled layer, also all weights and their gradients."""
    calls: int = 0
    """The PyTorch functions that the host calls in loops over chunks of a row (`Part.loop`)."""

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.linear_flops + self.attention_flops


def _left_out(
    model: ModelSpec, kind: str, layer: str, workload: Workload
) -> dict[str, tuple[int, ...]]:
    """Returns the `last_products` that an op of `kind` leaves out. A `recompute` is one whose
    output nothing reads.
    """
    leaves_out = "backward" if workload.piece else "recompute"
    return model.last_products(layer, workload) if kind == leaves_out else {}


def longest_product_flops(model: ModelSpec, workload: Workload, fp8_speed: float = 1.0) -> float:
    """Returns the FLOPs of the longest matrix product of a decoder layer in a micro-batch or a
    piece of it, without products of experts. FLOPs in fp8 are divided by `fp8_speed`.
    """
    layers = {layer.signature: layer.name for layer in model.decoders}.values()
    sizes = [
        math.prod(shape) / (fp8_speed if name in model.fp8_products(layer, workload) else 1.0)
        for layer in layers
        for name, shape in model.part(layer).linears
    ]
    return 2 * (workload.piece or workload.tokens) * max(sizes, default=0.0)


def fp8_share(model: ModelSpec, workload: Workload) -> float:
    """Returns the share of the FLOPs of the decoder layers' matrix products that are in fp8."""
    able = sum(
        math.prod(shape)
        for layer in model.decoders
        for shape in model.fp8_products(layer.name, workload).values()
    )
    return able / sum(model.part(layer.name).active for layer in model.decoders)


def _fp8_bytes(model: ModelSpec, kind: str, layer: str, workload: Workload) -> int:
    """Returns the traffic in bytes of the casts to fp8 in an op of a decoder layer.

    A cast moves 5 n bytes for an operand of n elements: it reads the operand twice in bf16, and
    writes it once in fp8. In eager layers, where each step is a separate kernel, a cast moves
    13 n bytes.

    `forward` and `recompute` cast the input and the weight of each linear layer. `backward`
    casts both again, and casts the gradient of the output once, or twice with rowwise scaling.
    `backward` also copies all three operands once into the memory layout that the product needs
    (2 n bytes). If the product is left out, the weight is not cast.
    """
    compiled = workload.compiled and model.stack[layer].compilable
    cast, moved = 5 if compiled else 13, 0
    left_out = _left_out(model, kind, layer, workload)
    for name, (target, source) in model.fp8_products(layer, workload).items():
        weight = 0 if name in left_out else source * target
        operands, gradient = (workload.tokens * source + weight, workload.tokens * target)
        moved += cast * operands
        if kind == "backward":
            twice = 2 if workload.fp8 == "rowwise" else 1
            moved += twice * cast * gradient + 2 * (operands + gradient)
    return moved


def layer_flops(model: ModelSpec, layer: str, tokens: int, sequence: int) -> int:
    """Returns the forward FLOPs of a decoder layer: 2 for each token and each element of the
    matrices that the token uses, plus attention without masked pairs.
    """
    part = model.part(layer)
    return 2 * tokens * part.active + _attention_flops(part, tokens, sequence)


def _attention_flops(part: Part, tokens: int, sequence: int) -> int:
    """Returns the forward FLOPs of attention: `part.pair` for each unmasked pair of tokens,
    plus `part.state` for each token.

    In a sequence of S tokens, full causal attention has S^2 / 2 unmasked pairs, and attention
    in a window of W < S tokens has W (S - W / 2). A chunk of W tokens has W^2 / 2.
    """
    doubled = _doubled_pairs(part, sequence)
    return tokens * part.state + tokens * part.pair * doubled // (2 * sequence)


def attention_shape(model: ModelSpec, workload: Workload) -> str:
    """Returns a key of everything that the duration of a full attention kernel depends on,
    except the sequence length: `HEADSxKEY_HEADSxSIZE-DTYPE`, followed by `-KERNEL` if the
    kernel is not PyTorch's choice (`Workload.kernel`), and by `-lengths` if it receives the lengths
    of documents.
    """
    kernel = f"-{workload.kernel}" if workload.kernel else ""
    receives = workload.documents and document_attention(model, workload) == "lengths"
    heads = "x".join(map(str, model.heads))
    return f"{heads}-{workload.dtype}{kernel}{LENGTHS if receives else ''}"


def share_of_row(model: ModelSpec, layer: str, workload: Workload) -> float:
    """Returns the number of unmasked pairs of tokens in the layer's attention on one
    micro-batch, divided by that of full causal attention on one sequence. 0 for linear
    attention.
    """
    part = model.part(layer)
    pairs = _attention_flops(part, workload.tokens, workload.sequence)
    row = part.pair * workload.sequence**2 // 2
    return (pairs - workload.tokens * part.state) / row if row else 0.0


def computed_pairs(model: ModelSpec, layer: str, workload: Workload) -> float:
    """Returns the number of pairs of tokens that the layer's attention kernel computes, divided
    by the number of unmasked pairs. It is 1 if the kernel receives no mask.

    A fused kernel that receives a mask computes all S^2 pairs of a sequence of S tokens.
    Written-out scores also compute all pairs, but their products reach at least twice the rate
    of a fused kernel, so the result is 1 for them. Their other time is in the traffic, which
    counts all pairs. Linear attention has no pairs.
    """
    spec = model.stack[layer]
    if layer_writes_scores(model, spec, workload) or not is_masked(model, spec, workload):
        return 1.0
    return 2 * workload.sequence**2 / _doubled_pairs(model.part(layer), workload.sequence)


def projected_rows(model: ModelSpec, workload: Workload) -> int:
    """Returns the rows of the output projection's matrix that the head multiplies with.

    The matrix has one row for each word of the vocabulary. An eager head in bf16 pads it with
    zero rows to a multiple of 8, because cuBLAS is several times slower if rows of logits are
    not aligned to 16 bytes: seven times with the 49,155 words of Granite 3.1 on an H200
    (experiments/results/h200-families). The compiler pads compiled heads by itself.
    """
    if workload.compiled or workload.dtype != "bf16":
        return model.vocabulary
    return -(-model.vocabulary // 8) * 8


def head_flops(model: ModelSpec, tokens: int) -> int:
    """Returns the forward FLOPs of the output projection."""
    return 2 * tokens * model.hidden * model.vocabulary


def op_work(
    model: ModelSpec,
    kind: str,
    layer: str,
    workload: Workload,
    *,
    kept: bool = False,
    rebuilt: bool = False,
) -> Work:
    """Returns the FLOPs and the memory traffic of one compute op on one micro-batch.

    The formulas use T tokens per micro-batch, S tokens per sequence, b bytes per element, P
    parameters of the layer, V words in the vocabulary, and the hidden size d. Traffic is in
    bytes:

    * `forward`: the forward FLOPs. Traffic: T times the forward traffic of the layer's parts
      (`families/part.py`), T S times that of written-out scores, and P b for the weights.
    * `recompute`: the same as `forward`, without the MLP if it is computed in pieces, and
      without `last_products`.
    * `backward`: twice the forward FLOPs. Traffic: the same terms with the backward traffic,
      and 2 P b for the weights read and the gradients written.
    * `head`: three times the forward FLOPs. Traffic: T times the forward and the backward
      traffic of the norm; T V (2 b + 32) for the logits, with a cast (b + 4), softmax in fp32
      (8), and in the backward a gradient of zeros (4), softmax (12) and a cast (4 + b); for
      each loss chunk, three times the matrix, 3 V d b, and with several chunks also the sum of
      the gradients, V d (b + 8).
    * `loss`: the forward FLOPs of the head. Traffic: T times the forward traffic of the norm;
      T V (b + 12) for the logits' cast and softmax; V d b for each loss chunk.
    * `embed`: no FLOPs. Traffic: the rows read and written, 2 T d b.
    * `embed_backward`: no FLOPs. Traffic: V d b to write zeros. T d (4 b + 36) to convert the
      gradients to fp32 (b + 4), sum them by token with partial sums in between (20), copy the
      sum of each token (8), round it (4 + b), and store it (2 b).

    Some workloads and models add to these:

    * With fp8 products, `forward`, `recompute` and `backward` have the traffic of the casts
      (`_fp8_bytes`). With pieces of tokens, they have that of `_in_pieces`. With several groups
      of heads, tensors of each group are copied (2).
    * If the layer rebuilds outputs, `backward` has the traffic of `_rebuilding_bytes` in
      addition, and a `recompute` without `last_products` has less.
    * A soft cap divides the logits, takes the tanh and multiplies. Its traffic is T V 6 b in
      `loss`, and T V 13 b in `head`, where 7 b are the backward. Scaled logits have T V 2 b in
      `loss` and T V 4 b in `head`.
    * A padded matrix (`projected_rows`) is copied, 2 V d b. In `head`, its logits have T V 3 b.
    * If the embedding has several tables, V d is the elements of all tables, and d is the width
      of all rows, in `embed` and `embed_backward`. If a token carries more than d elements,
      `embed` also writes these, and `head` writes their gradient.

    Args:
        kind: the kind of op.
        layer: the decoder layer; only ops of decoder layers use it.
        workload: the workload, with the tokens of a micro-batch.
        kept: True for a recompute that skips attention because the forward saved it.
        rebuilt: True if the layer rebuilds outputs (`Knobs.rebuild_outputs`).
    """
    tokens, width, hidden = workload.tokens, DTYPE_BYTES[workload.dtype], model.hidden
    table, tables = model.vocabulary * hidden, model.table_shapes
    unpadded = width * (projected_rows(model, workload) > model.vocabulary)
    padding = 2 * table * unpadded
    row = sum(columns for _, columns in tables)
    cap, scale = width * model.caps_logits, width * model.scales_logits
    if kind == "embed":
        return Work(0, 0, tokens * (row + model.carried) * width)
    if kind == "embed_backward":
        moved = tokens * row * (4 * width + 36) + sum(map(math.prod, tables)) * width
        return Work(0, 0, moved)
    if kind == "head":
        norm, chunks = model.architecture.norm, -(-tokens // workload.loss_chunk)
        moved = tokens * (
            norm.forward.bytes(width)
            + norm.backward.bytes(width)
            + model.vocabulary * (2 * width + 32 + 13 * cap + 4 * scale + 3 * unpadded)
            + (model.carried - hidden) * width
        )
        sums = chunks * table * (width + 8) if chunks > 1 else 0
        return Work(
            3 * head_flops(model, tokens),
            0,
            moved + padding + chunks * table * 3 * width + sums,
            unfused_bytes=sums,
        )
    if kind == "loss":
        moved = tokens * (
            model.architecture.norm.forward.bytes(width)
            + model.vocabulary * (width + 12 + 6 * cap + 2 * scale)
        )
        return Work(
            head_flops(model, tokens),
            0,
            moved + padding + -(-tokens // workload.loss_chunk) * table * width,
        )
    part, passes = model.computed_part(layer, workload), _PASSES[kind]
    traffic, matrix = (
        (part.backward, part.scores.backward)
        if kind == "backward"
        else (part.forward, part.scores.forward)
    )
    more_flops, more_bytes, more_weights = _in_pieces(model, kind, layer, workload)
    if workload.groups > 1 and part.kernel and not kept:
        copied = part.kernel.copied if kind == "backward" else part.attended
        more_bytes += 2 * tokens * copied.bytes(width)
    weights = passes * width * model.stack[layer].parameters
    left_out = _left_out(model, kind, layer, workload)
    last = sum(map(math.prod, left_out.values()))
    if workload.piece:
        more_weights -= workload.pieces * width * last
    else:
        weights -= width * last
    unfused = _fp8_bytes(model, kind, layer, workload) + more_weights
    loop, chunks = part.loop, part.loop.chunks(workload.sequence)
    if kind == "backward":
        unfused += tokens * loop.moved * chunks
    if rebuilt:
        unfused += _rebuilding_bytes(model, kind, layer, workload)
    if workload.compiled and model.stack[layer].compilable:
        unfused, weights = unfused + weights, 0
    return Work(
        2 * tokens * (passes * part.active - last) + more_flops,
        0 if kept else passes * _attention_flops(part, tokens, workload.sequence),
        tokens * (traffic.bytes(width) + workload.sequence * matrix.bytes(width))
        + weights
        + more_bytes
        + unfused,
        2
        * tokens
        * sum(
            (passes - (name in left_out)) * math.prod(shape)
            for name, shape in model.fp8_products(layer, workload).items()
        ),
        unfused,
        chunks * (loop.backward_calls if kind == "backward" else loop.forward_calls),
    )


def _rebuilding_bytes(model: ModelSpec, kind: str, layer: str, workload: Workload) -> int:
    """Returns the traffic in bytes that an op of a decoder layer has in addition because the
    layer rebuilds outputs. It may be negative.

    `backward` writes each rebuilt output once and reads two tensors for it: 3 n b for n
    elements. A `recompute` without `last_products` computes no product of gate and up, whose
    traffic is 3 n b too, because nothing reads it.
    """
    if kind == "backward":
        return 3 * rebuilt_bytes(model, layer, workload)
    unread = model.rebuilding_products(layer, workload) and _left_out(model, kind, layer, workload)
    product = workload.tokens * model.mlp_width(layer) * DTYPE_BYTES[workload.dtype]
    return -3 * product if unread else 0


def _in_pieces(model: ModelSpec, kind: str, layer: str, workload: Workload) -> tuple[int, int, int]:
    """Returns what a decoder layer has in addition because its tokens are computed in pieces:
    (linear FLOPs, bytes of elementwise traffic, bytes of weights and their gradients). Each
    may be negative.

    With n pieces, and P parameters of b bytes in the modules that are computed in pieces:

    * Each pass over the pieces reads the weights n - 1 times more, (n - 1) P b. This includes
      the weights of all experts.
    * The products of experts have fewer rows each, and compute whole tiles
      (`_tiled_elements`).
    * `recompute` leaves out the MLP, if `skips_mlp`.
    * `backward` runs the forward pass of the pieces first. The gradients of weights are written
      n times, P b each. Their fp32 sum is written once, read and written n - 1 times, and read
      once more to be written in the compute dtype: 8 n P bytes, and P b.
    """
    pieces = model.layer_pieces(layer, compiled=workload.compiled)
    if not workload.piece or pieces is None:
        return 0, 0, 0
    tokens, width, count = workload.tokens, DTYPE_BYTES[workload.dtype], workload.pieces
    chain, first = pieces.chain, pieces.first
    weights = elements_of(chain) + (elements_of(first) if first else 0)
    tiles = 2 * _tiled_elements(chain, workload)
    if kind == "recompute" and model.skips_mlp(layer):
        again = (count - 1) * width * (weights - elements_of(chain))
        left_out, unread = tokens * chain.forward.bytes(width), width * elements_of(chain)
        if not (workload.compiled and model.stack[layer].compilable):
            left_out, unread = left_out + unread, 0  # eager weights count as elementwise
        return -2 * tokens * chain.active, -left_out, again - unread
    if kind != "backward":
        return tiles, 0, (count - 1) * width * weights
    once_more = tokens * (chain.forward.bytes(width) + (first.forward.bytes(width) if first else 0))
    read, written = (2 * count - 1) * width, (count - 1) * width
    again = weights * (read + written + 8 * count + width)
    return 2 * tokens * chain.active + 3 * tiles, once_more, again


def _tiled_elements(chain: Part, workload: Workload) -> int:
    """Returns the elements of experts' weights that a pass over the pieces multiplies in
    addition, because the products compute whole tiles of rows.

    Each expert computes a multiple of `TILE` rows. This is half a tile more than its rows on
    average, or one tile if it has fewer rows than half a tile. The result is the number for all
    pieces, minus the number for all tokens at once.
    """
    count, chosen = chain.rows
    if not count:
        return 0

    def added(tokens: int) -> int:
        rows = tokens * chosen // count
        return max(TILE // 2, TILE - rows)

    more = workload.pieces * added(workload.piece) - added(workload.tokens)
    return more * chain.experts


def _doubled_pairs(part: Part, sequence: int) -> int:
    """Returns twice the unmasked pairs of tokens in the attention of a layer on one sequence."""
    window = min(part.window or sequence, sequence)
    if not part.chunked:
        return window * (2 * sequence - window)
    chunks, rest = divmod(sequence, window)
    return chunks * window**2 + rest**2
