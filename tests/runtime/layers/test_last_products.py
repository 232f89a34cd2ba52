"""Tests of short recomputes, which leave out products that no gradient needs, and of layers that
compute the gradients of such products in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_sample import FEW, others_nightly
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from whole_models import SEQUENCE, drawn, gradients_of, model_of

from megatrain.runtime.layers import compiling, functional_layers
from megatrain.runtime.layers.fp8_linear import Fp8Linear
from megatrain.runtime.layers.last_products import SkippableLinear, leave_out, put_in_order
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.schedule.plan import Placement


class FeedForward(torch.nn.Module):
    """A gated MLP with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(8, 32, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def step(running: Any) -> tuple[Any, ...]:
    """Trains one step. Returns its loss, its gradient norm and its gradients by name."""
    result = running.executor.step(drawn(running.plan), rate=0.0, number=1)
    return result.loss, result.gradient_norm, gradients_of(running)


def assert_same_bits(results: list[tuple[Any, ...]]) -> None:
    for (loss, norm, full), (other_loss, other_norm, other) in itertools.pairwise(results):
        assert (loss, norm) == (other_loss, other_norm)
        assert full.keys() == other.keys()
        assert all(torch.equal(full[name], other[name]) for name in full)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list of whether the outputs of recomputes are NaN, in the order of the calls."""
    found: list[bool] = []
    recompute = functional_layers.FunctionalLayers.recompute

    def recorded(*args: Any, **kwargs: Any) -> Any:
        saved = recompute(*args, **kwargs)
        found.append(bool(saved.output.isnan().all()))
        return saved

    monkeypatch.setattr(functional_layers.FunctionalLayers, "recompute", recorded)
    return found


@pytest.mark.parametrize("family", others_nightly(FAMILIES, among=FEW))
def test_gradients_have_the_same_bits(
    run: Callable[..., Any], unread: list[bool], family: str
) -> None:
    """They would be NaN if a gradient needed the output of a product that is left out."""
    results = []
    for short in (False, True):
        with run(
            model_of(family), dtype="bf16", checkpoint_interval=1, short_recompute=short
        ) as running:
            results.append(step(running))
            model, work = running.plan.model, running.plan.workload
    assert_same_bits(results)
    left_out = [bool(model.last_products(layer.name, work)) for layer in model.decoders]
    assert unread == [False] * model.layers + left_out[::-1]


def test_a_recompute_whose_output_is_read_is_not_short(
    run: Callable[..., Any], unread: list[bool]
) -> None:
    """Blocks have two layers. The recompute of the second reads the output of the first."""
    with run(model_of("llama"), checkpoint_interval=2) as running:
        layers = running.plan.model.layers
        step(running)
    blocks = [list(range(layers))[first : first + 2] for first in range(0, layers, 2)]
    assert unread == [index == block[-1] for block in blocks[::-1] for index in block]


def test_a_layer_that_saves_its_activations_computes_its_output(
    run: Callable[..., Any], unread: list[bool]
) -> None:
    with run(
        model_of("llama"), checkpoint_interval=1, placement=Placement(saved_activations="all")
    ) as running:
        step(running)
    assert not any(unread)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_products_in_fp8_are_left_out(
    run: Callable[..., Any], unread: list[bool], scaling: str
) -> None:
    results = []
    for short in (False, True):
        with run(
            model_of("llama", hidden_size=64, intermediate_size=96),
            dtype="bf16",
            fp8=scaling,
            batch=2,
            sequence=16,
            checkpoint_interval=1,
            short_recompute=short,
        ) as running:
            results.append(step(running))
    assert_same_bits(results)
    assert any(unread)


@pytest.mark.parametrize(("family", "piece"), [("llama", 5), ("gemma2", 7), ("deepseek_v3", 16)])
def test_the_backward_pass_in_pieces_leaves_them_out(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, family: str, piece: int
) -> None:
    """The op `backward` computes each piece again. No gradient of a piece needs its output, even
    if there is a norm after the MLP.
    """
    results, skipped = [], list[int]()
    forward = SkippableLinear.forward

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        skipped[-1] += self.unread
        return forward(self, x)

    monkeypatch.setattr(SkippableLinear, "forward", counted)
    for short in (False, True):
        skipped.append(0)
        with run(
            model_of(family), token_piece=piece, checkpoint_interval=1, short_recompute=short
        ) as running:
            results.append(step(running))
            model, work = running.plan.model, running.plan.workload
    assert_same_bits(results)
    layers = sum(bool(model.last_products(layer.name, work)) for layer in model.decoders)
    assert layers
    assert skipped == [0, layers * work.pieces]


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_compiled_layers_leave_them_out(
    request: pytest.FixtureRequest, run: Callable[..., Any], unread: list[bool], kernels: bool
) -> None:
    """The compiled program differs, so its gradients may round differently.

    Without kernels, each result in bf16 would be rounded, so the dtype is fp32.
    """
    if not kernels:
        request.getfixturevalue("without_kernels")
    results = []
    for short in (False, True):
        with run(
            model_of("llama"),
            dtype="bf16" if kernels else "fp32",
            compiled=True,
            loss_chunk=2 * SEQUENCE,  # one chunk, so the head is compiled once
            checkpoint_interval=1,
            short_recompute=short,
        ) as running:
            results.append(step(running))
            layers = running.plan.model.layers
    assert unread == [False] * layers + [True] * layers
    (_, _, full), (_, _, short_gradients) = results
    for name, gradient in full.items():
        assert (gradient - short_gradients[name]).abs().max() <= 0.02 * gradient.abs().max()


@pytest.mark.usefixtures("without_kernels")
def test_compiled_layers_in_deterministic_mode_compute_everything(
    run: Callable[..., Any], unread: list[bool]
) -> None:
    """Recomputed layers and layers with saved activations then run the same program."""
    torch.use_deterministic_algorithms(True)
    try:
        with run(model_of("llama"), compiled=True, checkpoint_interval=1) as running:
            step(running)
    finally:
        torch.use_deterministic_algorithms(False)
    assert unread
    assert not any(unread)


@pytest.mark.parametrize("shape", [(3, 5, 8), (15, 8)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_one_linear_layer(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    """They are those of PyTorch, in order, and without the product."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 6, bias=bias, dtype=dtype)
    x, gradient = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 6, dtype=dtype)
    found, outputs = [], []
    for change in (put_in_order, leave_out, None):
        given = x.clone().requires_grad_()
        outputs.append(linear(given))
        found.append(torch.autograd.grad(outputs[-1], (given, *linear.parameters()), gradient))
        if change:
            change(torch.nn.ModuleDict({"linear": linear}), ["linear.weight"])
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[2].isnan().all()
    assert all(
        torch.equal(first, other) for first, *others in zip(*found, strict=True) for other in others
    )


def test_the_compiler_computes_what_the_product_reads_in_the_forward_pass() -> None:
    """In the backward pass, it would exist beside the gradients, and take more memory."""
    mlp = FeedForward()
    leave_out(mlp, ["down.weight"])
    counts = list[int]()

    def counted(graph: torch.fx.GraphModule, _: object, **_options: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes]
        counts.append(targets.count(torch.ops.aten.mm.default))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    # Inductor simplifies the graph before it is divided, so a plain partitioner is no test.
    compiled: Any = torch.compile(
        mlp,
        backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=counted),
        fullgraph=True,
    )
    compiled(torch.randn(1, 64, 8, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    assert counts == [2, 6]


@pytest.mark.parametrize("rebuild", [False, True])
def test_the_gradient_of_the_weight_is_computed_first(rebuild: bool) -> None:
    """The product of gate and up is computed again, and read by the first product only."""
    mlp, graphs = FeedForward(), list[torch.fx.Graph]()
    put_in_order(mlp, ["down.weight"])

    def recorded(graph: torch.fx.GraphModule, _: object, **_options: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled: Any = torch.compile(
        mlp,
        backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=recorded),
        fullgraph=True,
    )
    x = torch.randn(1, 64, 8, requires_grad=True)
    if rebuild:
        with compiling.rebuilding():
            compiled(x).sum().backward()
    else:
        compiled(x).sum().backward()
    torch._dynamo.reset()
    backward = list(graphs[1].nodes)
    products = [
        node
        for node in backward
        if node.target in (torch.ops.aten.mm.default, torch.ops.megatrain.product_after.default)
    ]
    assert [node.target for node in products].count(torch.ops.aten.mm.default) == 5
    first, after = products[:2]
    assert after.target is torch.ops.megatrain.product_after.default
    assert after.args[2] is first
    of_weight = [
        node for node in backward if node.op == "placeholder" and node.meta["val"].shape[-1] == 32
    ]
    assert len(of_weight) == (3 if rebuild else 4)  # the weight, gate, up, and their product


def test_only_linear_layers_can_be_left_out() -> None:
    assert issubclass(Fp8Linear, SkippableLinear)
    with pytest.raises(ValueError, match=r"norm.weight belongs to a LayerNorm, not to"):
        leave_out(torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4)}), ["norm.weight"])
