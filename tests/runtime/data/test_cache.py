"""Tests of the token cache: tokens are read back as a memory map, and no partial file is left.

A file that is changed or cut anywhere is not used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.runtime.data.tokens.cache import CacheWriter, TokenSummary, load
from megatrain.simulator.base.errors import UserError

SUMMARY = TokenSummary(
    layout="text",
    flagged=False,
    whole=False,
    largest_id=9,
    rows=4,
    bad=1,
    shown=(("rows.jsonl:3: invalid JSON", 1),),
    empty=0,
    templated=True,
)


def write(folder: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    with CacheWriter(folder, "key", np.dtype(dtype)) as writer:
        for document in documents:
            writer.add(np.array(document[:2], dtype=np.uint32), closes=False)
            writer.add(np.array(document[2:], dtype=np.uint32), closes=True)
        assert writer.documents == sum(map(bool, documents))
        writer.finish(SUMMARY)
    return folder / "key.tokens"


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_written_tokens_are_read_back(tmp_path: Path, dtype: type) -> None:
    write(tmp_path, [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]], dtype)
    found = load(tmp_path, "key")
    assert found is not None
    documents, summary = found
    assert summary == SUMMARY
    assert isinstance(documents.tokens, np.memmap)
    assert documents.tokens.dtype == dtype
    assert [
        documents.tokens[a:b].tolist()
        for a, b in zip(documents.begins, documents.ends, strict=True)
    ] == [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert load(tmp_path, "another") is None
    assert [file.name for file in tmp_path.iterdir()] == ["key.tokens"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write(tmp_path_factory.mktemp("cache"), [[1, 2, 3], [4, 5]])
    return path, path.read_bytes()


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_cache_file_is_not_used(sound: tuple[Path, bytes], data: st.DataObject) -> None:
    path, whole = sound
    content = bytearray(whole)
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    path.write_bytes(content)
    assert load(path.parent, "key") is None


def test_a_cache_file_of_another_run_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, [[1]]).rename(tmp_path / "other.tokens")
    assert load(tmp_path, "other") is None


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with CacheWriter(tmp_path, "key", np.dtype(np.uint16)) as writer:
            writer.add(np.arange(3), closes=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=(
            r"cache .*file.*: found (not a directory|file exists); allowed: a writable folder"
            r" with enough free space"
        ),
    ):
        CacheWriter(tmp_path / "file" / "cache", "key", np.dtype(np.uint16))


def test_a_full_disk_gives_a_one_line_error(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, "key", np.dtype(np.uint16)) as writer:
        writer._file.close()
        writer._file = Path("/dev/full").open("wb")  # noqa: SIM115
        with pytest.raises(UserError, match="found no space left on device"):
            writer.add(np.arange(2**20), closes=True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_the_end_gives_a_one_line_error(tmp_path: Path) -> None:
    """The last bytes are in a buffer until the file is flushed."""

    def written() -> None:
        with CacheWriter(tmp_path, "key", np.dtype(np.uint16)) as writer:
            writer.add(np.arange(8), closes=True)
            writer._file.close()
            writer._file = Path("/dev/full").open("wb")  # noqa: SIM115
            writer.finish(SUMMARY)

    with pytest.raises(UserError, match="found no space left on device"):
        written()
    assert list(tmp_path.iterdir()) == []
