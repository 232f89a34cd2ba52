"""Tests of the lock on a run's folder: only one process at a time can use the folder.

The lock ends with the process, even if the process is killed.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

NEW = (
    "train",
    "double_buffer.toml",
    "--data",
    "corpus",
    "--device",
    "cpu",
    "--steps",
    3,
    "--save-every",
    1,
)


@pytest.mark.parametrize(
    "second",
    [(*NEW, "--out", "run"), ("train", "--resume", "run", "--device", "cpu")],
    ids=["out", "resume"],
)
def test_a_second_run_in_the_same_folder_is_refused_by_the_name_of_the_first(
    driver: Any, workplace: Path, second: Any, leftovers: Any
) -> None:
    """The error message names the process of the first run, which is stopped before step 2."""
    first = driver.start(
        workplace,
        *NEW,
        "--out",
        "run",
        at=("megatrain.runtime.execution.executor:Executor.step", 2, "SIGSTOP"),
    )
    try:
        _until_stopped(first.pid)
        refused = driver.run(workplace, *second)
    finally:
        first.send(signal.SIGCONT)
    assert first.wait().status == 0
    who = (
        rf"process {first.pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\d"
        r" \d\d:\d\d:\d\d"
    )
    assert re.search(
        rf"^megatrain: run: found a run in use by {who}\S*; allowed: one process at a time; fix: ",
        refused.refusal,
    )
    assert (workplace / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert leftovers(workplace) == []


@pytest.mark.parametrize(
    "before",
    [
        "megatrain.runtime.training.trainer:Trainer._open_data",
        "megatrain.runtime.training.trainer:Trainer.__init__",
    ],
)
def test_the_folder_is_locked_before_anything_is_read(
    driver: Any, workplace: Path, before: str
) -> None:
    first = driver.start(workplace, *NEW, "--out", "run", at=(before, 1, "SIGSTOP"))
    try:
        _until_stopped(first.pid)
        refused = driver.run(workplace, *NEW, "--out", "run")
    finally:
        first.send(signal.SIGCONT)
    assert f"found a run in use by process {first.pid} on " in refused.refusal
    assert first.wait().status == 0


def test_a_killed_run_leaves_no_lock(driver: Any, workplace: Path, leftovers: Any) -> None:
    killed = driver.run(
        workplace,
        *NEW,
        "--out",
        "run",
        at=("megatrain.runtime.execution.executor:Executor.step", 3, "SIGKILL"),
    )
    assert killed.status == -signal.SIGKILL
    assert driver.run(workplace, "train", "--resume", "run", "--device", "cpu").status == 0
    assert (workplace / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert leftovers(workplace) == []


@pytest.mark.parametrize(
    "words", [("--steps", -1), ("--model", "nowhere"), ("--set", "data.columns=prompt")]
)
def test_a_run_that_is_refused_leaves_no_folder(
    driver: Any, workplace: Path, words: tuple[object, ...]
) -> None:
    assert driver.run(workplace, *NEW, *words, "--out", "deep/er/run").refusal
    assert not (workplace / "deep").exists()
    assert driver.run(workplace, *NEW, "--out", "deep/er/run").status == 0


def _until_stopped(pid: int) -> None:
    """Waits until the process is stopped or has ended.

    The process is a child of the driver, so this process cannot wait for it and polls its state.
    """
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
        time.sleep(0.005)
