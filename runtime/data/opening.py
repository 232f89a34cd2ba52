"""Opens the data of a run: makes the training and evaluation corpus that DataOptions describe."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
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
from megatrain.runtime.data.mixture import joined, weighted
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.preview import preview
from megatrain.runtime.data.remarks import remarks
from megatrain.runtime.data.sources import (
    DataSource,
    WeightedPath,
    sources_at,
    sources_of,
    weighted_path,
)
from megatrain.runtime.data.summary import DataSummary, summarize
from megatrain.runtime.data.tokenize import (
    Encoder,
    load_tokenizer,
    read_chat_template,
    tokenizer_digest,
)
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import printable
from megatrain.simulator.model.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Note = Callable[[str], None]
_FORMAT = 5
"""Version of the tokenization. It is part of the cache's key."""
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
    on_summary: Callable[[dict[str, DataSummary]], object] = lambda _: None,
) -> tuple[Corpus, Corpus | None]:
    """Returns the training corpus, and the evaluation corpus or None if `options` have none.

    The training corpus is shuffled by `seed`. The evaluation corpus has the order of its files.

    Args:
        options: the options, with `packing` set.
        tokenizer_folder: the model's folder. If it has no tokenizer, plain text is read as bytes.
        vocabulary: number of rows of the model's embedding.
        on_note: receives lines for the user on files, rows, tokens and the cache.
        on_summary: receives what is in the `training` and the `evaluation` corpus.

    Raises UserError for every mistake in files, rows and options.
    """
    assert options.packing, "packing is taken from the plan if the options do not set it"
    tokenizer = _tokenizer_of(options, tokenizer_folder)
    reader = _Reader(options, tokenizer_folder, tokenizer, vocabulary, on_note)
    sources, other_sources = sources_of(options)
    named = [weighted_path(text) for text in options.paths]
    training = reader.read(sources)
    kept, evaluation = training.documents, None
    if other_sources is not None:
        other = reader.read(other_sources)
        _compare(training, other, on_note)
        evaluation = other.documents
    else:
        kept, evaluation = split(kept, options)
    # Evaluation documents are set apart first, so that no copy of one is trained on.
    epoch = _weighted(named, training, kept, seed, on_note)
    where = ", ".join(options.paths)
    corpus = Corpus(epoch, workload, seed=seed, packing=options.packing, where=f"data {where}")
    summaries = {"training": summarize(corpus, workload.sequence, training.summaries)}
    held_out = None
    on_note(f"training: {describe_packing(corpus, workload.sequence, len(epoch))}")
    if evaluation is not None:
        held_out = Corpus(
            evaluation,
            workload,
            seed=None,
            packing=options.packing,
            where=f"evaluation data {options.evaluation_data or where}",
        )
        on_note(f"evaluation: {describe_packing(held_out, workload.sequence, len(evaluation))}")
        files = other.summaries if other_sources is not None else ()
        summaries["evaluation"] = summarize(held_out, workload.sequence, files)
    on_summary(summaries)
    if tokenizer is not None:
        for line in (
            *remarks(options, training.sources, training.summaries, epoch, corpus, tokenizer),
            *preview(epoch, tokenizer),
        ):
            on_note(f"  {line}")
    return corpus, held_out


def _tokenizer_of(options: DataOptions, folder: Path | None) -> PreTrainedTokenizerBase | None:
    if folder is None:
        return None
    return load_tokenizer(
        folder, chat_template=options.chat_template, trust_remote_code=options.trust_remote_code
    )


@dataclass(frozen=True, kw_only=True)
class TokenizedData:
    """The documents of one or several sources, before they are packed."""

    sources: list[DataSource]
    """The files of each source."""
    summaries: list[TokenSummary]
    """What was found in each source; empty if there is no tokenizer."""
    starts: list[int]
    """Index of the first token of each source in the tokens of `documents`."""
    documents: Documents
    """The documents of all sources."""


def training_documents(
    options: DataOptions, tokenizer_folder: Path | None, vocabulary: int, *, seed: int
) -> Documents:
    """Returns the documents of an epoch that `open_data` trains on, before they are packed.

    Their tokens are cached, so that `open_data` does not tokenize them again. The arguments are
    those of `open_data`, and so are the errors.
    """
    tokenizer = _tokenizer_of(options, tokenizer_folder)
    reader = _Reader(options, tokenizer_folder, tokenizer, vocabulary, lambda _: None)
    sources, other_sources = sources_of(options)
    training = reader.read(sources)
    kept = training.documents if other_sources else split(training.documents, options)[0]
    named = [weighted_path(text) for text in options.paths]
    return _weighted(named, training, kept, seed, lambda _: None)


def read_data(
    options: DataOptions,
    tokenizer_folder: Path,
    vocabulary: int,
    on_note: Note = lambda _: None,
    *,
    splits: Sequence[str] = (),
) -> tuple[TokenizedData, PreTrainedTokenizerBase | None]:
    """Returns the documents of `options.data` before packing, and the tokenizer.

    They are those of one epoch, and none are set apart for evaluation. The arguments are those of
    `open_data`, and so are the errors. `splits` replaces the split in `options`: of each source,
    the first that exists is read.
    """
    tokenizer = _tokenizer_of(options, tokenizer_folder)
    reader = _Reader(options, tokenizer_folder, tokenizer, vocabulary, on_note)
    named = [weighted_path(text) for text in options.paths]
    data = reader.read(sources_at(options.paths, splits or (options.split,)))
    epoch = _weighted(named, data, data.documents, 0, on_note)
    return replace(data, documents=epoch), tokenizer


def _compare(training: TokenizedData, other: TokenizedData, on_note: Note) -> None:
    """Warns if the evaluation data and the training data have files or all rows in common."""
    files, others = (
        {file.resolve() for source in data.sources for file in source.files}
        for data in (training, other)
    )
    if shared := files & others:
        found = (
            f"{_count(len(shared), 'file')} of the evaluation data"
            f" {'is' if len(shared) == 1 else 'are'} also in the training data"
        )
    elif training.documents.digest == other.documents.digest:
        found = "the evaluation data has the same rows as the training data"
    else:
        return
    on_note(
        f"warning: {found}, so its loss does not show how well the model does on unseen text."
        " Choose other rows with --eval-split or --eval-data, or keep some for evaluation with"
        " --eval-fraction"
    )


def _weighted(
    named: list[WeightedPath], data: TokenizedData, documents: Documents, seed: int, on_note: Note
) -> Documents:
    """Returns the documents of an epoch, and notes how many of each source it has.

    Args:
        documents: those of `data` that are not kept for evaluation.
    """
    epoch = weighted(documents, data.starts, [place.weight for place in named], seed)
    if epoch is documents:
        return epoch
    before, after = (
        np.searchsorted(data.starts, found.begins, side="right") - 1 for found in (documents, epoch)
    )
    for number, (path, weight) in enumerate(named):
        chosen = after == number
        tokens = int(epoch.lengths[chosen].sum())
        on_note(
            f"weight {weight:g} of {path}: {_count(int(chosen.sum()), 'document')} an epoch, from"
            f" {int((before == number).sum()):,}, {_count(tokens, 'token')},"
            f" {tokens / max(epoch.total, 1):.1%} of all"
        )
    return epoch


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

    def read(self, sources: list[DataSource]) -> TokenizedData:
        """Returns the documents of all `sources`."""
        found = [self._documents(source) for source in sources]
        parts = [documents for documents, _ in found]
        return TokenizedData(
            sources=sources,
            summaries=[summary for _, summary in found if summary is not None],
            starts=list(itertools.accumulate((len(part.tokens) for part in parts[:-1]), initial=0)),
            documents=joined(parts, sources),
        )

    def _documents(self, source: DataSource) -> tuple[Documents, TokenSummary | None]:
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
            else _nothing(
                source,
                f"no row that can be read, the first {looked_at[0]}",
                "at least one row without such a mistake",
            )
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
            if reasons:
                raise _nothing(
                    source,
                    f"no row that can be used, the first {reasons}",
                    "at least one row without such a mistake",
                )
            raise _nothing(source, "no text" if count else "no rows")
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


def _nothing(
    source: DataSource, found: str, allowed: str = "at least one row with text"
) -> UserError:
    """Returns the error for data without a usable row."""
    return UserError(f"data {source.path}", found=found, allowed=allowed, fix="correct the data")


def describe_packing(corpus: Corpus, sequence: int, given: int) -> str:
    """Returns a phrase that describes an epoch of `corpus`, made of `given` documents."""
    parts = [
        f"{_count(given - corpus.left_out, 'document')}, {_count(corpus.tokens, 'token')} in"
        f" {_count(corpus.rows, 'row')} of {sequence}"
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
            f" {sequence} tokens"
        )
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
