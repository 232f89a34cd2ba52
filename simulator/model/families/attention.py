"""Attention as a part of decoder layers, with its scores if no fused kernel computes it.

In the docstrings below, a number in parentheses after an operation is the number of elements that
its kernels read and write, per element of the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.part import (
    Compiled,
    Kept,
    KernelMemory,
    Part,
    Scores,
    Traffic,
)
from megatrain.simulator.model.families.parts import linear, rms_norm, rotary, shared_input


def softmax_scores(c: ModelConfig, *, capped: bool = False, wide: bool = False) -> Scores:
    """Returns the costs of scores with a softmax in fp32.

    Forward: the products of queries and keys are scaled (2), a mask is added (3), and softmax runs
    in fp32 (3) between two casts. Backward: scaling (2), softmax (5) and the casts. Autograd saves
    the softmax in fp32 and in the compute dtype. If the scores are `capped`, a division, a tanh and
    a product (2 each) are added, and the tanh is saved.

    A compiled layer saves the softmax in the compute dtype, and the scores from which it computes
    the softmax again. With `wide`, queries and keys are multiplied in fp32, so these scores are in
    fp32.
    """
    heads = c.heads
    cap = 6 * heads if capped else 0
    return Scores(
        Kept(heads * (2 if capped else 1), 0, heads),
        Kept(2 * heads, 2 * heads),
        Traffic(5 * heads + cap, 3 * heads, 2 * heads),
        Traffic(2 * heads + cap, 5 * heads, 2 * heads),
        (
            Kept(heads, 0, heads) if wide else Kept(2 * heads),
            Kept(heads) if capped else Kept(0, heads),
        ),
    )


def capped_scores(c: ModelConfig) -> Scores | None:
    """Returns the costs of capped scores, or None if the config has no soft cap."""
    return softmax_scores(c, capped=True) if c.get("attn_logit_softcapping") else None


def scaled_scores(c: ModelConfig) -> Scores:
    """Returns the costs of `softmax_scores` plus a log-sum-exp of the scores (2).

    The log-sum-exp scales the output of attention. Autograd saves the scores for it.
    """
    heads = c.heads
    return Scores(
        Kept(2 * heads, 0, heads),
        Kept(3 * heads, 2 * heads),
        Traffic(6 * heads, 3 * heads, 2 * heads),
        Traffic(6 * heads, 5 * heads, 2 * heads),
        (Kept(2 * heads), Kept(2 * heads)),
    )


def sink_scores(c: ModelConfig) -> Scores:
    """Returns the costs of scores with an attention sink: one more column, a learned number per
    head.

    The column is appended (2), the largest score is subtracted (3), softmax runs in the compute
    dtype, and the column is cut off (2).

    A compiled layer saves the scores with this column, and the softmax. For its temporary elements
    in the backward pass, the number of eager layers is used. A count gave fewer elements (2), but
    with this count, the predicted memory of a step of six layers of gpt-oss-20b on an H200 is too
    small.
    """
    heads = c.heads
    return Scores(
        Kept(heads),
        Kept(4 * heads),
        Traffic(15 * heads),
        Traffic(18 * heads),
        (Kept(2 * heads), Kept(4 * heads)),
    )


def attend(
    c: ModelConfig,
    kind: str,
    *,
    query: int = 0,
    value: int = 0,
    kv_heads: int = 0,
    window: int = 0,
    chunked: bool = False,
    copied: bool = False,
    fused: bool = False,
    scores: Scores | None = None,
    sinks: bool = False,
) -> Part:
    """Returns attention without its projections.

    It is one fused kernel, for which autograd saves q, k, v, the output and the log-sum-exp of each
    head. If several query heads share keys and values, and heads have more than 256 elements or
    values of another size than keys, transformers copies keys and values for each query head.

    Args:
        c: The config.
        kind: The layer's attention. With `sliding_attention`, the window is `sliding_window`.
        query: Elements of a query or key per head. 0 means `head_dim`.
        value: Elements of a value per head. 0 means `query`.
        kv_heads: Heads of keys and values. 0 means the number in the config.
        window: The most tokens that a query attends to, for any other `kind`. 0 means all.
        chunked: The same as `Part.chunked`.
        copied: Whether queries are concatenated head by head. If they are, the output has the
            layout of heads, and is copied for the output projection, which saves the copy.
        fused: Whether q, k and v come from one projection. If they do, its whole output is saved
            together with v.
        scores: The costs of scores if they are written out. None means that a fused kernel is used.
            With scores, shared keys and values are copied for each query head, and q, k and v are
            copied into the layout of the matrix product.
        sinks: Whether the scores are those of heads with sinks, which the flash kernel can compute.
    """
    heads, kv_heads, query = c.heads, kv_heads or c.kv_heads, query or c.head_dim
    value = value or query
    if kind == "sliding_attention":
        window = c.window
        if not window:
            raise c.wrong(
                "layer_types",
                "full_attention only, since sliding_window or use_sliding_window turns the window"
                " off",
            )
    output, whole = heads * value if copied else 0, (heads + kv_heads) * query if fused else 0
    label = (
        f"{heads}:{kv_heads}x{query}"
        + (f"v{value}" if value != query else "")
        + (f"w{window}" if window else "")
    )
    if scores is not None:
        of_kernel = functools.partial(
            attend, c, kind, query=query, value=value, kv_heads=kv_heads, window=window
        )
        return Part(
            pair=2 * heads * (query + value),
            window=window,
            forward=Traffic(2 * heads * (2 * query + 2 * value)),
            scores=scores,
            backward=Traffic(3 * heads * (2 * query + 2 * value)),
            kept=Kept(2 * heads * (query + value)),
            compiled=Compiled(Kept(2 * heads * (query + value) + 2 * heads, 4 * heads)),
            attention=label,
            flash=_with_sinks(of_kernel(), heads, value) if sinks else None,
        )
    saved_heads = kv_heads if query == value <= 256 else heads
    kernel = _backward_of_attention(heads, kv_heads, query, value)
    return Part(
        pair=2 * heads * (query + value),
        window=window,
        chunked=chunked,
        forward=Traffic(2 * output),
        backward=Traffic(2 * output),
        kept=Kept((heads + saved_heads) * (query + value) + output + whole, heads),
        attended=Kept(heads * value, heads),
        kernel=kernel,
        late=(kernel.whole,),
        attention=label,
    )


def _with_sinks(part: Part, heads: int, value: int) -> Part:
    """Returns attention by a fused kernel, `part`, with sinks.

    Forward: the output is scaled in place (2), by a number per head that a subtraction and a
    sigmoid make (5), and the log-sum-exp gets the sink (3). Backward: the product of the output and
    its gradient is a cast, a product in place (3) and a sum (1), and is multiplied with a number
    per head and summed (8). The temporary tensors of this product are fewer than those of the
    kernel, which runs later. Autograd saves the same tensors as without sinks.
    """
    output = heads * value
    return msgspec.structs.replace(
        part,
        forward=part.forward.plus(Traffic(2 * output, 9 * heads)),
        backward=part.backward.plus(Traffic(output, 3 * output + 8 * heads, output)),
    )


def _backward_of_attention(heads: int, kv_heads: int, query: int, value: int) -> KernelMemory:
    """Returns the temporary elements of the backward kernel of fused attention.

    They are the gradients of the output and of q, k and v, an fp32 sum of q's gradient, and the
    gradients of k and v for each query head if several query heads share them. If values and
    queries differ in size, or if heads have more than 256 elements, the kernel also sums the
    gradients of k and v in fp32, unless heads have at most 128 elements. The sum of q's gradient
    has a multiple of 32 elements per head.
    """
    rounded = -(-query // 32) * 32
    results = Kept(heads * query + kv_heads * (query + value))
    unequal = (query != value or query > 256) and max(query, value) > 128
    inside = Kept(
        heads * (query + value) if heads != kv_heads else 0,
        heads * (rounded + 1 + (query + value if unequal else 0)),
    )
    return KernelMemory(Kept(heads * value), results, inside)


def attention(
    c: ModelConfig,
    kind: str,
    *,
    bias: bool | str = False,
    out_bias: bool | str | None = None,
    out: str = "o_proj",
    norms: str = "",
    weight: str = "low",
    copied: bool = False,
    scores: Callable[[ModelConfig], Scores | None] | None = None,
    sinks: bool = False,
) -> tuple[Part, ...]:
    """Returns attention with its projections and rotary positions.

    Args:
        c: The config.
        kind: The layer's attention.
        bias: Whether the projections have a bias, or the key of config.json that decides it.
        out_bias: The same for the output projection. None means the value of `bias`.
        out: The name of the output projection.
        norms: The norms of queries and keys: empty for none, `head` for one row per head, `whole`
            for one row with all heads.
        weight: The dtype of these norms' weight product, as in `rms_norm`.
        copied: As in `attend`.
        scores: A function of the config that returns `scores` of `attend`. None means that a fused
            kernel is used.
        sinks: As in `attend`.
    """
    heads, kv_heads, size, hidden = c.heads, c.kv_heads, c.head_dim, c.hidden
    biased = c.is_on(bias)
    parts = [
        linear(f"self_attn.{name}_proj", hidden, size * count, biased)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    ]
    out_biased = biased if out_bias is None else c.is_on(out_bias)
    parts.append(linear(f"self_attn.{out}", heads * size, hidden, out_biased))
    for name, count in (("q", heads), ("k", kv_heads)) if norms else ():
        rows, width = (count, size) if norms == "head" else (1, count * size)
        parts.append(
            rms_norm(f"self_attn.{name}_norm", width, rows=rows, projected=False, weight=weight)
        )
    return (
        *parts,
        rotary((heads + kv_heads) * size),
        attend(c, kind, copied=copied, scores=scores(c) if scores else None, sinks=sinks),
        Part(inputs=hidden * (heads + 2 * kv_heads) * size),
        shared_input(hidden, 3),
    )
