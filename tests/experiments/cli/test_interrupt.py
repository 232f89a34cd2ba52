"""Tests of Ctrl-C outside of training steps: one line, status 130 and no half-written model.

`test_resume.py` tests Ctrl-C between training steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments.cli.main import VERBS
from megatrain.simulator.base.errors import Interrupted


@pytest.mark.usefixtures("workplace")
def test_ctrl_c_while_the_model_is_written(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.runtime.files import model_files

    def interrupt(path: Path, _: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_files, "write_tensors", interrupt)
    outcome = command(
        "train", "plan.toml", "--data", "corpus", "--steps", 2, "--device", "cpu", "--out", "a run"
    )
    assert outcome.status == 130
    assert outcome.err == (
        "megatrain: stopped after step 2; saved; continue with: megatrain train --resume 'a run'\n"
    )
    assert set(os.listdir("a run")) == {
        "checkpoints",
        "plan.toml",
        "config.toml",
        "environment.json",
        "data.json",
        "metrics.jsonl",
        "models.json",
        "memory.json",
        "measured.json",
    }


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_status_names_the_signal(
    command: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    def end(_: object) -> int:
        raise Interrupted(number)

    monkeypatch.setattr(VERBS["check"], "run", end)
    outcome = command("check", "llama-3.1-8b", "--hardware", "h200")
    assert (outcome.status, outcome.err) == (status, "megatrain: interrupted\n")


_LATE = """
import os, signal, time
from megatrain.experiments.cli.program import interruptible
from megatrain.simulator.base.errors import Interrupted

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass

try:
    with interruptible():
        Late()
        time.sleep(60)
except Interrupted as error:
    print(error.status)
"""


def test_a_signal_that_arrives_in_a_finalizer_is_not_lost() -> None:
    """Python ignores an exception in `__del__`, and the run would go on to its end."""
    done = subprocess.run(
        [sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("143", "")
