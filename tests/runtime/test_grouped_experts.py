"""Experts as grouped products: the results of transformers' own modules, and nothing that the host
has to wait for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts, JetMoeTopKGating
from whole_models import model_of

from megatrain.runtime.layers import grouped_experts
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec


def modules(chosen: int = 2) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    made = torch.nn.ModuleList([JetMoeTopKGating(16, 8, chosen), JetMoeParallelExperts(8, 16, 24)])
    torch.nn.init.normal_(made[1].weight)
    return made


def grouped(chosen: int = 2) -> torch.nn.ModuleList:
    made = modules(chosen)
    grouped_experts.install(made)
    return made


def outputs(pair: torch.nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    router, experts = pair
    order, tokens, weights, sizes, logits = router(x)
    made = experts(x[tokens], sizes) * weights[:, None]
    summed = torch.zeros(len(x), 24).index_add(0, tokens, made)
    return [order, tokens, weights, logits, summed]


@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("tokens", [1, 40])
def test_results_and_gradients_are_those_of_transformers(chosen: int, tokens: int) -> None:
    """With one token, most experts have none."""
    x, found = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)), []
    for pair in (modules(chosen), grouped(chosen)):
        made = outputs(pair, x)
        made[-1].square().sum().backward()
        found.append([*made, *(parameter.grad for parameter in pair.parameters())])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nothing_is_read_by_the_host() -> None:
    """On the meta device nothing can be."""
    pair = grouped().to("meta")
    assert pair[0](torch.empty(40, 16, device="meta"))[3].shape == (8,)
    with pytest.raises(RuntimeError, match="meta"):
        modules().to("meta")[0](torch.empty(40, 16, device="meta"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts_per_tok": 3},
            "num_experts_per_tok: found 3; allowed: at most 2, since recompute could add",
        ),
        ({"output_router_logits": True}, "output_router_logits: found True; allowed: false, since"),
    ],
)
def test_what_is_not_trained_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    config = {**model_of("jetmoe").config, **changes}
    with pytest.raises(UserError, match=message):
        ModelSpec.from_config(config, "config.json")


def test_the_number_of_heads_is_computed_as_in_transformers() -> None:
    config = dict(model_of("jetmoe").config)
    for given in (None, 7):
        config["num_attention_heads"] = given
        content = {key: value for key, value in config.items() if value is not None}
        assert ModelSpec.from_config(content, "config.json").heads[:2] == (4, 2)
