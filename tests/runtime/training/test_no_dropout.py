"""Tests of `no_dropout` in a plan's workload: a model is trained without its dropout.

The exported config still has the dropout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_models import model_of

from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.supported import DROPOUT, refuse_unsupported
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.exporting import export_run
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan

WITHOUT = Workload(batch=2, sequence=16, no_dropout=True)
PUBLISHED: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "gpt_bigcode": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "opt": {"dropout": 0.1, "layerdrop": 0.2},
    "starcoder2": {"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1},
    "phi": {"resid_pdrop": 0.1},
    "granite": {"attention_dropout": 0.1},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.01},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_dropout_is_refused_unless_no_dropout_is_set(family: str) -> None:
    model = model_of(family, **PUBLISHED[family])
    message = (
        rf"model {family}: ({'|'.join(PUBLISHED[family])}): found 0\.\d+; allowed: 0; fix: make the"
        r" plan with --no-dropout, which trains without it"
    )
    for workload in (None, Workload(batch=2, sequence=16)):
        with pytest.raises(UserError, match=message):
            refuse_unsupported(model, workload)
    refuse_unsupported(model, WITHOUT)
    config = config_of(model)
    assert not [key for key in DROPOUT if getattr(config, key, None)]
    torch.manual_seed(0)
    whole, ids = AutoModelForCausalLM.from_config(config).train(), torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, whole(ids).logits)


@pytest.fixture
def trained(place: Path, executable: Callable[..., Plan]) -> Callable[..., Path]:
    """Returns a function that trains GPT-2 with the given config keys and returns the run's folder.

    It always starts from the same weights.
    """

    def make(name: str, no_dropout: bool, **keys: Any) -> Path:
        model = model_of("gpt2", vocab_size=300, **keys)
        config = config_of(model)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            place / "small"
        )
        given = json.loads((place / "small" / "config.json").read_text())
        (place / "small" / "config.json").write_text(json.dumps({**given, **keys}))
        plan = executable(
            "resident",
            model=ModelSpec.load(str(place / "small")),
            dtype="fp32",
            no_dropout=no_dropout,
        )
        plan.save(place / f"{name}.toml")
        fields = {"training.steps": 2, "saving.every_steps": 2}
        Trainer(
            place / f"{name}.toml",
            None,
            place / "corpus",
            Config.load(None, fields),
            out=place / name,
            device=torch.device("cpu"),
        ).fit()
        return place / name

    return make


def test_no_dropout_trains_like_a_config_without_dropout_and_exports_the_dropout(
    trained: Callable[..., Path], place: Path
) -> None:
    none = trained("none", False, **dict.fromkeys(PUBLISHED["gpt2"], 0.0))
    published = trained("published", True, **PUBLISHED["gpt2"])
    assert Plan.load(published / "plan.toml").workload.no_dropout
    expected, found = (load_file(run / "model" / "model.safetensors") for run in (none, published))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    export_run(published, place / "out")
    for folder in (published / "model", place / "out"):
        config = json.loads((folder / "config.json").read_text())
        assert {key: config[key] for key in PUBLISHED["gpt2"]} == PUBLISHED["gpt2"]


def test_a_plan_without_no_dropout_does_not_write_the_key(
    executable: Callable[..., Plan], tmp_path: Path
) -> None:
    """A plan without `no_dropout` does not write the key, so its file does not change."""
    executable().save(tmp_path / "plan.toml")
    assert "no_dropout" not in (tmp_path / "plan.toml").read_text()
    assert not Plan.load(tmp_path / "plan.toml").workload.no_dropout
