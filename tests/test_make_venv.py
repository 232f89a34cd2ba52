"""Tests of `.ci/make-venv`, which `make venv` runs, with a Python that installs nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pages import ROOT

# Its output shows when it was called. It makes the environment as a copy of itself.
PROGRAM = """#!/usr/bin/env bash
case "$1 $2" in
"-m venv")
    echo "called: venv"
    mkdir -p "${@: -1}/bin"
    cp "$0" "${@: -1}/bin/python"
    touch "${@: -1}/pyvenv.cfg"
    ;;
"-m pip") echo "called: pip" ;;
*) [[ "$2" != *print* ]] || echo 3.12 ;;
esac
"""


def test_each_phase_is_announced_before_it_begins(tmp_path: Path) -> None:
    """The first line comes at once and says what is installed and how long it takes."""
    program = tmp_path / "python3"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "constraints.txt").write_text("torch==2.9\n")
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "make-venv"), ".venv"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": str(program), "SYSTEM_TORCH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    lines = [line.removeprefix(".venv: ") for line in done.stdout.splitlines()]
    assert lines[0].startswith("PyTorch, transformers and the tools of the tests are installed")
    assert "about five minutes the first time" in lines[0]
    assert lines[1:] == [
        f"a new environment with {program} (Python 3.12)",
        "called: venv",
        "installing PyTorch, the largest download",
        "called: pip",
        "installing megatrain, transformers and the tools of the tests",
        "called: pip",
        "called: pip",
        "installing packages that only the tests read: TRL, bitsandbytes and torchao",
        "called: pip",
        "called: pip",
        "installed",
    ]
