"""The description of a part of a decoder layer: its tensors and the costs of its arithmetic.

The costs are those of transformers' modules as PyTorch runs them eagerly, kernel by kernel. An
elementwise kernel reads each operand once and writes its result once. A tensor that is saved for
the backward pass is counted in the part that produces it. With b bytes per element of the compute
dtype, a layer costs for each token:

    FLOPs   2 x active, plus `pair` for each token attended to, plus `state` (linear attention)
    bytes   b x low + 4 x wide, plus (b + 4) x casts if b < 4
    saved   b x low + 4 x wide, plus 4 x upcast if b < 4

If no fused kernel computes attention, its scores are written out to memory (`Scores`). Then the
bytes and saved bytes of each pair of tokens in a row are added, by the same formulas. This includes
masked pairs. Scores with sinks are written out by transformers, and a flash kernel computes them if
the workload names it. So such a part has two descriptions (`Part.flash`).
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import msgspec

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


class Loop(NamedTuple):
    """The costs of linear attention that is computed in a loop over chunks of a row."""

    chunk: int = 0
    """The tokens of a chunk. 0 means that there is no loop."""
    moved: int = 0
    """The bytes per token of the row that the backward pass of each chunk moves."""
    forward_calls: int = 0
    """The PyTorch functions that the host calls for a chunk in the forward pass. One call serves
    all rows of a micro-batch."""
    backward_calls: int = 0
    """The same in the backward pass."""

    def chunks(self, sequence: int) -> int:
        """Returns the number of chunks in a row of `sequence` tokens, or 0 without a loop."""
        return -(-sequence // self.chunk) if self.chunk else 0


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
    loop: Loop = Loop()
    """The loop over chunks of a row, for linear attention that has one."""
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
    clamped: bool = False
    """Whether experts clamp gate and up and add biases."""
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
        loop=max(part.loop for part in parts),
        kept=functools.reduce(Kept.plus, [part.kept for part in parts]),
        attended=functools.reduce(Kept.plus, [part.attended for part in parts]),
        scores=functools.reduce(Scores.plus, [part.scores for part in parts]),
        inner=sum(part.inner for part in parts),
        logits=sum(part.logits for part in parts),
        experts=sum(part.experts for part in parts),
        rows=max(part.rows for part in parts),
        clamped=any(part.clamped for part in parts),
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
