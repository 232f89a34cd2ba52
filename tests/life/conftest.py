"""Fixtures of the tests of signals: commands in processes of their own, and a folder for them.

Real signals end the commands. The folder has a tiny model, a corpus and plans of three policies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

POLICIES = ("double_buffer", "overlapped", "resident")
WORK = (
    "--batch",
    "2",
    "--seq",
    "16",
    "--loss-chunk",
    "16",
    "--dtype",
    "fp32",
    "--accumulation",
    "2",
)


At = tuple[str, int, str]
"""(function as MODULE:NAME, number of its call, name of the signal that is sent right before it)"""


class Ended(NamedTuple):
    """The status and the output of a command that has ended.

    The status is minus the signal's number if a signal ended the process.
    """

    status: int
    text: str

    @property
    def refusal(self) -> str:
        """The error message. Asserts that there is only one and no traceback."""
        assert self.status in (1, 2), self
        (line,) = [line for line in self.text.splitlines() if line.startswith("megatrain: ")]
        assert "Traceback" not in self.text
        return line


class Running:
    """A started command, which may still run."""

    def __init__(self, driver: Driver, pid: int, log: Path) -> None:
        self.pid, self._driver, self._log = pid, driver, log
        self._handle = os.pidfd_open(pid)

    def ends_within(self, seconds: float) -> bool:
        """Returns whether the command ends within this time."""
        return bool(select.select([self._handle], [], [], seconds)[0])

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended already."""
        if not self.ends_within(0):
            signal.pidfd_send_signal(self._handle, number)

    def wait(self) -> Ended:
        status = int(self._driver.ask(str(self.pid)))
        os.close(self._handle)
        return Ended(status, self._log.read_text(errors="replace"))


class Driver:
    """Starts commands with `command_driver.py`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
        program = [sys.executable, str(Path(__file__).with_name("command_driver.py"))]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._started = 0
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def start(
        self,
        folder: Path,
        *words: object,
        at: At | None = None,
        and_at: At | None = None,
        ignores: Sequence[str] = (),
    ) -> Running:
        """Starts `megatrain WORDS` in `folder`.

        `at` and `and_at` are signals that the command gets right before a call. `ignores` names
        signals that it ignores from the start.
        """
        self._started += 1
        log = folder.parent / f"command-{self._started}.log"
        given = {
            "words": [*map(str, words)],
            "folder": str(folder),
            "log": str(log),
            "at": [each for each in (at, and_at) if each],
            "ignores": list(ignores),
        }
        return Running(self, int(self.ask(json.dumps(given))), log)

    def run(self, folder: Path, *words: object, **given: Any) -> Ended:
        return self.start(folder, *words, **given).wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


def _makers() -> ModuleType:
    """Returns the module `tests/experiments/conftest.py`, which can make a tiny model."""
    spec = importlib.util.spec_from_file_location(
        "makers", Path(__file__).parent.parent / "experiments" / "conftest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, driver: Driver) -> Path:
    """Returns the folder that `workplace` copies for each test. Tests must not change it."""
    place: Path = tmp_path_factory.mktemp("life") / "place"
    place.mkdir()
    makers = _makers()
    makers.make_tiny_model(place / "tiny")
    makers.make_small_tokenizer(place / "tiny")
    (place / "corpus").mkdir()
    (place / "corpus" / "one.txt").write_text(
        "".join(f"line {number} of one\n" for number in range(200))
    )
    for policy in POLICIES:
        ended = driver.run(
            place,
            "plan",
            "tiny",
            "--hardware",
            "h200",
            "--policy",
            policy,
            *WORK,
            "--out",
            f"{policy}.toml",
        )
        assert ended.status == 0, ended.text
    return place


@pytest.fixture(scope="session")
def prepared_run(prepared: Path, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a workplace with a `run` of two steps, both saved. Tests must not change it."""
    place: Path = tmp_path_factory.mktemp("trained") / "place"
    shutil.copytree(prepared, place)
    words = (
        "train",
        "overlapped.toml",
        "--data",
        "corpus",
        "--data-cache",
        "cache",
        "--device",
        "cpu",
        "--steps",
        2,
        "--save-every",
        1,
        "--out",
        "run",
    )
    ended = driver.run(place, *words)
    assert ended.status == 0, ended.text
    return place


@pytest.fixture
def trained(prepared_run: Path, tmp_path: Path) -> Path:
    """Returns a copy of `prepared_run` that the test may change."""
    shutil.copytree(prepared_run, tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture(scope="session")
def leftovers() -> Any:
    """Returns a function that lists the temporary files below a folder.

    Only a command that is running may have such files.
    """

    def find(folder: Path) -> list[str]:
        marks = (".aside-", ".saving-", ".removing-", ".replaced-", ".lock")
        return sorted(
            path.name for path in folder.rglob("*") if any(mark in path.name for mark in marks)
        )

    return find
