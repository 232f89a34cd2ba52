"""Tests of axis ticks on the pages, which `axes.js` computes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

AXES = Path(__file__).parents[3] / "experiments" / "run_report" / "axes.js"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_tick_at_zero_has_no_sign() -> None:
    (ticks,) = re.findall(r"^function ticks\(.*?^}", AXES.read_text(), re.DOTALL | re.MULTILINE)
    script = f"{ticks}\nconsole.log(ticks(-0.1, 2, 3).values.map((x) => Object.is(x, -0)).join())"
    printed = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "false,false,false"
