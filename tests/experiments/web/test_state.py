"""Tests of the values in the page's address, which `state.js` reads."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import parse_count

STATE = Path(__file__).parents[3] / "experiments" / "web" / "state.js"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def evaluated(expression: str) -> Any:
    """Returns the value of a JavaScript expression that uses the functions of the page."""
    script = f"{STATE.read_text()}\nconsole.log(JSON.stringify({expression}))"
    printed = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    return json.loads(printed.stdout)


def counted(text: str) -> int | None:
    try:
        return parse_count(text)
    except UserError:
        return None


def test_the_page_and_the_command_accept_the_same_counts() -> None:
    numbers = ("0", "0.4", "0.5", "0.6", "1", "1.5", "2.5", "1e9", "007", ".5", "5.", "-1", "")
    units = ("", "k", "K", "m", "M", "b", "B", "g", "G", "t", "T", "kB", "x", " B", "B ")
    texts = [f"{number}{unit}" for number in numbers for unit in units]
    texts += ["0.0005k", "2.0005K", "0.0125k", "1152921T", "1152922T", "1" * 400, "1,000", "1 0"]
    found = evaluated(f"{json.dumps(texts)}.map(parseCount)")
    assert dict(zip(texts, found, strict=True)) == {text: counted(text) for text in texts}


def test_tokens_in_a_link_are_read_like_those_in_the_field() -> None:
    links = ["1,000", " 1,000 ", "1,00", "1b"]
    queries = (
        f"{json.dumps(links)}.map((tokens) => readState(new URLSearchParams({{tokens}}), {{}}))"
    )
    assert [state["tokens"] for state in evaluated(queries)] == ["1000", "1000", "1,00", "1b"]
    assert evaluated('readState("", {tokens: "100M"})')["tokens"] == "100M"
