"""Tests of README.md, CONTRIBUTING.md and docs/: links, file names, and the README's length.

`make docs` checks the links too, and those of the results' pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, name, read

_NAMED = re.compile(r"`((?:simulator|runtime|experiments|paper_figures|tests|docs)/[\w./*-]*)`")
_PLACES = {
    "simulator": ROOT / "simulator",
    "runtime": ROOT / "runtime",
    "experiments": ROOT / "experiments",
}


def prose(text: str) -> str:
    """Returns the text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target  # a folder is not a page of the site
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page: Path) -> None:
    for path in _NAMED.findall(page.read_text(encoding="utf-8")):
        assert path == "simulator/policies/pinned.py" or (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_of_prose_have_at_most_100_columns(page: Path) -> None:
    """Tables and single words, such as long links, may be longer."""
    lines = prose(page.read_text(encoding="utf-8")).splitlines()
    assert not [
        line
        for line in lines
        if len(line) > 100 and " " in line.strip().removeprefix("* ") and line[0] not in "|!["
    ]


def test_the_folders_of_the_architecture_exist() -> None:
    tables = re.findall(
        r"^### `(\w+)/`.*?\n(\|.*?)\n\n", read("docs/architecture.md"), re.DOTALL | re.MULTILINE
    )
    assert [folder for folder, _ in tables] == list(_PLACES)
    for folder, table in tables:
        names = [
            named
            for row in table.splitlines()[2:]
            for named in re.findall(r"`([\w/]+)`", row.split("|")[1])
        ]
        assert len(names) > 5
        for named in names:
            place = _PLACES[folder] / named
            assert place.is_dir() if named.endswith("/") else place.with_suffix(".py").is_file(), (
                f"{folder}/{named}"
            )


def test_every_page_is_on_the_site() -> None:
    listed = {
        entry
        for block in blocks("docs/index.md")
        for entry in re.findall(r"^(?:.*<)?([\w./]+)>?$", block.text, re.MULTILINE)
    }
    for page in PAGES:
        if page.name != "index.md":
            path = f"../{page.stem}" if page.parent == ROOT else page.stem
            assert path in listed, path


def test_the_readme_s_results_are_those_of_their_sources() -> None:
    (section,) = re.findall(r"^## Results\n(.*?)^## ", read("README.md"), re.DOTALL | re.MULTILINE)
    links = re.findall(r"\[([^\]]+)\]\((experiments/[^)]+)\)", section)
    assert len(links) == 13
    for text, source in links:
        numbers = re.findall(r"\d[\d,.]*(?:e-\d+)?(?: %)?", text)
        assert numbers
        assert all(number in read(source) for number in numbers), (text, source)


def test_the_errors_on_published_figures_are_those_of_the_stored_result() -> None:
    rows = re.findall(
        r"^\| [^|]* (\| \d+ \| [\d.]+ % \| [\d.]+ % \| [\d.]+ % \|)$",
        read("docs/accuracy.md"),
        re.MULTILINE,
    )
    assert len(rows) == 12
    source = read("experiments/results/published/README.md")
    assert all(row in source for row in rows)


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 150
