"""Remarks: what a user might not expect of the data at hand, though it is meant to be so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatrain.runtime.data.cache import Summary
from megatrain.runtime.data.corpus import Corpus
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.sources import Source
from megatrain.runtime.training.data_options import DataOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOKED_AT = 256


def remarks(options: DataOptions, source: Source, summary: Summary, documents: Documents, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line each. `documents` are all of those to train on, `corpus` has them packed."""
    found = []
    if documents.flagged and not _stops(documents, tokenizer):
        found.append("warning: no answer's last token with loss is a special token, so the model does not learn to stop")
    if summary.templated:
        if options.loss in ("assistant", "last"):
            found.append("only assistant turns have loss, up to the token that ends them: prompts and a line end after that token have none")
        if "strftime_now" in str(tokenizer.chat_template):
            found.append("the chat template writes today's date, so tokens differ from day to day; a run is resumed on another day from the cache alone")
    if corpus.truncated_documents:
        found.append("documents longer than a row are cut at their end, and what is cut is not trained on")
    elif not documents.whole and corpus.pieces > len(documents) and corpus.documents:
        found.append("a text that does not fit into the rest of its row goes on in another row, where what came before is not seen")
    if source.kind == "text":
        found.append("a text file is one document")
    if source.kinds > 1:
        found.append("a folder's files of one kind are read, of the kind that has the most bytes")
    if options.evaluation_fraction and len(documents) > 1:
        found.append(
            "the fraction kept for evaluation counts documents, not tokens, and is drawn anew when documents are added: compare no losses across that; "
            "a document that occurs twice may be on both sides"
        )
    return found


def _stops(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether any of the first documents has a stretch of targets that ends with a special token."""
    added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    special = np.array(sorted({*tokenizer.all_special_ids, *added}), dtype=np.int64)
    for begin, end in zip(documents.begins[:_LOOKED_AT], documents.ends[:_LOOKED_AT], strict=True):
        ids, targets = documents.read(int(begin), int(end))
        if np.isin(ids[targets & ~np.append(targets[1:], False)], special).any():
            return True
    return False
