"""Reads the pages of the documentation: README.md, CONTRIBUTING.md and docs/*.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def read(page: str) -> str:
    """Returns the text of a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Returns the fenced blocks of a page."""
    return [
        Block(page, *found)
        for found in re.findall(r"^```([^\n]*)\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    ]


def saved_examples(page: str) -> dict[str, str]:
    """Returns {file: source} of the page's Python examples that say "Saved as `FILE`" below."""
    found = re.findall(r"```python\n(.*?)```\s+Saved as `(\w+\.py)`", read(page), re.DOTALL)
    return {file: code.rpartition("```python\n")[2] for code, file in found}


def name(page: Path) -> str:
    """Returns the page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def words(line: str) -> list[str]:
    """Returns the words of a command line that begins with `megatrain` or `$ megatrain`.

    The comment after it and `megatrain` itself are left out.
    """
    return re.split(r" {3,}| +# ", line.removeprefix("$ "))[0].split()[1:]


COMMANDS = [
    (block.page, line)
    for page in PAGES
    for block in blocks(name(page))
    for line in re.sub(r" \\\n +", " ", block.text).splitlines()
    if line.startswith(("megatrain ", "$ megatrain "))
]
"""(page, line) of every line in a fenced block that begins with `megatrain`.

Lines that a backslash continues are one line here.
"""
