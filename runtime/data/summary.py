"""DataSummary: the numbers of rows, documents and tokens in a corpus, stored in a run's folder.

This module does not import torch, so a report can read the numbers quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatrain.simulator.base.files import convert, read_json
from megatrain.simulator.base.units import counted

if TYPE_CHECKING:
    from megatrain.runtime.data.corpus.corpus import Corpus
    from megatrain.runtime.data.tokens.cache import TokenSummary


class DataSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a corpus. Numbers of documents and tokens are for one epoch."""

    rows: int | None = None
    """Number of rows in the files. None if it is not known, for text that is read as bytes, and for
    evaluation documents that were set apart from the training data."""
    empty: int = 0
    """Number of rows without text."""
    unusable: int = 0
    """Number of rows that cannot be used."""
    documents: int
    """Number of documents, without those that are left out."""
    left_out: int
    """Number of documents that are left out, because no token with loss is within `sequence`."""
    cut: int
    """Number of documents that are cut at `sequence` tokens."""
    cut_tokens: int
    """Number of tokens that are cut off."""
    tokens: int
    """Number of tokens, without those that are cut off."""
    targets: int
    """Number of tokens that have loss."""
    sequence: int
    """Number of tokens in a packed row."""
    packed_rows: int
    """Number of rows of `sequence` tokens into which the documents are packed."""
    padding: float
    """Share of padding in the packed rows, from 0 to 1."""
    digest: str = ""
    """`Corpus.digest`. Empty if the run is older than this field."""
    chosen: str = ""
    """`Corpus.chosen_digest`. Empty if the run is older than this field."""


def read_summaries(run: Path) -> dict[str, DataSummary]:
    """Returns the summaries in the folder of a run: `training` and, if there is one, `evaluation`.

    The dictionary is empty if the batches did not come from files. Raises UserError for a damaged
    file.
    """
    path = run / "data.json"
    return convert(read_json(path), dict[str, DataSummary], str(path)) if path.is_file() else {}


def data_labels(summaries: Sequence[DataSummary]) -> list[str]:
    """Returns a label for the data of each of `summaries`, which must have a `digest`.

    Labels differ if the tokens or the chosen documents differ. If one of the runs is older than
    `DataSummary.chosen`, another choice shows only in the numbers of documents and tokens.
    """
    known = all(summary.chosen for summary in summaries)
    return [
        ", ".join(
            (
                summary.chosen if known else summary.digest,
                counted(summary.documents + summary.left_out, "document"),
                # A document that is left out was cut at `sequence` tokens before.
                counted(
                    summary.tokens + summary.cut_tokens + summary.left_out * summary.sequence,
                    "token",
                ),
            )
        )
        for summary in summaries
    ]


def summarize_data(
    corpus: Corpus, sequence: int, summaries: Sequence[TokenSummary] = ()
) -> DataSummary:
    """Returns the summary of `corpus`.

    Args:
        corpus: the packed documents.
        sequence: the number of tokens in a row.
        summaries: the summaries of its sources, or none if the rows are not known.
    """
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
        digest=corpus.digest,
        chosen=corpus.chosen_digest,
    )
