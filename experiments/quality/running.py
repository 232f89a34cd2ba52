"""Starts all runs of a comparison, several at a time, each in its own process."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from time import sleep
from typing import IO, NamedTuple

import msgspec

from megatrain.experiments.quality.rows import Part, QualityRow, RunSettings, RunSpec
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, write_json

_LOCK = ".lock"
_POLL_SECONDS = 0.2
_LAST_LINES = 4096
"""Bytes at the end of a run's output that are searched for the reason of its failure."""
OnEnd = Callable[[QualityRow], None]
"""A function that is called with the row of a run that has ended."""


class _Started(NamedTuple):
    """A run whose process was started."""

    spec: RunSpec
    """The run."""
    process: Popen[bytes]
    """The process that trains it."""
    log: IO[bytes]
    """The open file with the process's output."""


def specs(
    part: Part,
    variants: Sequence[str],
    seeds: Sequence[int],
    settings: RunSettings,
    *,
    device: str,
    parallel: int,
) -> list[RunSpec]:
    """Returns the runs in the order in which they start: all variants with the first seed, then
    with the second, and so on. So an interrupted comparison has complete seeds.
    """
    return [
        RunSpec(
            part=part,
            variant=variant,
            seed=seed,
            device=device,
            parallel=parallel,
            settings=settings,
        )
        for seed in seeds
        for variant in variants
    ]


def is_complete(folder: Path, spec: RunSpec) -> bool:
    """Returns whether the run has a row without a failure."""
    path = folder / "runs" / f"{spec.name}.json"
    return path.is_file() and not convert(read_json(path), QualityRow, str(path)).failure


def run_all(folder: Path, runs: Iterable[RunSpec], first_seed: int, on_end: OnEnd) -> None:
    """Trains all `runs` that are not complete, and calls `on_end` with the row of each.

    A run that fails gets a row with the reason, and the other runs continue. If this process is
    interrupted, it sends SIGTERM to every run, which saves a checkpoint, and waits for it.

    Raises UserError if runs of another command are still active in `folder`.

    Args:
        folder: the folder of the comparison.
        runs: the runs; the field `parallel` of the first one says how many run at a time.
        first_seed: seed of the run from whose weights fine-tunings start.
        on_end: called after each run.
    """
    waiting = [spec for spec in runs if not is_complete(folder, spec)]
    parallel = waiting[0].parallel if waiting else 0
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    started: list[_Started] = []
    with (folder / _LOCK).open("wb") as lock:
        _take(lock, folder)
        try:
            while waiting or started:
                while waiting and len(started) < parallel:
                    started.append(_start(folder, waiting.pop(0), first_seed, lock.fileno()))
                sleep(_POLL_SECONDS)
                for run in [run for run in started if run.process.poll() is not None]:
                    started.remove(run)
                    on_end(_ended(folder, run))
        finally:
            for run in started:
                run.process.send_signal(signal.SIGTERM)
            for run in started:
                run.process.wait()
                run.log.close()


def _take(lock: IO[bytes], folder: Path) -> None:
    """Locks the folder. The runs inherit the lock and keep it if this process is killed.

    Raises UserError if runs of another command are still active.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(
            str(folder),
            found="runs of another command",
            allowed="one command at a time",
            fix="wait until it has ended, or name another folder with --out",
        ) from None


def _start(folder: Path, spec: RunSpec, first_seed: int, lock: int) -> _Started:
    """Starts the process of a run. It has its own session, so Ctrl-C does not reach it directly:
    `run_all` sends it SIGTERM.
    """
    log = _log(folder, spec).open("wb")
    words = [str(folder), msgspec.json.encode(spec).decode(), str(first_seed)]
    # All runs compile the same layers, so they share one cache of compiled code.
    compiled = str((folder / "compiled").resolve())
    process = Popen(
        [sys.executable, "-m", "megatrain.experiments.quality.child", *words],
        stdin=DEVNULL,
        stdout=log,
        stderr=STDOUT,
        start_new_session=True,
        pass_fds=(lock,),
        env={
            "TORCHINDUCTOR_CACHE_DIR": compiled,
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "TOKENIZERS_PARALLELISM": "false",
        }
        | dict(os.environ),
    )
    return _Started(spec, process, log)


def _ended(folder: Path, run: _Started) -> QualityRow:
    """Returns the row of a run whose process has ended. If the run failed, writes its row first."""
    spec, process, log = run
    log.close()
    path = folder / "runs" / f"{spec.name}.json"
    if process.returncode == 0 and path.is_file():
        return convert(read_json(path), QualityRow, str(path))
    text = _log(folder, spec).read_bytes()[-_LAST_LINES:].decode(errors="replace").split("\n")
    lines = [line.strip() for line in text if line.strip()]
    reason = lines[-1] if lines else "no output"
    row = QualityRow(spec=spec, failure=f"status {process.returncode}: {reason}")
    write_json(path, row)
    return row


def _log(folder: Path, spec: RunSpec) -> Path:
    """Returns the file with the output of a run's process."""
    return folder / "runs" / f"{spec.name}.log"
