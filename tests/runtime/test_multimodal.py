"""Tests of the language model of a multimodal folder.

It trains as inside transformers' whole model, and is exported back into it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_multimodal
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText
from whole_models import SEQUENCE, compare, drawn, scale_of, token_losses

from megatrain.runtime.files.checkpoint_names import CheckpointNames
from megatrain.runtime.files.model_files import export, folder_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.training.opening import exported_config, not_trained
from megatrain.simulator.model.families import INSIDE
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

TRAINED = 3
"""number of compared exports; there is a step before each but the first"""


@pytest.fixture
def inside(
    tmp_path: Path, make_plan: Callable[..., Plan], session: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `inside(kind)`, which opens a session with the language model of a multimodal model.

    The multimodal model is saved to `tmp_path / "whole"`.
    """

    def make(kind: str) -> Any:
        tiny_multimodal.save(kind, tmp_path / "whole")
        model = ModelSpec.load(str(tmp_path / "whole"))
        plan = make_plan(
            "resident",
            model=model,
            sequence=SEQUENCE,
            dtype="fp32",
            loss_chunk=13,
            checkpoint_interval=3,
        )
        with folder_weights(tmp_path / "whole") as weights:
            return session(
                msgspec.structs.replace(plan, digest=lower(plan).digest), weights=weights
            )

    return make


def reloaded(folder: Path) -> Any:
    """Returns the exported model, as transformers loads it, in evaluation mode.

    In training mode, Gemma 3 needs to know which tokens are images. Without dropout, both modes
    compute the same.
    """
    model, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


@pytest.mark.parametrize("kind", INSIDE)
def test_a_language_model_trains_as_inside_the_whole_model_and_is_exported_into_it(
    inside: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """Exporting the untrained model gives the original folder.

    After training, loss and gradients are those of the whole model that transformers loads.
    """
    folder = tmp_path / "whole"
    with inside(kind) as running:
        plan, config = running.plan, exported_config(folder, running.plan.model, init="model")
        export(running.state, plan, config, tmp_path / "again", source=folder)
        first, again = (
            load_file(place / "model.safetensors") for place in (folder, tmp_path / "again")
        )
        assert first.keys() == again.keys()
        assert all(
            torch.equal(first[name], again[name]) and first[name].dtype == again[name].dtype
            for name in first
        )
        batches = drawn(plan)
        for number in range(TRAINED):
            if number:
                running.executor.step(batches, rate=1e-2, number=number)
                running.executor.flush_update()
            export(running.state, plan, config, tmp_path / str(number), source=folder)
            whole = reloaded(tmp_path / str(number))
            compare(
                running,
                batches,
                token_losses(whole(batches[0].ids).logits, batches[0].labels) * scale_of(batches),
                whole,
                1e-5,
            )
    last = load_file(tmp_path / str(number) / "model.safetensors")
    others = set(CheckpointNames(config).other_keys(first))
    assert others
    buffers = {name for name in first if name.endswith("layer_scalar")}
    assert {name for name in first if torch.equal(first[name], last[name])} == others | buffers, (
        "a tensor of the language model was not trained, or another one was"
    )


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_the_head_of_a_language_model_is_tied_where_transformers_ties_it(
    tmp_path: Path, kind: str, outer: bool | None, inner: bool | None
) -> None:
    tiny_multimodal.config_of(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part, tied in ((config, outer), (config["text_config"], inner)):
        del part["tie_word_embeddings"]
        part.update({} if tied is None else {"tie_word_embeddings": tied})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    model = ModelSpec.load(str(tmp_path))
    assert (model.tied, config_of(model).tie_word_embeddings) == (theirs, theirs)


def test_an_export_in_bf16_leaves_the_other_tensors_as_they_are(
    inside: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "whole"
    with inside("gemma3") as running:
        config = exported_config(folder, running.plan.model, init="model")
        export(running.state, running.plan, config, tmp_path / "out", dtype="bf16", source=folder)
    found = {
        name.startswith("language_model."): value.dtype
        for name, value in load_file(tmp_path / "out" / "model.safetensors").items()
    }
    assert found == {True: torch.bfloat16, False: torch.float32}
    assert reloaded(tmp_path / "out").dtype == torch.bfloat16


def test_a_language_model_from_random_weights_is_exported_alone(tmp_path: Path) -> None:
    """A language model that starts from random weights is exported without the other parts.

    The vision tower was not trained with it.
    """
    tiny_multimodal.save("gemma3", tmp_path)
    config = exported_config(tmp_path, ModelSpec.load(str(tmp_path)), init="random")
    assert config.model_type == "gemma3_text"
    assert not_trained(tmp_path, config) == ""


def test_a_note_says_what_is_not_trained(tmp_path: Path) -> None:
    model = tiny_multimodal.save("gemma3", tmp_path)
    count = sum(
        not name.startswith(("model.language_model.", "lm_head.")) for name in model.state_dict()
    )
    note = not_trained(
        tmp_path, exported_config(tmp_path, ModelSpec.load(str(tmp_path)), init="model")
    )
    assert (
        note == f"only the language model is trained; {count} tensors of multi_modal_projector,"
        " vision_tower are exported unchanged"
    )


def test_gemma_3_s_text_config_may_leave_out_what_has_a_default() -> None:
    """Gemma 3's text config may omit keys that have a default, as the published one does."""
    given = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = ModelSpec.from_config(
        {
            "model_type": "gemma3",
            "text_config": {**given, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        },
        "config.json",
    )
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model("gemma3", text_config=given)
        ).model.language_model
    assert (model.tied, model.parameters) == (
        True,
        sum(parameter.numel() for parameter in whole.parameters()),
    )
