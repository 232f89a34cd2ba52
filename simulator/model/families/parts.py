"""Parts of decoder layers: projections, norms, residuals, positions and MLPs.

In the docstrings below, a number in parentheses after an operation is the number of elements that
its kernels read and write, per element of the tensor.
"""

from __future__ import annotations

from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Tensors, Traffic, placed


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
