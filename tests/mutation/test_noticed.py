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


@pytest.mark.nightly
@pytest.mark.timeout(8 * 3600)
def test_85_percent_of_the_breakages_are_noticed() -> None:
    shutil.rmtree(ROOT / ".mutation", ignore_errors=True)
    subprocess.run(
        [
            sys.executable,
            "tests/mutation/mutate.py",
            "simulator",
            "runtime",
            *("--mutants", "120", "--seconds", "300", "--at-least", "0.85"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "typings"), "OMP_NUM_THREADS": "1"},
        check=True,
    )
