"""Tests of the corpus against a slow, simple computation.

A token's id is its position among all documents, so a batch shows where its tokens come from.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.documents import TARGET, Documents
from megatrain.runtime.data.options import Packing
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload


def documents_of(
    lengths: list[int], *, whole: bool = False, targets: list[bool] | None = None
) -> Documents:
    ends = np.cumsum(lengths)
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    if targets is not None:
        tokens |= np.where(np.resize(targets, len(tokens)), np.uint32(TARGET), np.uint32(0)).astype(
            np.uint32
        )
    return Documents(
        tokens=tokens, begins=ends - lengths, ends=ends, whole=whole, flagged=targets is not None
    )


def epoch(
    corpus: Corpus, rows: int, number: int = 0
) -> list[tuple[list[int], list[int], list[int] | None]]:
    """Returns the rows (ids, labels, documents) of an epoch of a corpus with one row a step."""
    steps = [corpus.step(number * rows + index + 1)[0] for index in range(rows)]
    return [
        (
            s.ids[0].tolist(),
            s.labels[0].tolist(),
            None if s.documents is None else s.documents[0].tolist(),
        )
        for s in steps
    ]


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
PACKINGS = st.sampled_from(["documents", "plain", "none"])
TARGETS = st.none() | st.lists(st.booleans(), min_size=1, max_size=11)


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 16), st.integers(0, 99), st.integers(0, 3), PACKINGS, TARGETS)
def test_text_loses_no_token_and_labels_are_the_next_ones(
    lengths: list[int], sequence: int, seed: int, number: int, packing, targets
) -> None:
    if sum(lengths) < sequence + 1:
        return
    given_documents = documents_of(lengths, targets=targets)
    corpus = Corpus(
        given_documents, Workload(batch=1, sequence=sequence), seed=seed, packing=packing
    )
    owner = np.repeat(np.arange(len(lengths)), lengths).tolist()
    is_target = [True] * len(owner) if targets is None else np.resize(targets, len(owner)).tolist()
    shown: Counter[int] = Counter()
    stream: dict[int, int] = {}
    for ids, labels, numbers in epoch(corpus, corpus.rows, number):
        real = [at for at in range(sequence) if numbers[at] >= 0] if numbers else range(sequence)
        assert list(real) == list(range(len(real)))  # padding is only at the end
        for at in real:
            token = ids[at]
            if numbers is None:
                if labels[at] == IGNORED and not token:
                    continue  # padding, or the first token if the next has no loss
                shown[token] += 1
                stream[token] = labels[at]
                continue
            shown[token] += 1
            inside = token + 1 < len(owner) and owner[token + 1] == owner[token]
            assert labels[at] == (token + 1 if inside and is_target[token + 1] else IGNORED)
            if at:
                same = numbers[at] == numbers[at - 1]
                assert same == (owner[token] == owner[ids[at - 1]])
                assert numbers[at] - numbers[at - 1] in (0, 1)
                assert not same or token == ids[at - 1] + 1
            else:
                assert numbers[0] == 0
        if numbers is not None:
            assert all(label == IGNORED for label in labels[len(real) :])
            assert all(n == -1 for n in numbers[len(real) :])
    if packing == "plain":
        last = set(range(len(owner))) - set(shown) - {0}
        assert len(last) <= 1  # the last token of the stream is only a label
        if targets is None:
            assert sorted(shown.values()) == [1] * (len(owner) - 1)
        for token, label in stream.items():
            inside = token + 1 < len(owner) and owner[token + 1] == owner[token]
            if label == IGNORED:
                assert not (inside and is_target[token + 1])
            else:
                assert is_target[label]
                assert (
                    label == token + 1 if inside else label == 0 or owner[label - 1] != owner[label]
                )  # or the label is the first token of another document
    else:
        assert shown == dict.fromkeys(range(len(owner)), 1)
        if packing == "documents":
            assert corpus.rows == -(-len(owner) // sequence)  # only the last row has padding
        assert corpus.padding == pytest.approx(1 - len(owner) / (corpus.rows * sequence))


@settings(max_examples=150)
@given(
    LENGTHS,
    st.integers(2, 24),
    st.integers(0, 99),
    st.integers(0, 2),
    st.sampled_from(["documents", "none"]),
    TARGETS,
)
def test_conversations_stay_whole_or_are_truncated(
    lengths: list[int], sequence: int, seed: int, number: int, packing, targets
) -> None:
    begins = np.cumsum(lengths) - lengths
    is_target = (
        [True] * sum(lengths) if targets is None else np.resize(targets, sum(lengths)).tolist()
    )
    kept = {}
    for begin, length in zip(begins.tolist(), lengths, strict=True):
        if length <= sequence or any(is_target[begin + 1 : begin + sequence]):
            kept[begin] = list(range(begin, begin + min(length, sequence)))
    documents = documents_of(lengths, whole=True, targets=targets)
    work = Workload(batch=1, sequence=sequence)
    if not kept:
        with pytest.raises(UserError, match=f"no document with an answer within {sequence} tokens"):
            Corpus(documents, work, seed=seed, packing=packing)
        return
    corpus = Corpus(documents, work, seed=seed, packing=packing)
    assert corpus.truncated_documents == sum(length > sequence for length in lengths)
    assert corpus.truncated_tokens == sum(max(length - sequence, 0) for length in lengths)
    assert corpus.left_out == len(lengths) - len(kept)
    found = {}
    for ids, labels, numbers in epoch(corpus, corpus.rows, number):
        assert numbers is not None
        for index in range(max(numbers) + 1):
            places = [at for at in range(sequence) if numbers[at] == index]
            tokens = [ids[at] for at in places]
            found[tokens[0]] = tokens
            expected = [token if is_target[token] else IGNORED for token in tokens[1:]] + [IGNORED]
            assert [labels[at] for at in places] == expected
        assert all(label == IGNORED for label, n in zip(labels, numbers, strict=True) if n == -1)
    assert found == kept
    if packing == "none":
        assert corpus.rows == len(kept)


@settings(max_examples=60)
@given(
    LENGTHS,
    PACKINGS,
    st.booleans(),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_a_step_does_not_depend_on_what_was_called_before(
    lengths: list[int], packing, whole: bool, numbers: list[int], seed: int
) -> None:
    def fresh() -> Corpus:
        return Corpus(
            documents_of([*lengths, 30, 30], whole=whole),
            Workload(batch=2, sequence=7, accumulation=1),
            seed=seed,
            packing=packing,
        )

    used = fresh()
    for number in numbers:
        for left, right in zip(used.step(number), fresh().step(number), strict=True):
            assert all(
                a is b is None or torch.equal(a, b) for a, b in zip(left, right, strict=True)
            )


def ids_of(batches: list[Batch]) -> torch.Tensor:
    return torch.stack([batch.ids for batch in batches])


def test_batches_are_as_the_workload_says() -> None:
    batches = Corpus(
        documents_of([1000]), Workload(batch=2, sequence=8, accumulation=3), seed=0
    ).step(1)
    assert len(batches) == 3
    for batch in batches:
        for tensor in batch:
            assert tensor is not None
            assert tensor.shape == (2, 8)
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()


@pytest.mark.parametrize(
    ("lengths", "whole", "packing", "expected"),
    [
        ([8, 8, 8], True, "documents", 8),
        ([2, 6, 2, 6], True, "documents", 5),  # (4 + 36) / 8
        ([20], True, "documents", 8),  # cut at the sequence
        ([12, 4], False, "documents", 6),  # 8, then 4 and 4: (64 + 16 + 16) / 16
        ([6, 5], True, "documents", 5),  # padding of 2 and 3: (36 + 4 + 25 + 9) / 16
        ([2, 6], True, "none", 5),  # padding of 6 and 2: (4 + 36 + 36 + 4) / 16
        ([2, 7, 8], False, "plain", 8),  # a row attends as a whole
    ],
)
def test_the_length_of_documents_is_the_mean_over_all_tokens_of_rows(
    lengths: list[int], whole: bool, packing: Packing, expected: int
) -> None:
    work = Workload(batch=1, sequence=8)
    corpus = Corpus(documents_of(lengths, whole=whole), work, seed=None, packing=packing)
    assert corpus.document_length == expected


def test_epochs_and_seeds_have_an_order_of_their_own() -> None:
    work = Workload(batch=10, sequence=8)
    for whole in (False, True):
        zero, one = (
            Corpus(documents_of([7, 1] * 40, whole=whole), work, seed=seed) for seed in (0, 1)
        )
        assert zero.rows == 40
        assert torch.equal(
            ids_of(zero.step(1)),
            ids_of(Corpus(documents_of([7, 1] * 40, whole=whole), work, seed=0).step(1)),
        )
        assert not torch.equal(ids_of(zero.step(1)), ids_of(one.step(1)))
        assert not torch.equal(
            ids_of(zero.step(1)), ids_of(zero.step(5))
        )  # the first rows of the next epoch


def test_a_document_whose_answer_is_cut_off_is_left_out() -> None:
    """Data is refused if no document has a target within its row.

    The first token of a document is never a label, so it does not count.
    """
    documents = documents_of([10, 10], whole=True, targets=[True] + [False] * 4 + [True] * 5)
    corpus = Corpus(documents, Workload(batch=1, sequence=6), seed=0)
    assert (corpus.rows, corpus.truncated_documents, corpus.truncated_tokens, corpus.left_out) == (
        2,
        2,
        8,
        0,
    )
    with pytest.raises(
        UserError,
        match=(
            "found no document with an answer within 5 tokens; allowed: at least one; fix: train on"
            " a longer sequence"
        ),
    ):
        Corpus(documents, Workload(batch=1, sequence=5), seed=0)


def test_plain_packing_has_no_documents_and_labels_across_borders() -> None:
    corpus = Corpus(documents_of([4, 5]), Workload(batch=1, sequence=8), seed=None, packing="plain")
    ((ids, labels, documents),) = corpus.batches()
    assert documents is None
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert labels.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_evaluation_shows_every_row_once_and_fills_up_without_labels() -> None:
    corpus = Corpus(documents_of([8] * 5), Workload(batch=2, sequence=8), seed=None)
    batches = list(corpus.batches())
    assert [batch.ids[:, 0].tolist() for batch in batches] == [[0, 8], [16, 24], [32, 32]]
    assert (batches[-1].labels[1] == IGNORED).all()
    assert sum(int((batch.labels != IGNORED).sum()) for batch in batches) == 5 * 7


def test_one_step_must_be_filled() -> None:
    work = Workload(batch=2, sequence=8, accumulation=3)
    assert Corpus(documents_of([48]), work, seed=0).rows == 6
    with pytest.raises(
        UserError,
        match=(
            "corpus: found 47 tokens; allowed: at least the 48 of one step; fix: give more text, or"
            " a smaller batch"
        ),
    ):
        Corpus(documents_of([47]), work, seed=0)
    with pytest.raises(
        UserError, match="corpus: found 48 tokens; allowed: at least the 49 of one step"
    ):
        Corpus(documents_of([48]), work, seed=0, packing="plain")
    with pytest.raises(
        UserError, match="found 40 tokens in 5 rows of 8; allowed: at least the 6 rows of one step"
    ):
        Corpus(documents_of([8] * 5, whole=True), work, seed=0)
    Corpus(documents_of([8] * 5, whole=True), work, seed=None)


def test_an_evaluation_without_any_label_is_refused() -> None:
    with pytest.raises(UserError, match="found 3 tokens and no label"):
        Corpus(documents_of([1, 1, 1]), Workload(batch=1, sequence=8), seed=None)
