"""Tests of best-fit packing against a simple search, and of the padding that it leaves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.runtime.data.corpus.packing import best_fit
from megatrain.runtime.data.documents import Documents


def documents_of(lengths: list[int]) -> Documents:
    ends = np.cumsum(lengths)
    return Documents(
        tokens=np.zeros(sum(lengths), dtype=np.uint16), begins=ends - lengths, ends=ends, whole=True
    )


def searched(lengths: list[int], sequence: int) -> list[int]:
    """Returns the number of tokens in each row by the definition of best-fit decreasing."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(rows)) if rows[row] + length <= sequence]
        if fitting:
            rows[max(fitting, key=lambda row: rows[row])] += length
        else:
            rows.append(length)
    return rows


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_follows_the_definition_of_best_fit(lengths: list[int]) -> None:
    rows = best_fit(documents_of(lengths), np.arange(len(lengths)), 20)
    sizes = rows.ends - rows.begins
    filled = [int(sizes[rows.firsts[row] : rows.firsts[row + 1]].sum()) for row in range(len(rows))]
    assert sorted(filled) == sorted(searched(lengths, 20))
    assert sorted(sizes.tolist()) == sorted(lengths)
    assert max(filled) <= 20


def test_few_tokens_in_a_thousand_are_padding() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 5000).astype(np.int64) + 1, 2048)
    rows = best_fit(documents_of(lengths.tolist()), np.arange(len(lengths)), 2048)
    assert 1 - lengths.sum() / (len(rows) * 2048) < 0.002
