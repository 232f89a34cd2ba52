"""Starts the ranks of a plan for several GPUs as processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


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

    def torchruns(self, folder: Path, hosts: int, per_host: int, *words: str) -> list[int]:
        """Starts a `torchrun` of `megatrain WORDS` for each host, and returns the process ids."""
        self._runs += 1
        self._out = [self._folder / f"{self._runs}.host-{host}" for host in range(hosts)]
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        request = {"torchruns": hosts, "per_host": per_host, "words": words, "port": port}
        out = [str(path) for path in self._out]
        return self._ask(json.dumps({**request, "folder": str(folder), "out": out}))

    def in_terminal(self, folder: Path, terminal: str, *words: str) -> int:
        """Starts `megatrain WORDS` as a process that takes `terminal`. Returns its process id."""
        request = {"terminal": terminal, "words": words, "folder": str(folder)}
        (process,) = self._ask(json.dumps(request))
        return process

    def printed(self, rank: int) -> str:
        """Returns what a rank has printed so far, or all ranks of a `torchrun`."""
        return self._out[rank].read_text() if self._out[rank].exists() else ""

    def wait(self) -> list[int]:
        """Returns the exit statuses of the ranks."""
        return self._ask("")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Agents:
    """Starts one `torchrun` for each host of a plan, all on this machine."""

    def __init__(self, folder: Path, hosts: int, per_host: int) -> None:
        """`folder` is the working directory, which also gets the output of each `torchrun`."""
        self._folder, self._hosts, self._per_host = folder, hosts, per_host
        self._processes: list[psutil.Popen] = []
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.left():
            process.kill()

    def start(self, module: str, *words: str) -> None:
        """Starts `python -m MODULE WORDS` in all ranks."""
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        torchrun = (
            *("-m", "torch.distributed.run"),
            *("--nnodes", str(self._hosts), "--nproc-per-node", str(self._per_host)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--rdzv-id", str(port), "--local-addr", "127.0.0.1"),
        )
        for host in range(self._hosts):
            with self._output(host).open("w") as output:
                self._processes.append(
                    psutil.Popen(
                        [sys.executable, *torchrun, "-m", module, *words],
                        cwd=self._folder,
                        stdout=output,
                        stderr=output,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )

    def _output(self, host: int) -> Path:
        return self._folder / f"host-{host}.txt"

    def printed(self, host: int | None = None) -> list[str]:
        """Returns the lines that the ranks of `host` have printed, or those of all hosts."""
        hosts = range(self._hosts) if host is None else (host,)
        return [line for each in hosts for line in self._output(each).read_text().splitlines()]

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns number -> process of the ranks that run."""
        found = {}
        for agent in self._processes:
            with contextlib.suppress(psutil.Error):
                for process in agent.children():
                    if number := process.environ().get("RANK"):
                        found[int(number)] = process
        self._seen.update(found.values())
        return found

    def wait(self, timeout_s: float) -> list[int]:
        """Returns the exit status of each `torchrun`. Raises psutil.TimeoutExpired."""
        end = time.monotonic() + timeout_s
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in self._processes]

    def left(self) -> list[psutil.Process]:
        """Returns the processes of ranks and of `torchrun` that still run."""
        self.ranks()
        known = (*self._processes, *self._seen)
        return [each for each in known if each.is_running() and each.status() != "zombie"]
