"""Fixtures of the tests of the command line: a tiny model, a corpus, a plan and the command itself.

The command runs in the process of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from short_model import SHORT

from megatrain.experiments.cli import main as cli

WORK = ["--batch", "2", "--seq", "16", "--loss-chunk", "16", "--dtype", "fp32"]


class Outcome(NamedTuple):
    """The status, standard output and standard error of one command."""

    status: int
    out: str
    err: str


def make_tiny_model(folder: Path) -> int:
    """Saves a Llama with random weights in Hugging Face format; returns the parameter count."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_small_tokenizer(folder: Path) -> None:
    """Saves a byte-level BPE tokenizer with fewer than 320 ids and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["how are you, I am well"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "<e>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<e>")
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m.role }}\\n{{ m.content }}<e>{% endfor %}{% if"
        " add_generation_prompt %}<s>assistant\\n{% endif %}"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[[Path], None]:
    return make_small_tokenizer


@pytest.fixture(scope="session")
def make_model() -> Callable[[Path], int]:
    return make_tiny_model


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, a corpus and a plan, which `workplace` copies for each test.

    Tests must not change it.
    """
    place = tmp_path_factory.mktemp("prepared")
    make_tiny_model(place / "tiny")
    (place / "corpus").mkdir()
    for name in ("one.txt", "two.py"):
        (place / "corpus" / name).write_text(
            "".join(f"line {number} of {name}\n" for number in range(200))
        )
    words = [
        "plan",
        str(place / "tiny"),
        "--hardware",
        "h200",
        "--policy",
        "double_buffer",
        *WORK,
        "--out",
        str(place / "plan.toml"),
    ]
    assert cli.main(words) == 0
    return place


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with a model `tiny`, a `corpus` and a `plan.toml`, and changes into it."""
    place = tmp_path / "place"
    shutil.copytree(prepared, place)
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def short_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes into a folder with the config of `short_model.SHORT` as `config.json`."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(SHORT.config))


@pytest.fixture(scope="session")
def finished(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a finished run of three steps. Tests must not change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    words = [
        "train",
        str(prepared / "plan.toml"),
        "--data",
        str(prepared / "corpus"),
        "--steps",
        "3",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    assert cli.main(words) == 0
    return out


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Returns a function that runs `megatrain WORDS` in this process."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        status = cli.main([str(word) for word in words])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def with_pictures() -> None:
    """Switches on the pictures of commands, for tests that look at them."""


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches off the pictures of commands, which take longer than a run of a few steps. Those of
    `compare` and of a sweep are empty files.
    """
    from megatrain.experiments.run_report import pictures
    from megatrain.experiments.sweep import picture
    from megatrain.simulator.base.files import write_bytes
    from megatrain.simulator.plots import canvas

    if "with_pictures" not in request.fixturenames:
        monkeypatch.setattr(pictures, "draw_loss", lambda *_: None)
        monkeypatch.setattr(canvas, "save", lambda _, path: write_bytes(path, b""))
        monkeypatch.setattr(picture, "file_bytes", lambda *_, **__: b"")


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches searches and reasons, for tests that print a verdict both as text and as JSON."""
    from megatrain.simulator.planner import search
    from megatrain.simulator.verdict import verdict

    for module, name in ((search, "candidates"), (verdict, "explain")):
        monkeypatch.setattr(module, name, remembering(getattr(module, name)))


@pytest.fixture
def without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the advice of verdicts empty, for tests that do not look at it.

    Each entry is a search of its own, and together they take half of the time of `check`.
    """
    from megatrain.simulator.verdict.advice import Adviser

    monkeypatch.setattr(Adviser, "suggestions", lambda _: ())


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with a cache: it is called once for the same arguments."""
    known: dict[str, Any] = {}

    def remembered(*args: Any, **given: Any) -> Any:
        key = repr((args, given))
        if key not in known:
            known[key] = function(*args, **given)
        return known[key]

    return remembered


@pytest.fixture(scope="session")
def files_in() -> Callable[[Path], dict[str, bytes | None]]:
    """Returns a function that maps each path below a folder to its content (None for a folder)."""

    def read(folder: Path) -> dict[str, bytes | None]:
        return {
            os.path.relpath(path, folder): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))
        }

    return read
