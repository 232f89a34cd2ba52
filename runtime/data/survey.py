"""Describes data without training on it: rows, lengths, and the tokens that would be cut."""

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
"""The default sequence for running text, in tokens."""
_ROWS_SHOWN = 40
"""The maximum number of lines of the document that is shown."""
_MOST_CUTS = 6
"""The maximum number of powers of two in `Survey.cuts`."""


class Cut(NamedTuple):
    """The loss of data if documents are cut to one sequence length."""

    sequence: int
    """The sequence length in tokens."""
    documents: int
    """Number of documents that are longer."""
    tokens: int
    """Number of tokens that are cut off from these documents."""
    left_out: int
    """Number of these documents that are left out, because no token with loss remains."""


class SourceSurvey(NamedTuple):
    """The contents of one source, which is a path or a data set on the hub."""

    path: str
    """The file or folder."""
    kind: str
    """Format of the files."""
    files: int
    """Number of files."""
    layout: str
    """The layout of the rows, as a phrase. Empty for text that is read as bytes."""
    rows: int
    """Number of rows, including rows that are left out."""
    empty: int
    """Number of rows without text."""
    left_out: int
    """Number of rows that cannot be used."""
    reasons: tuple[tuple[str, int], ...]
    """For each kind of row that cannot be used: the first such row with the reason, as text, and
    the number of such rows."""


class Survey(NamedTuple):
    """A description of the data, and of its packing into rows."""

    sources: list[SourceSurvey]
    """The contents of each source."""
    documents: int
    """Number of documents in an epoch."""
    tokens: int
    """Number of tokens in an epoch."""
    median: int
    """Median length of a document, in tokens."""
    percentile_95: int
    """Length in tokens that 95 % of the documents do not exceed."""
    longest: int
    """Length of the longest document, in tokens."""
    cuts: list[Cut]
    """The loss of data for several sequence lengths. Empty for running text, which is never cut."""
    packed: str
    """The packing of an epoch into rows, as a phrase."""
    remarks: list[str]
    """Remarks on facts that a user might not expect, one line each."""
    shown: list[str]
    """Lines that show one document. Empty for text that is read as bytes."""


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
    """Returns a description of the data that `options` name.

    Args:
        options: the options of the data.
        tokenizer_folder: the model's folder.
        vocabulary: number of rows of the model's embedding.
        on_note: called with lines for the user on files, rows, tokens and the cache.
        sequence: the number of tokens in a row. None chooses the least power of two that cuts no
            document, or 1024 for running text, but at most `limit`.
        limit: the maximum sequence length by the model's config, or None.
        number: the number of the document to show, from 1.
        marks: the marks around text with loss.

    Raises the errors of `open_data`, and UserError if there is no document `number`.
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
    """Returns the loss of data for several sequence lengths.

    The lengths are powers of two up to the first that cuts no document, and those in `more`.
    """
    last = (int(documents.lengths.max()) - 1).bit_length()
    first = max(int(np.median(documents.lengths)).bit_length() - 1, last - _MOST_CUTS + 1, 1)
    lengths = sorted({*(1 << power for power in range(first, last + 1)), *more})
    return [Cut(length, *truncated(documents, length)[1:]) for length in lengths]
