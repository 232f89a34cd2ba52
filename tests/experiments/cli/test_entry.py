"""Tests of the start of the command: `python -m megatrain`, closed streams, Ctrl-C and full disks.

Others test the public names, types and versions of the packages.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import megatrain.runtime
import megatrain.simulator
from megatrain.experiments.cli.program import one_line_warnings
from megatrain.simulator.policies.policy import PolicyWarning

ROOT = Path(__file__).parents[3]


def run(*words: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `python -m megatrain WORDS` in a shell that redirects its streams."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "megatrain", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_is_the_command() -> None:
    done = run("--version")
    version = importlib.metadata.version("megatrain")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"megatrain {version}\n", "")


@pytest.mark.parametrize("redirect", [">&-", "<&- >&-"])
def test_a_closed_standard_output_is_no_error(redirect: str) -> None:
    done = run("check", "qwen3-0.6b", "--hardware", "h200", "--batch", "1", redirect=redirect)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_mistake_with_every_stream_closed() -> None:
    done = run("chekc", redirect="<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_the_warning_of_a_policy_that_is_left_out_is_one_line() -> None:
    place = ("search.py", 230)
    usual = warnings.formatwarning
    with one_line_warnings("megatrain"):
        found = warnings.formatwarning(PolicyWarning("left out: x"), PolicyWarning, *place)
        assert found == "megatrain: left out: x\n"
        other = warnings.formatwarning(UserWarning("another"), UserWarning, *place)
        assert "search.py:230: UserWarning: another" in other
    assert warnings.formatwarning is usual


def test_a_full_disk_behind_standard_output_gives_a_one_line_error() -> None:
    done = run("list", "optimizers", redirect=">/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("megatrain: output: found no space left on device;")
    assert done.stderr.count("\n") == 1


INTERRUPTED = """
import os, signal, sys
from megatrain.experiments.cli.entry import main

class CtrlC:
    def find_spec(self, name, *_):
        if name == "megatrain.experiments.cli.options":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.meta_path.insert(0, CtrlC())
sys.exit(main())
"""


def test_ctrl_c_during_imports_ends_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "megatrain: interrupted\n")


BEFORE_THE_HANDLER = """
import contextlib, io, os, re, signal, sys
before = set(sys.modules)
from megatrain.experiments.cli.entry import main
print(*sorted(set(sys.modules) - before))
"""


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    """Ctrl-C then shows a traceback only while Python itself starts."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_THE_HANDLER], capture_output=True, text=True, check=False
    )
    names = "megatrain megatrain.experiments megatrain.experiments.cli"
    assert (done.stdout, done.stderr) == (f"{names} megatrain.experiments.cli.entry\n", "")


def test_the_package_has_a_version() -> None:
    assert megatrain.__version__ == importlib.metadata.version("megatrain")
    with pytest.raises(AttributeError, match="'megatrain' has no attribute 'version'"):
        _ = megatrain.version


@pytest.mark.parametrize(
    "package",
    [megatrain, megatrain.simulator, megatrain.runtime],
    ids=lambda each: str(each.__name__),
)
def test_a_package_lists_its_public_names(package: Any) -> None:
    """Each listed name exists."""
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_every_package_has_types() -> None:
    """Each package has the file `py.typed`, in the repository and in the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for name, folder in setuptools["package-dir"].items():
        assert (ROOT / folder / "py.typed").exists(), name
        assert "py.typed" in setuptools["package-data"][name], name
