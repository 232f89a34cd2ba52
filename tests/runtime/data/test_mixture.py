"""Tests of several sources of data and their weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rows import CHAT, same

from megatrain.runtime.data.corpus.mixture import weighted
from megatrain.runtime.data.documents import Documents, JoinedTokens
from megatrain.runtime.data.rows.sources import weighted_path
from megatrain.simulator.base.errors import UserError

Folder = Callable[..., Path]
MANY = [{"text": f"hello {'one ' * (number % 7)}"} for number in range(60)]
OTHERS = [{"text": f"words {'you ' * (number % 5)}"} for number in range(40)]


def documents_of(lengths: Sequence[int], *, whole: bool = True) -> Documents:
    ends = np.cumsum(lengths)
    return Documents(
        tokens=np.arange(ends[-1]), begins=ends - lengths, ends=ends, whole=whole, digest="d"
    )


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [
        ("a.jsonl", "a.jsonl", 1),
        ("a.jsonl:0.7", "a.jsonl", 0.7),
        ("a:b:2", "a:b", 2),
        ("a.jsonl:.5", "a.jsonl", 0.5),
        ("a:b", "a:b", 1),
        ("1:1:1", "1:1", 1),
    ],
)
def test_a_weight_is_the_number_at_the_end(text: str, path: str, weight: float) -> None:
    assert weighted_path(text) == (Path(path), weight)


def test_a_file_whose_name_ends_like_a_weight_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows:2").mkdir()
    assert weighted_path(f"{tmp_path}/rows:2") == (tmp_path / "rows:2", 1)
    assert weighted_path(f"{tmp_path}/rows:2:3") == (tmp_path / "rows:2", 3)


@pytest.mark.parametrize("weight", ["0", "0.0", "1001", "-1", "-.5"])
def test_a_weight_out_of_range_gives_a_one_line_error(weight: str) -> None:
    with pytest.raises(UserError, match=rf"^data a\.jsonl: weight: found {weight}; allowed: a num"):
        weighted_path(f"a.jsonl:{weight}")


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_joined_tokens_are_read_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    tokens = JoinedTokens(np.split(whole, np.cumsum(lengths)[:-1]))
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    assert tokens[begin:end].tolist() == whole[begin:end].tolist()
    assert tokens[begin:end].dtype == np.uint16
    assert len(tokens) == len(whole)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 3.5), min_size=3, max_size=3),
    st.integers(0, 5),
)
def test_every_document_is_there_as_often_as_its_weight(
    counts: list[int], weights: list[float], seed: int
) -> None:
    documents = documents_of([2] * sum(counts))
    starts = [2 * sum(counts[:number]) for number in range(len(counts))]
    chosen = weights[: len(counts)]
    epoch = weighted(documents, starts, chosen, seed)
    found = Counter(epoch.begins.tolist())
    for start, count, weight in zip(starts, counts, chosen, strict=True):
        times = [found[begin] for begin in range(start, start + 2 * count, 2)]
        assert min(times) >= int(weight)
        assert max(times) <= int(weight) + 1
        more = sum(times) - int(weight) * count
        assert more == (max(1, round(weight % 1 * count)) if weight % 1 else 0)
    again = weighted(documents, starts, chosen, seed)
    assert again.begins.tolist() == epoch.begins.tolist()
    assert again.digest == epoch.digest


def test_the_seed_draws_the_fraction_and_weights_change_the_digest() -> None:
    documents = documents_of([2] * 50)
    draws = [weighted(documents, [0], [0.5], seed).begins.tolist() for seed in range(3)]
    assert len(set(map(tuple, draws))) == 3
    digests = {weighted(documents, [0], [weight], 0).digest for weight in (1, 0.5, 2)}
    assert len(digests) == 3
    assert "d" in digests  # a weight of 1 changes nothing


def test_a_fraction_of_a_single_text_is_its_beginning() -> None:
    epoch = weighted(documents_of([10, 20], whole=False), [0, 10], [0.3, 1.5], 0)
    assert [*zip(epoch.begins.tolist(), epoch.ends.tolist(), strict=True)] == [
        (10, 30),
        (0, 3),
        (10, 20),
    ]


def test_several_files_are_one_epoch(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    one, two = jsonl(MANY, "one.jsonl"), tmp_path / "two.json"
    two.write_text(json.dumps(OTHERS))
    both, _, notes = opened((str(one), str(two)))
    assert f"data {one}: jsonl, 1 file" in notes
    assert f"data {two}: json, 1 file" in notes
    assert any(note.startswith("training: 100 documents, ") for note in notes)
    whole = jsonl([*MANY, *OTHERS], "whole.jsonl")
    apart, _, _ = opened(whole)
    assert both.digest != apart.digest  # it is known from the parts
    assert same(both.step(1), apart.step(1))
    assert same(both.step(9), apart.step(9))


def test_weights_are_in_the_batches_the_digest_and_the_notes(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    one, two = (jsonl(MANY, "one.jsonl"), jsonl(OTHERS, "two.jsonl"))
    corpus, _, notes = opened((f"{one}:0.5", f"{two}:2"), seed=3)
    assert any(
        note.startswith(f"weight 0.5 of {one}: 30 documents an epoch, from 60, ") for note in notes
    )
    assert any(
        note.startswith(f"weight 2 of {two}: 80 documents an epoch, from 40, ") for note in notes
    )
    again, _, _ = opened((f"{one}:0.5", f"{two}:2"), seed=3)
    assert same(corpus.step(5), again.step(5))
    digests = {
        opened(paths)[0].digest
        for paths in (
            (str(one), str(two)),
            (str(two), str(one)),
            (f"{one}:2", str(two)),
            (str(one), f"{two}:2"),
            (str(one),),
        )
    }
    assert len(digests) == 5


def test_evaluation_documents_are_never_trained_on(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    rows = [{"text": f"document {number}"} for number in range(60)]
    one, two = jsonl(rows[:30], "one.jsonl"), jsonl(rows[30:], "two.jsonl")
    corpus, evaluation, _ = opened((f"{one}:3", f"{two}:0.5"), evaluation_fraction=0.3)
    trained, evaluated = (set(data._documents.begins.tolist()) for data in (corpus, evaluation))
    assert len(evaluated) == 18
    assert not trained & evaluated


def test_a_source_that_is_only_evaluated_on_is_named(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    one, two = jsonl(MANY, "one.jsonl"), jsonl(OTHERS[:5], "two.jsonl")
    paths = (str(one), f"{two}:2")
    warning = (
        f"warning: {two}:2 is not trained on, because 5 documents, all that it has, are kept for"
        " evaluation. Keep fewer, or give other data with --evaluation-data"
    )
    for documents, warned in ((4, False), (5, True)):
        _, _, notes = opened(paths, evaluation_documents=documents)
        assert [note for note in notes if "not trained on" in note] == [warning] * warned


@pytest.mark.parametrize("same_file", ["one.jsonl", "."])
def test_a_file_that_is_named_twice_is_refused(
    opened: Callable[..., Any], jsonl: Folder, same_file: str, tmp_path: Path
) -> None:
    one = jsonl(MANY, "one.jsonl")
    with pytest.raises(
        UserError,
        match=(
            r"one\.jsonl: found a file that is named twice; allowed: each file once; fix: give it a"
            r" weight: one\.jsonl:2"
        ),
    ):
        opened((str(one), str(tmp_path / same_file)))


def test_text_and_conversations_are_refused(opened: Callable[..., Any], jsonl: Folder) -> None:
    text, chat = jsonl(MANY, "text.jsonl"), jsonl([{"messages": CHAT}] * 20, "chat.jsonl")
    with pytest.raises(
        UserError, match=r"^data: found text in .*text.jsonl, and prompts with answers in .*chat.j"
    ):
        opened((str(text), str(chat)))


def test_conversations_in_several_layouts_are_one_epoch(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    alpaca = [{"instruction": "hello", "output": "world"}] * 20
    corpus, _, notes = opened(
        (str(jsonl([{"messages": CHAT}] * 20, "chat.jsonl")), str(jsonl(alpaca, "alpaca.jsonl")))
    )
    assert corpus.conversations
    assert sum(note.startswith("recognized: ") for note in notes) == 2
