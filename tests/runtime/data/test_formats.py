"""Readers: rows with their file and line, whatever the format; broken files are one line, broken rows are counted where they stand."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.runtime.data import formats
from megatrain.runtime.data.formats import BadRow, Row, find, rows
from megatrain.simulator.errors import UserError


def read(path: Path) -> list[Row | BadRow]:
    return list(rows(find(path)))


def test_jsonl_rows_have_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": 1\n["text"]\n{"text": "\xff"}\n' + b"[" * 100_000 + b'\nnull\n{"text": "z\\u00f6lf"}')
    found = read(path)
    assert [(row.line, row.value) for row in found if isinstance(row, Row)] == [(1, {"text": "a"}), (8, {"text": "zölf"})]
    reasons = {row.line: row.reason for row in found if isinstance(row, BadRow)}
    assert sorted(reasons) == [3, 4, 5, 6, 7]
    assert reasons[3].startswith("invalid JSON: ")
    assert (reasons[4], reasons[5], reasons[6], reasons[7]) == ("a list, not an object", "invalid UTF-8", "JSON nested too deeply", "null, not an object")
    assert str(found[1]).startswith(f"{path}:3: invalid JSON: ")


def test_a_line_without_end_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_LONGEST_LINE_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x" * 300}) + '\n{"text": "a"}\n' + json.dumps({"text": "x" * 300}))
    assert [(type(row), row.line) for row in read(path)] == [(BadRow, 1), (Row, 2), (BadRow, 3)]


def test_json_holds_an_object_a_line_and_no_array(jsonl: Callable[..., Path]) -> None:
    assert [row.line for row in read(jsonl([{"text": "a"}], "rows.json"))] == [1]
    with pytest.raises(UserError, match=r"array\.json: found one JSON array; allowed: an object a line; fix: jq -c '\.\[\]' array\.json > array\.jsonl"):
        read(jsonl(['[{"text": "a"}]'], "array.json"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_give_the_same_rows_as_jsonl(tmp_path: Path, suffix: str) -> None:
    table = pyarrow.table({"messages": [[{"role": "user", "content": str(i)}] for i in range(3000)], "score": range(3000)})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=700)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    found = read(path)
    assert [row.line for row in found] == list(range(1, 3001))
    assert found[2345] == Row(path, 2346, {"messages": [{"role": "user", "content": "2345"}], "score": 2345})
    assert list(rows(find(path), ("messages",)))[7] == Row(path, 8, {"messages": [{"role": "user", "content": "7"}]})


def test_an_arrow_file_is_read_like_a_stream(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"]})
    path = tmp_path / "rows.arrow"
    with pyarrow.ipc.new_file(path, table.schema) as stream:
        stream.write_table(table)
    assert read(path) == [Row(path, 1, {"text": "a"}), Row(path, 2, {"text": "b"})]


def test_text_that_is_not_utf8_is_a_bad_row_of_its_table(tmp_path: Path) -> None:
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, pyarrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])), pyarrow.py_buffer(b"a\xffb")]
    )
    path = tmp_path / "rows.arrow"
    with pyarrow.ipc.new_stream(path, pyarrow.schema({"text": pyarrow.string()})) as stream:
        stream.write_batch(pyarrow.record_batch({"text": column}))
    assert read(path) == [Row(path, 1, {"text": "a"}), BadRow(path, 2, "invalid UTF-8"), Row(path, 3, {"text": "b"})]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0", b"nonsense" * 100])
def test_a_damaged_table_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: found something else or damaged \(.*allowed: an? (Parquet file|Arrow stream or file); fix: "):
        read(tmp_path / name)


def save_to_disk(folder: Path, texts: list[str], shards: int = 2) -> None:
    """As `datasets.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05}-of-{shards:05}.arrow" for shard in range(shards)]
    for shard, name in enumerate(names):
        table = pyarrow.table({"text": texts[shard::shards]})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_arrow_files_in_their_order(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "train", ["a", "b", "c"])
    save_to_disk(tmp_path / "test", ["x"])
    (tmp_path / "train" / "cache-123.arrow").write_bytes(b"not of the dataset")
    assert [row.value for row in read(tmp_path / "train")] == [{"text": "a"}, {"text": "c"}, {"text": "b"}]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(read(tmp_path)) == 3
    assert [row.value for row in rows(find(tmp_path, split="test"))] == [{"text": "x"}]
    with pytest.raises(UserError, match="split: found 'validation'; allowed: train, test; fix: name one of these"):
        find(tmp_path, split="validation")


@pytest.mark.parametrize("state", ["[]", "{}", '{"_data_files": []}', '{"_data_files": [3]}', '{"_data_files": [{"filename": 3}]}'])
def test_a_saved_dataset_without_files_is_one_line(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"state\.json: found no list `_data_files` of file names"):
        find(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(UserError, match=r"gone\.arrow: found no such file, though state\.json names it"):
        find(tmp_path)


def test_of_a_folder_the_kind_with_the_most_bytes_is_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about the data")
    (tmp_path / "data").mkdir()
    for name in ("b", "a"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), tmp_path / "data" / f"{name}.parquet")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "packed.txt").write_text("x" * 100_000)
    source = find(tmp_path)
    assert [file.name for file in source.files] == ["a.parquet", "b.parquet"]
    assert source.left_out == "1 text (14 bytes)"


def test_what_is_no_data_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: found no such file or folder; allowed: a file or folder with \*\.jsonl, .*\*\.txt.*; fix: check the path"):
        find(tmp_path / "gone")
    with pytest.raises(UserError, match="found a folder without data; allowed: a file or folder with"):
        find(tmp_path)
    (tmp_path / "rows.csv").touch()
    with pytest.raises(UserError, match=r"rows\.csv: found a file ending in '\.csv'; allowed: \*\.jsonl, .*; fix: convert or rename the file"):
        find(tmp_path / "rows.csv")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="found no such file or folder, but a device or a pipe"):
        find(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="found embedded null byte"):
        find(tmp_path / "zero\0.jsonl")
    with pytest.raises(UserError, match="file name too long"):
        find(tmp_path / ("x" * 1000))


def test_a_file_that_goes_away_is_one_line(jsonl: Callable[..., Path]) -> None:
    source = find(jsonl([{"text": "a"}]))
    source.files[0].unlink()
    with pytest.raises(UserError, match=r"rows\.jsonl: found no such file or directory"):
        list(rows(source))


@pytest.mark.parametrize("line", ["some words\n  indented\n", "数据 und Wörter\n", "no end of line"])
def test_a_long_text_comes_in_pieces_that_make_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(formats, "_PIECE_BYTES", 50)
    path = tmp_path / "text.txt"
    path.write_text(line * 100, encoding="utf-8")
    found = [row for row in read(path) if isinstance(row, Row)]
    pieces = [row.value for row in found if isinstance(row.value, bytes)]
    assert b"".join(pieces).decode() == line * 100
    assert len(pieces) > 5
    assert [row.closes for row in found] == [False] * (len(found) - 1) + [True]
    for before, piece in itertools.pairwise(pieces):
        assert not piece.decode()[:1].isspace() or "\n" not in line
        assert before.endswith(b"\n") or "\n" not in line
    for index, row in enumerate(found):
        assert row.line == 1 + b"".join(pieces[:index]).count(b"\n")


def test_a_text_that_is_not_utf8_is_one_bad_row_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_PIECE_BYTES", 7)
    path = tmp_path / "text.txt"
    path.write_bytes("zwölf\n".encode() * 5 + b"\xff\n" + b"x\n" * 20)
    assert read(path) == [BadRow(path, 6, "invalid UTF-8")]
    path.write_bytes("zwölf\nä".encode()[:-1])  # cut within a character
    assert read(path) == [BadRow(path, 2, "invalid UTF-8")]
