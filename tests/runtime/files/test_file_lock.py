"""Tests of the file lock: one process holds it at a time, and no file is left.

The process that holds it may enter it again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.runtime.files.file_lock import FileLock
from megatrain.runtime.training.run_lock import RunLock
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan


def lock(path: Path) -> FileLock:
    return FileLock(path, what="a thing", fix="wait")


def test_one_process_holds_the_lock_and_may_enter_it_again(tmp_path: Path) -> None:
    first, file = lock(tmp_path / "lock"), tmp_path / "lock"
    with first:
        with (
            first,
            pytest.raises(
                UserError,
                match=(
                    rf"found a thing in use by process {os.getpid()} on \S+ since \d{{4}}-.*;"
                    r" allowed: one process at a time; fix: wait$"
                ),
            ),
        ):
            lock(file).__enter__()
        with pytest.raises(UserError, match="in use by"):
            lock(file).__enter__()
        assert file.read_text().startswith(f"process {os.getpid()} on ")
    assert not file.exists()
    with lock(file) as again:
        assert not again.abandoned


def test_folders_that_were_made_for_a_lock_are_removed_if_empty(tmp_path: Path) -> None:
    with lock(tmp_path / "a" / "b" / "lock"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]
    (tmp_path / "empty").mkdir()
    with lock(tmp_path / "empty" / "lock"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_a_lock_reports_that_its_former_holder_died(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        lock(tmp_path / "lock").__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with lock(tmp_path / "lock") as mine:
        assert mine.abandoned


def test_other_contents_of_the_lock_file_are_not_shown(tmp_path: Path) -> None:
    with lock(tmp_path / "lock"):
        (tmp_path / "lock").write_bytes(b"\x1b[2J\n")
        with pytest.raises(UserError, match="in use by another process;"):
            lock(tmp_path / "lock").__enter__()


def test_a_place_that_cannot_be_written_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match="found not a directory; allowed: a folder that can be made and written"
    ):
        lock(tmp_path / "file" / "lock").__enter__()


def test_a_second_run_is_refused_before_torch_is_loaded(
    tmp_path: Path, make_plan: Callable[..., Plan]
) -> None:
    program = (
        "import sys\nfrom megatrain.experiments.cli.main import main\n"
        "print(main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    make_plan().save(plan := tmp_path / "plan.toml")
    words = [
        "train",
        str(plan),
        "--data",
        str(plan),
        "--steps",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    with RunLock(tmp_path / "run"):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
        )
    assert done.stdout == "2 False\n"
    assert f"found a run in use by process {os.getpid()} on " in done.stderr


def test_on_a_full_disk_a_lock_does_not_name_its_former_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lock"
    file.write_text("process 7 on another-host since 2026-01-01\n")

    def full(*_: object) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with lock(file) as held:
        assert held.abandoned
        with pytest.raises(UserError, match="in use by another process"):
            lock(file).__enter__()
