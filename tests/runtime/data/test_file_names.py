"""Tests that data files whose names are not UTF-8 are read like others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_text

ROWS = [{"text": f"text {number} of some words"} for number in range(9)]
NAMED = os.fsdecode(b"bad\xe9name")


def write_jsonl(path: str) -> None:
    with open(path, "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS) + "no JSON\n")


def write_parquet(path: str) -> None:
    with open(path, "wb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)


def write_csv(path: str) -> None:
    with open(path, "wb") as file:
        pyarrow.csv.write_csv(pyarrow.Table.from_pylist(ROWS), file)


def write_plain(path: str) -> None:
    Path(path).write_text("some words " * 40)


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".jsonl", write_jsonl),
        (".parquet", write_parquet),
        (".csv", write_csv),
        (".txt", write_plain),
    ],
)
def test_a_name_of_other_bytes(
    suffix: str, write: Callable[[str], None], tmp_path: Path, opened: Callable[..., Any]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(str(folder / f"{NAMED}{suffix}"))
    for _ in range(2):  # tokenized, then from the cache
        training, _, notes = opened(folder)
        assert training.tokens > 50
        if suffix == ".jsonl":
            assert any(r"bad\xe9name.jsonl:10: invalid JSON" in note for note in notes)


def test_a_file_that_would_hold_such_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a name that is not UTF-8 text, .*bad.udce9'; "):
        write_text(tmp_path / "config.toml", f'data = "{NAMED}"')
    assert not (tmp_path / "config.toml").exists()
