"""Corpus: bytes as tokens, windows that cover the text once an epoch in an order of the seed's, and errors of one line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain.runtime.data import END_OF_DOCUMENT, VOCABULARY, Corpus
from megatrain.simulator.errors import UserError
from megatrain.simulator.specs import Workload

WORK = Workload(batch=2, sequence=8, accumulation=3)


def corpus_of(tokens: int, work: Workload = WORK, seed: int = 0) -> Corpus:
    return Corpus(np.arange(tokens, dtype=np.uint16), work, seed)


def test_labels_are_the_next_tokens() -> None:
    corpus = corpus_of(1000)
    micro_batches = corpus.step(1)
    assert len(micro_batches) == 3
    for ids, labels, _ in micro_batches:
        assert ids.shape == labels.shape == (2, 8)
        assert ids.dtype == labels.dtype == torch.int64
        assert torch.equal(labels, ids + 1)
        assert ids.is_contiguous()
        assert labels.is_contiguous()


def test_an_epoch_shows_every_window_once_and_the_next_begins_again() -> None:
    corpus = corpus_of(8 * 12 + 1)
    assert corpus.windows == 12
    firsts = [int(row[0]) for number in (1, 2, 3, 4) for ids, *_ in corpus.step(number) for row in ids]
    assert sorted(firsts[:12]) == [8 * window for window in range(12)]
    assert firsts[12:] == firsts[:12]


def test_a_step_is_a_function_of_seed_and_number() -> None:
    def step(seed: int, number: int) -> torch.Tensor:
        return torch.stack([ids for ids, *_ in corpus_of(1000, seed=seed).step(number)])

    assert torch.equal(step(0, 5), step(0, 5))
    assert not torch.equal(step(0, 5), step(0, 6))
    assert not torch.equal(step(0, 5), step(1, 5))


def test_one_step_must_be_filled() -> None:
    assert corpus_of(WORK.step_tokens + 1).windows == 6
    with pytest.raises(UserError, match="corpus: found 48 tokens; allowed: at least the 49 of one step; fix: give more text, or a smaller batch"):
        corpus_of(WORK.step_tokens)


def test_text_files_of_a_folder_are_packed_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_bytes("zwölf".encode())
    (tmp_path / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "c.bin").write_bytes(b"\xff" * 100)
    work = Workload(batch=1, sequence=13)
    corpus = Corpus.read(tmp_path, work, vocabulary=VOCABULARY, seed=0)
    ((ids, labels, _),) = corpus.step(1)
    packed = [*b"x = 1\n", END_OF_DOCUMENT, *"zwölf".encode(), END_OF_DOCUMENT]
    assert ids[0].tolist() == packed[:-1]
    assert labels[0].tolist() == packed[1:]


def test_a_corpus_is_cut_at_its_most_bytes(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 100)
    corpus = Corpus.read(tmp_path, Workload(batch=1, sequence=1), vocabulary=VOCABULARY, seed=0, most_bytes=150)
    assert corpus.windows == 150 + 2 - 1
    drawn = [int(ids) for number in range(1, corpus.windows + 1) for ids, *_ in corpus.step(number)]
    assert (drawn.count(ord("a")), drawn.count(ord("b")), drawn.count(ord("c"))) == (100, 50, 0)


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model: vocabulary: found 256; allowed: >= 257 for byte-level text; fix: "):
        Corpus.read(tmp_path, WORK, vocabulary=256, seed=0)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: found no such file or folder; allowed: a text file, or a folder with "):
        Corpus.read(tmp_path / "nowhere", WORK, vocabulary=VOCABULARY, seed=0)
    with pytest.raises(UserError, match="found a folder without text files"):
        Corpus.read(tmp_path, WORK, vocabulary=VOCABULARY, seed=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(UserError, match=r"secret\.txt: found permission denied; allowed: a readable text file; fix: "):
        Corpus.read(tmp_path, WORK, vocabulary=VOCABULARY, seed=0)


def test_an_error_while_reading_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("text")

    def broken(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", broken)
    with pytest.raises(UserError, match=r"text\.txt: found input/output error; allowed: a readable text file; fix: "):
        Corpus.read(tmp_path, WORK, vocabulary=VOCABULARY, seed=0)
