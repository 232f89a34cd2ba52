"""The nightly gate: the tests notice most breakages of the simulator and the runtime.

`make mutation` runs it and `docs/mutation.md` explains it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="comes with `pip install -e .[dev,mutation]`")
ROOT = Path(__file__).parents[2]


def mutate(*words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "typings"), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "tests/mutation/mutate.py", *words], cwd=ROOT, env=environment, check=True
    )


@pytest.fixture(scope="module")
def recorded() -> None:
    shutil.rmtree(ROOT / ".mutation", ignore_errors=True)
    mutate("record")


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("package", ["simulator", "runtime"])
def test_85_percent_of_the_breakages_are_noticed(package: str) -> None:
    mutate("run", package, "--mutants", "120", "--seconds", "300", "--at-least", "0.85")
