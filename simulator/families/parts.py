"""What decoder layers are made of: projections, norms, attention, MLPs, experts; each says its tensors and what its arithmetic costs.

Costs are counted in transformers' modules as PyTorch runs them eagerly, kernel by kernel: an elementwise kernel reads each operand once and
writes its result once. What is kept for the backward pass is counted by the part that produces it. Per token of the layer:

    FLOPs   2 x `active`, plus `pair` for each earlier token attended to, plus `state` (linear attention)
    bytes   b x low + 4 x wide + (b + 4) x casts, b the width of the compute dtype; casts only where b < 4
    kept    b x low + 4 x wide, and 4 x upcast where b < 4

Where attention's scores are written out (`Scores`), the same again for each pair of tokens of a row, masked ones too.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatrain.simulator.families.config import Config

Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class Traffic(NamedTuple):
    """Elements a token that elementwise kernels read and write."""

    low: int = 0
    """in the compute dtype"""
    wide: int = 0
    """in fp32"""
    casts: int = 0
    """read in one and written in the other"""

    def bytes(self, width: int) -> int:
        return width * self.low + 4 * self.wide + ((width + 4) * self.casts if width < 4 else 0)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.low + other.low, self.wide + other.wide, self.casts + other.casts)


class Kept(NamedTuple):
    """Elements a token that autograd keeps for the backward pass."""

    low: int = 0
    """in the compute dtype"""
    wide: int = 0
    """in fp32"""
    upcast: int = 0
    """copies in fp32 of what the layer was given; in fp32 there is no copy"""

    def bytes(self, width: int) -> int:
        return width * self.low + 4 * self.wide + (4 * self.upcast if width < 4 else 0)

    def plus(self, other: Kept) -> Kept:
        return Kept(self.low + other.low, self.wide + other.wide, self.upcast + other.upcast)


class Scores(NamedTuple):
    """What scores that are written out take: elements a pair of tokens of a row, all heads together."""

    kept: Kept = Kept()
    held: Kept = Kept()
    """at most at once in the backward pass besides these"""
    forward: Traffic = Traffic()
    backward: Traffic = Traffic()

    def plus(self, other: Scores) -> Scores:
        return Scores(
            self.kept.plus(other.kept), self.held.plus(other.held), self.forward.plus(other.forward), self.backward.plus(other.backward)
        )  # fmt: skip


def softmax_scores(heads: int, *, capped: bool = False) -> Scores:
    """Products of queries and keys, scaled (2) and with a mask added (3) in the compute dtype; softmax in fp32 (3) between two casts. Backward: the same
    without the mask, softmax 5. Keeps the softmax in fp32 and in the compute dtype. `capped`: a division, a tanh, which is kept, and a product (2 each).
    """
    cap = 6 * heads if capped else 0
    return Scores(
        Kept(heads * (2 if capped else 1), 0, heads), Kept(2 * heads, 2 * heads),
        Traffic(5 * heads + cap, 3 * heads, 2 * heads), Traffic(2 * heads + cap, 5 * heads, 2 * heads),
    )  # fmt: skip


def scaled_scores(heads: int) -> Scores:
    """`softmax_scores` whose log-sum-exp, which keeps them (2), says how much of the output stays."""
    return Scores(Kept(2 * heads, 0, heads), Kept(3 * heads, 2 * heads), Traffic(6 * heads, 3 * heads, 2 * heads), Traffic(6 * heads, 5 * heads, 2 * heads))


def sink_scores(heads: int) -> Scores:
    """`softmax_scores` with one more column, a number that a head learns: joined (2), less the largest (3), softmax in the compute dtype, cut off (2)."""
    return Scores(Kept(heads), Kept(4 * heads), Traffic(15 * heads), Traffic(18 * heads))


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A module of a decoder layer, or several."""

    tensors: Tensors = ()
    active: int = 0
    """matrix elements that one token is multiplied with"""
    idle: int = 0
    """parameters of experts that a token is not routed to"""
    pair: int = 0
    """FLOPs of a query with one key and its value"""
    window: int = 0
    """tokens that a query sees at most; 0: all before it"""
    state: int = 0
    """FLOPs a token of a recurrence"""
    forward: Traffic = Traffic()
    backward: Traffic = Traffic()
    kept: Kept = Kept()
    attended: Kept = Kept()
    """of these, what attention's kernel leaves: its output and the log-sum-exp of each head"""
    scores: Scores = Scores()
    """where attention writes them out"""
    inner: int = 0
    """elements a token between an MLP's projections"""
    attention: str = ""
    """what tells its attention from another one's, in a signature"""
    mlp: str = ""
    """what tells its MLP from another one's, in a signature"""


def joined(parts: tuple[Part, ...]) -> Part:
    """The parts as one: sums; tensors in order."""
    forward, backward, kept, attended, scores = Traffic(), Traffic(), Kept(), Kept(), Scores()
    for part in parts:
        forward, backward = forward.plus(part.forward), backward.plus(part.backward)
        kept, attended, scores = kept.plus(part.kept), attended.plus(part.attended), scores.plus(part.scores)
    return Part(
        tensors=tuple(tensor for part in parts for tensor in part.tensors), active=sum(part.active for part in parts), idle=sum(part.idle for part in parts),
        pair=sum(part.pair for part in parts), window=max(part.window for part in parts), state=sum(part.state for part in parts),
        forward=forward, backward=backward, kept=kept, attended=attended, scores=scores, inner=sum(part.inner for part in parts),
        attention="".join(part.attention for part in parts), mlp="".join(part.mlp for part in parts),
    )  # fmt: skip


def linear(name: str, source: int, target: int, bias: bool = False) -> Part:
    """A projection; the bias is added inside the product, and its gradient reads the output's once."""
    tensors: Tensors = ((f"{name}.weight", (target, source)),)
    return Part(
        tensors=tensors + (((f"{name}.bias", (target,)),) if bias else ()), active=source * target, backward=Traffic(low=target if bias else 0)
    )  # fmt: skip


def rms_norm(name: str, size: int, *, rows: int = 1, first: bool = False, projected: bool = True, weight: str = "low") -> Part:
    """In fp32, scaled by its weight in the compute dtype (`low`, Llama's) or in fp32 (`wide`, Gemma's and OLMo-2's).

    Forward: cast, square (2), mean (1), scale (2), weight (2), cast. Backward: weight (2) and its gradient (4); scale (2) and its gradient (4);
    of the mean of squares a fill (1), a copy (2), a double (2) and a product (3); a sum (3); two casts. Keeps the row in fp32 (`first`: the
    layer's own input), its scale, the normalised row, and its output where that is projected. `rows` of `size` elements a token share the weight.
    """
    elements = rows * size
    low, wide = (elements, 0) if weight == "low" else (0, elements)
    own, copy = (0, elements) if first else (elements, 0)
    return Part(
        tensors=((f"{name}.weight", (size,)),), forward=Traffic(2 * low, 5 * elements + 2 * wide, 2 * elements),
        backward=Traffic(6 * low, 17 * elements + 6 * wide, 2 * elements),
        kept=Kept(low + (elements if projected else 0), rows + wide + own, copy),
    )  # fmt: skip


def layer_norm(name: str, size: int, *, rows: int = 1, first: bool = False, projected: bool = True) -> Part:
    """PyTorch's, one kernel each way, with a bias. Keeps its input (`first`: the layer's own), mean and scale, and its output where that is projected."""
    elements = rows * size
    return Part(
        tensors=((f"{name}.weight", (size,)), (f"{name}.bias", (size,))), forward=Traffic(2 * elements), backward=Traffic(5 * elements),
        kept=Kept(elements * ((0 if first else 1) + (1 if projected else 0)), 2 * rows),
    )  # fmt: skip


def centred_norm(name: str, shape: tuple[int, ...], rows: int = 1, *, projected: bool = True) -> Part:
    """Cohere's layer norm without bias, written out in fp32: 12 forward and two casts; keeps the centred row twice, its scale, and the normalised row."""
    elements = rows * shape[-1]
    return Part(
        tensors=((f"{name}.weight", shape),), forward=Traffic(0, 12 * elements, 2 * elements), backward=Traffic(0, 31 * elements, 2 * elements),
        kept=Kept(elements if projected else 0, 3 * elements + rows),
    )  # fmt: skip


def residual(hidden: int, count: int = 2) -> Part:
    """Sums with the layer's input: a product's output is added (3); backward, the two gradients are (3)."""
    return Part(forward=Traffic(3 * hidden * count), backward=Traffic(3 * hidden * count))


def shared_input(hidden: int, consumers: int) -> Part:
    """Gradients of one input from several projections are summed, each sum 3."""
    return Part(backward=Traffic(3 * hidden * (consumers - 1)))


def rotary(elements: int) -> Part:
    """x cos + rotated(x) sin: 2, a negation (1), a concatenation (2), 2, a sum (3). Backward: 2, 2, the halves' gradients into zeros (5) and their sums (6)."""
    return Part(forward=Traffic(10 * elements), backward=Traffic(15 * elements))


def turned_in_pairs(elements: int) -> Part:
    """What rotary positions cost beyond `rotary` where they turn neighbouring elements, in fp32: casts there and back, cosines laid out anew."""
    return Part(forward=Traffic(0, 4 * elements, 2 * elements), backward=Traffic(0, 6 * elements, 2 * elements))


def attend(
    c: Config, kind: str, *, query: int = 0, value: int = 0, kv_heads: int = 0, window: int = 0, copied: bool = False, fused: bool = False,
    scores: Scores | None = None,
) -> Part:  # fmt: skip
    """Attention itself, in one kernel that keeps q, k, v, its output and a scale a head. A sliding window `kind` sees `sliding_window` tokens, another one
    `window` where it is not 0.

    `copied`: queries were put together head by head, so the output comes head by head and is copied for the projection, which keeps the copy.
    `fused`: q, k and v are one projection, all of which is kept with v. `scores`: those are written out, and no one kernel computes it; keys and values
    that several heads share are copied for each, and q, k and v as a product wants them.
    """
    heads, kv_heads, query = c.heads, kv_heads or c.kv_heads, query or c.head_dim
    value = value or query
    if kind == "sliding_attention":
        window = c.window
        if not window:
            raise c.wrong("layer_types", "full_attention alone, since sliding_window or use_sliding_window says that there is no window")
    output, whole = heads * value if copied else 0, (heads + kv_heads) * query if fused else 0
    label = f"{heads}:{kv_heads}x{query}" + (f"v{value}" if value != query else "") + (f"w{window}" if window else "")
    if scores is not None:
        return Part(
            pair=2 * heads * (query + value), window=window, forward=Traffic(2 * heads * (2 * query + 2 * value)), scores=scores,
            backward=Traffic(3 * heads * (2 * query + 2 * value)), kept=Kept(2 * heads * (query + value)), attention=label,
        )  # fmt: skip
    return Part(
        pair=2 * heads * (query + value), window=window, forward=Traffic(2 * output), backward=Traffic(2 * output),
        kept=Kept((heads + kv_heads) * (query + value) + output + whole, heads), attended=Kept(heads * value, heads), attention=label,
    )  # fmt: skip


def attention(
    c: Config,
    kind: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    out: str = "o_proj",
    norms: str = "",
    weight: str = "low",
    copied: bool = False,
    scores: Scores | None = None,
) -> tuple[Part, ...]:
    """Query, key and value projections, rotary positions, attention, output projection. `norms`: of query and key, over a `head` or the `whole`."""
    heads, kv_heads, size, hidden = c.heads, c.kv_heads, c.head_dim, c.hidden
    parts = [linear(f"self_attn.{name}_proj", hidden, size * count, bias) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))]
    parts.append(linear(f"self_attn.{out}", heads * size, hidden, out_bias))
    for name, count in (("q", heads), ("k", kv_heads)) if norms else ():
        rows, each = (count, size) if norms == "head" else (1, count * size)
        parts.append(rms_norm(f"self_attn.{name}_norm", each, rows=rows, projected=False, weight=weight))
    return (*parts, rotary((heads + kv_heads) * size), attend(c, kind, copied=copied, scores=scores), shared_input(hidden, 3))


_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")


def activation(c: Config, elements: int, key: str = "hidden_act") -> Part:
    """One kernel forward (2) and backward (3); keeps its input, or where it is relu its output, which is kept anyway. `gelu_new` is
    written out: 19 forward, 24 backward, and keeps four; relu2 is two kernels.
    """
    name = c.choice(key, (*_ACTIVATIONS, "gelu_new", "relu2"))
    if name == "gelu_new":
        return Part(forward=Traffic(19 * elements), backward=Traffic(24 * elements), kept=Kept(4 * elements))
    if name == "relu2":
        return Part(forward=Traffic(4 * elements), backward=Traffic(6 * elements), kept=Kept(elements))
    return Part(forward=Traffic(2 * elements), backward=Traffic(3 * elements), kept=Kept(0 if name == "relu" else elements))


def gated_mlp(
    c: Config, *, name: str = "mlp", inner: int = 0, act: str = "hidden_act", bias: bool = False, fused: bool = False, label: bool = True
) -> tuple[Part, ...]:
    """activation(gate) x up, then down; keeps gate, up, the activation and the product. `fused`: gate and up are one projection."""
    inner, hidden = inner or c.size("intermediate_size"), c.hidden
    names = ((f"{name}.gate_up_proj", 2 * inner),) if fused else ((f"{name}.gate_proj", inner), (f"{name}.up_proj", inner))
    product = Part(
        forward=Traffic(3 * inner), backward=Traffic((12 if fused else 6) * inner), kept=Kept(3 * inner), inner=inner, mlp=str(inner) if label else ""
    )  # fmt: skip
    return (
        *(linear(each, hidden, size, bias) for each, size in names), linear(f"{name}.down_proj", inner, hidden, bias), activation(c, inner, act), product,
        shared_input(hidden, len(names)),
    )  # fmt: skip


def plain_mlp(c: Config, up: str, down: str, *, bias: bool = True) -> tuple[Part, ...]:
    """down(activation(up)); keeps both sides of the activation."""
    inner, hidden = c.size("intermediate_size"), c.hidden
    return (
        linear(f"mlp.{up}", hidden, inner, bias), linear(f"mlp.{down}", inner, hidden, bias), activation(c, inner),
        Part(kept=Kept(inner), inner=inner, mlp=str(inner)),
    )  # fmt: skip
