"""Tests of runs that are really killed while they train or save.

After a resume, the results have the bits of a run that was not killed.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.runtime.training.interruption import SIGNALS, Interruption
from megatrain.simulator.base.errors import Interrupted

STEPS, EVERY = 12, 3


class Driver:
    """Starts runs one at a time, through `fault_driver.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        program = Path(__file__).with_name("fault_driver.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def start(self, checkpoints: Path, log: Path, **options: Any) -> int:
        """Starts a run and returns its process id."""
        given = {
            "folder": str(checkpoints),
            "log": str(log),
            "steps": STEPS,
            "every": EVERY,
            "policy": "overlapped",
            **options,
        }
        return self._ask(json.dumps(given))

    def wait(self) -> int:
        """Returns the run's exit status, which is minus the signal if it was killed."""
        return self._ask("")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    made = Driver(tmp_path_factory.mktemp("driver"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(driver: Driver) -> dict[str, str]:
    """Returns the log of a run that is not killed and saves only at its end.

    The log maps `step N` to loss and norm, and `finished` to a digest of all state.
    """
    log = driver.folder / "undisturbed"
    driver.start(driver.folder / "undisturbed-checkpoints", log, every=10**6)
    assert driver.wait() == 0
    return said(lines(log))


def lines(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def said(words: list[list[str]]) -> dict[str, str]:
    return {
        " ".join(line[:2]) if line[0] == "step" else line[0]: " ".join(
            line[2:] if line[0] == "step" else line[1:]
        )
        for line in words
        if line[0] in ("step", "finished")
    }


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.0005)


def reached(log: Path, before: int, word: str) -> bool:
    """Returns whether this run has logged `word`. Its log begins at line `before`."""
    return any(line[0] == word for line in lines(log)[before:])


def kill_and_resume(
    driver: Driver, folder: Path, undisturbed: dict[str, str], kills: int
) -> Counter[str]:
    """Kills `kills` runs at random moments. Each resumes from the previous run's checkpoint.

    Returns how often a run was killed after each log word.
    """
    generator, log, checkpoints = random.Random(7), folder / "log", folder / "checkpoints"
    died: Counter[str] = Counter()
    for number in range(kills):
        before = len(lines(log))
        process = driver.start(checkpoints, log, steps=10**6)
        word = ("training", "writing", "saving")[number % 3]
        until(lambda: reached(log, before, word))  # noqa: B023
        time.sleep(generator.uniform(0, 0.02 if word == "writing" else 0.06))
        os.kill(process, signal.SIGKILL)
        assert driver.wait() == -signal.SIGKILL
        words = lines(log)
        died[words[-1][0]] += 1
        saved = max([int(line[1]) for line in words[:before] if line[0] == "saved"], default=0)
        resumed = int(words[before][1])
        assert words[before][0] == "resumed"
        assert resumed >= saved, "a saved checkpoint was lost"
        assert resumed % EVERY == 0
        folders = (
            sorted(path for path in checkpoints.iterdir() if path.name.startswith("step-"))
            if checkpoints.exists()
            else []
        )
        for path in folders:
            assert verify(path).run.step == int(path.name.removeprefix("step-")), (
                "an incomplete checkpoint has the name of a complete one"
            )
    last = max((int(line[1]) for line in lines(log) if line[0] == "step"), default=0)
    driver.start(checkpoints, log, steps=max(last, STEPS))
    assert driver.wait() == 0, lines(log)[-1]
    steps: dict[str, set[str]] = {}
    for line in lines(log):
        if line[0] == "step":
            steps.setdefault(line[1], set()).add(" ".join(line[2:]))
    assert all(len(values) == 1 for values in steps.values()), "a repeated step had another result"
    if last > STEPS:  # The killed runs went further than the run in `undisturbed`.
        driver.start(folder / "again", folder / "again.log", steps=last, every=10**6)
        assert driver.wait() == 0
        undisturbed = said(lines(folder / "again.log"))
    found = said(lines(log))
    assert found == undisturbed
    assert not [path.name for path in checkpoints.iterdir() if path.name.startswith(".")], (
        "an interrupted save left a file"
    )
    return died


def test_three_kills(driver: Driver, undisturbed: dict[str, str], tmp_path: Path) -> None:
    kill_and_resume(driver, tmp_path, undisturbed, 3)


@pytest.mark.nightly
def test_twenty_kills(driver: Driver, undisturbed: dict[str, str], tmp_path: Path) -> None:
    died = kill_and_resume(driver, tmp_path, undisturbed, 20)
    assert died["training"] + died["step"] >= 4, died
    assert died["saving"] + died["writing"] >= 4, died
    assert died["writing"] >= 2, died


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_step_and_saves(
    driver: Driver, undisturbed: dict[str, str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """A signal ends the run after the current step, which is saved.

    A new run resumes from that step, so nothing is lost.
    """
    log = tmp_path / "log"
    driver.start(tmp_path / "checkpoints", log, every=10**6, signals={"training 5": number})
    assert driver.wait() == status
    words = lines(log)
    assert words[-4][:2] == ["step", "5"]
    assert [words[-3], words[-1]] == [["saving", "5"], ["saved", "5"]]
    driver.start(tmp_path / "checkpoints", log, every=10**6)
    assert driver.wait() == 0
    assert ["resumed", "5"] in lines(log)
    assert said(lines(log)) == undisturbed


def test_a_second_signal_ends_the_save(driver: Driver, tmp_path: Path) -> None:
    log = tmp_path / "log"
    signals = {"training 2": signal.SIGTERM, "writing": signal.SIGINT}
    driver.start(tmp_path / "checkpoints", log, every=10**6, signals=signals)
    assert driver.wait() == 130
    assert not list((tmp_path / "checkpoints").iterdir())
    assert lines(log)[-1][0] == "writing"


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interruption(lambda: "after step 3; saved") as interruption:
        assert not interruption
        assert str(interruption.error()) == (
            "a signal to another rank ended the training after step 3; saved"
        )
        assert interruption.error().status == 143
        signal.raise_signal(signal.SIGTERM)
        assert interruption
        assert interruption.error().status == 143
        first = str(pickle.loads(pickle.dumps(interruption.error())))
        assert first == "SIGTERM ended the training after step 3; saved"
        with pytest.raises(Interrupted) as second:
            signal.raise_signal(signal.SIGINT)
        assert second.value.status == 130
        assert str(second.value) == (
            "a second signal, SIGINT, ended the training at once, after step 3; saved"
        )
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """So a run under nohup goes on after its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption(lambda: "") as interruption:
            signal.raise_signal(signal.SIGHUP)
            assert not interruption
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_hangup_is_no_second_signal(first: signal.Signals) -> None:
    """The shell and the system may both send one when a terminal is closed."""
    with Interruption(lambda: "") as interruption:
        for number in (first, signal.SIGHUP):
            signal.raise_signal(number)
        assert interruption.error().status == 128 + first
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)


def test_after_a_hangup_a_closed_terminal_is_not_written_to() -> None:
    """An open terminal stays as it is."""
    kept, (ours, theirs) = os.dup(1), os.openpty()
    try:
        os.dup2(theirs, 1)
        os.close(theirs)
        with Interruption(lambda: ""):
            signal.raise_signal(signal.SIGHUP)
            assert os.isatty(1)
            os.close(ours)
            with pytest.raises(OSError, match="Input/output error"):
                os.write(1, b"lost")
            signal.raise_signal(signal.SIGHUP)
        assert os.write(1, b"discarded") == 9
        assert os.path.samestat(os.fstat(1), os.stat(os.devnull))
    finally:
        os.dup2(kept, 1)
        os.close(kept)
