"""Tests of experts as grouped products, for which the host never waits.

The results are those of transformers' modules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
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
    """With a single token, most experts get no token."""
    x, found = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)), []
    for pair in (modules(chosen), grouped(chosen)):
        made = outputs(pair, x)
        made[-1].square().sum().backward()
        found.append([*made, *(parameter.grad for parameter in pair.parameters())])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nothing_is_read_by_the_host() -> None:
    """Tensors on the meta device have no values that could be read."""
    pair = grouped().to("meta")
    assert pair[0](torch.empty(40, 16, device="meta"))[3].shape == (8,)
    with pytest.raises(RuntimeError, match="meta"):
        modules().to("meta")[0](torch.empty(40, 16, device="meta"))


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_of_dbrx_are_those_of_transformers(tokens: int) -> None:
    """The weights are views of flat matrices. The host reads no values."""
    torch.manual_seed(0)
    table = DbrxFFNConfig(
        hidden_size=16, ffn_hidden_size=24, moe_num_experts=8, ffn_act_fn={"name": "gelu"}
    )
    scores, chosen = torch.rand(tokens, 8).topk(2)
    module, found = DbrxExperts(table), []
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    for grouped_ones in (False, True):
        if grouped_ones:
            grouped_experts.install(module)
        module.zero_grad()
        x = torch.rand(1, tokens, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        made = module(x, chosen, scores)
        made.square().sum().backward()
        found.append([made, x.grad, *(parameter.grad.clone() for parameter in module.parameters())])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    module, low = module.to("meta", torch.bfloat16), scores.bfloat16().to("meta")
    assert module(x.detach().bfloat16().to("meta"), chosen.to("meta"), low).shape == x.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings: found True; allowed: false"),
        ({"output_router_logits": True}, "output_router_logits: found True; allowed: false, since"),
        (
            {"attn_config": {"rope_theta": 500000.0}},
            "rope_theta: found 500000.0; allowed: the rope_theta outside of attn_config, 10000.0",
        ),
        ({"attn_config": {"clip_qkv": None}}, "clip_qkv: found None; allowed: a number above 0"),
        ({"attn_config": {"attn_pdrop": 0.1}}, "attn_pdrop: found 0.1; allowed: 0"),
        ({"attn_config": {"kv_n_heads": 3}}, "kv_n_heads: found 3; allowed: a divisor of the 4"),
        ({"ffn_config": {"moe_jitter_eps": 0.01}}, "moe_jitter_eps: found 0.01; allowed: 0, since"),
        ({"ffn_config": {"moe_top_k": 9}}, "moe_top_k: found 9; allowed: at most the 8 experts"),
        (
            {"ffn_config": {"moe_normalize_expert_weights": None}},
            "ffn_config: found moe_normalize_expert_weights = null; allowed: a number",
        ),
    ],
)
def test_unsupported_settings_of_dbrx_are_refused_by_their_key(
    changes: dict[str, Any], message: str
) -> None:
    config = dict(model_of("dbrx").config)
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=message):
        ModelSpec.from_config(config, "config.json")


def test_dbrx_with_its_theta_given_twice_is_trained() -> None:
    """A published DBRX has theta only in `attn_config`, where transformers does not read it."""
    config = dict(model_of("dbrx").config)
    config["attn_config"] = {**config["attn_config"], "rope_theta": 500000.0}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert ModelSpec.from_config(config, "config.json").family == "dbrx"


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
def test_unsupported_settings_are_refused_by_their_key(
    changes: dict[str, Any], message: str
) -> None:
    config = {**model_of("jetmoe").config, **changes}
    with pytest.raises(UserError, match=message):
        ModelSpec.from_config(config, "config.json")


def test_the_number_of_heads_is_computed_as_in_transformers() -> None:
    config = dict(model_of("jetmoe").config)
    for given in (None, 7):
        config["num_attention_heads"] = given
        content = {key: value for key, value in config.items() if value is not None}
        assert ModelSpec.from_config(content, "config.json").heads[:2] == (4, 2)
