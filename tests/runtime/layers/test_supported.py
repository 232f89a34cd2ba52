"""Tests of models that the runtime refuses, in one line from both `train` and `calibrate`.

A plan alone is enough to rebuild transformers' config.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from tiny_families import OWN, SMALL
from transformers import AutoModelForCausalLM

from megatrain.runtime.calibration.calibrate import calibrate
from megatrain.runtime.layers import gemma3n
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.supported import refuse_unsupported
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.runtime.training.opening import find_model
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model import families
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"attention_dropout": 0.1},
        (
            r"model small: attention_dropout: found 0\.1; allowed: 0; fix: make the plan with"
            r" --no-dropout"
        ),
    ),
    (
        {
            "family": "mixtral",
            "num_local_experts": 4,
            "router_jitter_noise": 0.01,
            "sliding_window": 0,
        },
        (
            r"model small: router_jitter_noise: found 0\.01; allowed: 0; fix: make the plan with"
            r" --no-dropout"
        ),
    ),
    (
        {
            "family": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 8,
            "use_bidirectional_attention": True,
        },
        r"model small: use_bidirectional_attention: found true; allowed: false; fix: set",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_plans_that_cannot_be_executed_are_refused_before_anything_is_read(
    make_plan: Callable[..., Plan],
    make_model: Callable[..., ModelSpec],
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    plan = make_plan(model=make_model(**changes))
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)  # the planner accepts it
    plan.save(tmp_path / "plan.toml")
    with pytest.raises(UserError, match=message) as caught:
        Trainer(
            tmp_path / "plan.toml",
            None,
            tmp_path / "no-corpus",
            Config(training=TrainingSettings(steps=1)),
            out=tmp_path / "out",
            device=torch.device("cpu"),
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    work, config = plan.workload, config_of(plan.model)
    with pytest.raises(UserError, match=message):
        calibrate("machine", plan.model, work, config, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3, "rope_theta": 77.0},
    ],
)
def test_a_plan_alone_rebuilds_the_model(
    make_plan: Callable[..., Plan],
    make_model: Callable[..., ModelSpec],
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
) -> None:
    make_plan(model=make_model(family=family, **changes)).save(tmp_path / "plan.toml")
    model = Plan.load(tmp_path / "plan.toml").model
    refuse_unsupported(model)
    config = config_of(model)
    assert getattr(config, "sliding_window", None) is None
    assert config.pad_token_id is None
    assert {key: getattr(config, key) for key in changes if key != "rope_theta"} == {
        key: value for key, value in changes.items() if key != "rope_theta"
    }
    assert config.rope_parameters["rope_theta"] == changes.get(
        "rope_theta", config.rope_parameters["rope_theta"]
    )
    with torch.device("meta"):
        meta_model = AutoModelForCausalLM.from_config(config)
    assert model.parameters == sum(parameter.numel() for parameter in meta_model.parameters())


def test_a_multimodal_folder_is_refused_by_name(
    make_model: Callable[..., ModelSpec], tmp_path: Path
) -> None:
    """A multimodal folder is refused by name if its language model has not been tested.

    A test compares the language model with the whole model of transformers.
    """
    text = make_model(family="llama")
    transformers.LlavaConfig(text_config=dict(text.config)).save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=(
            r"config\.json: model_type: found 'llava'; allowed: the language model alone, 'llama',"
            r" or a multimodal model of gemma3, .*; fix: save"
        ),
    ):
        find_model(str(tmp_path), ModelSpec.load(str(tmp_path)), needed=True)


def test_a_dropout_that_a_config_leaves_out_is_the_family_s() -> None:
    """A dropout that config.json leaves out has the default of its class, 0.1 for GPT-2."""
    given = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 96,
        "n_positions": 32,
    }
    with pytest.raises(
        UserError,
        match=(
            r"model gpt2: resid_pdrop: found 0\.1; allowed: 0; fix: make the plan with"
            r" --no-dropout, which trains without it"
        ),
    ):
        refuse_unsupported(ModelSpec.from_config(given, "config.json"))
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    refuse_unsupported(
        ModelSpec.from_config({**given, **none}, "config.json"), Workload(batch=1, sequence=32)
    )
    with pytest.raises(
        UserError,
        match=(
            r"model gpt2: sequence: found 33; allowed: at most the model's 32 positions; fix:"
            r" plan shorter rows"
        ),
    ):
        refuse_unsupported(
            ModelSpec.from_config({**given, **none}, "config.json"), Workload(batch=1, sequence=33)
        )


def test_a_dropout_of_null_is_refused_by_its_key() -> None:
    """A dropout of null is refused by its key.

    Some config classes accept null, but no attention function does.
    """
    given = {
        "model_type": "falcon_h1",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    }
    model = ModelSpec.from_config(
        {**given, "intermediate_size": 64, "mamba_n_heads": 4, "attention_dropout": None},
        "config.json",
    )
    for workload in (None, Workload(batch=1, sequence=8, no_dropout=True)):
        with pytest.raises(
            UserError,
            match=(
                r"model falcon_h1: attention_dropout: found null; allowed: a number; fix: set"
                r" attention_dropout to 0\.0"
            ),
        ):
            refuse_unsupported(model, workload)


@pytest.mark.parametrize(
    ("family", "changes", "most", "allowed"),
    [
        ("gptj", {"n_positions": 32}, 32, "at most n_positions = 32"),
        ("gptj", {"n_positions": None}, 2048, "at most n_positions = 2048"),
        ("mpt", {"max_seq_len": 40}, 40, "at most max_seq_len = 40"),
        ("opt", {"max_position_embeddings": 30}, 30, "at most the model's 30 positions"),
    ],
)
def test_a_row_is_no_longer_than_the_family_s_positions(
    family: str, changes: dict[str, Any], most: int, allowed: str
) -> None:
    given = {"model_type": family, **SMALL, **OWN[family], **changes}
    model = ModelSpec.from_config(
        {key: value for key, value in given.items() if value is not None}, "config.json"
    )
    refuse_unsupported(model, Workload(batch=1, sequence=most))
    with pytest.raises(
        UserError, match=rf"sequence: found {most + 1}; allowed: {allowed}; fix: plan shorter rows"
    ):
        refuse_unsupported(model, Workload(batch=1, sequence=most + 1))


def test_documents_that_a_family_cannot_keep_apart_are_refused() -> None:
    model = ModelSpec.from_config(
        {
            "model_type": "mpt",
            **{key: value for key, value in {**SMALL, **OWN["mpt"]}.items() if value is not None},
        },
        "config.json",
    )
    refuse_unsupported(model, Workload(batch=1, sequence=16))
    with pytest.raises(
        UserError,
        match=(
            r"found mpt, whose attention mask does not separate documents; allowed: rows of one"
            r" document; fix: make the plan with --plain-packing"
        ),
    ):
        refuse_unsupported(model, Workload(batch=1, sequence=16, documents=True))


@pytest.mark.parametrize("value", [None, False, "vision"])
def test_attention_to_later_tokens_of_images_alone_is_not_refused(
    make_model: Callable[..., ModelSpec], value: Any
) -> None:
    refuse_unsupported(
        make_model(
            family="gemma3_text", head_dim=16, sliding_window=8, use_bidirectional_attention=value
        )
    )


def test_a_family_says_which_file_carries_more_than_the_hidden_size(
    make_model: Callable[..., ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed family that carries more does not get Gemma 3n's code unless it names it."""
    wide = msgspec.structs.replace(
        families.FAMILIES["llama"], carried=lambda config: 2 * config.hidden
    )
    monkeypatch.setitem(families.FAMILIES._loaded, "wide_of_mine", wide)
    model = make_model(family="wide_of_mine")
    assert not gemma3n.carries(model.family)
    with pytest.raises(UserError, match="family wide_of_mine, whose layers carry more") as error:
        refuse_unsupported(model)
    assert str(error.value).isprintable()
    named = msgspec.structs.replace(wide, carried_by="gemma3n")
    monkeypatch.setitem(families.FAMILIES._loaded, "wide_of_mine", named)
    assert gemma3n.carries(model.family)
    refuse_unsupported(model)
