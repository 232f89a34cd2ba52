"""Tests of a disk that really becomes full while a run saves.

The earlier checkpoint stays, and training stops or continues according to the config.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.training.callback import Callback
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import RunError


class Filler(Callback):
    """Fills the disk up to 100 KB after the first checkpoint, and frees it after the second."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.notes = disk, list[str]()

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_save(self, trainer: Trainer, number: int) -> None:
        if number == 1:
            (self.disk / "filler").write_bytes(bytes(shutil.disk_usage(self.disk).free - 100_000))
        else:
            (self.disk / "filler").unlink(missing_ok=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_on_a_disk_that_is_full_training_stops(
    place: Path, small_disk: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch, foreseen: bool
) -> None:
    filler = Filler(small_disk)
    if not foreseen:
        monkeypatch.setattr(
            checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40)
        )
        monkeypatch.setattr(
            filler,
            "on_save",
            lambda *_: (small_disk / "filler").write_bytes(bytes(free_bytes(small_disk) - 100_000)),
        )
    with pytest.raises(
        RunError,
        match=(
            r"step-00000002 was not saved: no space left on device.*; earlier checkpoints are"
            r" unchanged"
        ),
    ):
        prepare(
            place, "disk/run", callbacks=[filler], export=False, **{"saving.every_steps": 1}
        ).fit()
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == [
        "step-00000001"
    ]
    verify(small_disk / "run" / "checkpoints" / "step-00000001")


def test_a_nearly_full_disk_is_reported_before_the_first_step(
    place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for one of three checkpoints: two that are kept and a new one."""
    for minutes, free, warned in ((30, 2**21, True), (0, 2**21, False), (29, 2**30, False)):
        monkeypatch.setattr(Checkpoints, "free_bytes", lambda _, free=free: free)
        filler = Filler(place)
        monkeypatch.setattr(filler, "on_save", lambda *_: None)
        given = {"steps": 1, "export": False, "saving.every_minutes": minutes}
        prepare(place, f"run{minutes}", callbacks=[filler], **given).fit()
        said = [note for note in filler.notes if note.startswith("warning: up to 3 checkpoints")]
        assert bool(said) == warned


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_with_on_failure_go_on_training_continues_and_saves_when_there_is_room(
    place: Path, small_disk: Path, prepare: Any
) -> None:
    filler = Filler(small_disk)
    fitted = prepare(
        place,
        "disk/run",
        callbacks=[filler],
        export=False,
        on_failure="go on",
        **{"saving.every_steps": 1},
    ).fit()
    assert fitted.steps == 5
    assert [
        note.partition(" was ")[0][-8:]
        for note in filler.notes
        if "no space left on device" in note
    ] == ["00000002"]
    assert sorted(path.name for path in (small_disk / "run" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000005",
    ]
    for path in (small_disk / "run" / "checkpoints").iterdir():
        verify(path)
