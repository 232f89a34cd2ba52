"""Describes data without training on it: rows, lengths, and what a row of a length would cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.documents import Documents, truncated
from megatrain.runtime.data.opening import describe_packing, read_data
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.preview import Marks, preview
from megatrain.runtime.data.remarks import remarks
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload

_TEXT_SEQUENCE = 1024
_ROWS_SHOWN = 40
_MOST_CUTS = 6


class Cut(NamedTuple):
    """What is lost if documents are cut to one length."""

    sequence: int
    """The length, in tokens."""
    documents: int
    """Number of documents that are longer."""
    tokens: int
    """Number of their tokens that are cut off."""
    left_out: int
    """Number of these documents that then have no token with loss, and are left out."""


class SourceSurvey(NamedTuple):
    """What was found at one path."""

    path: str
    """The file or folder."""
    kind: str
    """Format of the files."""
    files: int
    """Number of files."""
    layout: str
    """How rows were interpreted, as a phrase; empty for text that is read as bytes."""
    rows: int
    """Number of rows, with those that were left out."""
    empty: int
    """Number of rows without text."""
    left_out: int
    """Number of rows that cannot be used."""
    reasons: tuple[tuple[str, int], ...]
    """The first such row of each kind with its reason, and the number of rows of this kind."""


class Survey(NamedTuple):
    """What was found in the data, and how it would be packed."""

    sources: list[SourceSurvey]
    """What was found at each path."""
    documents: int
    """Number of documents of an epoch."""
    tokens: int
    """Number of tokens of an epoch."""
    median: int
    """Median length of a document."""
    percentile_95: int
    """Length that 95 % of the documents do not exceed."""
    longest: int
    """Length of the longest document."""
    cuts: list[Cut]
    """What some lengths would cut; empty for text, which continues in another row."""
    packed: str
    """How an epoch is packed into rows of `sequence` tokens, as a phrase."""
    remarks: list[str]
    """What a user might not expect of this data."""
    shown: list[str]
    """Lines that show one document; empty for text that is read as bytes."""


def survey(
    options: DataOptions,
    tokenizer_folder: Path,
    vocabulary: int,
    on_note: Callable[[str], None],
    *,
    sequence: int | None,
    limit: int | None,
    number: int,
    marks: Marks,
) -> Survey:
    """Returns what is in the data that `options` name.

    Args:
        sequence: tokens of a row; None for the least power of two that cuts nothing, or 1024 for
            text, or `limit` if this is less.
        limit: the most tokens of a row by the model's config, or None.
        number: the document to show, from 1.
        marks: how text with loss is marked in it.

    The other arguments are those of `open_data`, and so are the errors. Raises UserError also if
    there is no document `number`.
    """
    data, tokenizer = read_data(options, tokenizer_folder, vocabulary, on_note)
    documents = data.documents
    if number > len(documents):
        raise UserError(
            "data: document",
            found=number,
            allowed=f"1 to {len(documents)}",
            fix="choose one of these",
        )
    longest = int(documents.lengths.max())
    if sequence is None:
        sequence = 1 << (longest - 1).bit_length() if documents.whole else _TEXT_SEQUENCE
        sequence = min(sequence, limit or sequence)
    corpus = Corpus(
        documents,
        Workload(batch=1, sequence=sequence),
        seed=None,
        packing="documents",
        where=f"data {', '.join(options.paths)}",
    )
    described = [
        SourceSurvey(
            path=str(source.path),
            kind=source.kind,
            files=len(source.files),
            layout=summary.layout if summary else "",
            rows=summary.rows if summary else len(source.files),
            empty=summary.empty if summary else 0,
            left_out=summary.bad if summary else 0,
            reasons=summary.shown if summary else (),
        )
        for source, summary in itertools.zip_longest(data.sources, data.summaries)
    ]
    return Survey(
        sources=described,
        documents=len(documents),
        tokens=documents.total,
        median=round(float(np.percentile(documents.lengths, 50, method="higher"))),
        percentile_95=round(float(np.percentile(documents.lengths, 95, method="higher"))),
        longest=longest,
        cuts=cuts(documents, [sequence]) if documents.whole else [],
        packed=describe_packing(corpus, sequence, len(documents)),
        remarks=(
            remarks(options, data.sources, data.summaries, documents, corpus, tokenizer)
            if tokenizer
            else []
        ),
        shown=(
            preview(
                documents, tokenizer, number=number - 1, rows=_ROWS_SHOWN, run=None, marks=marks
            )
            if tokenizer
            else []
        ),
    )


def cuts(documents: Documents, more: Iterable[int] = ()) -> list[Cut]:
    """Returns what some lengths would cut: powers of two up to the first that cuts nothing, and
    the lengths in `more`.
    """
    last = (int(documents.lengths.max()) - 1).bit_length()
    first = max(int(np.median(documents.lengths)).bit_length() - 1, last - _MOST_CUTS + 1, 1)
    lengths = sorted({*(1 << power for power in range(first, last + 1)), *more})
    return [Cut(length, *truncated(documents, length)[1:]) for length in lengths]
