"""The parts of decoder layers: projections, norms, attention and MLPs.

Each part lists its tensors and the costs of its arithmetic. The costs are those of transformers'
modules as PyTorch runs them eagerly, kernel by kernel. An elementwise kernel reads each operand
once and writes its result once. A tensor that is saved for the backward pass is counted in the part
that produces it. With b bytes per element of the compute dtype, a layer costs for each token:

    FLOPs   2 x active, plus `pair` for each token attended to, plus `state` (linear attention)
    bytes   b x low + 4 x wide, plus (b + 4) x casts if b < 4
    saved   b x low + 4 x wide, plus 4 x upcast if b < 4

If no fused kernel computes attention, its scores are written out to memory (`Scores`). Then the
bytes and saved bytes of each pair of tokens in a row are added, by the same formulas. This includes
masked pairs. Scores with sinks are written out by transformers, and a flash kernel computes them if
the workload names it. So such a part has two descriptions (`Part.flash`).

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
    """Elements that are read in the compute dtype and written in fp32, or the reverse."""

    def bytes(self, width: int) -> int:
        """Returns the bytes per token, with `width` bytes per element of the compute dtype."""
        return width * self.low + 4 * self.wide + ((width + 4) * self.casts if width < 4 else 0)

    def plus(self, other: Traffic) -> Traffic:
        """Returns the sums of all fields."""
        return Traffic(self.low + other.low, self.wide + other.wide, self.casts + other.casts)


class Kept(NamedTuple):
    """Elements per token that autograd saves for the backward pass."""

    low: int = 0
    """Elements in the compute dtype."""
    wide: int = 0
    """Elements in fp32."""
    upcast: int = 0
    """Elements of tensors in the compute dtype of which autograd saves an fp32 copy. If the compute
    dtype is fp32, there is no copy."""

    def bytes(self, width: int) -> int:
        """Returns the bytes per token, with `width` bytes per element of the compute dtype."""
        return width * self.low + 4 * self.wide + (4 * self.upcast if width < 4 else 0)

    def plus(self, other: Kept) -> Kept:
        """Returns the sums of all fields."""
        return Kept(self.low + other.low, self.wide + other.wide, self.upcast + other.upcast)


class Scores(NamedTuple):
    """The costs of attention scores that are written out, in elements per pair of tokens, summed
    over all heads.
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
        """Returns the sums of all fields."""
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


class Compiled(NamedTuple):
    """The numbers of a part that are different if its layer is compiled.

    The compiler fuses elementwise kernels. A compiled layer saves the inputs of matrix products and
    of attention, and the tensors from which the fused kernels compute the others again.
    """

    kept: Kept = Kept()
    """`Part.kept` in a compiled layer."""
    early: tuple[Kept, ...] = ()
    """`Part.early` in a compiled layer."""
    freed: Kept = Kept()
    """`Part.freed` in a compiled layer."""
    cast: int = 0
    """Elements of weights of which the layer saves an fp32 copy."""
    rebuilt: int = 0
    """Elements per token of `kept` that the layer does not save if the products that read them are
    in fp8, or if the plan says so (`Knobs.rebuild_outputs`). They are outputs of norms and of
    activations, which the backward pass computes again."""
    longer: int = 0
    """Elements per token of gradients that exist until the end of the backward pass, because the
    gradients of norms' weights are computed from them at last: for each product that reads the
    input of an MLP, the gradient of this input, and the gradient of attention's output, if it
    differs from that of the residual. fp32 gradients of a router are left out, because they take
    the place of the router's fp32 input."""
    gone: Kept = Kept()
    """The part of `freed` that an MLP has freed when the kernel of attention runs, if both have the
    same input."""

    def plus(self, other: Compiled) -> Compiled:
        """Returns the sums of all fields. The entries of `early` are joined."""
        return Compiled(
            self.kept.plus(other.kept),
            self.early + other.early,
            self.freed.plus(other.freed),
            self.cast + other.cast,
            self.rebuilt + other.rebuilt,
            self.longer + other.longer,
            self.gone.plus(other.gone),
        )


class KernelMemory(NamedTuple):
    """Temporary elements in the backward pass of fused attention."""

    gradient: Kept
    """The gradient of the output. The output has as many."""
    results: Kept
    """The gradients of queries, keys and values."""
    inside: Kept
    """What only the kernel uses."""

    @property
    def whole(self) -> Kept:
        """All of them, if the kernel runs once."""
        return self.gradient.plus(self.results).plus(self.inside)

    @property
    def copied(self) -> Kept:
        """The elements that are copied if the kernel runs for groups of heads: output and gradient
        of a group become contiguous, and its results are written to those of all heads.
        """
        return self.gradient.plus(self.gradient).plus(self.results)

    def bytes(self, width: int, groups: int) -> int:
        """Returns the bytes per token if the kernel runs for one of `groups` groups of heads at a
        time.
        """
        if groups == 1:
            return self.whole.bytes(width)
        of_group = self.copied.plus(self.inside).bytes(width)
        return self.gradient.plus(self.results).bytes(width) + -(-of_group // groups)


Place = Literal["", "first", "norm", "mlp"]
"""The role of a part in a layer whose tokens are computed in pieces.

* `first`: the norm at the beginning of the layer.
* `norm`: the norm before the MLP, if only the MLP reads its output.
* `mlp`: an MLP, or a router with its experts, that is one module and computes each token
  independently.
* Empty: none of these.
"""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors and costs of one or several modules of a decoder layer.

    All numbers of elements are per token, unless a field says otherwise.
    """

    tensors: Tensors = ()
    """The parameters, in the order in which transformers registers them."""
    linears: Tensors = ()
    """The weights of linear layers that every token is multiplied with, in the same order. Routers
    and experts are left out."""
    last: Tensors = ()
    """The entries of `linears` that project the output of an MLP. If `reads_output` is False for
    the layer, this output is only added to that of the layer."""
    silu_gated: bool = False
    """Whether the part is an MLP with a SiLU gate and separate projections for gate and up. It is
    False for experts."""
    reads_output: bool = False
    """Whether the part is a norm that reads the output of attention or of the MLP, not their
    input."""
    parallel: bool = False
    """Whether attention and the MLP of the layer have the same input, so neither reads the other's
    output."""
    active: int = 0
    """Matrix elements that each token is multiplied with."""
    idle: int = 0
    """Parameters of experts that a token is not routed to."""
    pair: int = 0
    """FLOPs of attention for one query and one key-value pair, summed over all heads."""
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
    """Elements between the projections of an MLP."""
    logits: int = 0
    """Elements of a router's logits."""
    experts: int = 0
    """Elements of the weights of all routed experts, not per token."""
    rows: tuple[int, int] = (0, 0)
    """The number of routed experts, and how many of them a token uses."""
    early: tuple[Kept, ...] = ()
    """Temporary elements in the backward pass of an MLP, or of a norm after it, in addition to the
    saved tensors and the gradients of weights. All activations of the layer are still saved then.
    The entries exist at different times."""
    middle: Kept = Kept()
    """Temporary elements while the gradients of an MLP's first projections are computed, minus the
    saved elements that the MLP has freed by then. It may be negative."""
    down: int = 0
    """Elements of those weights of an MLP whose gradients are computed first, not per token."""
    projections: int = 0
    """Elements of all weights of an MLP, not per token."""
    between: tuple[Kept, ...] = ()
    """Temporary elements in the backward pass of a norm before the MLP. The MLP has then freed its
    saved elements. The entries exist at different times."""
    gradients: tuple[int, ...] = ()
    """Elements of the gradients that an MLP, or experts, computes between its products."""
    joined: int = 0
    """Elements of a gradient that is put together from results of the attention kernel, for a
    projection that computes several of its arguments."""
    inputs: int = 0
    """Elements of the weights that queries, keys and values come from, not per token. Their
    gradients are computed after the attention kernel has run. 0 if they are not known."""
    kernel: KernelMemory | None = None
    """The entry of `late` of the attention kernel, if it is a fused kernel."""
    late: tuple[Kept, ...] = ()
    """Temporary elements in the backward pass of attention and its own norms. The entries exist at
    different times."""
    freed: Kept = Kept()
    """The part of `kept` that an MLP frees before the backward pass continues with the norm before
    it."""
    compiled: Compiled | None = None
    """The numbers that are different if the layer is compiled. None if all are the same."""
    flash: Part | None = None
    """What takes the place of this part if the workload names the flash kernel. None if the part is
    the same with and without it."""
    attention: str = ""
    """A text that distinguishes this attention from others, for a layer's signature."""
    mlp: str = ""
    """A text that distinguishes this MLP from others, for a layer's signature."""
    place: Place = ""
    """The role of the part if the layer's tokens are computed in pieces (`LayerPieces`)."""

    @property
    def in_compiled(self) -> Compiled:
        """`compiled`, or the part's own numbers if it is None."""
        return self.compiled or Compiled(self.kept, self.early, self.freed)


class LayerPieces(NamedTuple):
    """The parts of a decoder layer that can be computed in pieces of tokens.

    They form up to two chains of modules. One chain is the MLP or the experts with their router,
    with the norm before it if only this module reads that norm's output. The other is the norm at
    the beginning of the layer.
    """

    first: Part | None
    """The norm at the beginning of the layer. None if it is not computed in pieces."""
    norm: Part | None
    """The norm before the MLP. None if it is not computed in pieces."""
    mlp: Part
    """The MLP, or the experts with their router."""

    @property
    def chain(self) -> Part:
        """The chain that ends with the MLP."""
        return merge_parts((self.norm, self.mlp)) if self.norm else self.mlp

    @property
    def modules(self) -> tuple[tuple[str, ...], ...]:
        """The names of the modules of each chain, in the order in which they are computed."""
        last = (*((_module(self.norm),) if self.norm else ()), _module(self.mlp))
        return (*(((_module(self.first),),) if self.first else ()), last)


def _module(part: Part) -> str:
    """Returns the name of the layer's module that has the parameters of `part`."""
    return _root(part.tensors[0][0])


def _root(name: str) -> str:
    """Returns the name of the layer's module that has the parameter `name`."""
    return name.partition(".")[0]


def layer_pieces(parts: tuple[Part, ...]) -> LayerPieces | None:
    """Returns the parts of a layer that can be computed in pieces of tokens, or None if its MLP
    cannot be, or is more than one module. `parts` are all parts of the layer.
    """
    pieces = {
        place: merge_parts(tuple(part for part in parts if part.place == place))
        for place in ("first", "norm", "mlp")
        if any(part.place == place and part.tensors for part in parts)
    }
    if "mlp" not in pieces or len({_root(name) for name, _ in pieces["mlp"].tensors}) > 1:
        return None
    return LayerPieces(pieces.get("first"), pieces.get("norm"), pieces["mlp"])


def placed(place: Place, *parts: Part) -> tuple[Part, ...]:
    """Returns the parts with `place` as their field of this name."""
    return tuple(msgspec.structs.replace(part, place=place) for part in parts)


def with_flash(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns the parts of the same layer for a workload that names the flash kernel."""
    return tuple(part.flash or part for part in parts)


def merge_parts(parts: tuple[Part, ...]) -> Part:
    """Returns the parts as one part, without `Part.flash`. Costs are summed, and tensors stay in
    order.
    """
    return Part(
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        linears=tuple(tensor for part in parts for tensor in part.linears),
        last=tuple(tensor for part in parts for tensor in part.last),
        silu_gated=any(part.silu_gated for part in parts),
        reads_output=any(part.reads_output for part in parts),
        parallel=any(part.parallel for part in parts),
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
        logits=sum(part.logits for part in parts),
        experts=sum(part.experts for part in parts),
        rows=max(part.rows for part in parts),
        early=tuple(held for part in parts for held in part.early),
        middle=functools.reduce(Kept.plus, [part.middle for part in parts]),
        down=sum(part.down for part in parts),
        projections=sum(part.projections for part in parts),
        between=tuple(held for part in parts for held in part.between),
        late=tuple(held for part in parts for held in part.late),
        gradients=tuple(size for part in parts for size in part.gradients),
        joined=max(part.joined for part in parts),
        inputs=sum(part.inputs for part in parts),
        kernel=next((part.kernel for part in parts if part.kernel), None),
        freed=functools.reduce(Kept.plus, [part.freed for part in parts]),
        compiled=functools.reduce(Compiled.plus, [part.in_compiled for part in parts]),
        attention="".join(part.attention for part in parts),
        mlp="".join(part.mlp for part in parts),
    )


def linear(name: str, source: int, target: int, bias: bool = False) -> Part:
    """Returns a projection from `source` to `target` elements.

    The bias is added inside the matrix product. Its gradient reads the gradient of the output once.
    """
    tensors: Tensors = ((f"{name}.weight", (target, source)),)
    return Part(
        tensors=tensors + (((f"{name}.bias", (target,)),) if bias else ()),
        linears=() if "router" in name else tensors,
        active=source * target,
        backward=Traffic(low=target if bias else 0),
    )


def last_product(name: str, source: int, target: int) -> Tensors:
    """Returns `Part.last` of an MLP whose output is projected by the linear layer `name`, from
    `source` to `target` elements.
    """
    return ((f"{name}.weight", (target, source)),)


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
        first: Whether the input is the layer's input, which is saved in the compute dtype anyway.
        projected: Whether a projection reads the output.
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
        reads_output=not (first or projected or inside),
        between=held if projected and not first and not inside else (),
        late=held if inside else (),
    )


def layer_norm(
    name: str, size: int, *, rows: int = 1, first: bool = False, projected: bool = True
) -> Part:
    """Returns PyTorch's layer norm with a bias, one kernel forward and one backward.

    Autograd saves the input, the mean, the scale, and the output if a projection reads it.

    Args:
        name: The module's name.
        size: Elements of a row, and of the weight.
        rows: Rows per token that share the weight.
        first: Whether the input is the layer's input or saved by another part. It is then not
            counted.
        projected: Whether a projection reads the output.
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
    name: str, shape: tuple[int, ...], rows: int = 1, *, first: bool = False, projected: bool = True
) -> Part:
    """Returns Cohere's layer norm without bias, which is several elementwise kernels in fp32.

    Forward: 12 elements per element, and two casts. Backward: 31, and two casts. Autograd saves the
    centred row twice, its scale and the normalised row.

    Args:
        name: The module's name.
        shape: The shape of the weight, whose last dimension is the size of a row.
        rows: Rows per token that are normalised.
        first: Whether the input is the layer's input, which a compiled layer need not save.
        projected: Whether a projection reads the output.
    """
    elements = rows * shape[-1]
    return Part(
        tensors=((f"{name}.weight", shape),),
        forward=Traffic(0, 12 * elements, 2 * elements),
        backward=Traffic(0, 31 * elements, 2 * elements),
        kept=Kept(elements if projected else 0, 3 * elements + rows),
        compiled=Compiled(
            Kept(elements * (projected + (not first)), 2 * rows), rebuilt=elements * projected
        ),
    )


def residual(hidden: int, count: int = 2) -> Part:
    """Returns `count` residual sums. Forward: a sum (3). Backward: a sum of two gradients (3)."""
    return Part(forward=Traffic(3 * hidden * count), backward=Traffic(3 * hidden * count))


def shared_input(hidden: int, consumers: int) -> Part:
    """Returns the sums of the gradients of an input that `consumers` modules read (3 for each)."""
    return Part(backward=Traffic(3 * hidden * (consumers - 1)))


def rotary(elements: int) -> Part:
    """Returns rotary positions of queries and keys, x cos + rotated(x) sin, for `elements` per
    token.

    Forward: product with cos (2), negation of a half (1), concatenation (2), product with sin (2),
    sum (3). Backward: two products (2 each), gradients of the halves written into zeros (5), and
    their sums (6).
    """
    return Part(forward=Traffic(10 * elements), backward=Traffic(15 * elements))


def interleaved(elements: int) -> Part:
    """Returns the costs to add to `rotary` if it is interleaved and in fp32.

    Interleaved rotary positions rotate pairs of neighbouring elements. The additional costs are
    casts to fp32 and back, and a rearrangement of the cosines.
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


_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")


def activation(c: ModelConfig, elements: int, key: str = "hidden_act") -> Part:
    """Returns an activation function of `elements` per token, which the config names under `key`.

    Most are one kernel forward (2) and one backward (3), and autograd saves the input. relu saves
    its output instead, which the next projection saves anyway. relu2 is two kernels each. gelu_new
    is several elementwise kernels (19 and 24), and saves four tensors.
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

    Autograd saves gate, up, the activation and the product.

    Args:
        c: The config.
        name: The module's name.
        inner: The width between the projections. 0 means `intermediate_size`.
        act: The key of the activation in the config.
        bias: Whether the projections have a bias, or the key of the config that decides it.
        fused: Whether gate and up are one projection.
        label: Whether the result has a text for the signature (`Part.mlp`).
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
        compiled=Compiled(
            Kept(2 * inner),
            # Gradients of gate and up. One of two takes the place of the product's gradient.
            (Kept((2 if fused else 1) * inner),),
            Kept(3 * inner),
            rebuilt=inner,
            longer=len(names) * hidden,
        ),
        freed=Kept(3 * inner),
        early=(Kept(2 * inner),),
        middle=Kept(-inner),
        gradients=((2 if fused else 1) * inner,),
        last=last_product(f"{name}.down_proj", inner, hidden) if label else (),
        silu_gated=label and not fused and c.get(act) in ("silu", "swish"),
        down=inner * hidden,
        projections=3 * inner * hidden,
        inner=inner,
        mlp=str(inner) if label else "",
    )
    parts = (
        *(linear(projection, hidden, size, biased) for projection, size in names),
        linear(f"{name}.down_proj", inner, hidden, biased),
        activation(c, inner, act),
        product,
        shared_input(hidden, len(names)),
    )
    return placed("mlp", *parts) if label and "." not in name else parts


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

    Autograd saves the input and the output of the activation. `up` and `down` are the names of the
    projections. The other arguments are those of `gated_mlp`.
    """
    inner, hidden, biased = inner or c.size("intermediate_size"), c.hidden, c.is_on(bias)
    parts = (
        linear(up, hidden, inner, biased),
        linear(down, inner, hidden, biased),
        Part(last=last_product(down, inner, hidden)),
        activation(c, inner, act),
        hidden_of_mlp(c, inner, act, biased),
    )
    return placed("mlp", *parts) if "." in up else parts


def hidden_of_mlp(c: ModelConfig, inner: int, act: str, biased: bool) -> Part:
    """Returns the memory of the hidden units of an MLP without a gate.

    The units are `inner` elements per token between the two projections. The second projection
    saves them. In the backward pass, their gradient exists together with temporary tensors of the
    activation if that is several kernels.

    In a compiled layer, the gradient of the units takes the place of the units, if the gradient of
    the second projection's weight is computed before. It is not if this projection is `biased`: the
    backward pass of a product with a bias begins with the gradient of the input. relu reads the
    units in its backward pass.

    Args:
        c: The config.
        inner: The width between the projections.
        act: The key of the activation in the config.
        biased: Whether the second projection has a bias.
    """
    more = {"gelu_new": 1, "relu": 1, "relu2": 2}.get(str(c.get(act)), 0)
    relu = c.get(act) == "relu"
    return Part(
        kept=Kept(inner),
        compiled=Compiled(
            Kept(inner),
            (Kept(inner if biased or relu else 0),),
            Kept(inner if relu else 2 * inner),
            rebuilt=0 if relu else inner,  # the activation's output is its input
            longer=c.hidden,
            gone=Kept(0 if relu else inner),
        ),
        freed=Kept(inner),
        early=(Kept((1 + more) * inner),),
        gradients=(inner,),
        down=inner * c.hidden,
        projections=2 * inner * c.hidden,
        inner=inner,
        mlp=str(inner),
    )
