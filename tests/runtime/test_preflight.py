"""Before anything is allocated a model's tensors are compared with those of transformers' model, and one layer of each kind is run without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from whole_models import model_of

from megatrain.runtime.layers.edges import Edges
from megatrain.runtime.layers.model_config import completed
from megatrain.runtime.layers.preflight import preflight
from megatrain.runtime.layers.skeleton import skeleton
from megatrain.runtime.layers.templates import config_of
from megatrain.simulator.errors import UserError
from megatrain.simulator.families import FAMILIES, Part
from megatrain.simulator.families.config import Config
from megatrain.simulator.specs import ModelSpec


@pytest.mark.parametrize(
    ("family", "part", "message"),
    [
        ("llama", Part(tensors=(("self_attn.extra.weight", (3, 4)),)), r"tensor model\.layers\.0\.self_attn\.extra\.weight: found shape \(3, 4\) in the plan; allowed: no such tensor"),
        ("gpt2", Part(tensors=(("ln_1.weight", (5,)),)), r"tensor transformer\.h\.0\.ln_1\.weight: found shape \(5,\) in the plan; allowed: shape \(64,\), as in transformers' model"),
    ],
)  # fmt: skip
def test_a_tensor_that_transformers_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch, family: str, part: Part, message: str) -> None:
    usual = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, msgspec.structs.replace(usual, layer=lambda c, kind: (*usual.layer(c, kind), part)))
    with pytest.raises(UserError, match=message) as caught:
        config_of(model_of(family, initializer_factor=2.0))
    assert "\n" not in str(caught.value)


def test_a_tensor_that_the_description_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES, "llama", msgspec.structs.replace(usual, layer=lambda c, kind: usual.layer(c, kind)[1:]))
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.weight: found no such tensor in the plan; allowed: shape \(64, 64\)"):
        preflight(model_of("llama", initializer_factor=3.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "of tomorrow"}}, r"model small: config: found KeyError: 'of tomorrow'"),
        ({"head_dim": 7}, r"model small: config: found \w+: .*; allowed: values that transformers accepts; fix: correct config\.json"),
    ],
)
def test_what_transformers_cannot_run_is_one_line(make_model: Callable[..., ModelSpec], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config_of(make_model(**changes))
    assert "\n" not in str(caught.value)


def test_a_config_that_transformers_takes_and_cannot_write_is_one_line(make_model: Callable[..., ModelSpec]) -> None:
    """A damaged checkpoint may contain one: keys that a spec never has are not dropped there."""
    model = make_model()
    damaged = msgspec.structs.replace(model, config={**model.config, "quantization_config": True})
    with pytest.raises(UserError, match=r"model small: config: found AttributeError: .*to_dict"):
        completed(damaged)


def test_an_embedding_that_is_normalised_is_refused_where_the_description_lacks_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """NanoChat's norm has no weight, so that no tensor tells."""
    monkeypatch.setitem(FAMILIES, "nanochat", msgspec.structs.replace(FAMILIES["nanochat"], entrance=""))
    message = r"model_type: found nanochat, whose first layer's input is not linear in the embedding's rows; allowed: an embedding that is scaled .*; fix: use"
    with pytest.raises(UserError, match=message) as caught:
        config_of(model_of("nanochat", initializer_factor=4.0))
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_call_its_layers_is_refused_in_one_line() -> None:
    whole = skeleton(config_of(model_of("llama")), torch.float32, torch.device("cpu"))
    whole.model.forward = lambda **_: None
    with pytest.raises(UserError, match=r"model_type: found llama, whose forward does not call its last decoder layer; allowed: .*; fix: use") as caught:
        Edges(whole, 64, torch.float32, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_arguments_of_every_layer_are_made_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is too short for the last layer, in a family whose description does not look at it."""
    with pytest.raises(UserError, match=r"layer_rope_theta: found 3 entries; allowed: num_hidden_layers = 4 of them; fix: correct config\.json"):
        model_of("granite_swa", layer_rope_theta=[0.0, 10000.0, 0.0])
    monkeypatch.setattr(Config, "each_layer", lambda self, key, *_: self.config.get(key) if key == "layer_types" else None)
    with pytest.raises(
        UserError, match=r"model granite_swa: config: found IndexError: list index out of range; allowed: a model that .*; fix: correct"
    ) as caught:
        config_of(model_of("granite_swa", layer_rope_theta=[0.0, 10000.0, 0.0]))
    assert "\n" not in str(caught.value)
