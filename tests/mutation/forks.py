"""Runs pytest in forks of this process, which has imported the modules that most tests import.

So a run starts in a tenth of a second. The packages under test are not imported here, so each run
imports them from disk.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

_IMPORTED_BEFORE = (
    "torch",
    "transformers.modeling_utils",
    "pandas",
    "pyarrow.parquet",
    "hypothesis",
    "rich.console",
)


def import_before() -> None:
    """Imports the modules that most tests import."""
    for name in _IMPORTED_BEFORE:
        importlib.import_module(name)


def run_pytest(words: list[str], folder: Path, output: Path, limit_s: float) -> int | None:
    """Runs pytest on a copy of the repository, and writes its output into a file.

    Returns the exit code, or None if the run took longer than `limit_s` seconds and was killed.
    """
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(written, 1)
            os.dup2(written, 2)
            os.chdir(folder)
            os.environ["PYTHONPATH"] = str(folder / "typings")
            sys.path.insert(0, str(folder / "typings"))
            status = int(pytest.main(["-q", "-p", "no:cacheprovider", *words]))
            sys.stdout.flush()
            os._exit(status)
        finally:
            os._exit(pytest.ExitCode.INTERNAL_ERROR)
    end = time.monotonic() + limit_s
    ended, status = 0, 0
    while not ended and time.monotonic() < end:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)
