"""Tests of --push-to-hub: early checks, uploaded files, and failed uploads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, jsonl

from megatrain.experiments.run_report.model_card import model_card

TRAIN = ("train", "plan.toml", "--steps", 2, "--device", "cpu", "--out", "run")


@pytest.fixture
def hub(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(workplace, monkeypatch)


@pytest.fixture
def run(finished: Path, workplace: Path) -> Path:
    """A finished run of three steps."""
    shutil.copytree(finished, workplace / "run")
    return workplace / "run"


def test_a_training_uploads_its_model_and_a_card(
    hub: FakeHub, workplace: Path, command: Any
) -> None:
    """The model is private, and the card names no path of this machine."""
    outcome = command(
        *TRAIN, "--data", "corpus", "--eval-fraction", 0.1, "--push-to-hub", "tiny-tuned"
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("uploaded https://hub/me/tiny-tuned\n")
    assert hub.private == {"me/tiny-tuned": True}
    files = hub.models["me/tiny-tuned"]
    model = workplace / "run" / "model"
    assert {name: files[name] for name in files if name != "README.md"} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    card = files["README.md"].decode()
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- megatrain\n---\n"
    )
    for part in (
        "# me/tiny-tuned",
        "It began with the weights of `tiny`",
        "* `corpus`\n",
        "64 tokens with padding were trained on, in 2 steps",
        "| learning rate | 1e-5, cosine, 0 warm-up steps |",
        "| tokens a step | 1 x 2 x 16 |",
        "* training: ",
        "* evaluation: ",
    ):
        assert part in card
    assert str(workplace) not in card


def test_a_public_model_is_replaced_only_on_request(hub: FakeHub, run: Path, command: Any) -> None:
    upload = ("export", run, "--push-to-hub", "x")
    assert command(*upload, "--public").status == 0
    hub.models["me/x"].clear()
    outcome = command(*upload)
    assert outcome.status == 2
    assert "me/x, which exists and is public" in outcome.err
    assert hub.models["me/x"] == {}
    assert command(*upload, "--public").status == 0
    assert hub.models["me/x"]


def test_a_public_upload_into_a_private_model_is_refused(
    hub: FakeHub, run: Path, command: Any
) -> None:
    upload = ("export", run, "--push-to-hub", "x")
    assert command(*upload).status == 0
    hub.models["me/x"].clear()
    outcome = command(*upload, "--public")
    assert outcome.status == 2
    assert "--public: found me/x, which exists and is private" in outcome.err
    assert outcome.err.count("\n") == 1
    assert hub.models["me/x"] == {}
    assert command(*upload).status == 0


def test_the_card_names_base_model_and_data_sets_on_the_hub(
    hub: FakeHub, run: Path, command: Any
) -> None:
    """Base model and data sets are in the metadata that the hub reads."""
    config = run / "config.toml"
    hub.write("some/letters", {"train.jsonl": jsonl("a")})
    config.write_text(
        "".join(
            'data = ["some/letters:train:2", "/home/me/b.txt:0.5"]\n'
            if line.startswith("data = ")
            else line
            for line in config.read_text().splitlines(keepends=True)
        )
    )
    outcome = command("export", run, "--push-to-hub", "us/x", "--public")
    assert (outcome.status, outcome.err) == (0, "")
    card = hub.models["us/x"]["README.md"].decode()
    assert "datasets:\n- some/letters\n" in card
    assert "* `some/letters:train:2`\n* `b.txt:0.5`\n" in card
    assert hub.private == {"us/x": False}
    assert "base_model" not in card
    assert "\nbase_model:\n- org/base\ndatasets:" in model_card(run, "x", base="org/base@v1")


def test_export_uploads_the_model_of_a_finished_run(
    hub: FakeHub, run: Path, command: Any, files_in: Any
) -> None:
    before = files_in(run)
    outcome = command("export", run, "--push-to-hub", "x")
    assert (outcome.status, outcome.err) == (0, "")
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert hub.models["me/x"]["model.safetensors"] == weights
    assert files_in(run) == before


def test_export_uploads_a_checkpoint_in_another_dtype(
    hub: FakeHub, run: Path, command: Any, files_in: Any
) -> None:
    before = files_in(run)
    outcome = command("export", run, "--push-to-hub", "x", "--dtype", "bf16")
    assert (outcome.status, outcome.err) == (0, "")
    uploaded = hub.models["me/x"]["model.safetensors"]
    assert len(uploaded) < 0.6 * len((run / "model" / "model.safetensors").read_bytes())
    assert files_in(run) == before
    outcome = command("export", run, "--push-to-hub", "y", "--dtype", "bf16", "--out", "there")
    assert (outcome.status, outcome.err) == (0, "")
    assert (
        Path("there", "model.safetensors").read_bytes() == hub.models["me/y"]["model.safetensors"]
    )


def test_a_failed_upload_loses_nothing_and_says_how_to_repeat_it(
    hub: FakeHub, workplace: Path, command: Any
) -> None:
    hub.broken = True
    outcome = command(*TRAIN, "--data", "corpus", "--push-to-hub", "us/x", "--public")
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert "upload of us/x: found Connection lost." in outcome.err
    again = outcome.err.strip().partition("upload again with: ")[2]
    assert again == "megatrain export run --push-to-hub us/x --public"
    assert (workplace / "run" / "model" / "model.safetensors").is_file()
    hub.broken = False
    assert command(*again.split()[1:]).status == 0
    assert "model.safetensors" in hub.models["us/x"]


def test_a_failed_export_names_its_options_again(hub: FakeHub, run: Path, command: Any) -> None:
    hub.broken = True
    outcome = command("export", run, "--push-to-hub", "x", "--dtype", "fp32", "--from-step", 3)
    assert outcome.status == 1
    assert outcome.err.endswith(
        f"megatrain export {run} --from-step=3 --dtype=fp32 --push-to-hub me/x\n"
    )


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({}, "a b", "--push-to-hub: found 'a b'; allowed: NAME or org/NAME"),
        ({}, "a/b/c", "found 'a/b/c'"),
        ({}, "a--b", "found 'a--b'"),
        ({}, "other/x", "found other/x; allowed: a model of me, us; fix: name it me/x"),
        ({"token": None}, "x", "found no token of the hub"),
        ({"role": "read"}, "x", "found a token that may only read"),
        ({"online": False}, "x", "found a hub that does not answer (Cannot reach"),
    ],
)
def test_uploads_that_cannot_work_are_refused_before_the_training(
    hub: FakeHub, workplace: Path, command: Any, change: dict[str, Any], name: str, reason: str
) -> None:
    for attribute, value in change.items():
        setattr(hub, attribute, value)
    for words in ((*TRAIN, "--data", "corpus"), ("train", "tiny", *TRAIN[2:], "--data", "corpus")):
        outcome = command(*words, "--push-to-hub", name)
        assert outcome.status == 2
        assert reason in outcome.err
        assert outcome.err.count("\n") == 1
    assert not (workplace / "run" / "config.toml").exists()


@pytest.mark.usefixtures("hub")
def test_options_that_contradict_each_other(command: Any, run: Path) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--steps", 2, "--out", "new")
    assert "--public: found no --push-to-hub" in command(*words, "--public").err
    refused = command(*words, "--push-to-hub", "x", "--no-export").err
    assert "found no model to upload, because of --no-export" in refused
    assert "found neither --out nor --push-to-hub" in command("export", run).err
    (run / "config.toml").unlink()
    assert "found no config.toml" in command("export", run, "--push-to-hub", "x").err
