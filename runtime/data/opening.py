"""Opens the data of a run: makes the training and evaluation corpus that DataOptions describe."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from megatrain.runtime.data import byte_level
from megatrain.runtime.data.bad_rows import BadRows, describe_bad_rows
from megatrain.runtime.data.cache import CacheWriter, TokenSummary, load
from megatrain.runtime.data.columns import LAYOUTS, Layout, recognize, unknown_columns
from megatrain.runtime.data.corpus import Corpus
from megatrain.runtime.data.documents import TARGET, Documents
from megatrain.runtime.data.formats import BadRow, TextRow, rows
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.preview import preview
from megatrain.runtime.data.remarks import remarks
from megatrain.runtime.data.sources import DataSource, find
from megatrain.runtime.data.tokenize import (
    Encoder,
    load_tokenizer,
    read_chat_template,
    tokenizer_digest,
)
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Note = Callable[[str], None]
_FORMAT = 5
"""Version of the tokenization. It is part of the cache's key."""
_EVALUATION_SPLITS = ("validation", "test", "train")
"""Splits for evaluation, the preferred first, unless the options name one."""
_LOOKED_AT = 100
"""Number of rows from which the layout is recognized."""


def open_data(
    options: DataOptions,
    workload: Workload,
    tokenizer_folder: Path | None,
    vocabulary: int,
    on_note: Note = lambda _: None,
    *,
    seed: int = 0,
) -> tuple[Corpus, Corpus | None]:
    """Returns the training corpus, and the evaluation corpus or None if `options` have none.

    The training corpus is shuffled by `seed`. The evaluation corpus has the order of its files.

    Args:
        options: the options, with `packing` set.
        tokenizer_folder: the model's folder. If it has no tokenizer, plain text is read as bytes.
        vocabulary: number of rows of the model's embedding.
        on_note: receives lines for the user on files, rows, tokens and the cache.

    Raises UserError for every mistake in files, rows and options.
    """
    assert options.packing, "packing is taken from the plan if the options do not set it"
    source = find(Path(options.data), (options.split,))
    reader = _reader(options, tokenizer_folder, vocabulary, on_note)
    tokenizer = reader.tokenizer
    training, summary = reader.documents(source)
    evaluation: Documents | None
    if options.evaluation_data or options.evaluation_split:
        other_source = find(
            Path(options.evaluation_data or options.data),
            (options.evaluation_split,) if options.evaluation_split else _EVALUATION_SPLITS,
        )
        evaluation, _ = reader.documents(other_source)
        _compare(source, training, other_source, evaluation, on_note)
    else:
        training, evaluation = split(training, options)
    corpus, other = (
        Corpus(
            training, workload, seed=seed, packing=options.packing, where=f"data {options.data}"
        ),
        None,
    )
    on_note(f"training: {_packed(corpus, workload, len(training))}")
    if evaluation is not None:
        other = Corpus(
            evaluation,
            workload,
            seed=None,
            packing=options.packing,
            where=f"evaluation data {options.evaluation_data or options.data}",
        )
        on_note(f"evaluation: {_packed(other, workload, len(evaluation))}")
    if tokenizer is not None and summary is not None:
        for line in (
            *remarks(options, source, summary, training, corpus, tokenizer),
            *preview(training, tokenizer),
        ):
            on_note(f"  {line}")
    return corpus, other


def training_documents(
    options: DataOptions, tokenizer_folder: Path | None, vocabulary: int
) -> Documents:
    """Returns the documents that `open_data` trains on, before they are packed into rows.

    Their tokens are cached, so that `open_data` does not tokenize them again. Raises UserError as
    `open_data` does.
    """
    reader = _reader(options, tokenizer_folder, vocabulary, lambda _: None)
    documents, _ = reader.documents(find(Path(options.data), (options.split,)))
    if options.evaluation_data or options.evaluation_split:
        return documents
    return split(documents, options)[0]


def _compare(
    source: DataSource, training: Documents, other: DataSource, evaluation: Documents, on_note: Note
) -> None:
    """Warns if the evaluation data and the training data have files or all rows in common."""
    shared = {file.resolve() for file in source.files} & {file.resolve() for file in other.files}
    if shared:
        found = (
            f"{_count(len(shared), 'file')} of the evaluation data"
            f" {'is' if len(shared) == 1 else 'are'} also in the training data"
        )
    elif training.digest == evaluation.digest:
        found = "the evaluation data has the same rows as the training data"
    else:
        return
    on_note(
        f"warning: {found}, so its loss does not show how well the model does on unseen text."
        " Choose other rows with --eval-split or --eval-data, or keep some for evaluation with"
        " --eval-fraction"
    )


def split(documents: Documents, options: DataOptions) -> tuple[Documents, Documents | None]:
    """Splits documents into those to train on and those to evaluate on, or None.

    A fraction of a single text is its end. Raises UserError if nothing would be left to train on.
    """
    count = len(documents)
    if options.evaluation_fraction and count == 1 and not documents.whole:
        border = documents.ends - max(2, round(documents.total * options.evaluation_fraction))
        if border[0] <= documents.begins[0]:
            raise UserError(
                "data: evaluation",
                found=f"{documents.total} tokens",
                allowed="more than 2",
                fix="give more text",
            )
        return replace(documents, ends=border), replace(documents, begins=border)
    size = (
        max(1, round(count * options.evaluation_fraction))
        if options.evaluation_fraction
        else options.evaluation_documents
    )
    if not size:
        return documents, None
    if size >= count:
        raise UserError(
            "data: evaluation",
            found=f"{size} of {count} documents",
            allowed=f"at most {count - 1}",
            fix="keep fewer, or give other data with --eval-data",
        )
    chosen = np.zeros(count, dtype=bool)
    # The choice does not depend on the run's seed, so that no run trains on documents on which
    # another run was evaluated.
    chosen[
        (
            np.random.default_rng(0).permutation(count)[:size]
            if options.evaluation_fraction
            else slice(count - size, None)
        )
    ] = True
    return documents.chosen(~chosen), documents.chosen(chosen)


@dataclass(frozen=True)
class _Reader:
    """Reads files as documents, with the model's tokenizer."""

    options: DataOptions
    """Options of the run."""
    folder: Path | None
    """The tokenizer's folder, or None."""
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer, or None to read text as bytes."""
    vocabulary: int
    """Number of rows of the model's embedding."""
    on_note: Note
    """Receives lines for the user."""

    def documents(self, source: DataSource) -> tuple[Documents, TokenSummary | None]:
        """Returns the documents of `source`, from the cache if they are there, and their summary.

        Without a tokenizer, the documents are bytes, and there is no summary.
        """
        which = f", split {source.split}" if source.split else ""
        left_out = f"; not read: {source.left_out}" if source.left_out else ""
        self.on_note(
            f"data {source.path}: {source.kind},"
            f" {_count(len(source.files), 'file')}{which}{left_out}"
        )
        if self.tokenizer is None or self.folder is None:
            return _as_bytes(source, self.folder, self.vocabulary, self.on_note), None
        documents, summary, state = self._tokenized(source, self.folder, self.tokenizer)
        self.on_note(f"recognized: {summary.layout}")
        empty = f", {summary.empty:,} without text" if summary.empty else ""
        self.on_note(
            f"{_count(summary.rows, 'row')}{empty}, {_count(len(documents), 'document')},"
            f" {_count(documents.total, 'token')}; {state}"
        )
        if summary.bad:
            if self.options.strict:
                raise _stopped(summary.shown[0][0])
            self.on_note(describe_bad_rows(summary.bad, summary.shown))
        for layout, count in summary.elsewhere.items():
            self.on_note(
                f"{count:,} of these have the columns of {layout}; all rows are read with the"
                " layout of the first rows, or with that of --columns"
            )
        if summary.largest_id >= self.vocabulary:
            raise UserError(
                f"model: vocabulary, for data {source.path}",
                found=self.vocabulary,
                allowed=f">= {summary.largest_id + 1}, the largest token id + 1",
                fix="use the model's own tokenizer",
            )
        return documents, summary

    def _tokenized(
        self, source: DataSource, folder: Path, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Documents, TokenSummary, str]:
        """Returns documents, their summary, and a phrase on whether they came from the cache."""
        key = _key(source, self.options, folder, tokenizer)
        stored, state = load(self.options.cache_folder, key), "tokens from the cache"
        if stored is None:
            layout = Layout("text", ()) if source.kind == "text" else _layout(source, self.options)
            largest = max(tokenizer.get_vocab().values(), default=0)
            _tokenize(
                source,
                Encoder(
                    tokenizer, layout, self.options.loss, str(folder), self.options.chat_template
                ),
                self.options,
                key,
                largest,
            )
            if _key(source, self.options, folder, tokenizer) != key:
                raise UserError(
                    f"data {source.path}",
                    found="files that changed while they were read",
                    allowed="files that do not change",
                    fix="start again",
                )
            stored, state = load(self.options.cache_folder, key), "tokenized now, and cached"
            if stored is None:
                raise UserError(
                    f"cache {self.options.cache_folder}",
                    found="a file whose content is not what was written",
                    allowed="a working disk",
                    fix="choose another folder with --data-cache",
                )
        return (*stored, state)


def _reader(
    options: DataOptions, tokenizer_folder: Path | None, vocabulary: int, on_note: Note
) -> _Reader:
    """Returns a reader with the tokenizer of a folder, if there is one."""
    tokenizer = None
    if tokenizer_folder:
        tokenizer = load_tokenizer(
            tokenizer_folder,
            chat_template=options.chat_template,
            trust_remote_code=options.trust_remote_code,
        )
    return _Reader(options, tokenizer_folder, tokenizer, vocabulary, on_note)


def _as_bytes(source: DataSource, folder: Path | None, vocabulary: int, on_note: Note) -> Documents:
    """Returns text as bytes. Raises UserError for data that need a tokenizer."""
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
    documents = byte_level.byte_documents(source, vocabulary)
    on_note(
        f"text is read as bytes, at most {byte_level.MOST_BYTES:,}, because the model's folder has"
        " no tokenizer"
    )
    on_note(f"{_count(len(documents), 'document')}, {_count(documents.total, 'token')}")
    return documents


def _layout(source: DataSource, options: DataOptions) -> Layout:
    """Returns the layout of the first row that has one.

    Raises UserError if none of the first rows has a layout.
    """
    looked_at = list(itertools.islice(rows(source), _LOOKED_AT))
    found: set[str] = set()
    for row in looked_at:
        if isinstance(row, TextRow) and isinstance(row.value, dict):
            layout = recognize(row.value.keys(), options.columns)
            if layout:
                return layout
            found |= row.value.keys()
    if not looked_at:
        raise _nothing(source, "no rows")
    if all(isinstance(row, BadRow) for row in looked_at):
        raise (
            _stopped(str(looked_at[0]))
            if options.strict
            else _nothing(source, f"no row that can be read, the first {looked_at[0]}")
        )
    raise unknown_columns(f"data {source.path}", found, options.columns)


def _tokenize(
    source: DataSource, encoder: Encoder, options: DataOptions, key: str, largest: int
) -> None:
    """Tokenizes `source` and writes the tokens to the cache, under `key`.

    Raises UserError if no row can be used, and if `options.strict` is set for the first bad row.
    """
    count = empty = largest_id = 0
    bad = BadRows()
    elsewhere: Counter[str] = Counter()
    dtype = np.dtype(np.uint32 if encoder.flagged or largest >= 2**16 else np.uint16)
    layout = encoder.layout
    with CacheWriter(options.cache_folder, key, dtype) as writer:
        for found in encoder.encode(rows(source, layout.columns)):
            if found is None:
                count, empty = count + 1, empty + 1
            elif isinstance(found, BadRow):
                if options.strict:
                    raise _stopped(str(found))
                count += 1
                bad.add(found)
                elsewhere.update([found.layout] if found.layout else [])
            else:
                ids, closes = found
                count += closes
                largest_id = max(largest_id, int((ids & np.uint32(TARGET - 1)).max(initial=0)))
                writer.add(ids, closes=closes)
        if not writer.documents:
            reasons = "; ".join(row for row, _ in bad.shown)
            raise _nothing(
                source,
                (
                    f"no row that can be used, the first {reasons}"
                    if reasons
                    else "no text"
                    if count
                    else "no rows"
                ),
            )
        known = TokenSummary(
            layout=encoder.describe(),
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
        writer.finish(known)


def _key(source: DataSource, options: DataOptions, folder: Path, tokenizer: object) -> str:
    """Returns the digest of everything that the tokens depend on, as the key of the cache.

    A file is identified by its path, its size, and the times at which its content and its inode
    changed. The latter is needed because `cp -p` sets the former.
    """
    import tokenizers
    import transformers

    try:
        files = [
            (str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
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
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _stopped(row: str) -> UserError:
    """Returns the error for a bad row with `strict`."""
    return UserError(
        f"bad row {row.partition(': ')[0]}",
        found=row.partition(": ")[2],
        allowed="rows that can be used",
        fix="correct the row, or run without --strict",
    )


def _nothing(source: DataSource, found: str) -> UserError:
    """Returns the error for data without a usable row."""
    return UserError(
        f"data {source.path}",
        found=found,
        allowed="at least one row with text",
        fix="check the file",
    )


def _packed(corpus: Corpus, workload: Workload, given: int) -> str:
    """Returns a phrase that describes an epoch of `corpus`."""
    parts = [
        f"{_count(given - corpus.left_out, 'document')}, {_count(corpus.tokens, 'token')} in"
        f" {_count(corpus.rows, 'row')} of {workload.sequence}"
    ]
    parts.append(f"packing {corpus.packing}, {corpus.padding:.2%} padding")
    if corpus.truncated_documents:
        parts.append(
            f"{_count(corpus.truncated_documents, 'document')} truncated by"
            f" {_count(corpus.truncated_tokens, 'token')}"
        )
    if corpus.left_out:
        parts.append(
            f"{_count(corpus.left_out, 'document')} left out, whose answer begins after"
            f" {workload.sequence} tokens"
        )
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
