"""Tests of evaluation data: a fraction of the documents, the last ones, a file, or a split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rows import BOTTOM

from megatrain.runtime.batch import IGNORED
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.opening import split
from megatrain.runtime.data.options import DataOptions
from megatrain.simulator.base.errors import UserError

Folder = Callable[..., Path]


def documents_of(count: int, *, whole: bool = False) -> Documents:
    return Documents(
        tokens=np.arange(count * 10),
        begins=np.arange(count) * 10,
        ends=np.arange(count) * 10 + 10,
        whole=whole,
    )


@settings(max_examples=100)
@given(st.integers(2, 200), st.floats(0.001, 0.99))
def test_a_fraction_is_drawn_once_and_shares_no_document(count: int, fraction: float) -> None:
    options = DataOptions(evaluation_fraction=fraction)
    size = max(1, round(count * fraction))
    if size >= count:
        with pytest.raises(
            UserError,
            match=(
                f"data: evaluation: found {size} of {count} documents; allowed: at most {count - 1}"
            ),
        ):
            split(documents_of(count), options)
        return
    training, evaluation = split(documents_of(count), options)
    assert evaluation is not None
    assert sorted([*training.begins, *evaluation.begins]) == [10 * index for index in range(count)]
    assert len(evaluation) == size
    again = split(documents_of(count), options)[1]
    assert again is not None
    assert again.begins.tolist() == evaluation.begins.tolist()


def test_the_last_documents_can_be_evaluated() -> None:
    training, evaluation = split(documents_of(10), DataOptions(evaluation_documents=3))
    assert evaluation is not None
    assert evaluation.begins.tolist() == [70, 80, 90]
    assert len(training) == 7
    with pytest.raises(UserError, match="found 10 of 10 documents; allowed: at most 9"):
        split(documents_of(10), DataOptions(evaluation_documents=10))


def test_other_tokens_in_the_same_places_are_other_documents() -> None:
    digests = [replace(documents_of(3), digest=digest).chosen_digest for digest in "aab"]
    assert digests[0] == digests[1] != digests[2]


def test_the_end_of_a_single_text_is_evaluated() -> None:
    training, evaluation = split(documents_of(1), DataOptions(evaluation_fraction=0.3))
    assert evaluation is not None
    assert (training.begins[0], training.ends[0], evaluation.begins[0], evaluation.ends[0]) == (
        0,
        7,
        7,
        10,
    )
    with pytest.raises(UserError, match="found 1 of 1 documents"):
        split(documents_of(1, whole=True), DataOptions(evaluation_fraction=0.3))


def test_a_file_of_its_own_is_evaluated_in_its_order(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    corpus, evaluation, notes = opened(
        jsonl(BOTTOM), evaluation_data=str(jsonl([{"text": "one"}, {"text": "two"}], "other.jsonl"))
    )
    (batch,) = evaluation.batches()
    assert batch.documents[0].tolist()[:2] == [0, 0]
    assert int((batch.labels != IGNORED).sum()) == evaluation.tokens - 2
    (note,) = (note for note in notes if note.startswith("evaluation: "))
    assert note.startswith(
        f"evaluation: 2 documents, {evaluation.tokens} tokens in 1 row of 48; packing documents, "
    )
    assert isinstance(corpus, Corpus)


def test_a_split_of_its_own_is_evaluated(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    for name, text in (("train", "hello"), ("test", "one"), ("dev", "two words")):
        jsonl([{"text": text}] * 50, f"rows/{name}.jsonl")
    folder = tmp_path / "rows"

    corpus, evaluation, notes = opened(folder)
    assert evaluation is None
    assert (
        notes[0]
        == f"data {folder}: jsonl, 1 file, split train; not read: split validation (1 file), split"
        " test (1 file)"
    )
    corpus, evaluation, notes = opened(folder, evaluation_data=str(folder))
    assert (
        f"data {folder}: jsonl, 1 file, split validation; not read: split train (1 file), split"
        " test (1 file)" in notes
    )
    assert corpus.tokens != evaluation.tokens
    assert not any("warning" in note for note in notes)
    assert opened(folder, evaluation_split="validation")[1].digest == evaluation.digest
    assert opened(folder, evaluation_split="test")[1].digest not in (
        corpus.digest,
        evaluation.digest,
    )
    assert (
        opened(folder, split="test")[0].digest == opened(folder, evaluation_split="test")[1].digest
    )
    with pytest.raises(
        UserError, match="rows: split: found 'other'; allowed: train, validation, test"
    ):
        opened(folder, evaluation_split="other")


def test_a_note_names_rows_that_are_both_trained_and_evaluated_on(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    path = jsonl(BOTTOM)
    assert any(
        note.startswith(
            "warning: 1 file of the evaluation data is also in the training data, so its loss"
        )
        for note in opened(path, evaluation_data=str(path))[2]
    )
    copy = jsonl(BOTTOM, "copy.jsonl")
    assert any(
        note.startswith("warning: the evaluation data has the same rows as")
        for note in opened(path, evaluation_data=str(copy))[2]
    )
    other = jsonl(BOTTOM[1:], "other.jsonl")
    assert not any(
        note.startswith("warning") for note in opened(path, evaluation_data=str(other))[2]
    )


@pytest.mark.parametrize("tokens", [2, 3])
def test_a_text_of_two_tokens_has_no_end_to_evaluate_on(tokens: int) -> None:
    """An evaluation predicts a token from the one before it."""
    text = Documents(tokens=np.arange(tokens), begins=np.array([0]), ends=np.array([tokens]))
    options = DataOptions(evaluation_fraction=0.5)
    if tokens == 2:
        with pytest.raises(UserError, match="evaluation: found 2 tokens; allowed: more than 2"):
            split(text, options)
    else:
        train, held_out = split(text, options)
        assert held_out is not None
        assert (train.total, held_out.total) == (1, 2)
