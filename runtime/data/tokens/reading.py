"""Reads sources as tokenized documents. Uses the tokens in the cache if they are there.

Without a tokenizer, text is read as bytes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from megatrain.runtime.data.columns import LAYOUTS, Layout, recognize, unknown_columns
from megatrain.runtime.data.corpus.mixture import joined
from megatrain.runtime.data.documents import TARGET, Documents
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.rows import csv_rows
from megatrain.runtime.data.rows.formats import (
    BadRow,
    BadRows,
    TextRow,
    describe_bad_rows,
    encoding_fix,
    other_separators,
    rows,
)
from megatrain.runtime.data.rows.sources import DataSource
from megatrain.runtime.data.tokens import byte_level
from megatrain.runtime.data.tokens.cache import CacheWriter, TokenSummary, load
from megatrain.runtime.data.tokens.tokenize import (
    Encoder,
    load_tokenizer,
    read_chat_template,
    tokenizer_digest,
)
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import printable
from megatrain.simulator.base.units import counted, format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Note = Callable[[str], None]
"""A function that receives lines for the user."""
_FORMAT = 7
"""Version of the tokenization. It is part of the cache's key."""
_JSON = "one array of objects at the top of the file, or one object per line"
"""What a .json file may have."""
_INSPECTED = 100
"""Number of rows from which the layout is recognized."""


@dataclass(frozen=True, kw_only=True)
class TokenizedData:
    """The documents of one or several sources, before they are packed."""

    sources: list[DataSource]
    """The sources, with their files."""
    summaries: list[TokenSummary]
    """The summary of each source. Empty if there is no tokenizer."""
    starts: list[int]
    """Index of the first token of each source in the tokens of `documents`."""
    documents: Documents
    """The documents of all sources."""


class SourceReader:
    """Reads sources as documents, with the model's tokenizer."""

    def __init__(
        self, options: DataOptions, folder: Path | None, vocabulary: int, on_note: Note
    ) -> None:
        """Loads the tokenizer.

        Args:
            options: the options of the run.
            folder: the model's folder. If it has no tokenizer, plain text is read as bytes.
            vocabulary: number of rows of the model's embedding.
            on_note: called with lines for the user on files, rows, tokens and the cache.

        Raises UserError if the tokenizer cannot be loaded.
        """
        self._options, self._folder = options, folder
        self._vocabulary, self._on_note = vocabulary, on_note
        self.tokenizer = (
            load_tokenizer(
                folder,
                chat_template=options.chat_template,
                trust_remote_code=options.trust_remote_code,
            )
            if folder
            else None
        )
        """The tokenizer, or None to read text as bytes."""

    def read(self, sources: list[DataSource]) -> TokenizedData:
        """Returns the documents of all `sources`.

        Raises UserError if a source cannot be read or has no usable row, and with `strict` for the
        first bad row.
        """
        results = [self._documents(source) for source in sources]
        parts = [documents for documents, _ in results]
        return TokenizedData(
            sources=sources,
            summaries=[summary for _, summary in results if summary is not None],
            starts=list(itertools.accumulate((len(part.tokens) for part in parts[:-1]), initial=0)),
            documents=joined(parts, sources),
        )

    def _documents(self, source: DataSource) -> tuple[Documents, TokenSummary | None]:
        """Returns the documents of `source`, and their summary, and notes what was read.

        Without a tokenizer, the documents are bytes, and the summary is None.
        """
        which = f", split {source.split}" if source.split else ""
        left_out = f"; not read: {source.left_out}" if source.left_out else ""
        self._on_note(
            f"data {source.path}: {source.kind},"
            f" {counted(len(source.files), 'file')}{which}{left_out}"
        )
        if self.tokenizer is None or self._folder is None:
            return _as_bytes(source, self._folder, self._vocabulary, self._on_note), None
        documents, summary, state = self._tokenized(source, self._folder, self.tokenizer)
        self._on_note(f"recognized: {summary.layout}")
        empty = f", {summary.empty:,} without text" if summary.empty else ""
        self._on_note(
            f"{counted(summary.rows, 'row')}{empty}, {counted(len(documents), 'document')},"
            f" {counted(documents.total, 'token')}; {state}"
        )
        if summary.bad:
            if self._options.strict:
                raise _bad_row(summary.shown[0][0])
            self._on_note(describe_bad_rows(summary.bad, summary.shown))
        for layout, count in summary.elsewhere.items():
            self._on_note(
                f"{count:,} of the rows left out"
                f" {'has' if count == 1 else 'have'} the columns of {layout}, but every row is read"
                " with the layout of the first rows, or with that of --columns"
            )
        if summary.largest_id >= self._vocabulary:
            raise UserError(
                f"model: vocabulary, for data {source.path}",
                found=self._vocabulary,
                allowed=f">= {summary.largest_id + 1}, the largest token id + 1",
                fix="use the model's own tokenizer",
            )
        return documents, summary

    def _tokenized(
        self, source: DataSource, folder: Path, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Documents, TokenSummary, str]:
        """Returns the documents of `source`, their summary, and a phrase on the cache.

        If the cache does not have the documents, they are tokenized first.
        """
        key = _key(source, self._options, folder, tokenizer)
        stored, state = load(self._options.cache_folder, key), "tokens from the cache"
        if stored is None:
            layout = Layout("text", ()) if source.kind == "text" else _layout(source, self._options)
            largest = max(tokenizer.get_vocab().values(), default=0)
            _tokenize(
                source,
                Encoder(
                    tokenizer, layout, self._options.loss, str(folder), self._options.chat_template
                ),
                self._options,
                key,
                largest,
            )
            if _key(source, self._options, folder, tokenizer) != key:
                raise UserError(
                    f"data {source.path}",
                    found="files that changed while they were read",
                    allowed="files that do not change",
                    fix="start again",
                )
            stored, state = load(self._options.cache_folder, key), "tokenized now, and cached"
            if stored is None:
                raise UserError(
                    f"cache {self._options.cache_folder}",
                    found="a file whose content is not what was written",
                    allowed="a working disk",
                    fix="choose another folder with --data-cache",
                )
        return (*stored, state)


def _as_bytes(source: DataSource, folder: Path | None, vocabulary: int, on_note: Note) -> Documents:
    """Returns the documents of a text source, as bytes. Raises UserError for any other source."""
    if source.kind != "text":
        raise UserError(
            f"tokenizer {folder or 'of the model'}",
            found="none",
            allowed=f"one in the model's folder, for {source.kind} data",
            fix=(
                "copy the model's tokenizer files there, or give plain text, which is read as bytes"
                " without a tokenizer"
            ),
        )
    documents, whole = byte_level.byte_documents(source, vocabulary)
    on_note("the model's folder has no tokenizer, so each byte of the text is a token")
    if not whole:
        most = format_bytes(byte_level.MOST_BYTES)
        on_note(f"only the first {most} of the text are read; the rest is left out")
    on_note(f"{counted(len(documents), 'document')}, {counted(documents.total, 'token')}")
    return documents


def _layout(source: DataSource, options: DataOptions) -> Layout:
    """Returns the layout of the first row whose columns match one.

    Raises UserError if none of the first 100 rows matches.
    """
    inspected = list(itertools.islice(rows(source), _INSPECTED))
    columns: set[str] = set()
    for row in inspected:
        if isinstance(row, TextRow) and isinstance(row.value, dict):
            layout = recognize(row.value.keys(), options.columns)
            if layout:
                return layout
            columns |= row.value.keys()
    if not inspected:
        raise _no_data(source, "no rows")
    if all(isinstance(row, BadRow) for row in inspected):
        raise (
            _bad_row(str(inspected[0]))
            if options.strict
            else _no_data(
                source,
                f"no row that can be read, the first {inspected[0]}",
                _JSON if source.kind == "json" else "at least one row without such a mistake",
                encoding_fix(str(inspected[0])),
            )
        )
    if source.kind == "json" and (name := _wrapping(inspected)):
        raise _no_data(
            source,
            f"an object whose `{name}` is an array of objects",
            _JSON,
            f"write the array of `{name}` at the top of the file, without the object around it",
        )
    raise unknown_columns(f"data {source.path}", columns, options.columns)


def _wrapping(inspected: Sequence[TextRow | BadRow]) -> str:
    """Returns the first column whose value is a list of objects, if `inspected` is one row that has
    such a column, otherwise an empty text.
    """
    values = [row.value for row in inspected if isinstance(row, TextRow)]
    if len(inspected) != 1 or not values or not isinstance(values[0], dict):
        return ""
    return next(
        (
            name
            for name, value in values[0].items()
            if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
        ),
        "",
    )


def _tokenize(
    source: DataSource, encoder: Encoder, options: DataOptions, key: str, largest: int
) -> None:
    """Tokenizes `source` and writes the tokens to the cache, under `key`.

    `largest` is the largest token id of the tokenizer, from which the dtype of the tokens follows.
    Raises UserError if no row can be used, and with `options.strict` for the first bad row.
    """
    count = empty = largest_id = 0
    bad = BadRows()
    elsewhere: Counter[str] = Counter()
    dtype = np.dtype(np.uint32 if encoder.flagged or largest >= 2**16 else np.uint16)
    layout = encoder.layout
    with CacheWriter(options.cache_folder, key, dtype) as writer:
        for item in encoder.encode(rows(source, layout.columns)):
            if item is None:
                count, empty = count + 1, empty + 1
            elif isinstance(item, BadRow):
                if options.strict:
                    raise _bad_row(str(item))
                count += 1
                bad.add(item)
                elsewhere.update([item.layout] if item.layout else [])
            else:
                ids, closes = item
                count += closes
                largest_id = max(largest_id, int((ids & np.uint32(TARGET - 1)).max(initial=0)))
                writer.add(ids, closes=closes)
        if not writer.documents:
            reasons = "; ".join(row for row, _ in bad.shown)
            if reasons:
                raise _no_data(
                    source,
                    f"no row that can be used, the first {reasons}",
                    "at least one row without such a mistake",
                    encoding_fix(bad.shown[0][0]),
                )
            raise _no_data(source, "no text" if count else "no rows")
        separated = [f"columns separated by {other!r}" for other in other_separators(source)]
        summary = TokenSummary(
            layout="; ".join([encoder.describe(), *separated]),
            flagged=encoder.flagged,
            whole=layout.name != "text",
            largest_id=largest_id,
            rows=count,
            bad=bad.count,
            shown=bad.shown,
            empty=empty,
            templated=encoder.templated,
            elsewhere=dict(elsewhere),
        )
        writer.finish(summary)


def _key(source: DataSource, options: DataOptions, folder: Path, tokenizer: object) -> str:
    """Returns the key of the cache: a digest of everything that the tokens depend on.

    A file is identified by its path, its size, its mtime and its ctime. The ctime is needed because
    `cp -p` sets the mtime to an earlier one. Raises UserError if a file no longer exists.
    """
    import tokenizers
    import transformers

    try:
        files = [
            (printable(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            for file in source.files
            if (status := file.stat())
        ]
    except OSError as error:
        raise UserError(
            f"data {source.path}",
            found=str(error.strerror).lower(),
            allowed="files that do not change",
            fix="check the path",
        ) from None
    template = read_chat_template(options.chat_template) if options.chat_template else ""
    parts = (
        _FORMAT,
        source.kind,
        files,
        options.columns,
        options.loss,
        template,
        tokenizer_digest(folder, tokenizer),
        transformers.__version__,
        tokenizers.__version__,
        [layout.columns for layout in LAYOUTS],
        *([csv_rows.SEPARATORS] if source.kind == "csv" else []),
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _bad_row(row: str) -> UserError:
    """Returns the error for a bad row with `strict`. `row` is the text of the BadRow."""
    return UserError(
        f"bad row {row.partition(': ')[0]}",
        found=row.partition(": ")[2],
        allowed="rows that can be used",
        fix=encoding_fix(row) or "correct the row, or run without --strict",
    )


def _no_data(
    source: DataSource, found: str, allowed: str = "at least one row with text", fix: str = ""
) -> UserError:
    """Returns the error for data without a usable row. `fix` may be empty."""
    fix = fix or "correct the data"
    return UserError(f"data {source.path}", found=found, allowed=allowed, fix=fix)
