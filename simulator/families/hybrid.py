"""Families whose layers have attention and a state-space mixer on the same input: Falcon-H1."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.families.config import Config
from megatrain.simulator.families.family import Family, Parts
from megatrain.simulator.families.kinds import HYBRID, Kind
from megatrain.simulator.families.parts import Kept, Part, Tensors, Traffic, attention, gated_mlp, linear, residual, rms_norm


def mamba2(c: Config) -> Parts:
    """Mamba-2's mixer as PyTorch computes it: a short convolution, then a scan over chunks of tokens in fp32, and a gate.

    FLOPs a token and head, with chunks of C tokens, state size n and head size p: the products of queries and keys inside the chunk (2 C n) and
    with the values (2 C p), a chunk's state and its products (4 n p). Each chunk's start is a sum over all chunks of a row, 2 n p / C a chunk,
    which grows with the row as attention does.
    """
    hidden, heads, groups, state = c.hidden, c.size("mamba_n_heads"), c.size("mamba_n_groups"), c.size("mamba_d_state")
    chunk, taps, name = c.size("mamba_chunk_size"), c.size("mamba_d_conv"), "mamba"
    width = c.size("mamba_d_ssm", c.size("mamba_expand") * hidden)
    if width % heads:
        raise c.wrong("mamba_n_heads", f"a divisor of the {width} channels of the state-space mixer")
    if heads % groups:
        raise c.wrong("mamba_n_groups", f"a divisor of the {heads} state-space heads")
    channels, keys, inner, pairs = width + 2 * groups * state, heads * state, width // heads, chunk * heads
    small: Tensors = tuple((f"{name}.{each}", (heads,)) for each in ("dt_bias", "A_log", "D"))
    taken: Tensors = ((f"{name}.conv1d.weight", (channels, 1, taps)),)
    if c.flag("mamba_conv_bias"):
        taken += ((f"{name}.conv1d.bias", (channels,)),)
    projected = width + channels + heads
    convolution = Part(
        tensors=taken, state=2 * taps * channels, forward=Traffic(6 * channels + 2 * projected), backward=Traffic(9 * channels + 2 * projected),
        kept=Kept(channels + projected),
    )  # fmt: skip
    scan = Part(
        state=heads * (2 * chunk * (state + inner) + 4 * state * inner), pair=4 * keys * inner // chunk**2,
        forward=Traffic(3 * width, 18 * width + 14 * keys + 13 * pairs, channels + width),
        backward=Traffic(6 * width, 36 * width + 28 * keys + 26 * pairs, channels + width),
        kept=Kept(2 * width + 2 * heads, 6 * width + 3 * heads + 5 * keys + 3 * pairs + 2 * keys * inner // chunk, heads),
        inner=max(0, pairs - c.size("intermediate_size")),  # the backward's largest temporaries are the MLP's or those of a chunk's pairs
        attention=f"mamba{heads}x{inner}:{groups}x{state}c{chunk}",
    )  # fmt: skip
    norm = (rms_norm(f"{name}.norm", width, weight="wide"),) if c.flag("mamba_rms_norm") else ()
    return (
        Part(tensors=small), convolution, linear(f"{name}.in_proj", hidden, projected, c.flag("mamba_proj_bias")), *norm,
        linear(f"{name}.out_proj", width, hidden, c.flag("projectors_bias")), scan,
    )  # fmt: skip


def falcon_h1(c: Config, kind: Kind) -> Parts:
    """Attention and a state-space mixer side by side after one norm, each with a scaled input and a scaled output, then a gated MLP."""
    bias, hidden = c.flag("attention_bias"), c.hidden
    scaled = Part(forward=Traffic(8 * hidden + 3 * hidden), backward=Traffic(8 * hidden + 3 * hidden), kept=Kept(2 * hidden))
    return (
        *gated_mlp(c, name="feed_forward", bias=c.flag("mlp_bias")), *mamba2(c), *attention(c, kind.attention, bias=bias, out_bias=bias),
        rms_norm("input_layernorm", hidden, first=True, projected=False), rms_norm("pre_ff_layernorm", hidden), scaled, residual(hidden),
    )  # fmt: skip


def every_hybrid(c: Config) -> list[str]:
    return [HYBRID] * c.layers


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True,
}  # fmt: skip

HYBRID_FAMILIES: dict[str, Family] = {"falcon_h1": Family(layer=falcon_h1, attention=every_hybrid, norm_name="final_layernorm", defaults=_DEFAULTS)}
