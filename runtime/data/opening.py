"""Opens the data of a run: makes the training and evaluation corpus from DataOptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.corpus.mixture import weighted
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.preview import preview
from megatrain.runtime.data.remarks import remarks
from megatrain.runtime.data.rows.sources import sources_at, sources_of, weighted_path
from megatrain.runtime.data.summary import DataSummary, summarize_data
from megatrain.runtime.data.tokens.reading import Note, SourceReader, TokenizedData
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import counted
from megatrain.simulator.model.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        workload: the batch, the accumulation and the sequence of a step.
        tokenizer_folder: the model's folder. If it has no tokenizer, plain text is read as bytes.
        vocabulary: number of rows of the model's embedding.
        on_note: called with lines for the user on files, rows, tokens and the cache.
        seed: the seed for the order of the training data, and for weights that are fractions.
        on_summary: called with the summaries of the corpora, whose keys are `training` and, if
            there is one, `evaluation`.

    Raises UserError for every mistake in files, rows and options.
    """
    assert options.packing, "the caller sets `packing` from the plan"
    reader = SourceReader(options, tokenizer_folder, vocabulary, on_note)
    sources, other_sources = sources_of(options)
    training = reader.read(sources)
    if other_sources is None:
        kept, evaluation = split(training.documents, options)
        _note_emptied(options.paths, training, kept, on_note)
    else:
        other = reader.read(other_sources)
        _compare(training, other, on_note)
        kept, evaluation = training.documents, other.documents
    # Weights are applied after the split, so no copy of an evaluation document is trained on.
    epoch = _weighted(options.paths, training, kept, seed, on_note)
    where = ", ".join(options.paths)
    corpus = Corpus(epoch, workload, seed=seed, packing=options.packing, where=f"data {where}")
    summaries = {"training": summarize_data(corpus, workload.sequence, training.summaries)}
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
        summaries["evaluation"] = summarize_data(held_out, workload.sequence, files)
    on_summary(summaries)
    if tokenizer := reader.tokenizer:
        for line in (
            *remarks(options, training.sources, training.summaries, epoch, corpus, tokenizer),
            *preview(epoch, tokenizer),
        ):
            on_note(f"  {line}")
    return corpus, held_out


def training_documents(
    options: DataOptions, tokenizer_folder: Path | None, vocabulary: int, *, seed: int
) -> Documents:
    """Returns the documents of an epoch of the training corpus, before they are packed.

    Their tokens are cached, so `open_data` does not tokenize them again. Arguments and errors are
    the same as in `open_data`.
    """
    reader = SourceReader(options, tokenizer_folder, vocabulary, lambda _: None)
    sources, other_sources = sources_of(options)
    training = reader.read(sources)
    kept = training.documents if other_sources else split(training.documents, options)[0]
    return _weighted(options.paths, training, kept, seed, lambda _: None)


def read_data(
    options: DataOptions,
    tokenizer_folder: Path,
    vocabulary: int,
    on_note: Note = lambda _: None,
    *,
    splits: Sequence[str] = (),
) -> tuple[TokenizedData, PreTrainedTokenizerBase | None]:
    """Returns the documents of an epoch of `options.data` before packing, and the tokenizer.

    No documents are set apart for evaluation. If `splits` is given, the first of these splits that
    a source has is read, instead of the split in `options`. The other arguments and the errors are
    the same as in `open_data`.
    """
    reader = SourceReader(options, tokenizer_folder, vocabulary, on_note)
    data = reader.read(sources_at(options.paths, splits or (options.split,)))
    epoch = _weighted(options.paths, data, data.documents, 0, on_note)
    return replace(data, documents=epoch), reader.tokenizer


def _note_emptied(
    paths: Sequence[str], data: TokenizedData, kept: Documents, on_note: Note
) -> None:
    """Warns of each source that has no document in `kept`, the training documents."""
    given, left = (
        np.bincount(_source_numbers(data, documents), minlength=len(paths))
        for documents in (data.documents, kept)
    )
    for path, before, after in zip(paths, given, left, strict=True):
        if not after:
            on_note(
                f"warning: {path} is not trained on, because {counted(int(before), 'document')},"
                " all that it has, are kept for evaluation. Keep fewer, or give other data with"
                " --evaluation-data"
            )


def _source_numbers(data: TokenizedData, documents: Documents) -> npt.NDArray[np.int64]:
    """Returns the number of the source in `data` of each document [documents]."""
    return np.searchsorted(data.starts, documents.begins, side="right") - 1


def _compare(training: TokenizedData, other: TokenizedData, on_note: Note) -> None:
    """Warns if the evaluation data and the training data have files or all rows in common."""
    files, others = (
        {file.resolve() for source in data.sources for file in source.files}
        for data in (training, other)
    )
    if shared := files & others:
        overlap = (
            f"{counted(len(shared), 'file')} of the evaluation data"
            f" {'is' if len(shared) == 1 else 'are'} also in the training data"
        )
    elif training.documents.digest == other.documents.digest:
        overlap = "the evaluation data has the same rows as the training data"
    else:
        return
    on_note(
        f"warning: {overlap}, so its loss does not show how well the model does on unseen text."
        " Choose other rows with --evaluation-split or --evaluation-data, or keep some for"
        " evaluation with --evaluation-fraction"
    )


def _weighted(
    paths: Sequence[str], data: TokenizedData, documents: Documents, seed: int, on_note: Note
) -> Documents:
    """Returns the documents of an epoch. If there are weights, notes the documents of each source.

    Args:
        paths: the path of each source, with its weight if it has one.
        data: the tokenized sources.
        documents: the documents of `data` that are not kept for evaluation.
        seed: the seed for weights that are fractions.
        on_note: called with one line for each source.
    """
    sources = [weighted_path(path) for path in paths]
    epoch = weighted(documents, data.starts, [source.weight for source in sources], seed)
    if epoch is documents:
        return epoch
    before, after = (_source_numbers(data, entry) for entry in (documents, epoch))
    for number, (path, weight) in enumerate(sources):
        chosen = after == number
        tokens = int(epoch.lengths[chosen].sum())
        on_note(
            f"weight {weight:g} of {path}: {counted(int(chosen.sum()), 'document')} an epoch, from"
            f" {int((before == number).sum()):,}, {counted(tokens, 'token')},"
            f" {tokens / max(epoch.total, 1):.1%} of all"
        )
    return epoch


def split(documents: Documents, options: DataOptions) -> tuple[Documents, Documents | None]:
    """Returns the training documents, and the evaluation documents or None.

    `options` has a fraction or a number of documents to evaluate on. For a single text, a fraction
    selects its end. Raises UserError if nothing would be left to train on.
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
            fix="keep fewer, or give other data with --evaluation-data",
        )
    chosen = np.zeros(count, dtype=bool)
    # The seed of the run is not used, so all runs with the same data keep the same documents.
    chosen[
        (
            np.random.default_rng(0).permutation(count)[:size]
            if options.evaluation_fraction
            else slice(count - size, None)
        )
    ] = True
    return documents.chosen(~chosen), documents.chosen(chosen)


def describe_packing(corpus: Corpus, sequence: int, given: int) -> str:
    """Returns a phrase that describes an epoch of `corpus`, made from `given` documents."""
    parts = [
        f"{counted(given - corpus.left_out, 'document')}, {counted(corpus.tokens, 'token')} in"
        f" {counted(corpus.rows, 'row')} of {sequence}",
        f"packing {corpus.packing}, {corpus.padding:.2%} padding",
    ]
    if corpus.truncated_documents:
        parts.append(
            f"{counted(corpus.truncated_documents, 'document')} truncated by"
            f" {counted(corpus.truncated_tokens, 'token')}"
        )
    if corpus.left_out:
        parts.append(
            f"{counted(corpus.left_out, 'document')} left out, whose answer begins after"
            f" {sequence} tokens"
        )
    return "; ".join(parts)
