"""The parts of mixtures of experts, latent attention and linear attention.

`parts.py` explains the numbers in parentheses.
"""

from __future__ import annotations

from megatrain.simulator.model.families.attention import attend
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Layer, Parts, top_k
from megatrain.simulator.model.families.kinds import Kind
from megatrain.simulator.model.families.part import (
    Compiled,
    Kept,
    Loop,
    Part,
    Tensors,
    Traffic,
    merge_parts,
    placed,
)
from megatrain.simulator.model.families.parts import (
    gated_mlp,
    linear,
    rms_norm,
    rotary,
    shared_input,
)


def router(name: str, hidden: int, experts: int, *, bias: bool = False, wide: bool = False) -> Part:
    """Returns a router, which computes a score for every expert and chooses the best.

    The forward pass has a cast and a softmax in fp32 (4). The kernels of the backward pass read and
    write 6 elements for each score.

    Args:
        name: The module's name.
        hidden: The width of the layer.
        experts: The number of experts.
        bias: Whether the router has a bias.
        wide: Whether the router multiplies in fp32, so that autograd saves its input in fp32.
    """
    tensors: Tensors = ((f"{name}.weight", (experts, hidden)),)
    return Part(
        tensors=tensors + (((f"{name}.bias", (experts,)),) if bias else ()),
        active=experts * hidden,
        logits=experts,
        forward=Traffic(0, 4 * experts, experts),
        backward=Traffic(0, 6 * experts, experts),
        kept=Kept(0, experts, hidden if wide else 0),
        compiled=Compiled(
            Kept(0, experts + 2, hidden if wide else 0),
            cast=experts * hidden if wide else 0,
            longer=0 if wide else hidden,
        ),
    )


def experts(
    name: str,
    hidden: int,
    inner: int,
    count: int,
    chosen: int,
    *,
    transposed: bool = False,
    bias: bool = False,
    wide: bool = False,
    inputs: bool = False,
) -> Part:
    """Returns gated experts. For each token, `chosen` of `count` experts run.

    All experts share one 3-D tensor for gate and up, and one for down. Each pair of a token and an
    expert is a row. In the forward pass, a row is gathered (2), passes through its expert, is
    multiplied with its weight (3), scattered (2) and summed (2). In the backward pass, these
    numbers are 4, 6, 4 and 2. For each row, autograd saves the input, gate, up, the
    activation, the product of activation and up, the output, a weight, and three indices of 8
    bytes.

    Args:
        name: The module's name.
        hidden: The width of the layer.
        inner: The width between the projections of an expert.
        count: The number of experts.
        chosen: The number of experts that each token uses.
        transposed: Whether weights are stored as [in, out].
        bias: Whether experts have biases and clamp gate and up, as in gpt-oss.
        wide: Whether the weights of rows and the weighted outputs are in fp32.
        inputs: Whether the inputs are multiplied with the weights of rows, instead of the outputs.
            A compiled layer then saves no outputs, but the inputs twice.
    """
    up, down = (
        ((hidden, 2 * inner), (inner, hidden))
        if transposed
        else ((2 * inner, hidden), (hidden, inner))
    )
    tensors: Tensors = ((f"{name}.gate_up_proj", (count, *up)),)
    if bias:
        tensors += ((f"{name}.gate_up_proj_bias", (count, 2 * inner)),)
    tensors += ((f"{name}.down_proj", (count, *down)),)
    if bias:
        tensors += ((f"{name}.down_proj_bias", (count, hidden)),)
    rows, columns = chosen * hidden, chosen * inner
    clamped = 3 if bias else 0  # gpt-oss clamps gate and up and adds a sum
    # The first entry has the gradients of the weighted outputs, of the outputs, and of the weights
    # before they are summed. The second entry has the gradients of gate and up, and the temporary
    # tensors of a clamp.
    early = (
        Kept(rows, 3 * rows + 12 * chosen) if wide else Kept(3 * rows, 12 * chosen),
        Kept((2 + clamped) * columns, 12 * chosen),
    )
    after = early[1]._replace(low=early[1].low - (0 if inputs else rows))
    return Part(
        tensors=tensors,
        active=3 * chosen * hidden * inner,
        inner=chosen * inner,
        experts=3 * count * hidden * inner,
        rows=(count, chosen),
        clamped=bias,
        idle=(count - chosen) * (3 * hidden * inner + (2 * inner + hidden if bias else 0)),
        mlp=f"{chosen}of{count}x{inner}",
        forward=Traffic(9 * rows + (5 + 3 * clamped) * columns),
        backward=Traffic(16 * rows + (15 + 3 * clamped) * columns),
        kept=Kept(2 * rows + (4 + clamped) * columns, 8 * chosen),
        compiled=Compiled(
            Kept(2 * rows + 3 * columns, 11 * chosen),
            # The outputs of experts are freed before the gradients of gate and up exist.
            (Kept((3 if wide else 2) * rows + hidden, 12 * chosen), after),
            Kept(2 * rows + 3 * columns),
            longer=hidden,
        ),
        freed=Kept(2 * rows + (4 + clamped) * columns, 8 * chosen),
        early=early,
        gradients=(2 * columns, columns, rows),
        down=count * hidden * inner,
        projections=3 * count * hidden * inner,
    )


def routed(
    *,
    number: str = "num_experts",
    chosen: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    name: str = "mlp",
    gate: str = "gate",
    wide: bool = False,
    transposed: bool = False,
    bias: bool = False,
    experts_first: bool = False,
) -> Layer:
    """Returns a router and its experts.

    Args:
        number: The key of the number of experts, as in `top_k`.
        chosen: The key of the number of experts that each token uses.
        inner: The key of the width between the projections of an expert.
        name: The name of the module that contains router and experts.
        gate: The name of the router in this module.
        wide: As in `router` and `experts`.
        transposed: As in `experts`.
        bias: As in `router` and `experts`.
        experts_first: Whether transformers registers the experts before the router.
    """

    def parts(c: ModelConfig, _kind: Kind) -> Parts:
        count, used = top_k(c, number, chosen)
        modules = (
            router(f"{name}.{gate}", c.hidden, count, bias=bias, wide=wide),
            experts(
                f"{name}.experts",
                c.hidden,
                c.size(inner),
                count,
                used,
                transposed=transposed,
                bias=bias,
                wide=wide,
            ),
        )
        return placed("mlp", *(modules[::-1] if experts_first else modules))

    return parts


def shared_experts(
    number: str = "",
    *,
    inner: str = "moe_intermediate_size",
    name: str = "shared_experts",
    bias: bool | str = False,
    optional: bool = False,
    scaled: bool = False,
) -> Layer:
    """Returns the shared experts, which every token uses, as one MLP, and the sum of their output
    and that of the routed experts.

    Args:
        number: The key of the number of shared experts. Empty means one.
        inner: The key of the width between the projections of one expert.
        name: The name of the shared experts in `mlp`.
        bias: As in `gated_mlp`.
        optional: Whether the number may be 0. There are then no parts.
        scaled: Whether a product scales the sum.
    """

    def parts(c: ModelConfig, _kind: Kind) -> Parts:
        count = c.count(number, least=0 if optional else 1) if number else 1
        if not count:
            return ()
        shared = shared_expert(c, f"mlp.{name}", count * c.size(inner), bias=bias)
        product = Part(forward=Traffic(2 * c.hidden), backward=Traffic(2 * c.hidden))
        return placed("mlp", *((shared, product) if scaled else (shared,)))

    return parts


def shared_expert(c: ModelConfig, name: str, inner: int, *, bias: bool | str = False) -> Part:
    """Returns an MLP that every token uses, and the sum of its output and that of the routed
    experts.
    """
    part = merge_parts(gated_mlp(c, name=name, inner=inner, label=False, bias=bias))
    return merge_parts(
        (part, Part(forward=Traffic(3 * c.hidden), backward=Traffic(3 * c.hidden), mlp=f"+{inner}"))
    )


def expert_gate(name: str, hidden: int) -> Part:
    """Returns a sigmoid per token that scales the output of the shared expert. Autograd saves the
    output and the sigmoid.
    """
    return Part(
        tensors=((f"{name}.weight", (1, hidden)),),
        active=hidden,
        forward=Traffic(3 * hidden),
        backward=Traffic(6 * hidden),
        kept=Kept(hidden + 1),
        compiled=Compiled(Kept(hidden + 1), longer=hidden),
    )


def latent_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns DeepSeek's multi-head latent attention.

    Queries are projected through a narrow latent, and keys and values through another one. Each
    latent has a norm. Rotary positions have separate elements in each head. Queries and keys are
    concatenated head by head (2). Values are saved together with the keys that come from the same
    projection.
    """
    hidden, heads, bias = c.hidden, c.heads, c.flag("attention_bias")
    rank, latent, plain, rotated, value = (
        c.count("q_lora_rank", 0),
        c.size("kv_lora_rank"),
        c.size("qk_nope_head_dim"),
        c.size("qk_rope_head_dim"),
        c.size("v_head_dim", c.hidden // c.heads),
    )
    query = plain + rotated
    queries: Parts
    if rank:
        queries = (
            linear("self_attn.q_a_proj", hidden, rank, bias),
            rms_norm("self_attn.q_a_layernorm", rank),
            linear("self_attn.q_b_proj", rank, heads * query),
        )
    else:
        queries = (linear("self_attn.q_proj", hidden, heads * query),)
    joining = Part(forward=Traffic(2 * 2 * heads * query), backward=Traffic(2 * 3 * heads * query))
    return (
        *queries,
        linear("self_attn.kv_a_proj_with_mqa", hidden, latent + rotated, bias),
        rms_norm("self_attn.kv_a_layernorm", latent),
        linear("self_attn.kv_b_proj", latent, heads * (plain + value)),
        linear("self_attn.o_proj", heads * value, hidden, bias),
        rotary((heads + 1) * rotated),
        joining,
        attend(c, kind.attention, query=query, value=value, kv_heads=heads, copied=True),
        Part(
            kept=Kept(heads * plain),
            # The norm's input is saved with the rotated elements from the same projection.
            compiled=Compiled(Kept(heads * plain + rotated)),
            joined=heads * (plain + value),
            inputs=(rank * (hidden + heads * query) if rank else hidden * heads * query)
            + hidden * (latent + rotated)
            + latent * heads * (plain + value),
        ),
        shared_input(hidden, 2),
    )


_CHUNK = 64
"""Tokens in a chunk of the gated delta rule in transformers."""


def gated_delta(c: ModelConfig, _kind: Kind, *, separate: bool = False) -> Parts:
    """Returns the linear attention of Qwen3-Next: a short convolution, then the gated delta rule
    over chunks of 64 tokens in fp32, and a gated norm.

    With `separate`, the input has four projections as in Qwen3.5, instead of two.

    Let C be the tokens of a chunk, k the key size and v the value size. The FLOPs per token and
    value head are the sum of k k' and q k' (2 C k each), the triangular systems (C (k + v)), and
    the scan's products with the state (3 x 2 k v) and inside the chunk (2 C v).

    transformers' scan is a loop that reads one chunk of five fp32 tensors at a time: queries, keys,
    decayed keys, values, and the products inside chunks. For each chunk, autograd fills a gradient
    of each whole tensor with zeros, and adds it: 16 bytes an element. It also copies the gradient
    of the whole output: 8 bytes.

    For each chunk, the host calls 37 functions in the forward pass, views included, and autograd
    calls 54 in the backward pass.
    """
    hidden, kernel = c.hidden, c.size("linear_conv_kernel_dim")
    key_heads, value_heads = c.size("linear_num_key_heads"), c.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise c.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    key, value = c.size("linear_key_head_dim"), c.size("linear_value_head_dim")
    keys, values, name = key * key_heads, value * value_heads, "linear_attn"
    mixed, wide, chunk = 2 * keys + values, key * value_heads, _CHUNK
    convolution = Part(
        tensors=((f"{name}.conv1d.weight", (mixed, 1, kernel)),),
        state=2 * kernel * mixed,
        forward=Traffic(6 * mixed),
        backward=Traffic(9 * mixed),
        kept=Kept(2 * mixed),
    )
    rule = Part(
        state=value_heads
        * (4 * chunk * key + chunk * (key + value) + 6 * key * value + 2 * chunk * value),
        forward=Traffic(
            2 * (keys + values),
            30 * wide + 12 * values + 10 * chunk * value_heads,
            2 * wide + 2 * values,
        ),
        backward=Traffic(
            4 * (keys + values),
            60 * wide + 30 * values + 24 * chunk * value_heads,
            2 * wide + 2 * values,
        ),
        kept=Kept(
            0,
            8 * wide
            + 3 * values
            + 5 * chunk * value_heads
            + 2 * value_heads * key * value // chunk,
        ),
        late=(Kept(2 * (keys + values), 8 * wide + 2 * values),),
        loop=Loop(
            chunk,
            16 * (3 * wide + values + chunk * value_heads) + 8 * values,
            forward_calls=37,
            backward_calls=54,
        ),
        attention=f"delta{key_heads}x{key}:{value_heads}x{value}",
    )
    gate = Part(
        forward=Traffic(values, 7 * values, 2 * values),
        backward=Traffic(values, 12 * values, 3 * values),
        kept=Kept(2 * values, 2 * values),
    )
    inputs: tuple[tuple[str, int], ...] = (
        ("in_proj_qkvz", mixed + values),
        ("in_proj_ba", 2 * value_heads),
    )
    norm, out = (
        rms_norm(f"{name}.norm", value, rows=value_heads, projected=False),
        linear(f"{name}.out_proj", values, hidden),
    )
    if separate:
        inputs = (
            ("in_proj_qkv", mixed),
            ("in_proj_z", values),
            ("in_proj_b", value_heads),
            ("in_proj_a", value_heads),
        )
    projections = tuple(linear(f"{name}.{key}", hidden, size) for key, size in inputs)
    small: Tensors = ((f"{name}.dt_bias", (value_heads,)), (f"{name}.A_log", (value_heads,)))
    return (
        Part(tensors=small),
        convolution,
        *((norm, out, *projections) if separate else (*projections, norm, out)),
        rule,
        gate,
        shared_input(hidden, len(projections)),
    )


def lightning(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the linear attention of MiniMax over blocks of tokens.

    Inside a block, queries and keys are multiplied. A state sums up all blocks before it. The saved
    bytes are an upper bound, because a row that is shorter than a block has fewer products.

    Let C be the tokens of a block, and k the head size. The FLOPs per token and head are the sum of
    q k' and its product with v (2 C k each), and of the product of q with the state and the sum of
    the state (2 k k each).
    """
    hidden, heads, size, block, name = (
        c.hidden,
        c.heads,
        c.head_dim,
        c.size("block_size"),
        "self_attn",
    )
    values = heads * size
    rule = Part(
        state=heads * (4 * block * size + 4 * size * size),
        forward=Traffic(40 * values + 5 * heads * block),
        backward=Traffic(80 * values + 10 * heads * block),
        kept=Kept(14 * values + heads * block + heads * size * size // block),
        late=(Kept(8 * values + 3 * heads * block),),
        attention=f"lightning{heads}x{size}b{block}",
    )
    return (
        rms_norm(f"{name}.norm", values, projected=False),
        linear(f"{name}.qkv_proj", hidden, 3 * values),
        linear(f"{name}.out_proj", values, hidden),
        linear(f"{name}.output_gate", hidden, values),
        rule,
        shared_input(hidden, 2),
    )
