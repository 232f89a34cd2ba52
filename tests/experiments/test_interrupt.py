"""Ctrl-C: one line, status 130, soon; no half-written model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments.cli import VERBS
from megatrain.simulator.errors import Interrupted

# a shell that starts a process in the background has it ignore SIGINT: undo that
PROGRAM = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom megatrain.experiments.cli import main\nsys.exit(main())"


@pytest.mark.parametrize("steps_before", [1, 6])
def test_ctrl_c_while_training(steps_before: int, workplace: Path) -> None:
    words = ["train", "plan.toml", "--data", "corpus", "--steps", "100000", "--device", "cpu", "--out", "run"]
    metrics = workplace / "run" / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not (metrics.exists() and metrics.read_text().count("\n") >= steps_before):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline, "no step within a minute"
                time.sleep(0.01)
            time.sleep(0.005 * steps_before)  # into the next step
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 130
    assert complaint == "megatrain: interrupted\n"
    assert set(os.listdir(workplace / "run")) == {"plan.toml", "config.toml", "environment.json", "metrics.jsonl"}
    assert (workplace / "run" / "metrics.jsonl").read_text().endswith("}\n")


@pytest.mark.usefixtures("workplace")
def test_ctrl_c_while_the_model_is_written(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.runtime import model_files

    def interrupt(path: Path, _: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_files, "write_tensors", interrupt)
    outcome = command("train", "plan.toml", "--data", "corpus", "--steps", 2, "--device", "cpu", "--out", "run")
    assert outcome.status == 130
    assert outcome.err == "megatrain: interrupted\n"
    assert set(os.listdir("run")) == {"plan.toml", "config.toml", "environment.json", "metrics.jsonl", "memory.json", "measured.json"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_status_tells_which_signal_it_was(command: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int) -> None:
    def end(_: object) -> int:
        raise Interrupted(number)

    monkeypatch.setattr(VERBS["check"], "run", end)
    outcome = command("check", "llama-3.1-8b", "--hardware", "h200")
    assert (outcome.status, outcome.err) == (status, "megatrain: interrupted\n")
