"""DataSummary: what a run trains on or evaluates, in numbers, for its folder.

This module does not import torch, so that a report can read the numbers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from megatrain.runtime.data.corpus.corpus import Corpus
    from megatrain.runtime.data.tokens.cache import TokenSummary


class DataSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is in one corpus. Numbers of tokens are those of an epoch."""

    rows: int | None = None
    """Number of rows in the files. None if they are not counted: text that is read as bytes, or
    documents that were set apart from the training data."""
    empty: int = 0
    """Number of rows without text."""
    unusable: int = 0
    """Number of rows that cannot be used."""
    documents: int
    """Number of documents in the rows of `sequence` tokens."""
    left_out: int
    """Number of documents that are left out, because no token with loss is within `sequence`."""
    cut: int
    """Number of documents that are cut at `sequence` tokens."""
    cut_tokens: int
    """Number of tokens that are cut off."""
    tokens: int
    """Number of tokens."""
    targets: int
    """Number of tokens that have loss."""
    sequence: int
    """Tokens in a row."""
    packed_rows: int
    """Number of rows that the documents are packed into."""
    padding: float
    """Share of padding in these rows."""


def summarize_data(
    corpus: Corpus, sequence: int, summaries: Sequence[TokenSummary] = ()
) -> DataSummary:
    """Returns the summary of `corpus`. `summaries` are those of its files, if they are known."""
    return DataSummary(
        rows=sum(summary.rows for summary in summaries) if summaries else None,
        empty=sum(summary.empty for summary in summaries),
        unusable=sum(summary.bad for summary in summaries),
        documents=corpus.count,
        left_out=corpus.left_out,
        cut=corpus.truncated_documents,
        cut_tokens=corpus.truncated_tokens,
        tokens=corpus.tokens,
        targets=corpus.targets,
        sequence=sequence,
        packed_rows=corpus.rows,
        padding=corpus.padding,
    )
