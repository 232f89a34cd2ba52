"""Models with few layers, whose plans are found quickly, and what commands print about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_model import SMALL

from megatrain.experiments.cli import main as cli
from megatrain.simulator.model.specs import ModelSpec

SHORT = SMALL.shortest(3)


def shortened(name: str, layers: int, folder: Path = Path()) -> str:
    """Writes the config of a model of the library, with only its first layers, into `folder`.
    Returns the name of the file, which is `NAME-LAYERS.json`.
    """
    file = f"{name}-{layers}.json"
    (folder / file).write_text(json.dumps(ModelSpec.load(name).with_layers(layers).config))
    return file


def out(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """Runs a command that ends with `status`. Returns what it prints."""
    assert cli.main(list(words)) == status
    return capsys.readouterr().out


def checked(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    """Returns the verdict that `check` prints as JSON. `words` include the model, and `status` is
    that of the command.
    """
    found: dict[str, Any] = json.loads(out(capsys, "check", *words, "--json", status=status))
    return found
