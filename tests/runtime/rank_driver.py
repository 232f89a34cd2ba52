"""A process that imports torch once, then forks the ranks of a run for every JSON line that it
reads.

Each line has for each rank the arguments of `megatrain.experiments.ranks` of one run after the
other, and the ports of these runs. What a rank prints goes to a file of its own. The answer is the
process ids of the ranks. An empty line waits for them, and the answer is their exit statuses, each
the largest of the rank's runs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from megatrain.experiments.ranks import main


def _rank(rank: int, count: int, runs: list[list[str]], ports: list[int], out: str) -> int:
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
    }
    statuses = []
    for arguments, port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        statuses.append(main(arguments))
    return max(statuses)


def _start(request: dict[str, Any]) -> list[int]:
    processes = []
    for rank, runs in enumerate(request["runs"]):
        process = os.fork()
        if not process:
            status = 70
            try:
                status = _rank(
                    rank, len(request["runs"]), runs, request["ports"], request["out"][rank]
                )
            finally:
                os._exit(status)
        processes.append(process)
    return processes


def serve() -> None:
    """Answers the lines of standard input."""

    def answer(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    torch.set_num_threads(1)
    processes: list[int] = []
    answer("ready")
    for line in sys.stdin:
        if line.strip():
            processes = _start(json.loads(line))
            answer(json.dumps(processes))
        else:
            ended = [os.waitpid(process, 0)[1] for process in processes]
            answer(json.dumps([os.waitstatus_to_exitcode(each) for each in ended]))


if __name__ == "__main__":
    serve()
