"""Tests of the families' defaults against transformers' config classes.

Defaults are the values of keys that a config.json leaves out. They decide the kinds of layers.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tiny_families import OWN, SMALL, config_of
from transformers import AutoConfig

from megatrain.runtime.layers.functional_layers import config_of as whole_config
from megatrain.runtime.layers.model_config import differences
from megatrain.simulator.model.families import FAMILIES, Architecture
from megatrain.simulator.model.specs import ModelSpec

NO_ATTRIBUTE = ("first_k_dense_replace", "global_head_dim", "moe_layer_end_index", "moe_layer_freq")
"""Keys that some config classes read and do not keep.

The kinds of layers below and `test_gemma4.py` check their defaults.
"""
OTHER_NAME = {"n_embed": "hidden_size"}
"""Keys of a config.json whose attribute in the config class has another name."""
WINDOW = {"use_sliding_window": True, "sliding_window": 64}
NO_WINDOW = ("iquestcoder", "minimax")
"""Families that refuse a window."""
LAYERS = 66
"""More layers than any default that counts layers, such as `max_window_layers` of 62."""


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    ours = {
        key: value for key, value in FAMILIES[family].defaults.items() if key not in NO_ATTRIBUTE
    }
    theirs = AutoConfig.for_model(family)
    if "use_sliding_window" in ours:  # the class ignores all windows if it is false
        assert theirs.use_sliding_window == ours.pop("use_sliding_window")
        theirs = AutoConfig.for_model(family, use_sliding_window=True)
    said = theirs.to_dict()
    assert {
        key: said[key] if key in said else getattr(theirs, OTHER_NAME.get(key, key)) for key in ours
    } == ours


def test_infinity_is_read_as_transformers_writes_it() -> None:
    """JSON has no infinity, so transformers writes a table in its place."""
    theirs = config_of("falcon_h1")
    written = json.loads(theirs.to_json_string())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    spec = ModelSpec.from_config(written, "config.json")
    in_plan, in_checkpoint = (
        tomllib.loads(tomli_w.dumps(msgspec.to_builtins(spec))),
        json.loads(msgspec.json.encode(spec)),
    )
    for kept in (in_plan, in_checkpoint):
        again = msgspec.convert(kept, ModelSpec, strict=True)
        assert again == spec
        assert list(whole_config(again).time_step_limit) == [0.0, math.inf]
    default = ModelSpec(
        name=spec.name,
        config={key: spec.config[key] for key in spec.config if key != "time_step_limit"},
    )
    assert differences(spec, default) == []


def test_floats_that_json_lacks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    written = json.loads(config_of("falcon_h1").to_json_string())
    limits = {"time_step_limit": [0.0, math.inf], "lm_head_multiplier": math.nan}
    (tmp_path / "config.json").write_text(json.dumps({**written, **limits}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert list(theirs.time_step_limit) == [0.0, math.inf]
    assert math.isnan(theirs.lm_head_multiplier)
    spec = ModelSpec.load(str(tmp_path))
    ours = whole_config(spec)
    assert list(ours.time_step_limit) == [0.0, math.inf]
    assert math.isnan(ours.lm_head_multiplier)
    assert differences(spec, ModelSpec.load(str(tmp_path))) == []


@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["plain", "window"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_deep_model_are_of_transformers_kinds(
    family: str, changes: dict[str, Any]
) -> None:
    """A config without keys that list the kinds of layers gives the kinds of transformers."""
    if changes and family in NO_WINDOW:
        return
    left_out = ("first_k_dense_replace", "layer_rope_theta", "sliding_window")
    small = {
        key: value
        for key, value in {**SMALL, **OWN.get(family, {})}.items()
        if key not in left_out and value is not None
    }
    given = {**small, "num_hidden_layers": LAYERS, **changes}
    theirs, kinds = (
        AutoConfig.for_model(family, **given),
        Architecture({"model_type": family, **given}, "config.json").kinds,
    )
    assert len(kinds) == LAYERS
    for key, found in (
        ("layer_types", [kind.attention for kind in kinds]),
        ("mlp_layer_types", [kind.mlp for kind in kinds]),
    ):
        assert found == (getattr(theirs, key, None) or found)


@pytest.mark.parametrize("family", ["dots1", "qwen2", "qwen3_moe", "mistral", "mixtral", "phi3"])
def test_a_window_of_null_is_none(family: str) -> None:
    given = {**SMALL, **OWN.get(family, {}), "num_hidden_layers": LAYERS, "sliding_window": None}
    model = ModelSpec.from_config({"model_type": family, **given}, "config.json")
    assert {layer.attention for layer in model.decoders} == {"full_attention"}
