"""Tests that `megatrain plan` refuses the model folders that `megatrain train` would refuse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatrain.experiments.cli import main as cli
from megatrain.simulator.schedule.plan import Plan

WORK = ("--hardware", "h200", "--batch", 2, "--seq", 16, "--dtype", "fp32")
REFUSED = {
    "dropout": ({"attention_dropout": 0.1}, "model tiny: attention_dropout: found 0.1"),
    "a kind of positions that transformers does not have": (
        {"rope_scaling": {"rope_type": "of tomorrow"}},
        "model tiny: config: found KeyError: 'of tomorrow'",
    ),
    "heads that transformers cannot split": ({"head_dim": 7}, "model tiny: config: found "),
    "a value of a key that training does not use": (
        {"bos_token_id": "first"},
        "tiny/config.json: found ",
    ),
    "a head of its own that config.json ties": (
        {"tie_word_embeddings": True},
        "tiny: lm_head.weight: found a matrix that differs from model.embed_tokens.weight, to which"
        " tie_word_embeddings in config.json ties it; allowed: the same matrix; fix: set"
        " tie_word_embeddings to false in config.json and make the plan again",
    ),
}


@pytest.fixture
def changed(workplace: Path) -> Callable[..., Path]:
    """Returns a function that changes keys in the config.json of the workplace's model."""

    def change(keys: dict[str, Any]) -> Path:
        path = workplace / "tiny" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        return path

    return change


@pytest.mark.parametrize("kind", REFUSED)
def test_a_folder_that_cannot_be_trained_is_refused_in_one_line(
    command: Callable[..., Any], changed: Callable[..., Path], kind: str
) -> None:
    keys, message = REFUSED[kind]
    changed(keys)
    planned = command("plan", "tiny", *WORK, "--out", "new.toml")
    assert planned.status == 2
    assert message in planned.err
    assert planned.err.count("\n") == 1
    assert not Path("new.toml").exists()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_plan_that_training_refuses_is_still_predicted(
    command: Callable[..., Any], changed: Callable[..., Path], kind: str
) -> None:
    config = changed(REFUSED[kind][0])
    assert command("check", "tiny", *WORK).status == 0
    assert command("plan", config, *WORK, "--out", "new.toml").status == 0
    assert Path("new.toml").exists()


@pytest.mark.usefixtures("workplace")
def test_a_policy_of_another_system_is_planned_for_prediction(command: Callable[..., Any]) -> None:
    words = ("--policy", "megatrain_code", "--out", "new.toml")
    assert command("plan", "tiny", *WORK, *words).status == 0


@pytest.mark.parametrize(
    "kind", ["heads that transformers cannot split", "a head of its own that config.json ties"]
)
def test_plan_and_train_refuse_the_same_plan(
    command: Callable[..., Any], changed: Callable[..., Path], kind: str
) -> None:
    """A plan that names the config.json is written, and `train` refuses it with the same error."""
    keys, message = REFUSED[kind]
    config = changed(keys)
    planned = command("plan", "tiny", *WORK, "--out", "new.toml")
    assert command("plan", config, *WORK, "--out", "new.toml").status == 0
    words = ("--data", "corpus", "--steps", 1, "--device", "cpu", "--out", "run")
    trained = command("train", "new.toml", *words, "--model", "tiny")
    assert message in planned.err
    assert message in trained.err


@pytest.mark.parametrize(
    ("name", "fix"), [("foo", "see `megatrain plan --help`"), ("netwrok", "did you mean network?")]
)
@pytest.mark.usefixtures("workplace")
def test_an_unknown_key_of_set_names_all_that_may_be_set(
    command: Callable[..., Any], name: str, fix: str
) -> None:
    outcome = command("plan", "--from", "plan.toml", "--set", f"{name}=1", "--out", "new.toml")
    assert outcome.status == 2
    limits = "device_memory, host_memory, gpus, hosts or network"
    assert f"a field of the workload, {limits}; fix: {fix}" in outcome.err
    swept = command("sweep", "tiny", "--hardware", "h200", "--over", name, 1, "--out", "sweep")
    assert "a field of the workload, device_memory or host_memory; fix: " in swept.err


def test_weights_are_opened_as_training_opens_them(
    command: Callable[..., Any], changed: Callable[..., Path]
) -> None:
    words = ("plan", "tiny", *WORK, "--out", "new.toml")
    weights = changed({"tie_word_embeddings": True}).parent / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights)
    assert command(*words).status == 0
    save_file({name: tensors[name] for name in tensors if name != "model.norm.weight"}, weights)
    missing = command(*words)
    assert missing.status == 2
    assert "tiny: found no tensor model.norm.weight; " in missing.err
    weights.unlink()  # random weights may be trained
    assert command(*words).status == 0


@pytest.mark.usefixtures("workplace")
def test_a_plan_that_does_not_fit_is_refused_with_the_first_suggestion_of_check(
    command: Callable[..., Any],
) -> None:
    words = ("tiny", *WORK, "--device-memory", "20KiB")
    first = json.loads(command("check", *words, "--json").out)["advice"][0]
    assert first["fits"]
    outcome = command("plan", *words, "--out", "new.toml")
    assert outcome.status == 3
    name = first["model"] or " ".join(f"--{key} {value}" for key, value in first["options"].items())
    assert f"; fix: {name} would fit" in outcome.err


@pytest.mark.usefixtures("workplace")
def test_the_plan_is_written_before_a_reader_may_close_the_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For example, `megatrain plan ... | head -1` closes the output."""
    unread, writing = os.pipe()
    os.close(unread)
    with open(writing, "w", buffering=1) as closed:
        monkeypatch.setattr("sys.stdout", closed)
        words = ("plan", "tiny", *WORK, "--out", tmp_path / "new.toml")
        assert cli.main([str(word) for word in words]) == 141
    assert Plan.load(tmp_path / "new.toml").digest
