"""Tests of commands that a signal ends: they leave no half-written files.

A killed command may leave such files. The next command with the same target removes them.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

NEW = (
    "train",
    "overlapped.toml",
    "--data",
    "corpus",
    "--data-cache",
    "cache",
    "--device",
    "cpu",
    "--steps",
    2,
    "--save-every",
    1,
)
WRITE = "megatrain.runtime.files.model_files:write_tensors"
FINISH = "megatrain.runtime.data.tokens.cache:CacheWriter.finish"
RENAME = "os:replace"
STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


WRITERS: dict[str, tuple[tuple[object, ...], str, str]] = {
    "export": (("export", "run", "--out", "exported"), WRITE, "exported"),
    "plan": (
        ("plan", "tiny", "--hardware", "h200", "--batch", 2, "--seq", 16, "--out", "new.toml"),
        RENAME,
        "new.toml",
    ),
    "tokens": ((*NEW, "--data-cache", "other", "--out", "again"), FINISH, "again"),
    "the model at the end": ((*NEW, "--out", "again"), WRITE, "again/model"),
}


@pytest.mark.parametrize(
    ("writer", "name"),
    [*((writer, "SIGTERM") for writer in WRITERS), ("export", "SIGINT"), ("export", "SIGHUP")],
)
def test_a_signal_leaves_nothing_half_written(
    driver: Any, trained: Path, writer: str, name: str, leftovers: Any
) -> None:
    words, function, target = WRITERS[writer]
    ended = driver.run(trained, *words, at=(function, 1, name))
    assert ended.status == STATUS[name], ended.text
    how = "stopped after step 2; saved; continue with: megatrain train --resume again"
    what = how if writer == "the model at the end" else "interrupted"
    assert ended.text.endswith(f"megatrain: {what}\n")
    assert leftovers(trained) == []
    assert not (trained / target).exists()
    assert writer != "tokens" or not list((trained / "other").iterdir())


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_kill_leaves_is_removed_by_the_next_command(
    driver: Any, trained: Path, writer: str, leftovers: Any
) -> None:
    words, function, target = WRITERS[writer]
    assert driver.run(trained, *words, at=(function, 1, "SIGKILL")).status == -signal.SIGKILL
    assert leftovers(trained)
    again = (
        ("train", "--resume", "again", "--device", "cpu")
        if writer == "the model at the end"
        else words
    )
    ended = driver.run(trained, *again)
    assert ended.status == 0, ended.text
    assert leftovers(trained) == []
    assert (trained / target).exists()


def test_a_second_signal_does_not_stop_the_cleaning_up(
    driver: Any, trained: Path, leftovers: Any
) -> None:
    words = ("export", "run", "--out", "exported")
    ended = driver.run(
        trained, *words, at=(WRITE, 1, "SIGTERM"), and_at=("shutil:rmtree", 1, "SIGTERM")
    )
    assert ended.status == STATUS["SIGTERM"], ended.text
    assert leftovers(trained) == []


def test_signals_that_nohup_ignores_stay_ignored(driver: Any, trained: Path) -> None:
    ended = driver.run(
        trained, "export", "run", "--out", "exported", at=(WRITE, 1, "SIGHUP"), ignores=["SIGHUP"]
    )
    assert ended.status == 0, ended.text
