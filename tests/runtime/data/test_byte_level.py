"""Tests of text as bytes: documents, packing, the limit of bytes, and errors of one line.

Each file is a document. Documents are packed without borders.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.tokens import byte_level
from megatrain.runtime.data.tokens.byte_level import END_OF_DOCUMENT, VOCABULARY
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload

WORK = Workload(batch=2, sequence=8, accumulation=3)


def read(path: Path, work: Workload = WORK, vocabulary: int = VOCABULARY) -> Corpus:
    return open_data(DataOptions(data=str(path), packing="plain"), work, None, vocabulary)[0]


def test_text_files_of_a_folder_are_packed_without_borders(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_bytes("zwölf".encode())
    (tmp_path / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "c.bin").write_bytes(b"\xff" * 100)
    corpus = read(tmp_path, Workload(batch=1, sequence=13))
    first, second = [*b"x = 1\n", END_OF_DOCUMENT], [*"zwölf".encode(), END_OF_DOCUMENT]
    seen = set()
    for number in range(1, 20):
        ((ids, labels, documents),) = corpus.step(number)
        assert documents is None
        row = (*ids[0].tolist(), int(labels[0, -1]))
        assert row in ((*first, *second), (*second, *first))
        assert labels[0].tolist() == [*row[1:]]
        seen.add(row)
    assert len(seen) == 2  # an epoch has its own order


def test_a_corpus_is_cut_at_its_limit_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 100)
    monkeypatch.setattr(byte_level, "MOST_BYTES", 150)
    corpus = read(tmp_path, Workload(batch=1, sequence=1))
    assert corpus.rows == 150 + 2 - 1
    drawn = [int(ids) for number in range(1, corpus.rows + 1) for ids, *_ in corpus.step(number)]
    assert (drawn.count(ord("a")), drawn.count(ord("b")), drawn.count(ord("c"))) == (100, 50, 0)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text", encoding="utf-8-sig")
    ((ids, labels, _),) = read(tmp_path, Workload(batch=1, sequence=4)).step(1)
    assert ids[0].tolist() == [*b"text"]
    assert labels[0].tolist() == [*b"ext", END_OF_DOCUMENT]


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(
        UserError, match="model: vocabulary: found 256; allowed: >= 257 for byte-level text; fix: "
    ):
        read(tmp_path, vocabulary=256)


def test_an_unreadable_path_gives_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"nowhere: found no such file or folder; allowed: a file or folder with \*\.jsonl, ",
    ):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match="found a folder without data"):
        read(tmp_path)
    (tmp_path / "text.txt").touch()
    with pytest.raises(UserError, match="found an empty file; allowed: files with data; fix: "):
        read(tmp_path)
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(
        UserError, match="found 2 tokens; allowed: at least the 49 of one step; fix: give more text"
    ):
        read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(
        UserError,
        match=r"secret\.txt: found permission denied; allowed: a readable text file; fix: ",
    ):
        read(tmp_path)


def test_an_error_while_reading_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("text")

    def broken(path: Path, *_: object) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(
        UserError,
        match=r"text\.txt: found input/output error; allowed: a readable text file; fix: ",
    ):
        read(tmp_path)
