"""open_data: from DataOptions and a model's folder to the corpus to train on, and the one to evaluate on."""

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
from megatrain.runtime.data.bad_rows import BadRows, in_words
from megatrain.runtime.data.cache import CacheWriter, Summary, load
from megatrain.runtime.data.columns import LAYOUTS, Layout, recognise, unknown_columns
from megatrain.runtime.data.corpus import Corpus
from megatrain.runtime.data.documents import TARGET, Documents
from megatrain.runtime.data.formats import BadRow, Row, rows
from megatrain.runtime.data.preview import preview
from megatrain.runtime.data.remarks import remarks
from megatrain.runtime.data.sources import Source, find
from megatrain.runtime.data.tokenize import Encoder, load_tokenizer, read_chat_template, tokenizer_digest
from megatrain.runtime.training.data_options import DataOptions
from megatrain.simulator.errors import UserError
from megatrain.simulator.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Note = Callable[[str], None]
_FORMAT = 5
"""of what tokenised data is; part of the cache's key"""
_EVALUATION_SPLITS = ("validation", "test", "train")
"""the first of these that the evaluation data has, unless one is named"""
_LOOKED_AT = 100


def open_data(
    options: DataOptions, workload: Workload, tokenizer_folder: Path | None, vocabulary: int, on_note: Note = lambda _: None, *, seed: int = 0
) -> tuple[Corpus, Corpus | None]:
    """The corpus to train on, shuffled by `seed`, and the one to evaluate on, in its own order, where `options` ask for one.

    `tokenizer_folder`: the model's; without a tokenizer there, plain text is read as bytes. `vocabulary`: rows of the model's embedding.
    `on_note` hears line by line what was found, counted, left out and cached. Raises UserError for every mistake in files, rows and options.
    """
    assert options.packing, "the plan says which where the options do not"
    source = find(Path(options.data), (options.split,))
    tokenizer = None
    if tokenizer_folder:
        tokenizer = load_tokenizer(tokenizer_folder, chat_template=options.chat_template, trust_remote_code=options.trust_remote_code)
    reader = _Reader(options, tokenizer_folder, tokenizer, vocabulary, on_note)
    training, summary = reader.documents(source)
    evaluation: Documents | None
    if options.evaluation_data or options.evaluation_split:
        other_source = find(Path(options.evaluation_data or options.data), (options.evaluation_split,) if options.evaluation_split else _EVALUATION_SPLITS)
        evaluation, _ = reader.documents(other_source)
        _compare(source, training, other_source, evaluation, on_note)
    else:
        training, evaluation = split(training, options)
    corpus, other = Corpus(training, workload, seed=seed, packing=options.packing, where=f"data {options.data}"), None
    on_note(f"training: {_packed(corpus, workload, len(training))}")
    if evaluation is not None:
        other = Corpus(evaluation, workload, seed=None, packing=options.packing, where=f"evaluation data {options.evaluation_data or options.data}")
        on_note(f"evaluation: {_packed(other, workload, len(evaluation))}")
    if tokenizer is not None and summary is not None:
        for line in (*remarks(options, source, summary, training, corpus, tokenizer), *preview(training, tokenizer)):
            on_note(f"  {line}")
    return corpus, other


def _compare(source: Source, training: Documents, other: Source, evaluation: Documents, on_note: Note) -> None:
    """Says where rows to evaluate on are rows to train on."""
    shared = {file.resolve() for file in source.files} & {file.resolve() for file in other.files}
    if shared:
        found = f"{_count(len(shared), 'file')} of the evaluation data {'is' if len(shared) == 1 else 'are'} trained on"
    elif training.digest == evaluation.digest:
        found = "the evaluation data has the same rows as the training data"
    else:
        return
    on_note(f"warning: {found}: its loss says nothing about unseen text. --eval-split or --eval-data names other rows, --eval-fraction keeps some back")


def split(documents: Documents, options: DataOptions) -> tuple[Documents, Documents | None]:
    """What to train and to evaluate on, without a document in both. A fraction of a single text is its end. Raises UserError where nothing would be left."""
    count = len(documents)
    if options.evaluation_fraction and count == 1 and not documents.whole:
        border = documents.ends - max(2, round(documents.total * options.evaluation_fraction))
        if border[0] <= documents.begins[0]:
            raise UserError("data: evaluation", found=f"{documents.total} tokens", allowed="more than 2", fix="give more text")
        return replace(documents, ends=border), replace(documents, begins=border)
    size = max(1, round(count * options.evaluation_fraction)) if options.evaluation_fraction else options.evaluation_documents
    if not size:
        return documents, None
    if size >= count:
        raise UserError(
            "data: evaluation", found=f"{size} of {count} documents", allowed=f"at most {count - 1}", fix="keep fewer, or name a file with evaluation_data"
        )
    chosen = np.zeros(count, dtype=bool)
    # the same whatever the run's seed is, so that no run trains on what another was evaluated on
    chosen[np.random.default_rng(0).permutation(count)[:size] if options.evaluation_fraction else slice(count - size, None)] = True
    return documents.chosen(~chosen), documents.chosen(chosen)


@dataclass(frozen=True)
class _Reader:
    """Files -> documents, by the model's tokenizer."""

    options: DataOptions
    folder: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    vocabulary: int
    on_note: Note

    def documents(self, source: Source) -> tuple[Documents, Summary | None]:
        """Tokenised now or before; without a tokenizer, bytes."""
        which = f", split {source.split}" if source.split else ""
        left_out = f"; not read: {source.left_out}" if source.left_out else ""
        self.on_note(f"data {source.path}: {source.kind}, {_count(len(source.files), 'file')}{which}{left_out}")
        if self.tokenizer is None or self.folder is None:
            return _as_bytes(source, self.folder, self.vocabulary, self.on_note), None
        documents, summary, state = self._tokenised(source, self.folder, self.tokenizer)
        self.on_note(f"recognised: {summary.layout}")
        empty = f", {summary.empty:,} without text" if summary.empty else ""
        self.on_note(f"{_count(summary.rows, 'row')}{empty}, {_count(len(documents), 'document')}, {_count(documents.total, 'token')}; {state}")
        if summary.bad:
            if self.options.strict:
                raise _stopped(summary.shown[0][0])
            self.on_note(in_words(summary.bad, summary.shown))
        for layout, count in summary.elsewhere.items():
            self.on_note(f"{count:,} of these have the columns of {layout}: the first rows decide how all are read, or --columns does")
        if summary.largest_id >= self.vocabulary:
            raise UserError(
                f"model: vocabulary, for data {source.path}", found=self.vocabulary, allowed=f">= {summary.largest_id + 1}, the tokens' largest id + 1",
                fix="use the model's own tokenizer",
            )  # fmt: skip
        return documents, summary

    def _tokenised(self, source: Source, folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[Documents, Summary, str]:
        """And where they came from, in words."""
        key = _key(source, self.options, folder, tokenizer)
        stored, state = load(self.options.cache_folder, key), "tokens from the cache"
        if stored is None:
            layout = Layout("text", ()) if source.kind == "text" else _layout(source, self.options)
            largest = max(tokenizer.get_vocab().values(), default=0)
            _tokenise(source, Encoder(tokenizer, layout, self.options.loss, str(folder), self.options.chat_template), self.options, key, largest)
            if _key(source, self.options, folder, tokenizer) != key:
                raise UserError(f"data {source.path}", found="files that changed while they were read", allowed="files at rest", fix="start again")
            stored, state = load(self.options.cache_folder, key), "tokenised now, and cached"
            if stored is None:
                raise UserError(
                    f"cache {self.options.cache_folder}", found="a file that is not what was written", allowed="a sound disk", fix="name another folder"
                )
        return (*stored, state)


def _as_bytes(source: Source, folder: Path | None, vocabulary: int, on_note: Note) -> Documents:
    if source.kind != "text":
        raise UserError(
            f"tokenizer {folder or 'of the model'}", found="none", allowed=f"one in the model's folder, for {source.kind} data",
            fix="copy the model's tokenizer files there, or give plain text, which is read as bytes without one",
        )  # fmt: skip
    documents = byte_level.byte_documents(source, vocabulary)
    on_note(f"text as bytes, at most {byte_level.MOST_BYTES:,} of them: the model's folder has no tokenizer")
    on_note(f"{_count(len(documents), 'document')}, {_count(documents.total, 'token')}")
    return documents


def _layout(source: Source, options: DataOptions) -> Layout:
    """That of the first row which has one. Raises UserError where there is none among the first."""
    looked_at = list(itertools.islice(rows(source), _LOOKED_AT))
    found: set[str] = set()
    for row in looked_at:
        if isinstance(row, Row) and isinstance(row.value, dict):
            layout = recognise(row.value.keys(), options.columns)
            if layout:
                return layout
            found |= row.value.keys()
    if not looked_at:
        raise _nothing(source, "no rows")
    if all(isinstance(row, BadRow) for row in looked_at):
        raise _stopped(str(looked_at[0])) if options.strict else _nothing(source, f"no row that can be read, the first {looked_at[0]}")
    raise unknown_columns(f"data {source.path}", found, options.columns)


def _tokenise(source: Source, encoder: Encoder, options: DataOptions, key: str, largest: int) -> None:
    """Into the cache. Raises UserError for no usable row, and, where `options` are strict, for the first bad one."""
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
            raise _nothing(source, f"no row that can be used, the first {reasons}" if reasons else "no text" if count else "no rows")
        known = Summary(
            layout=encoder.describe(), flagged=encoder.flagged, whole=layout.name != "text", largest_id=largest_id,
            rows=count, bad=bad.count, shown=bad.shown, empty=empty,
            templated=encoder.templated, elsewhere=dict(elsewhere),
        )  # fmt: skip
        writer.finish(known)


def _key(source: Source, options: DataOptions, folder: Path, tokenizer: object) -> str:
    """Of everything that tokens depend on. A file is known by its place, its size, and when it and its inode were changed: `cp -p` sets the former."""
    import tokenizers
    import transformers

    try:
        files = [(str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns) for file in source.files if (status := file.stat())]
    except OSError as error:
        raise UserError(f"data {source.path}", found=str(error.strerror).lower(), allowed="files at rest", fix="check the path") from None
    template = read_chat_template(options.chat_template) if options.chat_template else ""
    parts = (
        _FORMAT, source.kind, files, options.columns, options.loss, template, tokenizer_digest(folder, tokenizer), transformers.__version__,
        tokenizers.__version__,
        [layout.columns for layout in LAYOUTS],
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _stopped(row: str) -> UserError:
    return UserError(
        f"bad row {row.partition(': ')[0]}", found=row.partition(": ")[2], allowed="rows that can be used", fix="correct it, or run without strict"
    )


def _nothing(source: Source, found: str) -> UserError:
    return UserError(f"data {source.path}", found=found, allowed="at least one row with text", fix="check the file")


def _packed(corpus: Corpus, workload: Workload, given: int) -> str:
    """What an epoch of `corpus` is, in words."""
    parts = [f"{_count(given - corpus.left_out, 'document')}, {_count(corpus.tokens, 'token')} in {_count(corpus.rows, 'row')} of {workload.sequence}"]
    parts.append(f"packing {corpus.packing}, {corpus.padding:.2%} padding")
    if corpus.truncated_documents:
        parts.append(f"{_count(corpus.truncated_documents, 'document')} truncated by {_count(corpus.truncated_tokens, 'token')}")
    if corpus.left_out:
        parts.append(f"{_count(corpus.left_out, 'document')} left out, whose answer begins after {workload.sequence} tokens")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
