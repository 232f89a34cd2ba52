"""Tests of names: classes have different names, and the list of equivalent breakages is current."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("simulator", "runtime", "experiments", "paper_figures")


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    assert len(found) > 300, "the sources were found"
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_equivalent_breakages_are_lines_of_the_code() -> None:
    """An entry whose line was changed would no longer be recognized (`docs/mutation.md`)."""
    named = tomllib.loads((ROOT / "tests/mutation/equivalent.toml").read_text())["equivalent"]
    assert len(named) > 70
    assert [
        (entry["file"], entry["before"])
        for entry in named
        if entry["before"]
        not in (line.strip() for line in (ROOT / entry["file"]).read_text().splitlines())
    ] == []
