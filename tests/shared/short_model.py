"""A model with few layers, whose plans are found quickly, and what commands print about it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small_model import SMALL

from megatrain.experiments.cli import main as cli

SHORT = SMALL.shortest(3)


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that succeeds. Returns what it prints."""
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Returns the verdict that `check` prints as JSON. `words` include the model."""
    found: dict[str, Any] = json.loads(out(capsys, "check", *words, "--json"))
    return found
