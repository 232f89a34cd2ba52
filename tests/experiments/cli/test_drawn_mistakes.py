"""Tests of random wrong invocations of every verb.

Each gives one line and status 2 within two seconds, and writes nothing. PyTorch is not loaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import drawn_mistakes
import pytest
from drawn_mistakes import VALID, draw_mistakes, write_files

from megatrain.experiments.cli import options
from megatrain.experiments.cli.main import VERBS
from megatrain.simulator.base.errors import UserError


def outcomes(invocations: list[list[str]]) -> list[tuple[int | None, str, str]]:
    """Returns the outcomes of invocations, which are all executed in one process."""
    done = subprocess.run(
        [sys.executable, drawn_mistakes.__file__],
        input="".join(json.dumps(words) + "\n" for words in invocations),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(status, out, err) for status, out, err in map(json.loads, done.stdout.splitlines())]


def check_line(words: list[str], status: int | None, out: str, err: str) -> None:
    assert status == 2, (words, err or out)
    assert out == "", words
    program = "quality" if words[0] == "quality" else "megatrain"
    assert err.startswith(f"{program}: "), (words, err)
    assert not err.startswith("megatrain: megatrain"), (words, err)
    assert err.count("\n") == 1, (words, err)
    assert err.endswith("\n"), (words, err)
    assert all(part in err for part in (": found ", "; allowed: ", "; fix: ")), (words, err)
    assert len(err) < 700, (words, err)


@pytest.fixture
def place(workplace: Path) -> Path:
    """Returns the workplace with broken files, a model without weights, and a saved run."""
    write_files(workplace / "plan.toml")
    (workplace / "weightless").mkdir()
    shutil.copy(workplace / "tiny" / "config.json", workplace / "weightless")
    (workplace / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (workplace / "run" / "config.toml").write_text("[training]\nsteps = 4\n")
    return workplace


def check_all(invocations: list[list[str]], place: Path, files_in: Any) -> None:
    before = files_in(place)
    found = outcomes(invocations)
    assert len(found) == len(invocations)
    for words, outcome in zip(invocations, found, strict=True):
        check_line(words, *outcome)
    assert files_in(place) == before


def test_the_drawn_mistakes_cover_every_verb_and_differ() -> None:
    drawn = draw_mistakes(200)
    assert len({tuple(words) for words in drawn}) > 150
    assert {words[0] for words in drawn} >= {name.partition(" ")[0] for name in VALID}
    assert {name.partition(" ")[0] for name in VALID} >= set(VERBS)


def test_200_wrong_invocations(place: Path, files_in: Any) -> None:
    check_all(draw_mistakes(200), place, files_in)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 6))
def test_1000_more_wrong_invocations(place: Path, files_in: Any, seed: int) -> None:
    check_all(draw_mistakes(1000, seed), place, files_in)


def test_some_wrong_invocations_in_separate_processes(place: Path, files_in: Any) -> None:
    before = files_in(place)
    for words in draw_mistakes(4, seed=99):
        done = subprocess.run(
            [sys.executable, "-m", "megatrain", *words], capture_output=True, text=True, check=False
        )
        check_line(words, done.returncode, done.stdout, done.stderr)
    assert files_in(place) == before


TRAIN = ("train", "plan.toml", "--steps", "2", "--device", "cpu")
TRAIN_MODEL = ("train", "tiny", "--data", "corpus", "--device", "cpu", "--out", "new")
DATA = ("data", "corpus", "--model")
EXPENSIVE = {
    "missing data": (*TRAIN, "--data", "gone", "--out", "new"),
    "data by a name that is not UTF-8": (*TRAIN, "--data", "bad\udce9.txt", "--out", "new"),
    "out that exists": (*TRAIN, "--data", "corpus", "--out", "corpus"),
    "out that cannot be made": (*TRAIN, "--data", "corpus", "--out", "/proc/nope/x"),
    "edited plan": ("train", "edited.toml", *TRAIN[2:], "--data", "corpus", "--out", "new"),
    "missing model": (*TRAIN, "--data", "corpus", "--out", "new", "--model", "./gone"),
    "missing weights": (*TRAIN, "--data", "corpus", "--out", "new", "--model", "weightless"),
    "missing weights of a model": ("train", "weightless", "--data", "corpus", "--out", "new"),
    "misspelt optimizer": (*TRAIN_MODEL, "--optimizer", "lion"),
    "misspelt policy": (*TRAIN_MODEL, "--policy", "zigzag"),
    "cache by a name that is not UTF-8": (*TRAIN_MODEL, "--data-cache", "bad\udce9"),
    "missing chat template": (*TRAIN_MODEL, "--chat-template", "gone"),
    "missing chat template of data": (*DATA, "tiny", "--chat-template", "gone"),
    "data for a missing model": (*DATA, "gone"),
    "missing checkpoint": ("train", "--resume", "run", "--from-step", "3", "--device", "cpu"),
    "export of no run": ("export", "corpus", "--out", "new"),
    "export to what exists": ("export", "corpus", "--out", "tiny"),
    "calibration of a missing model": ("calibrate", "gone", "--out", "new.toml"),
    "calibration of too large a batch": ("calibrate", "tiny", "--batch", "9999999", "--out", "n"),
    "chat without a model": ("chat", "corpus", "--prompt", "hello"),
    "report where nothing can be": ("report", "corpus", "--out", "/proc/nope/x.html"),
}
"""Mistakes that are found without PyTorch, which takes seconds to load."""


def test_mistakes_are_reported_before_pytorch_is_loaded(place: Path, files_in: Any) -> None:
    check_all([list(words) for words in EXPENSIVE.values()], place, files_in)


ON_A_GPU = {
    "calibrate": ("calibrate", "tiny", "--out", "new.toml", "--device", "cuda"),
    "train": (*TRAIN[:4], "--data", "corpus", "--out", "new", "--device", "cuda"),
    "train MODEL": ("train", "tiny", "--data", "corpus", "--out", "new", "--device", "cuda"),
    "eval": ("eval", "run", "--data", "corpus", "--device", "cuda"),
    "chat": ("chat", "tiny", "--prompt", "hello", "--device", "cuda"),
}


def test_a_missing_gpu_is_reported_before_pytorch_is_loaded(
    place: Path, files_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_all([list(words) for words in ON_A_GPU.values()], place, files_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(options, "_GPU_DRIVERS", ("/dev/no-such-driver",))
    with pytest.raises(UserError, match="found cuda, but no GPU driver"):
        options.refuse_missing_gpu(argparse.Namespace(device="cuda"))
    options.refuse_missing_gpu(argparse.Namespace(device="auto"))


@pytest.mark.usefixtures("workplace")
def test_the_probe_notices_pytorch_and_valid_invocations() -> None:
    train = ["train", *VALID["train"]]
    (fine, loads) = outcomes([["list", "optimizers"], train])
    assert fine[0] == 0
    assert loads[0] is None
    assert "imports torch" in loads[2]
