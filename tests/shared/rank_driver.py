"""A process that imports torch once and forks the ranks of a run for every JSON line.

A line has, for each rank, the arguments of its runs, which are executed one after the other, and
the ports of the runs. A run executes `megatrain` if its first argument is `train` or `calibrate`, a
program in Python if that is a file, and otherwise `megatrain.experiments.ranks`. Each rank prints
into a file of its own. Other keys of a line:

* `folder`: the working directory.
* `folders`: the working directory of each rank.
* `appears_within_s`: how long ranks of other hosts look for a file of rank 0.
* `timeout_s`: how long ranks wait for each other in a step.
* `silent_s`: after how long without a new copy of its board a rank of another host does not answer.
* `window_s`: how long a calibration measures lanes together. Its copies and rounds are then small.
* `exits`: the processes end by the exit handlers of Python. A lost rank or a terminal needs this.
* `file_bytes`: the largest file that the last rank can write.
* `hangs_at`: the call of the embedding in which the last rank sleeps for ever.
* `interrupted_at`: the look for a signal from which on all ranks find one. There are two in a step,
  before and after it.
* `stops_at`: the call of `Ranks.total` before which the last rank stops itself.

If a line has `torchruns`, it starts as many `torchrun`, one for each host, which fork `per_host`
ranks. `port` is where they meet, and all ranks execute `words`, a command of `megatrain`.

If a line has `terminal`, a process takes this terminal, and executes `words` in `folder`.

The answer is the process ids of the ranks, or of each `torchrun`. An empty line waits for them, and
its answer is their exit statuses. The status of a rank is the largest of its runs.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatrain.experiments.cli import main as cli
from megatrain.experiments.ranks import main
from megatrain.experiments.run_report import pictures
from megatrain.runtime.calibration import contention, several_gpus
from megatrain.runtime.layers.functional_layers import FunctionalLayers
from megatrain.runtime.ranks import Ranks, board_mirror, joining, ranks
from megatrain.runtime.training import shared_folder, trainer

VERBS = ("train", "calibrate")
"""Runs of `megatrain` begin with one of these."""


def _run(arguments: list[str]) -> int:
    """Executes one run and returns its exit status."""
    first = arguments[0]
    if not first.endswith(".py"):
        return cli.main(arguments) if first in VERBS else main(arguments)
    sys.argv = arguments
    try:
        runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _rank(rank: int, request: dict[str, Any]) -> int:
    runs, count = request["runs"][rank], len(request["runs"])
    if "folder" in request:
        os.chdir(request["folder"])
    if "folders" in request:
        os.chdir(request["folders"][rank])
    shared_folder._WAIT_S = request.get("appears_within_s", shared_folder._WAIT_S)
    joining.TIMEOUT_S = request.get("timeout_s", joining.TIMEOUT_S)
    if "silent_s" in request:
        ranks._SILENT_S, board_mirror._EVERY_S = request["silent_s"], request["silent_s"] / 4
    if "window_s" in request:
        contention._WINDOW_SECONDS = several_gpus._BESIDE_SECONDS = request["window_s"]
        sizes = several_gpus._SIZES["cpu"]
        several_gpus._SIZES["cpu"] = sizes._replace(copied=2**20, round=2**18)
    if "file_bytes" in request and rank == count - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
    if "hangs_at" in request and rank == count - 1:
        calls, embed = itertools.count(1), FunctionalLayers.embed

        def sleep(*given: Any) -> Any:
            if next(calls) == request["hangs_at"]:
                time.sleep(1e6)
            return embed(*given)

        FunctionalLayers.embed = sleep  # type: ignore[method-assign]
    if "stops_at" in request and rank == count - 1:
        collectives, total = itertools.count(1), Ranks.total

        def stop(*given: Any) -> Any:
            if next(collectives) == request["stops_at"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            return total(*given)

        Ranks.total = stop  # type: ignore[method-assign]
    if "interrupted_at" in request:
        looks = itertools.count(1)
        trainer.Trainer._interrupted = (  # type: ignore[method-assign]
            lambda *_: next(looks) >= request["interrupted_at"]
        )
    pictures.draw_loss = lambda *_: None
    handle = os.open(request["out"][rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
    }
    statuses = []
    for arguments, port in zip(runs, request["ports"], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        statuses.append(_run(arguments))
    return max(statuses)


def _megatrain(*words: str) -> None:
    """Executes a command. Raises RuntimeError if it fails."""
    if status := cli.main(list(words)):
        raise RuntimeError(f"status {status}")


def _torchrun(host: int, request: dict[str, Any]) -> int:
    """Does what `torchrun` does on a host, but forks the ranks, and returns its exit status."""
    os.chdir(request["folder"])
    handle = os.open(request["out"][host], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    config = LaunchConfig(
        min_nodes=request["torchruns"],
        max_nodes=request["torchruns"],
        nproc_per_node=request["per_host"],
        run_id=str(request["port"]),
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{request['port']}",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, _megatrain)(*request["words"])
    except ChildFailedError:
        return 1
    return 0


def _in_terminal(_: int, request: dict[str, Any]) -> int:
    os.chdir(request["folder"])
    os.setsid()
    handle = os.open(request["terminal"], os.O_RDWR)  # takes it, without O_NOCTTY
    for standard in range(3):
        os.dup2(handle, standard)
    os.close(handle)
    os.environ["TERM"] = "xterm"
    pictures.draw_loss = lambda *_: None
    return cli.main(request["words"])


def _start(request: dict[str, Any]) -> list[int]:
    run, count = _rank, len(request.get("runs", ()))
    if "torchruns" in request:
        run, count = _torchrun, request["torchruns"]
    elif "terminal" in request:
        run, count = _in_terminal, 1
    processes = []
    for number in range(count):
        process = os.fork()
        if not process:
            status = 70
            try:
                status = run(number, request)
            finally:
                if not {"exits", "stops_at", "terminal"} & request.keys():
                    os._exit(status)
            sys.exit(status)  # runs the exit handlers of Python
        processes.append(process)
    return processes


def serve() -> None:
    """Answers each line of standard input."""

    def answer(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    torch.set_num_threads(1)
    gc.freeze()  # otherwise a collection in a child copies the memory of all imported modules
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
