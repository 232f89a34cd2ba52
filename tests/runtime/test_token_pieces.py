"""Tests of layers that compute in token pieces: gradients of the whole model, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_sample import others_nightly
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from transformers import CONFIG_MAPPING
from whole_models import (
    SEQUENCE,
    bound,
    compare,
    drawn,
    model_of,
    scale_of,
    token_losses,
    whole_model,
)

from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.schedule.plan import Placement

ABLE = [
    family
    for family in FAMILIES
    # Another version of transformers may lack a family.
    if family in CONFIG_MAPPING and not model_of(family).pieces_obstacle()
]
COMPILED = [family for family in ABLE if not model_of(family).pieces_obstacle(compiled=True)]
SAMPLE = ("llama", "gemma2", "glm4", "olmo2", "phi", "mixtral", "gpt_oss", "deepseek_v3", "dbrx")
"""A norm before the MLP, norms before and after it, after both, only after it, none of its own,
experts, a mixture that returns two values, shared experts, and experts without such a norm."""


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compiles whole functions to graphs, but not to kernels, which would take a minute.

    Returns the list of graphs.
    """
    found: list[Any] = []
    compiled = torch.compile
    backend = aot_autograd(
        fw_compiler=lambda graph, _: found.append(graph) or make_boxed_func(graph.forward)
    )
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: compiled(
            function, **options | {"options": None}, fullgraph=True, backend=backend
        ),
    )
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("family", "interval", "compiled"),
    [
        *others_nightly(ABLE, 1, False, among=SAMPLE),
        *others_nightly(ABLE, 3, False, among=("qwen3",)),
        *others_nightly(COMPILED, 1, True, among=("llama", "mixtral")),
        *others_nightly(COMPILED, 3, True, among=()),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    run: Callable[..., Any], graphs: list[Any], family: str, interval: int, compiled: bool
) -> None:
    """Eager layers have pieces that do not divide the number of tokens.

    Layers are recomputed, and in blocks of one layer, one layer keeps its graph.
    """
    with run(
        model_of(family),
        accumulation=2,
        token_piece=16 if compiled else 5,  # few shapes to compile
        loss_chunk=2 * SEQUENCE if compiled else 13,
        compiled=compiled,
        checkpoint_interval=interval,
        policy="overlapped" if interval == 1 else "resident",
        placement=Placement(saved_activations="1" if interval == 1 else ""),
        device_limit_bytes=2**30,
        host_limit_bytes=2**30,
    ) as running:
        model, batches = (
            whole_model(running.plan, config_of(running.plan.model)),
            drawn(running.plan),
        )
        loss = sum(
            token_losses(model(batch.ids).logits, batch.labels) for batch in batches
        ) * scale_of(batches)
        compare(running, batches, loss, model, bound(family, "fp32"))
    ops = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert ("megatrain.in_pieces_backward.default" in ops) is compiled
