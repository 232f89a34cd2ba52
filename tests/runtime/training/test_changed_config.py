"""Tests of a config.json that changes after planning.

A changed key that affects training is refused by name, in a new run and in a resumed run. Any other
key may change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.model_config import differences, full_config
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan

GIVEN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "rope_theta": 77_000.0,
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "transformers_version": "4.40.0",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ADDED: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
ABSENT = "taken away"
MEANINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        GIVEN,
        ADDED,
        (
            r"found .*rope_parameters\.factor 8\.0, .*rope_type linear; allowed: .*factor nothing,"
            r" .*rope_type default, as planned"
        ),
    ),
    (
        GIVEN | ADDED,
        {"rope_scaling": ABSENT},
        (
            r"found rope_parameters\.factor nothing, .*; allowed: rope_parameters\.factor 8\.0, .*,"
            r" as planned"
        ),
    ),
    (
        GIVEN,
        {"rms_norm_eps": ABSENT},
        r"found rms_norm_eps 1e-06; allowed: rms_norm_eps 0\.001, as planned",
    ),
    (
        GIVEN,
        {"rope_theta": ABSENT},
        (
            r"found rope_parameters\.rope_theta 10000\.0; allowed: rope_parameters\.rope_theta"
            r" 77000\.0, as planned"
        ),
    ),
    (GIVEN, {"hidden_act": ABSENT}, r"found hidden_act silu; allowed: hidden_act gelu, as planned"),
    (
        GIVEN,
        {"pad_token_id": 0},
        r"found pad_token_id 0; allowed: pad_token_id nothing, as planned",
    ),
    (
        GIVEN,
        {"num_hidden_layers": 1},
        r"found num_hidden_layers 1; allowed: num_hidden_layers 2, as planned",
    ),
]
COSMETIC: dict[str, Any] = {
    "transformers_version": "5.0.0",
    "_name_or_path": "elsewhere",
    "torch_dtype": ABSENT,
    "dtype": "bfloat16",
    "architectures": ABSENT,
    "use_cache": False,
    "bos_token_id": ABSENT,
    "eos_token_id": [2, 3],
    "initializer_range": 0.5,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not ABSENT}


@pytest.fixture
def planned(place: Path, executable: Callable[..., Plan]) -> Callable[[dict[str, Any]], Path]:
    """Returns a function that writes this config.json and a plan for it to `place`."""

    def make(config: dict[str, Any]) -> Path:
        (place / "small" / "config.json").write_text(json.dumps(config))
        plan = executable(model=ModelSpec.load(str(place / "small")), dtype="fp32", accumulation=2)
        AutoModelForCausalLM.from_config(
            config_of(plan.model), dtype=torch.float32
        ).save_pretrained(place / "small")
        (place / "small" / "config.json").write_text(json.dumps(config))
        plan.save(place / "plan.toml")
        return place

    return make


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    MEANINGS,
    ids=[",".join(changes) for _, changes, _ in MEANINGS],
)
def test_a_changed_meaning_is_refused_before_anything_is_written(
    planned: Callable[[dict[str, Any]], Path],
    prepare: Any,
    run: Any,
    config: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    place = planned(config)
    run(place, "begun", steps=2, export=False, **{"saving.every_steps": 1})
    (place / "small" / "config.json").write_text(json.dumps(changed(config, changes)))
    before = sorted(place.rglob("*"))
    fix = "; fix: make the plan again with `megatrain plan`, or restore config.json"
    with pytest.raises(UserError, match=r"config\.json: " + message + fix) as caught:
        prepare(place).fit()
    assert "\n" not in str(caught.value)
    going_on = Config.load(place / "begun" / "config.toml", {"training.steps": 3})
    with pytest.raises(UserError, match=r"config\.json: " + message + fix):
        Trainer(
            place / "begun" / "plan.toml",
            None,
            None,
            going_on,
            out=place / "begun",
            resume="newest",
            device=torch.device("cpu"),
        ).fit()
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    MEANINGS,
    ids=[",".join(changes) for _, changes, _ in MEANINGS],
)
def test_a_checkpoint_of_a_model_with_another_meaning_is_refused(
    planned: Callable[[dict[str, Any]], Path],
    run: Any,
    executable: Callable[..., Plan],
    config: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    """A checkpoint is refused if its model differs from that of the plan.

    This holds even if the model folder agrees with the plan.
    """
    place = planned(config)
    run(place, "begun", steps=1, export=False, init="random", **{"saving.every_steps": 1})
    model = ModelSpec.from_config(changed(config, changes), "config.json", "small")
    plan = executable(model=model, dtype="fp32", accumulation=2)
    (place / "small" / "config.json").write_text(json.dumps(changed(config, changes)))
    key = message.partition(" ")[2].partition(" ")[0].rpartition(".*")[2]
    going_on = Config.load(place / "begun" / "config.toml", {"training.steps": 3})
    with pytest.raises(
        UserError, match=rf"found .*model\.{key} .* in the checkpoint and .* in this run"
    ):
        Trainer(
            plan,
            place / "small",
            None,
            going_on,
            out=place / "begun",
            resume="newest",
            device=torch.device("cpu"),
        ).fit()


def test_keys_that_do_not_affect_training_may_change(
    planned: Callable[[dict[str, Any]], Path], run: Any
) -> None:
    place = planned(GIVEN)
    (place / "small" / "config.json").write_text(json.dumps(changed(GIVEN, COSMETIC)))
    run(place, steps=1)
    exported = json.loads((place / "run" / "model" / "config.json").read_text())
    assert exported["eos_token_id"] == [2, 3], "the export lacks the folder's own keys"
    assert exported["rope_parameters"]["rope_theta"] == 77_000.0


def test_each_cosmetic_key_alone_makes_no_difference() -> None:
    model = ModelSpec.from_config(GIVEN, "config.json")
    for key, value in COSMETIC.items():
        assert not differences(
            model, ModelSpec.from_config(changed(GIVEN, {key: value}), "config.json")
        ), key


@pytest.mark.parametrize("config", [GIVEN, GIVEN | ADDED])
def test_a_plan_s_file_keeps_all_of_the_model(
    tmp_path: Path, executable: Callable[..., Plan], config: dict[str, Any]
) -> None:
    model = ModelSpec.from_config(config, "config.json")
    executable(model=model).save(tmp_path / "plan.toml")
    assert not differences(model, Plan.load(tmp_path / "plan.toml").model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"pad_token_id": None}),
        ("gemma2", {}),
    ],
)
def test_null_is_not_the_default(family: str, changes: dict[str, Any]) -> None:
    """A key that is null in config.json stays null in a plan's TOML.

    A missing key gets the default of transformers' class.
    """
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    }
    config = full_config(
        ModelSpec.from_config({"model_type": family, **sizes, **changes}, "config.json")
    )
    assert {key: getattr(config, key) for key in changes} == changes
    if not changes:
        assert (
            config.attn_logit_softcapping,
            config.final_logit_softcapping,
            config.pad_token_id,
        ) == (50.0, 30.0, 0)


def test_a_value_that_transformers_refuses_gives_a_one_line_error() -> None:
    model = ModelSpec.from_config(
        {
            **GIVEN,
            "rope_scaling": {"rope_type": "linear", "factor": "eight"},
            "rms_norm_eps": "small",
        },
        "config.json",
        "small",
    )
    with pytest.raises(
        UserError,
        match=(
            r"model small: config: found .*rms_norm_eps.*; allowed: values that transformers"
            r" accepts; fix: correct"
        ),
    ) as caught:
        full_config(model)
    assert "\n" not in str(caught.value)
