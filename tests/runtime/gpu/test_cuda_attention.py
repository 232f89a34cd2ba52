"""Tests on a GPU: each attention kernel computes what `scaled_dot_product_attention` does.

Saving its output changes no bit. The tests are skipped on machines without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash4_kernel import FLASH4

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.attention import Attention, attend, kernel_of
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
SIZES = {
    "family": "qwen2",
    "hidden": 256,
    "intermediate": 512,
    "head_dim": 64,
    "vocabulary": 1000,
    "batch": 2,
    "sequence": 256,
    "loss_chunk": 100,
    "device_limit_bytes": 2**32,
    "host_limit_bytes": 2**32,
    "chunk_bytes": 2**18,
}
PLACEMENTS = [
    Placement(
        saved_attention=layers,
        offloaded_attention=away,
        saved_activations=saved,
        offloaded_inputs=offloaded,
    )
    for layers, away, saved, offloaded in (
        ("", "", "", ""),
        ("all", "", "", ""),
        ("0-2", "0-1", "3", "all"),
    )
]


def both_ways(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the output and the gradients of the inputs."""
    for tensor in inputs:
        tensor.requires_grad_()
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (28, 4)])
@pytest.mark.parametrize("kernel", ["flash", "cudnn", FLASH4])
def test_a_kernel_computes_attention_and_its_backward_from_a_kept_output(
    kernel: Any, heads: int, kv_heads: int
) -> None:
    """A kernel in bf16 computes attention within 1 % of fp32, also with grouped heads.

    The backward pass from a kept output has the same gradients, and so has one in groups of heads.
    """
    torch.manual_seed(0)
    shapes = [(2, 512, count, 128) for count in (heads, kv_heads, kv_heads)]
    wide = [torch.randn(shape, device="cuda").transpose(1, 2) for shape in shapes]
    inputs = [tensor.bfloat16() for tensor in wide]
    gradient = torch.randn(2, 512, heads, 128, device="cuda")
    grouped = heads != kv_heads

    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)

    left: list[torch.Tensor] = []
    module = torch.nn.Module()

    def computed(*tensors: torch.Tensor) -> torch.Tensor:
        return attend(module, *tensors, None, kernel=kernel, results=left)[0]

    def taken(*tensors: torch.Tensor, groups: int = 1) -> torch.Tensor:
        return attend(
            module,
            *tensors,
            None,
            kernel=kernel,
            kept=Attention(*(tensor.detach() for tensor in left)),
            groups=groups,
        )[0]

    exact = both_ways(reference, wide, gradient)
    ours = both_ways(computed, inputs, gradient.bfloat16())
    again = both_ways(taken, inputs, gradient.bfloat16())
    in_groups = both_ways(functools.partial(taken, groups=2), inputs, gradient.bfloat16())
    for way in (ours, again, in_groups):
        for name, right, found in zip(("output", "query", "key", "value"), exact, way, strict=True):
            error = (found.float() - right).norm() / right.norm()
            assert error < 0.01, f"{kernel}, {name}: the error is {error:.4f} of the norm"
    assert torch.equal(ours[0], again[0])
    for name, computed_now, from_kept in zip(
        ("query", "key", "value"), ours[1:], again[1:], strict=True
    ):
        if kernel == "flash" or name != "query":  # others may sum the query's gradient in any order
            torch.testing.assert_close(
                from_kept,
                computed_now,
                rtol=1e-2,
                atol=1e-2,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("chosen", [None, "flash", FLASH4])
def test_keeping_attention_in_a_layer_changes_no_bit(
    make_plan: Callable[..., Plan], chosen: Any, accumulation: int, compiled: bool
) -> None:
    results = [
        trained(
            make_plan(
                "overlapped",
                attention=chosen,
                accumulation=accumulation,
                compiled=compiled,
                placement=place,
                **SIZES,
            )
        )
        for place in PLACEMENTS
    ]
    for losses, masters in results[1:]:
        assert losses == results[0][0]
        assert all(map(torch.equal, masters, results[0][1]))


@pytest.mark.parametrize("compiled", [False, True])
def test_cudnn_trains_with_and_without_kept_attention(
    make_plan: Callable[..., Plan], compiled: bool
) -> None:
    """cuDNN may sum in any order, so the losses are close but not equal."""
    first, *others = (
        trained(
            make_plan("overlapped", attention="cudnn", compiled=compiled, placement=place, **SIZES)
        )[0]
        for place in PLACEMENTS
    )
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-3)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_takes_flash(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("overlapped", **SIZES)
    assert kernel_of(plan.model, plan.workload, torch.device("cuda", 0)) == "flash"


def trained(plan: Plan) -> tuple[list[float], list[torch.Tensor]]:
    """Returns the losses of three steps, and the masters after them."""
    work, generator = plan.workload, torch.Generator().manual_seed(1)
    with Executor(
        plan,
        config_of(plan.model),
        AdamW(max_norm=0.5),
        torch.device("cuda", 0),
        schedule=policies.lower(plan),
    ) as executor:
        state = executor.state
        state.load(random_weights(0))
        losses = []
        for number in range(1, 4):
            drawn = [
                torch.randint(
                    plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator
                )
                for _ in range(work.accumulation)
            ]
            losses.append(
                executor.step([Batch(*pair) for pair in drawn], rate=1e-2, number=number).loss
            )
        executor.flush_update()
        return losses, [
            tensor.cpu()
            for layer in plan.model.stack.values()
            for tensor in state.masters(layer).values()
        ]
