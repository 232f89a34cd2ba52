"""Tests on a GPU: fp8 products are those of their definition, compiled and eager.

A step has the same bits under every plan. The tests are skipped on machines without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_definition import error, products

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.fp8_linear import Fp8Linear
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
EVERY: list[tuple[str, dict[str, Any]]] = [
    ("sequential", {"weight_slots": 1}),
    ("double_buffer", {"checkpoint_interval": 3}),
    ("resident", {}),
    ("overlapped", {"placement": Placement(saved_activations="all")}),
    ("overlapped", {"placement": Placement(weights="1-2,e", offloaded_inputs="all")}),
    ("overlapped", {"placement": Placement(saved_activations="2-3", host_updated="1")}),
]
SIZES = {
    "hidden": 256,
    "intermediate": 512,
    "head_dim": 64,
    "vocabulary": 1000,
    "batch": 4,
    "sequence": 128,
    "loss_chunk": 128,
    "device_limit_bytes": 2**32,
    "host_limit_bytes": 2**32,
}


@pytest.fixture(autouse=True)
def has_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")


def linear(scaling: str, weight: torch.Tensor) -> Fp8Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.__class__ = Fp8Linear
    made.scaling = scaling
    made.weight = torch.nn.Parameter(weight)
    return made


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("sizes", [(64, 128, 96), (1024, 3584, 512), (4096, 512, 1536)])
def test_products_are_those_of_the_definition(
    scaling: str, sizes: tuple[int, int, int], compiled: bool
) -> None:
    torch.manual_seed(0)
    tokens, source, target = sizes
    x = torch.randn(tokens, source, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-2, 1, tokens, device="cuda", dtype=torch.bfloat16)[:, None]
    weight = 0.02 * torch.randn(target, source, device="cuda", dtype=torch.bfloat16)
    gradient = 1e-6 * torch.randn(tokens, target, device="cuda", dtype=torch.bfloat16)
    layer = linear(scaling, weight)
    run: Callable[..., torch.Tensor] = torch.compile(layer, dynamic=False) if compiled else layer
    output = run(x.requires_grad_())
    found = [output, *torch.autograd.grad(output, (x, layer.weight), gradient)]
    exact = [x.float() @ weight.float().t(), gradient.float() @ weight.float()]
    exact.append(gradient.float().t() @ x.detach().float())
    wanted = products(x.detach(), weight, gradient, scaling)
    for name, ours, theirs, plain in zip(wanted._fields, found, wanted, exact, strict=True):
        assert error(ours, theirs) < 0.01, name
        assert error(ours, plain) < (0.05 if scaling == "rowwise" else 0.08), name


def execute(plan: Plan) -> tuple[list[tuple[float, float | None]], list[torch.Tensor]]:
    """Returns losses and norms of three steps, and the masters after them."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, plan.workload.batch, plan.workload.sequence)
    settings, device = AdamW(max_norm=0.5, weight_decay=0.1), torch.device("cuda", 0)
    with Executor(
        plan, config_of(plan.model), settings, device, schedule=policies.lower(plan)
    ) as executor:
        executor.state.load(random_weights(0))
        results = []
        for number in (1, 2, 3):
            batches = [
                Batch(*torch.randint(1000, shape, generator=generator))
                for _ in range(plan.workload.accumulation)
            ]
            results.append(executor.step(batches, rate=1e-2, number=number))
        executor.flush_update()
        masters = [
            master.cpu()
            for layer in plan.model.stack.values()
            for master in executor.state.masters(layer).values()
        ]
    return [(result.loss, result.gradient_norm) for result in results], masters


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("scaling", "accumulation"), [("rowwise", 2), ("tensorwise", 1)])
def test_every_plan_gives_the_same_bits(
    make_plan: Callable[..., Plan], scaling: str, accumulation: int, compiled: bool
) -> None:
    common = {
        **SIZES,
        "family": "qwen2",
        "fp8": scaling,
        "accumulation": accumulation,
        "compiled": compiled,
    }
    first = execute(make_plan("resident", **common))
    plain, _ = execute(make_plan("resident", **{**common, "fp8": None}))
    assert first[0] != plain
    for (ours, _), (theirs, _) in zip(first[0], plain, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    for policy, knobs in EVERY:
        results, masters = execute(make_plan(policy, **{"chunk_bytes": 2**18, **common, **knobs}))
        assert results == first[0], (policy, knobs)
        assert all(map(torch.equal, masters, first[1])), (policy, knobs)
