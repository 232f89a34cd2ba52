"""Remarks on the data: intended behavior that a user might not expect."""

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

_LOOKED_AT = 256


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
        sources: the files of each source of the data.
        summaries: what was found in each source.
        documents: all documents to train on.
        corpus: these documents, packed.
    """
    found = []
    if documents.flagged and not _stops(documents, tokenizer):
        found.append(
            "warning: no answer ends with a special token that has loss, so the model does not"
            " learn to stop"
        )
    if any(summary.templated for summary in summaries):
        if options.loss in ("assistant", "last"):
            found.append(
                "only assistant turns have loss, up to the token that ends them; prompts, and a"
                " line end after this token, have no loss"
            )
        if "strftime_now" in str(tokenizer.chat_template):
            found.append(
                "the chat template writes today's date, so tokens change from day to day; a run can"
                " be resumed on another day only while its tokens are in the cache"
            )
    if corpus.truncated_documents:
        found.append(
            "documents longer than a row are cut at their end, and the rest is not trained on"
        )
    elif not documents.whole and corpus.pieces > len(documents) and corpus.documents:
        found.append(
            "a text that does not fit into the rest of its row continues in another row, without"
            " attention to its earlier part"
        )
    if any(source.kind == "text" for source in sources):
        found.append("a text file is one document")
    if any(source.kinds > 1 for source in sources):
        found.append("only one kind of files in the folder is read: the one with the most bytes")
    if options.evaluation_fraction and len(documents) > 1:
        found.append(
            "the fraction kept for evaluation counts documents, not tokens. It is drawn again when"
            " documents are added, so do not compare losses before and after. A document that"
            " occurs twice may be in both parts"
        )
    return found


def _stops(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Checks whether in any of the first documents a run of targets ends with a special token.

    Blanks and line ends after this token do not count: they have loss too if everything has.
    """
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    special = np.array(sorted({*tokenizer.all_special_ids, *added}), dtype=np.int64)
    for begin, end in zip(documents.begins[:_LOOKED_AT], documents.ends[:_LOOKED_AT], strict=True):
        ids, targets = documents.read(int(begin), int(end))
        for last in np.flatnonzero(targets & ~np.append(targets[1:], False)):
            while last and targets[last] and str(tokenizer.decode([int(ids[last])])).isspace():
                last -= 1
            if targets[last] and ids[last] in special:
                return True
    return False
