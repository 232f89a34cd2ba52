"""Layers in pieces of tokens: the gradients of the whole model, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from family_sample import others_nightly
from transformers import CONFIG_MAPPING
from whole_models import bound, compare, drawn, model_of, scale_of, token_losses, whole_model

from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.schedule.plan import Placement

ABLE = [
    family
    for family in FAMILIES
    # Another version of transformers may lack a family.
    if family in CONFIG_MAPPING and not model_of(family).pieces_obstacle()
]
SAMPLE = ("llama", "gemma2", "glm4", "olmo2", "phi")
"""A norm before the MLP, norms before and after it, after both, only after it, and none of its
own."""


@pytest.mark.parametrize(
    ("family", "interval"),
    [*others_nightly(ABLE, 1, among=SAMPLE), *others_nightly(ABLE, 3, among=("qwen3",))],
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    run: Callable[..., Any], family: str, interval: int
) -> None:
    """With pieces that do not divide the tokens, recomputed layers and, in blocks of one, a layer
    whose graph is kept.
    """
    with run(
        model_of(family),
        accumulation=2,
        token_piece=5,
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
