"""Tests of atomic writes: a file is whole or absent, and files of dead writers are removed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatrain.simulator.base import atomic_files as aside
from megatrain.simulator.base.atomic_files import AtomicWrite
from megatrain.simulator.base.files import write_text


def die_while_writing(target: Path, *, folder: bool) -> None:
    """Kills a child process while it writes."""
    child = os.fork()
    if child == 0:
        made = AtomicWrite(target, folder=folder)
        (made.path / "half" if folder else made.path).write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("folder", [False, True])
def test_temporary_files_of_a_dead_writer_are_removed_by_the_next(
    tmp_path: Path, folder: bool
) -> None:
    die_while_writing(tmp_path / "plan.toml", folder=folder)
    assert len(os.listdir(tmp_path)) == 1
    write_text(tmp_path / "plan.toml", "whole")
    assert os.listdir(tmp_path) == ["plan.toml"]


def test_other_temporary_files_are_left_alone(tmp_path: Path) -> None:
    """Files of another target, of a live writer and of the user stay."""
    die_while_writing(tmp_path / "other.toml", folder=False)
    mine = [".plan.toml.original", ".plan.toml.swp", "plan.toml.aside-1234"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    with AtomicWrite(tmp_path / "plan.toml") as first:
        first.write_text("first")
        write_text(tmp_path / "plan.toml", "second")
        assert first.read_text() == "first"
        first.rename(tmp_path / "plan.toml")
    assert (tmp_path / "plan.toml").read_text() == "first"
    left = sorted(
        name for name in os.listdir(tmp_path) if not name.startswith(".other.toml.aside-")
    )
    assert left == sorted([*mine, "plan.toml"])
    assert len(os.listdir(tmp_path)) == len(left) + 1


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, folder: bool, error: type[BaseException]) -> None:
    made = AtomicWrite(tmp_path / "out", folder=folder)
    (made.path / "half" if folder else made.path).write_text("half")
    with pytest.raises(error), made:
        raise error
    assert os.listdir(tmp_path) == []


def test_a_temporary_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary file that another writer removes before it is locked is made again."""
    real, locked = aside.fcntl.flock, []

    def remove_the_first(handle: int, how: int) -> None:
        if not locked:
            Path(os.readlink(f"/proc/self/fd/{handle}")).unlink()
        locked.append(handle)
        real(handle, how)

    monkeypatch.setattr(aside.fcntl, "flock", remove_the_first)
    with AtomicWrite(tmp_path / "out") as path:
        assert path.exists()
    assert len(locked) == 2


def test_a_file_is_written_even_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks, a file is written, and files of other writers stay: they may be alive."""
    die_while_writing(tmp_path / "out", folder=False)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(aside.fcntl, "flock", refuse)
    write_text(tmp_path / "out", "whole")
    assert (tmp_path / "out").read_text() == "whole"
    assert len(os.listdir(tmp_path)) == 2
