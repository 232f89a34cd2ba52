"""Starts the ranks of a plan for several GPUs as processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


class Driver:
    """Starts ranks through `rank_driver.py`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs, self._out = folder, 0, list[Path]()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _ask(self, line: str) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: list[int] = json.loads(self._answer())
        return answer

    def start(self, runs: list[list[list[str]]], **more: Any) -> list[int]:
        """Starts the runs of each rank, one after the other, and returns the process ids.

        `more` has further keys for `rank_driver.py`.
        """
        self._runs += 1
        self._out = [self._folder / f"{self._runs}.{rank}" for rank in range(len(runs))]
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in runs[0]]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
        out = [str(path) for path in self._out]
        request = {"runs": runs, "ports": ports, "out": out, **more}
        return self._ask(json.dumps(request))

    def printed(self, rank: int) -> str:
        """Returns what a rank has printed so far."""
        return self._out[rank].read_text() if self._out[rank].exists() else ""

    def wait(self) -> list[int]:
        """Returns the exit statuses of the ranks."""
        return self._ask("")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
