"""Families whose layers have attention and a state-space mixer on the same input: Falcon-H1."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attention
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Family, Parts
from megatrain.simulator.model.families.kinds import HYBRID, Kind
from megatrain.simulator.model.families.part import Kept, Part, Tensors, Traffic
from megatrain.simulator.model.families.parts import gated_mlp, linear, residual, rms_norm


def mamba2(c: ModelConfig) -> Parts:
    """Returns the mixer of Mamba-2 as PyTorch computes it: a short convolution, then a scan over
    chunks of tokens in fp32, and a gate.

    Let C be the tokens of a chunk, n the state size and p the head size. The FLOPs per token and
    head are the sum of the products of queries and keys inside the chunk (2 C n), their products
    with the values (2 C p), and the chunk's state with its products (4 n p). The initial state of
    each chunk is a sum over all chunks of the row. This sum costs 2 n p / C for each of these
    chunks, so its cost grows with the length of the row, like that of attention.
    """
    hidden, heads, groups, state = (
        c.hidden,
        c.size("mamba_n_heads"),
        c.size("mamba_n_groups"),
        c.size("mamba_d_state"),
    )
    chunk, taps, name = c.size("mamba_chunk_size"), c.size("mamba_d_conv"), "mamba"
    width = c.size("mamba_d_ssm", c.size("mamba_expand") * hidden)
    if width % heads:
        raise c.wrong(
            "mamba_n_heads", f"a divisor of the {width} channels of the state-space mixer"
        )
    if heads % groups:
        raise c.wrong("mamba_n_groups", f"a divisor of the {heads} state-space heads")
    channels, keys, inner, pairs = (
        width + 2 * groups * state,
        heads * state,
        width // heads,
        chunk * heads,
    )
    small: Tensors = tuple((f"{name}.{key}", (heads,)) for key in ("dt_bias", "A_log", "D"))
    filters: Tensors = ((f"{name}.conv1d.weight", (channels, 1, taps)),)
    if c.flag("mamba_conv_bias"):
        filters += ((f"{name}.conv1d.bias", (channels,)),)
    projected = width + channels + heads
    convolution = Part(
        tensors=filters,
        state=2 * taps * channels,
        forward=Traffic(6 * channels + 2 * projected),
        backward=Traffic(9 * channels + 2 * projected),
        kept=Kept(channels + projected),
    )
    scan = Part(
        state=heads * (2 * chunk * (state + inner) + 4 * state * inner),
        pair=4 * keys * inner // chunk**2,
        forward=Traffic(3 * width, 18 * width + 14 * keys + 13 * pairs, channels + width),
        backward=Traffic(6 * width, 36 * width + 28 * keys + 26 * pairs, channels + width),
        kept=Kept(
            2 * width + 2 * heads,
            6 * width + 3 * heads + 5 * keys + 3 * pairs + 2 * keys * inner // chunk,
            heads,
        ),
        late=(Kept(2 * width, 4 * pairs),),
        attention=f"mamba{heads}x{inner}:{groups}x{state}c{chunk}",
    )
    norm = (rms_norm(f"{name}.norm", width, weight="wide"),) if c.flag("mamba_rms_norm") else ()
    return (
        Part(tensors=small),
        convolution,
        linear(f"{name}.in_proj", hidden, projected, c.flag("mamba_proj_bias")),
        *norm,
        linear(f"{name}.out_proj", width, hidden, c.flag("projectors_bias")),
        scan,
    )


def falcon_h1(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Falcon-H1: one norm, attention and a state-space mixer in parallel, and
    then a gated MLP.

    Inputs and outputs of attention and mixer are scaled.
    """
    hidden = c.hidden
    scaled = Part(
        forward=Traffic(8 * hidden + 3 * hidden),
        backward=Traffic(8 * hidden + 3 * hidden),
        kept=Kept(2 * hidden),
    )
    return (
        *gated_mlp(c, name="feed_forward", bias="mlp_bias"),
        *mamba2(c),
        *attention(c, kind.attention, bias="attention_bias"),
        rms_norm("input_layernorm", hidden, first=True, projected=False),
        rms_norm("pre_ff_layernorm", hidden),
        scaled,
        residual(hidden),
    )


def every_hybrid(c: ModelConfig) -> list[str]:
    """Returns `HYBRID` for each layer."""
    return [HYBRID] * c.layers


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
}

HYBRID_FAMILIES: dict[str, Family] = {
    "falcon_h1": Family(
        layer=falcon_h1,
        attention=every_hybrid,
        norm_name="final_layernorm",
        scales_logits=True,
        defaults=_DEFAULTS,
    )
}
"""`model_type` -> family."""
