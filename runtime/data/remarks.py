"""Remarks on the data, for the user: intended behavior that might not be expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.rows.sources import DataSource
from megatrain.runtime.data.tokens.cache import TokenSummary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INSPECTED = 256
"""Number of documents that are searched for a special token at the end of an answer."""


def remarks(
    options: DataOptions,
    sources: Sequence[DataSource],
    summaries: Sequence[TokenSummary],
    documents: Documents,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Returns one line for each remark.

    Args:
        options: the options of the data.
        sources: the sources, with their files.
        summaries: the summary of each source.
        documents: all training documents.
        corpus: the same documents, packed.
        tokenizer: the tokenizer that made their tokens.
    """
    lines = []
    if documents.flagged and not _stops(documents, tokenizer):
        lines.append(
            "warning: no answer ends with a special token that has loss, so the model does not"
            " learn to stop"
        )
    if any(summary.templated for summary in summaries):
        if options.loss in ("assistant", "last"):
            lines.append(
                "only assistant turns have loss, up to the token that ends them; prompts, and a"
                " line end after this token, have no loss"
            )
        if "strftime_now" in str(tokenizer.chat_template):
            lines.append(
                "the chat template writes today's date, so tokens change from day to day; a run can"
                " be resumed on another day only while its tokens are in the cache"
            )
    if corpus.truncated_documents:
        lines.append(
            "documents longer than a row are cut at their end, and the rest is not trained on"
        )
    elif not documents.whole and corpus.pieces > len(documents) and corpus.documents:
        lines.append(
            "a text that does not fit into the rest of its row continues in another row, without"
            " attention to its earlier part"
        )
    if any(source.kind == "text" for source in sources):
        lines.append("a text file is one document")
    if any(source.kinds > 1 for source in sources):
        lines.append("only one kind of files in the folder is read: the one with the most bytes")
    if options.evaluation_fraction and len(documents) > 1:
        lines.append(
            "the fraction kept for evaluation counts documents, not tokens. It is drawn again when"
            " documents are added, so do not compare losses before and after. A document that"
            " occurs twice may be in both parts"
        )
    return lines


def _stops(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether a run of targets ends with a special token in any of the first documents.

    Blanks and line ends after this token do not count. They have loss if all tokens have loss.
    """
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    special = np.array(sorted({*tokenizer.all_special_ids, *added}), dtype=np.int64)
    for begin, end in zip(documents.begins[:_INSPECTED], documents.ends[:_INSPECTED], strict=True):
        ids, targets = documents.read(int(begin), int(end))
        for last in np.flatnonzero(targets & ~np.append(targets[1:], False)):
            while last and targets[last] and str(tokenizer.decode([int(ids[last])])).isspace():
                last -= 1
            if targets[last] and ids[last] in special:
                return True
    return False
