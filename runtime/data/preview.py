"""Shows the beginning of a document as its tokens decode, with the text that has loss marked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from megatrain.runtime.data.documents import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS = 2048
"""Number of tokens that are decoded, from the document's beginning."""
_RUN, _ROW, _ROWS = 180, 100, 5
"""Characters of one run of text with or without loss, characters per row, and rows."""
_CUT = " [...] "


def preview(documents: Documents, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns a few lines that show how the first document begins.

    Text with loss is between « and », unless all tokens have loss.
    """
    begin, end = int(documents.begins[0]), int(documents.ends[0])
    ids, targets = documents.read(begin, min(end, begin + _TOKENS))
    borders = [0, *(np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist(), len(ids)]
    text = ""
    for first, last in itertools.pairwise(borders):
        run = _shortened(_plain(tokenizer.decode(ids[first:last].tolist())))
        text += f"«{run}»" if documents.flagged and targets[first] else run
    room = _ROW * _ROWS
    if len(text) > room or end - begin > _TOKENS:
        text = f"{text[: room - len(_CUT)]}{_CUT}"
    marked = "loss on text between « and »" if documents.flagged else "loss on every token"
    return [
        f"the first document, {end - begin:,} tokens, {marked}:",
        *("    " + text[at : at + _ROW] for at in range(0, len(text), _ROW)),
    ]


def _plain(text: str | list[str]) -> str:
    """Returns `text` with line ends and control characters written as escapes."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _RUN else f"{text[: _RUN * 2 // 3]}{_CUT}{text[-_RUN // 3 :]}"
