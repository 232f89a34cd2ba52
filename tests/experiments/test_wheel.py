"""Tests of the wheel: installed into an empty environment, it has all files that the command needs.

The environment has access to the packages that are installed here, but not to this repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from pages import ROOT

from megatrain.experiments.paper_data.stored import digest

FOLDERS = {
    "simulator": "megatrain/simulator",
    "runtime": "megatrain/runtime",
    "experiments": "megatrain/experiments",
    "paper_figures": "megatrain/paper_figures",
}
_MOST_BYTES = 2_100_000


class Installed(NamedTuple):
    """The wheel, and a function that runs a program in the environment with the wheel."""

    wheel: Path
    run: Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Builds the wheel from a copy of the sources, and installs it without its dependencies."""
    place = tmp_path_factory.mktemp("wheel")
    sources = place / "sources"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=place,
            env=outside,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", sources)
    (wheel,) = (place / "dist").glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "env")
    (packages,) = (place / "env").glob("lib/python*/site-packages")
    # A path in a .pth file adds that folder's packages, but not what its own .pth files add, such
    # as an editable installation of this repository.
    found = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(found) + "\n")
    bin_folder = place / "env" / "bin"
    run(*pip, "--python", bin_folder / "python", "install", "--no-deps", "--no-index", wheel)
    return Installed(wheel, lambda program, *words: run(bin_folder / program, *words))


def test_the_wheel_has_only_the_files_that_are_needed(installed: Installed) -> None:
    """The wheel has all code and the stored results that it reads, in at most 2.1 MB.

    It has no pictures, pages, traces or plans of benchmarks.
    """
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    code = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
        if path.parent != ROOT / "experiments" / "cli" / "namespace"
    }
    own = {"megatrain/__init__.py", "megatrain/__main__.py"}
    assert {name for name in names if name.endswith(".py")} == code | own
    assert {f"{package}/py.typed" for package in ("megatrain", *FOLDERS.values())} <= names
    results = ROOT / "experiments" / "results"
    read = {
        f"megatrain/experiments/results/{path.relative_to(results).as_posix()}"
        for path in results.rglob("*")
        if path.suffix in (".json", ".csv", ".toml") or path.name == "rows.jsonl"
        if path.name not in ("trace.json", "plans.json", "speed.json", "quality.json", "host.csv")
        if not path.name.endswith(".plan.toml")
    }
    assert {name for name in names if "/results/" in name} == read
    endings = {Path(name).suffix for name in names if ".dist-info" not in name}
    code_and_data = {".py", ".json", ".toml", ".csv", ".jsonl", ".c", ".h", ".typed"}
    assert endings == {*code_and_data, ".html", ".css", ".js"}
    assert installed.wheel.stat().st_size < _MOST_BYTES


def test_the_installed_command_predicts_and_draws(installed: Installed) -> None:
    run = installed.run
    version = run("megatrain", "--version")
    assert version.startswith("megatrain ")
    assert run("python", "-m", "megatrain", "--version") == version
    checked = run("megatrain", "check", "qwen2.5-0.5b", "--hardware", "h200", "--batch", 1)
    assert checked.startswith("YES ")
    assert "rtx4090" in run("megatrain", "list", "hardware")
    drawn = run("megatrain", "figures", "table4", "--out", "drawn")
    assert "drawn/pictures/table4.png" in drawn
    program = (
        "from megatrain.experiments.paper_data import stored\n"
        "print(stored.__file__, stored.digest('table4'))"
    )
    home, found = run("python", "-c", program).split()
    assert str(ROOT) not in home
    assert found == digest("table4"), "the same inputs are read"


def test_the_installed_command_trains(installed: Installed, prepared: Path, tmp_path: Path) -> None:
    words = ("train", prepared / "plan.toml", "--data", prepared / "corpus", "--steps", 3)
    installed.run("megatrain", *words, "--device", "cpu", "--out", tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


SCRIPT = """
from megatrain.runtime import Config, Trainer
from megatrain.runtime.training.config import TrainingSettings
from megatrain.simulator import HardwareSpec, ModelSpec, Workload, judge

verdict = judge(ModelSpec.load("a"), HardwareSpec.load("h200"), Workload(batch=1, sequence=8))
reveal_type(verdict.step_seconds)
reveal_type(Trainer("plan.toml", config=Config(training=TrainingSettings(steps=3))).fit().loss)
Workload(batch="one", sequence=8)
"""
SETTINGS = """
[mypy]
[mypy-torch.*,transformers.*,numpy.*,pandas.*,pyarrow.*,rich.*,matplotlib.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


@pytest.mark.nightly
def test_a_script_is_checked_against_the_installed_types(
    installed: Installed, tmp_path: Path
) -> None:
    """mypy finds the types outside of the repository. It skips large packages to save time."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    words = ("-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", tmp_path / "cache")
    python = installed.wheel.parents[1] / "env" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, *map(str, words), "--python-executable", str(python), "script.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()[:-1]] == [
        'note: Revealed type is "float"',
        'note: Revealed type is "float | None"',
        'error: Argument "batch" to "Workload" has incompatible type "str"; expected "int"'
        "  [arg-type]",
    ], done.stdout


@pytest.mark.nightly
def test_the_installed_command_draws_every_figure(installed: Installed, tmp_path: Path) -> None:
    installed.run("megatrain", "figures", "--out", tmp_path)
    page = ROOT / "paper_figures" / "README.md"
    assert (tmp_path / "README.md").read_text() == page.read_text()
