"""The parts of decoder layers: projections, norms, attention and MLPs.

Each part lists its tensors and the costs of its arithmetic. The costs are those of transformers'
modules as PyTorch runs them eagerly, kernel by kernel. An elementwise kernel reads each operand
once and writes its result once. A tensor that is saved for the backward pass is counted in the part
that produces it. With b bytes per element of the compute dtype, a layer costs for each token:

    FLOPs   2 x active, plus `pair` for each token attended to, plus `state` (linear attention)
    bytes   b x low + 4 x wide, plus (b + 4) x casts if b < 4
    saved   b x low + 4 x wide, plus 4 x upcast if b < 4

If attention writes out its scores (`Scores`), bytes and saved bytes come again for each pair of
tokens in a row, including masked pairs.

In the docstrings below, a number in parentheses after an operation is the number of elements that
its kernels read and write, per element of the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from megatrain.simulator.model.families.config import ModelConfig

Tensors = tuple[tuple[str, tuple[int, ...]], ...]
"""(name, shape) of each tensor, in the order in which transformers registers them."""


class Traffic(NamedTuple):
    """Elements per token that elementwise kernels read and write."""

    low: int = 0
    """Elements in the compute dtype."""
    wide: int = 0
    """Elements in fp32."""
    casts: int = 0
    """Elements that are read in one of the two dtypes and written in the other."""

    def bytes(self, width: int) -> int:
        """Returns the bytes per token, with `width` bytes per element of the compute dtype."""
        return width * self.low + 4 * self.wide + ((width + 4) * self.casts if width < 4 else 0)

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.low + other.low, self.wide + other.wide, self.casts + other.casts)


class Kept(NamedTuple):
    """Elements per token that autograd saves for the backward pass."""

    low: int = 0
    """Elements in the compute dtype."""
    wide: int = 0
    """Elements in fp32."""
    upcast: int = 0
    """Elements of fp32 copies of tensors in the compute dtype. If the compute dtype is fp32, there
    is no copy."""

    def bytes(self, width: int) -> int:
        """Returns the bytes per token, with `width` bytes per element of the compute dtype."""
        return width * self.low + 4 * self.wide + (4 * self.upcast if width < 4 else 0)

    def plus(self, other: Kept) -> Kept:
        return Kept(self.low + other.low, self.wide + other.wide, self.upcast + other.upcast)


class Scores(NamedTuple):
    """The costs of attention scores that are written out: elements per pair of tokens.

    All heads are counted together.
    """

    kept: Kept = Kept()
    """Elements that autograd saves."""
    held: Kept = Kept()
    """The largest number of temporary elements that exist at once in the backward pass."""
    forward: Traffic = Traffic()
    """Elements read and written in the forward pass."""
    backward: Traffic = Traffic()
    """Elements read and written in the backward pass."""
    compiled: tuple[Kept, Kept] = (Kept(), Kept())
    """`kept` and `held` in a compiled layer."""

    def plus(self, other: Scores) -> Scores:
        return Scores(
            self.kept.plus(other.kept),
            self.held.plus(other.held),
            self.forward.plus(other.forward),
            self.backward.plus(other.backward),
            (self.compiled[0].plus(other.compiled[0]), self.compiled[1].plus(other.compiled[1])),
        )


def softmax_scores(c: ModelConfig, *, capped: bool = False, wide: bool = False) -> Scores:
    """Returns the costs of scores with a softmax in fp32.

    Forward: the products of queries and keys are scaled (2), a mask is added (3), and softmax runs
    in fp32 (3) between two casts. Backward: scaling (2), softmax (5) and the casts. Autograd saves
    the softmax in fp32 and in the compute dtype. If the scores are `capped`, a division, a tanh and
    a product (2 each) are added, and the tanh is saved.

    A compiled layer saves the softmax in the compute dtype, and the scores that it is computed
    from again. These are in fp32 if queries and keys are multiplied in fp32 (`wide`).
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
    """Returns the costs of `softmax_scores` plus a log-sum-exp of the scores (2), which saves them.

    The log-sum-exp scales the output of attention.
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

    A compiled layer saves the scores with this column, and the softmax. What it holds besides in
    the backward pass was counted as 2, but is assumed to be as in eager layers: with 2, a step of
    six layers of gpt-oss-20b would be predicted below what was measured on an H200.
    """
    heads = c.heads
    return Scores(
        Kept(heads),
        Kept(4 * heads),
        Traffic(15 * heads),
        Traffic(18 * heads),
        (Kept(2 * heads), Kept(4 * heads)),
    )


class Compiled(NamedTuple):
    """What differs in a compiled layer. Kernels that only read and write elements are fused there:
    it saves what matrix products and attention read, and what these kernels can start from.
    """

    kept: Kept = Kept()
    """As `Part.kept`."""
    early: tuple[Kept, ...] = ()
    """As `Part.early`."""
    freed: Kept = Kept()
    """As `Part.freed`."""
    cast: int = 0
    """Elements of the weights that it saves a copy of in fp32."""
    rebuilt: int = 0
    """Elements per token of `kept` that the layer computes again in the backward pass if the
    products that read them are in fp8: outputs of norms and of activations."""

    def plus(self, other: Compiled) -> Compiled:
        return Compiled(
            self.kept.plus(other.kept),
            self.early + other.early,
            self.freed.plus(other.freed),
            self.cast + other.cast,
            self.rebuilt + other.rebuilt,
        )


Place = Literal["", "first", "norm", "mlp"]
"""`first`: the norm at the beginning of a layer, `norm`: the norm before the MLP whose output
nothing else reads, `mlp`: an MLP that is one module and computes each token by itself."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors and costs of one module of a decoder layer, or of several."""

    tensors: Tensors = ()
    """Its parameters, in order."""
    linears: Tensors = ()
    """The weights of its linear layers that every token is multiplied with, in order. Routers and
    experts are left out."""
    active: int = 0
    """Matrix elements that each token is multiplied with."""
    idle: int = 0
    """Parameters of experts that a token is not routed to."""
    pair: int = 0
    """FLOPs of attention for one query and one key with its value."""
    window: int = 0
    """The most tokens that a query attends to. 0 means all tokens before it."""
    chunked: bool = False
    """Whether a row is cut into chunks of `window` tokens, and a query attends to its own chunk."""
    state: int = 0
    """FLOPs per token of linear attention, a state-space mixer, or products of activations."""
    forward: Traffic = Traffic()
    """Elements that elementwise kernels read and write in the forward pass."""
    backward: Traffic = Traffic()
    """Elements that elementwise kernels read and write in the backward pass."""
    kept: Kept = Kept()
    """Elements that autograd saves."""
    attended: Kept = Kept()
    """The elements of `kept` that are results of the attention kernel: its output, and the
    log-sum-exp of each head."""
    scores: Scores = Scores()
    """The costs of attention scores, if they are written out."""
    inner: int = 0
    """Elements per token between the projections of an MLP."""
    early: tuple[Kept, ...] = ()
    """What the backward pass of an MLP or of a norm after it holds besides the saved tensors and
    the weights' gradients, while all activations of the layer are still saved. Each entry is at
    another time."""
    middle: Kept = Kept()
    """The same while the gradients of an MLP's first projections are computed, less what the MLP
    has freed by then. It may be negative."""
    down: int = 0
    """Elements of the weights of an MLP whose gradients are computed first."""
    projections: int = 0
    """Elements of all weights of an MLP."""
    between: tuple[Kept, ...] = ()
    """What the backward pass holds besides in a norm before the MLP, which has freed what it
    saved. Each entry is at another time."""
    late: tuple[Kept, ...] = ()
    """What the backward pass holds besides in attention and its own norms. Each entry is at another
    time."""
    freed: Kept = Kept()
    """The part of `kept` that the MLP has freed by then."""
    compiled: Compiled | None = None
    """What differs if the layer is compiled. None means nothing."""
    attention: str = ""
    """A text that distinguishes this attention from others, for a layer's signature."""
    mlp: str = ""
    """A text that distinguishes this MLP from others, for a layer's signature."""
    place: Place = ""
    """What it is of a layer whose tokens are computed in pieces (`LayerPieces`)."""

    @property
    def in_compiled(self) -> Compiled:
        """`compiled`, or what stands for it if it is None."""
        return self.compiled or Compiled(self.kept, self.early, self.freed)


class LayerPieces(NamedTuple):
    """The parts of a decoder layer that can be computed in pieces of tokens.

    The MLP is one chain with the norm before it, if nothing else reads the output of that norm. The
    norm at the beginning of the layer is a chain by itself.
    """

    first: Part | None
    """The norm at the beginning of the layer. None if it is not computed in pieces."""
    norm: Part | None
    """The norm before the MLP. None if it is not computed in pieces."""
    mlp: Part
    """The MLP."""

    @property
    def chain(self) -> Part:
        """The chain that ends with the MLP."""
        return merge_parts((self.norm, self.mlp)) if self.norm else self.mlp

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """The names of the modules of each chain, in the order in which a token passes them."""
        last = (*((_module(self.norm),) if self.norm else ()), _module(self.mlp))
        return (*(((_module(self.first),),) if self.first else ()), last)


def _module(part: Part) -> str:
    """Returns the name of the module of a layer that has the parameters of `part`."""
    return part.tensors[0][0].partition(".")[0]


def layer_pieces(parts: tuple[Part, ...]) -> LayerPieces | None:
    """Returns what can be computed in pieces of the layer of these parts, or None if its MLP
    cannot.
    """
    found = {
        place: merge_parts(tuple(part for part in parts if part.place == place))
        for place in ("first", "norm", "mlp")
        if any(part.place == place and part.tensors for part in parts)
    }
    if "mlp" not in found:
        return None
    return LayerPieces(found.get("first"), found.get("norm"), found["mlp"])


def placed(place: Place, *parts: Part) -> tuple[Part, ...]:
    """Returns the parts with the field `place`."""
    return tuple(msgspec.structs.replace(part, place=place) for part in parts)


def merge_parts(parts: tuple[Part, ...]) -> Part:
    """Returns the parts as one part: their costs are summed, and their tensors stay in order."""
    return Part(
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        linears=tuple(tensor for part in parts for tensor in part.linears),
        active=sum(part.active for part in parts),
        idle=sum(part.idle for part in parts),
        pair=sum(part.pair for part in parts),
        window=max(part.window for part in parts),
        chunked=any(part.chunked for part in parts),
        state=sum(part.state for part in parts),
        forward=functools.reduce(Traffic.plus, [part.forward for part in parts]),
        backward=functools.reduce(Traffic.plus, [part.backward for part in parts]),
        kept=functools.reduce(Kept.plus, [part.kept for part in parts]),
        attended=functools.reduce(Kept.plus, [part.attended for part in parts]),
        scores=functools.reduce(Scores.plus, [part.scores for part in parts]),
        inner=sum(part.inner for part in parts),
        early=tuple(held for part in parts for held in part.early),
        middle=functools.reduce(Kept.plus, [part.middle for part in parts]),
        down=sum(part.down for part in parts),
        projections=sum(part.projections for part in parts),
        between=tuple(held for part in parts for held in part.between),
        late=tuple(held for part in parts for held in part.late),
        freed=functools.reduce(Kept.plus, [part.freed for part in parts]),
        compiled=functools.reduce(Compiled.plus, [part.in_compiled for part in parts]),
        attention="".join(part.attention for part in parts),
        mlp="".join(part.mlp for part in parts),
    )


def linear(name: str, source: int, target: int, bias: bool = False) -> Part:
    """Returns a projection.

    The bias is added inside the matrix product. Its gradient reads the gradient of the output once.
    """
    tensors: Tensors = ((f"{name}.weight", (target, source)),)
    return Part(
        tensors=tensors + (((f"{name}.bias", (target,)),) if bias else ()),
        linears=() if "router" in name else tensors,
        active=source * target,
        backward=Traffic(low=target if bias else 0),
    )


def rms_norm(
    name: str,
    size: int,
    *,
    rows: int = 1,
    first: bool = False,
    projected: bool = True,
    weight: str = "low",
) -> Part:
    """Returns an RMS norm that is computed in fp32.

    Forward: cast, square (2), mean (1), product with the scale (2), product with the weight (2),
    cast. Backward: weight (2) and its gradient (4); scale (2) and its gradient (4); for the mean of
    squares a fill (1), a copy (2), a doubling (2) and a product (3); a sum (3); two casts. Autograd
    saves the input in fp32, the scale, the normalised row, and the output if a projection reads it.

    Args:
        name: The module's name.
        size: Elements of a row, and of the weight.
        rows: Rows per token that share the weight.
        first: Whether its input is the layer's input, which the layer has in the compute dtype.
        projected: Whether a projection reads its output.
        weight: The dtype of the product with the weight: `low` for the compute dtype (Llama),
            `wide` for fp32 (Gemma, OLMo 2).
    """
    elements = rows * size
    low, wide = (elements, 0) if weight == "low" else (0, elements)
    own, copy = (0, elements) if first else (elements, 0)
    held, inside = (Kept(2 * elements, 4 * elements),), "." in name
    return Part(
        tensors=((f"{name}.weight", (size,)),),
        forward=Traffic(2 * low, 5 * elements + 2 * wide, 2 * elements),
        backward=Traffic(6 * low, 17 * elements + 6 * wide, 2 * elements),
        kept=Kept(low + (elements if projected else 0), rows + wide + own, copy),
        compiled=Compiled(
            Kept(elements * (projected + (not first)), rows), rebuilt=elements * projected
        ),
        early=() if projected or inside else held,
        between=held if projected and not first and not inside else (),
        late=held if inside else (),
    )


def layer_norm(
    name: str, size: int, *, rows: int = 1, first: bool = False, projected: bool = True
) -> Part:
    """Returns PyTorch's layer norm with a bias, one kernel forward and one backward.

    Autograd saves its input, mean and scale, and its output if a projection reads it (`projected`).
    The input is not counted if it is that of the layer (`first`). `rows` of `size` elements per
    token share the weight.
    """
    elements = rows * size
    kept = Kept(elements * ((0 if first else 1) + (1 if projected else 0)), 2 * rows)
    return Part(
        tensors=((f"{name}.weight", (size,)), (f"{name}.bias", (size,))),
        forward=Traffic(2 * elements),
        backward=Traffic(5 * elements),
        kept=kept,
        compiled=Compiled(kept, rebuilt=elements * projected),
    )


def centred_norm(
    name: str, shape: tuple[int, ...], rows: int = 1, *, projected: bool = True
) -> Part:
    """Returns Cohere's layer norm without bias, which is written out in fp32.

    Forward: 12 elements per element, and two casts. Autograd saves the centred row twice, its scale
    and the normalised row. `shape` is that of the weight, and `rows` rows per token are normalised.
    """
    elements = rows * shape[-1]
    return Part(
        tensors=((f"{name}.weight", shape),),
        forward=Traffic(0, 12 * elements, 2 * elements),
        backward=Traffic(0, 31 * elements, 2 * elements),
        kept=Kept(elements if projected else 0, 3 * elements + rows),
        compiled=Compiled(Kept(elements * (1 + projected), 2 * rows), rebuilt=elements * projected),
    )


def residual(hidden: int, count: int = 2) -> Part:
    """Returns `count` residual sums: one sum forward (3), and one of two gradients backward (3)."""
    return Part(forward=Traffic(3 * hidden * count), backward=Traffic(3 * hidden * count))


def shared_input(hidden: int, consumers: int) -> Part:
    """Returns the sums of gradients for an input that several modules read, 3 for each sum."""
    return Part(backward=Traffic(3 * hidden * (consumers - 1)))


def rotary(elements: int) -> Part:
    """Returns rotary positions of queries and keys: x cos + rotated(x) sin.

    Forward: product with cos (2), negation of a half (1), concatenation (2), product with sin (2),
    sum (3). Backward: two products (2 each), gradients of the halves written into zeros (5), and
    their sums (6).
    """
    return Part(forward=Traffic(10 * elements), backward=Traffic(15 * elements))


def turned_in_pairs(elements: int) -> Part:
    """Returns the costs to add to `rotary` if pairs of neighbouring elements are rotated, in fp32.

    These are casts to fp32 and back, and a rearrangement of the cosines.
    """
    return Part(
        forward=Traffic(0, 4 * elements, 2 * elements),
        backward=Traffic(0, 6 * elements, 2 * elements),
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
) -> Part:
    """Returns attention without its projections.

    It is one fused kernel, for which autograd saves q, k, v, the output and the log-sum-exp of each
    head. transformers copies keys and values that several heads share for each head if these have
    more than 256 elements, or values of another size.

    Args:
        c: The config.
        kind: The layer's attention. With `sliding_attention`, the window is `sliding_window`.
        query: Elements of a query or key per head. 0 means `head_dim`.
        value: Elements of a value per head. 0 means `query`.
        kv_heads: Heads of keys and values. 0 means those of the config.
        window: The most tokens that a query attends to, with another `kind`. 0 means all.
        chunked: As in `Part`.
        copied: Queries were concatenated head by head. The output therefore has the layout of heads
            and is copied for the projection, which saves the copy.
        fused: q, k and v come from one projection, whose whole output is saved together with v.
        scores: The costs of scores, if they are written out and there is no fused kernel. Keys and
            values that several heads share are then copied for each head, and q, k and v are copied
            into the layout of the matrix product.
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
        return Part(
            pair=2 * heads * (query + value),
            window=window,
            forward=Traffic(2 * heads * (2 * query + 2 * value)),
            scores=scores,
            backward=Traffic(3 * heads * (2 * query + 2 * value)),
            kept=Kept(2 * heads * (query + value)),
            compiled=Compiled(Kept(2 * heads * (query + value) + 2 * heads, 4 * heads)),
            attention=label,
        )
    pairs = kv_heads if query == value <= 256 else heads
    return Part(
        pair=2 * heads * (query + value),
        window=window,
        chunked=chunked,
        forward=Traffic(2 * output),
        backward=Traffic(2 * output),
        kept=Kept((heads + pairs) * (query + value) + output + whole, heads),
        attended=Kept(heads * value, heads),
        late=(_backward_of_attention(heads, kv_heads, query, value),),
        attention=label,
    )


def _backward_of_attention(heads: int, kv_heads: int, query: int, value: int) -> Kept:
    """Returns what the backward kernel of fused attention holds.

    These are the gradients of its output and of q, k and v, a sum of q's gradient in fp32, and
    gradients of k and v for each query head if several share them. Kernels whose values differ from
    queries in size, or whose heads have more than 256 elements, also sum those in fp32. Sums have a
    multiple of 32 elements per head.
    """
    rounded = -(-query // 32) * 32
    low = heads * (query + value) + kv_heads * (query + value)
    if heads != kv_heads:
        low += heads * (query + value)
    unequal = query != value or query > 256
    return Kept(low, heads * (rounded + 1 + (query + value if unequal else 0)))


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
) -> tuple[Part, ...]:
    """Returns attention with its projections and rotary positions.

    Args:
        c: The config.
        kind: The layer's attention.
        bias: Whether the projections have a bias, or the key of config.json that decides it.
        out_bias: The same for the output projection. None means that it is like the others.
        out: The name of the output projection.
        norms: The norms of queries and keys: empty for none, `head` for one row per head, `whole`
            for one row with all heads.
        weight: The dtype of these norms' weight product, as in `rms_norm`.
        copied: As in `attend`.
        scores: Returns `scores` of `attend`.
    """
    heads, kv_heads, size, hidden = c.heads, c.kv_heads, c.head_dim, c.hidden
    into = c.is_on(bias)
    parts = [
        linear(f"self_attn.{name}_proj", hidden, size * count, into)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    ]
    out_of = into if out_bias is None else c.is_on(out_bias)
    parts.append(linear(f"self_attn.{out}", heads * size, hidden, out_of))
    for name, count in (("q", heads), ("k", kv_heads)) if norms else ():
        rows, each = (count, size) if norms == "head" else (1, count * size)
        parts.append(
            rms_norm(f"self_attn.{name}_norm", each, rows=rows, projected=False, weight=weight)
        )
    return (
        *parts,
        rotary((heads + kv_heads) * size),
        attend(c, kind, copied=copied, scores=scores(c) if scores else None),
        shared_input(hidden, 3),
    )


_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")


def activation(c: ModelConfig, elements: int, key: str = "hidden_act") -> Part:
    """Returns an activation function, which the config names under `key`.

    It is one kernel in the forward pass and one in the backward pass, which move 2 and 3 elements
    per element. Autograd saves the input. relu saves its output instead, which the next projection
    saves anyway. `gelu_new` is written out: it moves 19 and 24 elements, and saves four tensors.
    relu2 is two kernels.
    """
    name = c.choice(key, (*_ACTIVATIONS, "gelu_new", "relu2"))
    if name == "gelu_new":
        return Part(
            forward=Traffic(19 * elements),
            backward=Traffic(24 * elements),
            kept=Kept(4 * elements),
            compiled=Compiled(Kept(elements)),
        )
    if name == "relu2":
        return Part(
            forward=Traffic(4 * elements), backward=Traffic(6 * elements), kept=Kept(elements)
        )
    return Part(
        forward=Traffic(2 * elements),
        backward=Traffic(3 * elements),
        kept=Kept(0 if name == "relu" else elements),
    )


def gated_mlp(
    c: ModelConfig,
    *,
    name: str = "mlp",
    inner: int = 0,
    act: str = "hidden_act",
    bias: bool | str = False,
    fused: bool = False,
    label: bool = True,
) -> tuple[Part, ...]:
    """Returns a gated MLP: down(activation(gate) x up).

    Autograd saves gate, up, the activation and the product. `inner` is the width between the
    projections (0 means `intermediate_size`). `act` is the key of the activation in the config.
    `bias` may be the key that decides whether there is one. With `fused`, gate and up are one
    projection. Without `label`, the part has no text for the signature.
    """
    inner, hidden, biased = inner or c.size("intermediate_size"), c.hidden, c.is_on(bias)
    names = (
        ((f"{name}.gate_up_proj", 2 * inner),)
        if fused
        else ((f"{name}.gate_proj", inner), (f"{name}.up_proj", inner))
    )
    product = Part(
        forward=Traffic(3 * inner),
        backward=Traffic((12 if fused else 6) * inner),
        kept=Kept(3 * inner),
        compiled=Compiled(Kept(2 * inner), (Kept(inner),), Kept(3 * inner), rebuilt=inner),
        freed=Kept(3 * inner),
        early=(Kept(2 * inner),),
        middle=Kept(-inner),
        down=inner * hidden,
        projections=3 * inner * hidden,
        inner=inner,
        mlp=str(inner) if label else "",
    )
    made = (
        *(linear(each, hidden, size, biased) for each, size in names),
        linear(f"{name}.down_proj", inner, hidden, biased),
        activation(c, inner, act),
        product,
        shared_input(hidden, len(names)),
    )
    return placed("mlp", *made) if label and "." not in name else made


def plain_mlp(
    c: ModelConfig,
    up: str,
    down: str,
    *,
    inner: int = 0,
    act: str = "hidden_act",
    bias: bool | str = True,
) -> tuple[Part, ...]:
    """Returns an MLP without a gate: down(activation(up)).

    Autograd saves input and output of the activation. `up` and `down` name the projections. The
    other arguments are those of `gated_mlp`.
    """
    inner, hidden, biased = inner or c.size("intermediate_size"), c.hidden, c.is_on(bias)
    made = (
        linear(up, hidden, inner, biased),
        linear(down, inner, hidden, biased),
        activation(c, inner, act),
        hidden_of_mlp(c, inner, act),
    )
    return placed("mlp", *made) if "." in up else made


def hidden_of_mlp(c: ModelConfig, inner: int, act: str) -> Part:
    """Returns what lies between the projections of an MLP without a gate: `inner` elements per
    token, which the second projection saves. `act` is the key of the activation in the config.

    Backward, their gradient is held together with temporary tensors of an activation that consists
    of several kernels.
    """
    more = {"gelu_new": 1, "relu": 1, "relu2": 2}.get(str(c.get(act)), 0)
    return Part(
        kept=Kept(inner),
        compiled=Compiled(
            Kept(inner),
            (Kept(inner),),
            Kept(inner),
            rebuilt=0 if c.get(act) == "relu" else inner,  # the activation's output is its input
        ),
        freed=Kept(inner),
        early=(Kept((1 + more) * inner),),
        down=inner * c.hidden,
        projections=2 * inner * c.hidden,
        inner=inner,
        mlp=str(inner),
    )
