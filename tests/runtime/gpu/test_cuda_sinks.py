"""Tests on a GPU: flash attention with sinks computes a softmax with a column of sinks.

They are skipped on machines without a GPU. The tests of the kernel take seconds, and those of
compiled layers mostly compile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash4_kernel import FLASH4
from sinks_definition import written_out
from whole_models import Tensors, drawn, gradients_of, model_of, weights

from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.layers import lengths
from megatrain.runtime.layers.attention import Attention, attend, kernel_of
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.lengths import LengthBounds
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
HEADS, PAIRS, LENGTH, SIZE = 16, 2, 512, 64
NAMES = ("output", "query", "key", "value", "sinks")
RESIDENT = Placement(weights="all", gradients="all")
KEPT = Placement(saved_attention="1-2", saved_activations="3", weights="all", gradients="all")


def inputs_of(batch: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns queries, keys, values and sinks in bf16, and a gradient of the output."""
    torch.manual_seed(0)
    shapes = [(batch, LENGTH, count, SIZE) for count in (HEADS, PAIRS, PAIRS)]
    tensors = [torch.randn(shape, device="cuda").transpose(1, 2) for shape in shapes]
    tensors.append(torch.randn(HEADS, device="cuda") * 2)
    gradient = torch.randn(batch, LENGTH, HEADS, SIZE, device="cuda")
    return [tensor.bfloat16() for tensor in tensors], gradient.bfloat16()


def computed(
    inputs: list[torch.Tensor],
    gradient: torch.Tensor,
    bounds: LengthBounds,
    kernel: Any = "flash",
    **options: Any,
) -> list[torch.Tensor]:
    """Returns the output and the gradients of the inputs, by a kernel."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    *others, sinks = leaves
    output, _ = attend(torch.nn.Module(), *others, bounds, kernel=kernel, s_aux=sinks, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [0, 1, 128])
@pytest.mark.parametrize("kernel", ["flash", FLASH4])
def test_the_kernel_computes_a_softmax_with_a_column_of_sinks(
    kernel: Any, window: int, documents: bool
) -> None:
    """Output and gradients in bf16 are within 1 % of fp64, with and without a window.

    The backward pass from a saved output has the same gradients, and so has one in groups of heads.
    """
    batch = 2
    inputs, gradient = inputs_of(batch)
    cuts = [0, 100, 101, 512, 700, 1024] if documents else [0, 512, 1024]
    starts = torch.tensor(cuts, dtype=torch.int32, device="cuda")
    index = torch.arange(batch * LENGTH, device="cuda").view(batch, LENGTH)
    document = torch.searchsorted(starts.long(), index, right=True)
    behind = index[:, :, None] - index[:, None, :]
    seen = (document[:, :, None] == document[:, None, :]) & (behind >= 0)
    seen = (seen & (behind < (window or LENGTH)))[:, None]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    exact = written_out(*wide, seen)
    right = [exact.detach(), *torch.autograd.grad(exact, wide, gradient.double())]
    bounds, results = LengthBounds(starts, torch.empty(LENGTH, 0), window), list[torch.Tensor]()
    found = computed(inputs, gradient, bounds, kernel, results=results)
    kept = Attention(*(tensor.detach() for tensor in results))
    assert kept.log_sum_exp.shape == (batch, HEADS, LENGTH)
    assert kept.log_sum_exp.dtype == torch.float32
    from_kept = computed(inputs, gradient, bounds, kernel, kept=kept)
    grouped = computed(inputs, gradient, bounds, kernel, groups=2)
    for name, exactly, ours, again, groups in zip(
        NAMES, right, found, from_kept, grouped, strict=True
    ):
        for way, tensor in (("at once", ours), ("from a saved output", again), ("groups", groups)):
            error = float((tensor.double() - exactly).norm() / exactly.norm())
            assert error < 0.01, f"{name}, {way}: the error is {error:.4f} of the norm"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kernel", ["flash", FLASH4])
def test_gradients_have_the_same_bits_in_deterministic_mode(kernel: Any) -> None:
    inputs, gradient = inputs_of(2)
    starts = torch.tensor([0, 512, 1024], dtype=torch.int32, device="cuda")
    for window in (0, 128):
        results: list[torch.Tensor] = []
        bounds = LengthBounds(starts, torch.empty(LENGTH, 0), window)
        first = computed(inputs, gradient, bounds, kernel, results=results)
        kept = Attention(*(tensor.detach() for tensor in results))
        for again in (
            computed(inputs, gradient, bounds, kernel),
            computed(inputs, gradient, bounds, kernel, kept=kept),
        ):
            assert all(map(torch.equal, first, again))


def test_the_scores_of_a_long_row_are_not_written_out() -> None:
    """A row of 16,384 tokens takes less memory than its scores for one head in bf16."""
    length = 16384
    query, key, value = (
        torch.randn(1, length, count, SIZE, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for count in (8, 1, 1)
    )
    sinks = torch.zeros(8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, _ = attend(
        torch.nn.Module(),
        query,
        key,
        value,
        LengthBounds(starts, torch.empty(length, 0), 128),
        kernel="flash",
        s_aux=sinks,
    )
    torch.autograd.grad(output, (query, key, value, sinks), torch.ones_like(output))
    assert torch.cuda.max_memory_allocated() - before < 2 * length**2


@pytest.mark.parametrize(("documents", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kernel", ["flash", FLASH4])
def test_a_step_is_close_to_one_with_written_out_scores(
    make_plan: Callable[..., Plan], kernel: Any, documents: bool, compiled: bool
) -> None:
    """Gradients in bf16, recomputed and from saved attention, are as close to those in fp32 as with
    transformers' attention in bf16. The family has dense layers, because another rounding may make
    a router choose another expert.
    """
    sizes = {"model": model_of("granite_swa", sliding_window=32, hidden_size=128)}
    exact, right = stepped(make_plan, "granite_swa", documents=documents, dtype="fp32", **sizes)
    _, theirs = stepped(make_plan, "granite_swa", documents=documents, **sizes)
    rounding = distance(theirs, right)
    for placement in (RESIDENT, KEPT):
        found, ours = stepped(
            make_plan,
            "granite_swa",
            documents=documents,
            attention=kernel,
            compiled=compiled,
            placement=placement,
            **sizes,
        )
        assert found == pytest.approx(exact, rel=5e-3)
        error = distance(ours, right)
        assert error < 1.25 * rounding, f"{error:.4f} of the norm, and {rounding:.4f} with scores"


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True])
def test_saved_attention_changes_no_bit_of_a_step(
    make_plan: Callable[..., Plan], compiled: bool
) -> None:
    first, second = (
        stepped(make_plan, "granite_swa", attention="flash", compiled=compiled, placement=placement)
        for placement in (RESIDENT, KEPT)
    )
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_fp32_has_the_attention_of_transformers(make_plan: Callable[..., Plan]) -> None:
    """The kernel has no fp32. Plans in fp32 name no kernel, and one that does is refused."""
    model, device = model_of("gpt_oss"), torch.device("cuda", 0)
    work = Workload(batch=1, sequence=128, dtype="fp32", attention="flash")
    assert not lengths.takes_lengths(model, work, device)
    with pytest.raises(UserError, match="flash for fp32 heads of 16"):
        kernel_of(model, work, device)
    assert stepped(make_plan, "gpt_oss", dtype="fp32")[0] > 0


def distance(found: Tensors, right: Tensors) -> float:
    """Returns the norm of the difference of all gradients, relative to the norm of `right`."""
    squares = sum((found[name] - right[name]).square().sum() for name in right)
    return float(squares / sum(tensor.square().sum() for tensor in right.values())) ** 0.5


def stepped(make_plan: Callable[..., Plan], family: str, **changes: Any) -> tuple[float, Tensors]:
    """Returns the loss and the gradients of a step of a small model."""
    plan = make_plan(
        "overlapped",
        **{
            "model": model_of(family, sliding_window=32),
            "batch": 2,
            "sequence": 128,
            "loss_chunk": 100,
            "device_limit_bytes": 2**32,
            "host_limit_bytes": 2**32,
            "chunk_bytes": 2**18,
            "placement": RESIDENT,
            **changes,
        },
    )
    with Executor(
        plan, config_of(plan.model), AdamW(), torch.device("cuda", 0), schedule=lower(plan)
    ) as executor:
        executor.state.load(weights)
        batches = drawn(plan)
        if plan.workload.documents:
            cut = torch.tensor([[0] * 50 + [1] * 78, [0] * 100 + [-1] * 28])
            batches = [batch._replace(documents=cut) for batch in batches]
        loss = executor.step(batches, rate=0.0, number=1).loss
        found = gradients_of(SimpleNamespace(plan=plan, executor=executor))
        return loss, {name: gradient.cpu() for name, gradient in found.items()}
