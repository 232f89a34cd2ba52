"""Tests of `examples/`: each example runs, and the image's file agrees with the project."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pages import ROOT, read

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def in_the_folder_of_the_examples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """Makes the examples importable, and changes into a temporary folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("chat_finetuning", "what_if_70b"):
        sys.modules.pop(name, None)


def test_a_chat_model_is_trained_and_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import chat_finetuning

    chat_finetuning.main(tmp_path / "chat-example", steps=4)
    printed = capsys.readouterr().out
    assert "recognized: messages, chat template of the tokenizer" in printed
    assert "step 4/4  loss " in printed
    answers = re.findall(r"^(.*\?) -> ", printed, re.MULTILINE)
    assert answers == list(chat_finetuning.QUESTIONS), "the notebook's test trains until they fit"


def test_what_if_is_a_table_of_machines_and_host_memory() -> None:
    import what_if_70b

    table = what_if_70b.what_if("qwen2.5-1.5b", ["rtx3080-10gb", "h200"], [1, 64])
    assert list(table["machine"]) == ["rtx3080-10gb"] * 2 + ["h200"] * 2
    assert list(table["host_gib"]) == [1, 64] * 2
    assert list(table["fits"]) == [False, True, True, True]
    assert list(table["tokens_per_second"].notna()) == list(table["fits"])
    assert table["tokens_per_second"][3] > table["tokens_per_second"][1]


@pytest.mark.nightly
def test_what_if_of_70b() -> None:
    import what_if_70b

    table = what_if_70b.what_if()
    assert len(table) == len(what_if_70b.MACHINES) * len(what_if_70b.HOST_GIB)
    assert table.pivot(index="machine", columns="host_gib", values="fits")[1536].all()


def test_the_notebook_s_cells_run_in_their_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    monkeypatch.setattr("tempfile.tempdir", str(Path.cwd()))
    names: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("True ")
    assert "step 30/30  loss " in printed
    assert printed.endswith("I am tiny.\n")


def test_the_page_names_every_example() -> None:
    page = read("examples/README.md")
    targets = re.findall(r"\]\(([^)#]+)", page)
    assert all((EXAMPLES / target).is_file() for target in targets)
    files = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"
    }
    assert files <= set(targets)
    assert "(examples/README.md)" in read("README.md")


def instructions() -> list[tuple[str, str]]:
    """Returns the name and the arguments of each instruction of the Dockerfile."""
    lines = [
        line for line in read("examples/docker/Dockerfile").splitlines() if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, arguments) for name, _, arguments in found]


def test_the_image_is_made_of_files_that_exist() -> None:
    """The image copies all files that the wheel is built from. The page has its build command."""
    copied = [
        source
        for name, arguments in instructions()
        if name == "COPY"
        for source in shlex.split(arguments)[:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads(read("pyproject.toml"))
    roots = {Path(path).parts[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    licenses = project["project"]["license-files"]
    needed = {*roots, "pyproject.toml", project["project"]["readme"], *licenses}
    assert needed <= set(copied)
    (built,) = re.findall(r"^docker build -f (\S+) ", read("examples/README.md"), re.MULTILINE)
    assert (ROOT / built).is_file()


def test_the_image_has_the_project_s_versions_and_command() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    by_name = dict(instructions())
    (python,) = re.findall(r"python:([\d.]+)-slim", by_name["FROM"])
    assert python in SpecifierSet(project["requires-python"])
    assert json.loads(by_name["ENTRYPOINT"]) == list(project["scripts"])
    installs = [arguments for _, arguments in instructions() if "pip install" in arguments]
    assert all(arguments.endswith("-c constraints.txt") for arguments in installs)
    pinned = dict(line.split("==") for line in read("constraints.txt").splitlines()[1:])
    for text in project["dependencies"]:
        requirement = Requirement(text)
        name = requirement.name.replace("-", "_")
        version = pinned.get(requirement.name) or pinned[name]
        assert version in requirement.specifier, text
