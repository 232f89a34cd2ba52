"""Tests of writing a checkpoint: the order of writes, crashes, full disks and interruptions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import SETTINGS, everything, run_of

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.checkpoint import CheckpointError, save
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.simulator.schedule.plan import Plan


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    saved: tuple[Plan, Path],
    session: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint is on the disk before it is renamed to its final name.

    First each file is synced, then the folder, and after the rename the parent folder.
    """
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def watched_sync(handle: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def watched_rename(path: Path, target: Path) -> Path:
        events.append(("rename", str(path)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    with session(saved[0]) as running:
        save(running.executor, run_of(1), tmp_path / "new" / "one")
    aside = next(path for event, path in events if event == "rename")
    place = events.index(("rename", aside))
    before, after = events[:place], events[place + 1 :]
    assert before.index(("sync", str(tmp_path))) == 0, "the new folder was not synced first"
    assert before[-1] == ("sync", aside)
    assert {Path(path).name.partition(".json")[0].lstrip(".") for event, path in before[1:-1]} == {
        "state-00001.safetensors",
        "manifest",
    }
    assert all(path.startswith(f"{aside}/") for _, path in before[1:-1])
    assert after == [("sync", str(tmp_path / "new"))]


def test_the_old_checkpoint_is_put_back_if_the_new_one_cannot_replace_it(
    saved: tuple[Plan, Path], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = saved
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(checkpoint.ASIDE):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with (
        session(plan) as running,
        pytest.raises(
            CheckpointError,
            match="was not saved: input/output error; earlier checkpoints are unchanged",
        ),
    ):
        save(running.executor, run_of(2, 9.0), folder / "step-00000002")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


# ---- a disk with no room ----


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_the_previous_checkpoint_unchanged(
    saved: tuple[Plan, Path],
    session: Callable[..., Any],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    foreseen: bool,
) -> None:
    """A save that does not fit leaves earlier checkpoints unchanged, and training may continue.

    It is refused before writing if the disk reports its free space. Otherwise it fails at the byte
    that does not fit.
    """
    plan, _ = saved
    checkpoints = Checkpoints(small_disk / "checkpoints", keep_last=9)
    with session(plan) as running:
        running.step(1)
        checkpoints.save(running.executor, run_of(1))
        before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
        (small_disk / "other").write_bytes(bytes(3_000_000))
        if not foreseen:
            monkeypatch.setattr(
                checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40)
            )
        running.step(2)
        with pytest.raises(
            CheckpointError,
            match=(
                r"^checkpoint .*step-00000002 was not saved: no space left on device.*; earlier"
                r" checkpoints are unchanged"
            ),
        ):
            checkpoints.save(running.executor, run_of(2))
        (small_disk / "other").unlink()
        assert {
            path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()
        } == before
        assert checkpoints.steps() == [1]
        running.step(3)
        checkpoints.save(running.executor, run_of(3))
        expected = everything(running)
    with session(plan) as running:
        assert checkpoints.restore(running.executor, SETTINGS) == run_of(3)
        assert everything(running) == expected


def test_a_folder_that_cannot_be_made_gives_a_one_line_error(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with (
        session(saved[0]) as running,
        pytest.raises(CheckpointError, match=r"was not saved: (not a directory|file exists)"),
    ):
        Checkpoints(tmp_path / "file" / "checkpoints").save(running.executor, run_of(1))


def test_an_interrupted_save_leaves_nothing(
    saved: tuple[Plan, Path], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = saved

    def interrupt(path: Path, _: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_tensors", interrupt)
    with session(plan) as running, pytest.raises(KeyboardInterrupt):
        Checkpoints(folder).save(running.executor, run_of(3))
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]
