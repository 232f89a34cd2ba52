"""Tests of sources: which files of a path and a split are read, and that others are named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.runtime.data.rows.formats import BadRow, TextRow, rows
from megatrain.runtime.data.rows.sources import DataSource, find, sources_at
from megatrain.simulator.base.errors import UserError


def read(path: Path) -> list[TextRow | BadRow]:
    return list(rows(find(path)))


def names(source: DataSource) -> list[str]:
    return [file.relative_to(source.path).as_posix() for file in source.files]


def make(folder: Path, files: Sequence[str]) -> Path:
    for number, name in enumerate(files, 1):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b'{"text": "a"}\n' * number)
    return folder


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        (
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ["data/validation-00000-of-00001.parquet"],
            ["data/test-00000-of-00001.parquet"],
        ),
        (["train.jsonl"], ["dev.jsonl"], ["eval.jsonl"]),
        (["my_Train_file.csv", "train1.csv"], ["val.csv"], ["a.testing 2.csv"]),
        (
            ["training/a.jsonl", "training/b.jsonl"],
            ["deep/valid-1/a.jsonl"],
            ["test/train.jsonl", "test/b.jsonl"],
        ),
        (["wiki.train.tokens.txt"], ["wiki.valid.tokens.txt"], ["wiki.test.tokens.txt"]),
        (["rows.jsonl", "contest.jsonl", "trained.jsonl"], ["validation.jsonl.gz"], ["test.JSONL"]),
    ],
)
def test_splits_of_a_folder_are_recognized_by_name(
    tmp_path: Path, train: list[str], validation: list[str], test: list[str]
) -> None:
    folder = make(
        tmp_path / "eval", [*train, *validation, *test]
    )  # names of parent folders have no meaning
    assert names(find(folder)) == sorted(train)
    assert names(find(folder, ("dev",))) == sorted(validation)
    assert names(find(folder, ("missing", "test"))) == sorted(test)
    found = find(folder)
    assert (found.split, found.left_out) == (
        "train",
        f"split validation (1 file), split test ({len(test)} file{'s' * (len(test) > 1)})",
    )
    with pytest.raises(
        UserError,
        match=(
            "eval: split: found 'train_sft'; allowed: train, validation, test; fix: name one of"
            " these"
        ),
    ):
        find(folder, ("train_sft",))


def test_shards_may_have_splits_of_other_names(tmp_path: Path) -> None:
    make(
        tmp_path,
        [
            f"data/{split}-0000{shard}-of-00002.parquet"
            for split in ("train_sft", "test_sft", "train_gen")
            for shard in range(2)
        ],
    )
    assert names(find(tmp_path, ("train_sft",))) == [
        "data/train_sft-00000-of-00002.parquet",
        "data/train_sft-00001-of-00002.parquet",
    ]
    with pytest.raises(
        UserError, match="split: found 'train'; allowed: test_sft, train_gen, train_sft"
    ):
        find(tmp_path)


def test_a_folder_of_test_data_alone_is_not_trained_on(tmp_path: Path) -> None:
    make(tmp_path, ["README.md", "test.jsonl"])
    with pytest.raises(
        UserError, match="split: found 'train'; allowed: test; fix: name one of these"
    ):
        find(tmp_path)
    assert find(tmp_path, ("validation", "test", "train")).left_out == "README.md (14 bytes)"


def test_a_folder_of_unit_tests_is_not_test_data(tmp_path: Path) -> None:
    files = ["tool.py", "tests/test_tool.py", "docs/testing.md", "README.md"]
    assert names(find(make(tmp_path, files))) == sorted(files)
    with pytest.raises(UserError, match="split: found 'test'; allowed: train"):
        find(tmp_path, ("test",))


def test_files_outside_all_splits_are_named(tmp_path: Path) -> None:
    make(tmp_path, ["other.jsonl", "train.jsonl"])
    assert names(find(tmp_path)) == ["train.jsonl"]
    assert find(tmp_path).left_out == "other.jsonl"


def test_every_file_that_is_not_read_is_named(tmp_path: Path) -> None:
    left = [
        "a.csv",
        "b.csv",
        "c.TXT",
        "dataset_infos.json",
        "e.zip",
        "f/LICENSE",
        "g.json",
        "h.parquet.gz",
    ]
    make(tmp_path, [*left, "rows.jsonl", "rows.NDJSON.zst", ".hidden.jsonl"])
    (tmp_path / "rows.jsonl").write_text("x" * 10_000)
    found = find(tmp_path)
    assert names(found) == ["rows.NDJSON.zst", "rows.jsonl"]
    assert (
        found.left_out
        == "2 *.csv (42 bytes), g.json (98 bytes), c.TXT (42 bytes), f/LICENSE, dataset_infos.json,"
        " h.parquet.gz, e.zip"
    )


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    make(tmp_path, ["test.jsonl"])
    assert names(find(tmp_path / "test.jsonl")) == ["."]
    with pytest.raises(
        UserError,
        match=(
            r"test\.jsonl: split: found 'validation'; allowed: train; fix: name one of these, or"
            r" its folder or file"
        ),
    ):
        find(tmp_path / "test.jsonl", ("validation",))


def save_to_disk(folder: Path, texts: list[str], shards: int = 2) -> None:
    """Writes rows as `datasets.save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05}-of-{shards:05}.arrow" for shard in range(shards)]
    for shard, name in enumerate(names):
        table = pyarrow.table({"text": texts[shard::shards]})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(
        json.dumps(
            {
                "_data_files": [{"filename": name} for name in names],
                "_split": "train",
                "_format_type": None,
            }
        )
    )
    (folder / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_is_its_arrow_files_in_their_order(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "train", ["a", "b", "c"])
    save_to_disk(tmp_path / "test", ["x"])
    (tmp_path / "train" / "cache-123.arrow").write_bytes(b"not of the dataset")
    assert [row.value for row in read(tmp_path / "train")] == [
        {"text": "a"},
        {"text": "c"},
        {"text": "b"},
    ]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(read(tmp_path)) == 3
    assert (find(tmp_path).split, find(tmp_path).left_out) == ("train", "split test")
    assert [row.value for row in rows(find(tmp_path, splits=("test",)))] == [{"text": "x"}]
    with pytest.raises(
        UserError, match="split: found 'validation'; allowed: train, test; fix: name one of these"
    ):
        find(tmp_path, splits=("validation",))


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        "{}",
        '{"_data_files": []}',
        '{"_data_files": [3]}',
        '{"_data_files": [{"filename": 3}]}',
    ],
)
def test_a_saved_dataset_without_files_gives_a_one_line_error(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"state\.json: found no list `_data_files` of file names"):
        find(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(
        UserError, match=r"gone\.arrow: found no such file, though state\.json names it"
    ):
        find(tmp_path)


def test_the_kind_of_file_with_the_most_bytes_is_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about the data")
    (tmp_path / "data").mkdir()
    for name in ("b", "a"):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [name]}), tmp_path / "data" / f"{name}.parquet"
        )
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "packed.txt").write_text("x" * 100_000)
    source = find(tmp_path)
    assert [file.name for file in source.files] == ["a.parquet", "b.parquet"]
    assert source.left_out == "README.md (14 bytes)"


def test_a_data_file_next_to_a_wrong_path_is_suggested(tmp_path: Path) -> None:
    for name in ("config.json", "notes.md", "chat.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model").mkdir()
    named = re.escape(str(tmp_path / "chat.jsonl"))
    with pytest.raises(
        UserError, match=f"without data; .*; fix: name a data file, such as {named}$"
    ):
        find(tmp_path / "model")
    with pytest.raises(UserError, match=rf"no such file .*; fix: did you mean {named}\?$"):
        find(tmp_path / "chats.jsonl")


@pytest.mark.parametrize("weight", ["", ":0.5"])
def test_a_split_after_the_name_of_a_folder_names_its_option(tmp_path: Path, weight: str) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "test.jsonl").write_text("{}\n")
    folder = re.escape(str(tmp_path / "rows"))
    with pytest.raises(
        UserError,
        match=rf"rows:test: found no such file .*; fix: write {folder} and --split test, or ",
    ):
        sources_at([f"{tmp_path}/rows:test{weight}"], ("train",))


def test_paths_without_data_give_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"gone: found no such file or folder; allowed: a file or folder with \*\.jsonl,"
            r" .*\*\.txt.*; fix: check the path"
        ),
    ):
        find(tmp_path / "gone")
    with pytest.raises(
        UserError, match="found a folder without data; allowed: a file or folder with"
    ):
        find(tmp_path)
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(
        UserError,
        match=r"found a folder without data, only rows\.xlsx; allowed: a file or folder with",
    ):
        find(tmp_path)
    with pytest.raises(
        UserError,
        match=(
            r"rows\.xlsx: found a file ending in '\.xlsx'; allowed: \*\.jsonl, .*; fix: convert or"
            r" rename the file"
        ),
    ):
        find(tmp_path / "rows.xlsx")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="found no such file or folder, but a device or a pipe"):
        find(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="found embedded null byte"):
        find(tmp_path / "zero\0.jsonl")
    with pytest.raises(UserError, match="file name too long"):
        find(tmp_path / ("x" * 1000))


def test_the_most_frequent_file_extensions_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for number in range(30):
        (tmp_path / f"once.e{number:02d}").write_text("-")
    for number in range(3):
        (tmp_path / f"{number}.zz").write_text("-")
    source = find(tmp_path)
    named = source.left_out.split(", ")
    assert named[0] == "once.e00"
    assert named[-2:] == ["3 *.zz", "23 other files"]
    assert len(named) == 9


def test_data_without_a_path_is_refused() -> None:
    with pytest.raises(UserError, match=r"data: found no path; .* fix: name one with --data"):
        sources_at((), ("train",))
