"""Shows the beginning of a document, decoded from its tokens. Text with loss is marked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatrain.runtime.data.documents import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENS = 2048
"""The number of tokens that are decoded, from the document's beginning."""
_RUN, _ROW, _ROWS = 180, 70, 7
"""The maximum characters of a run of text with or without loss, the characters per line, and the
maximum number of lines."""
_CUT = " [...] "
_BEGIN, _END = "\x01", "\x02"
"""Placeholders for the marks until the text is cut into lines. The text cannot contain them,
because `_plain` escapes characters that are not printable."""


class Marks(NamedTuple):
    """The marks around text with loss."""

    begin: str = "«"
    """Written before text with loss."""
    end: str = "»"
    """Written after text with loss."""
    meaning: str = "text between « and »"
    """Describes marked text to the user."""


GUILLEMETS = Marks()
"""Marks for output without colours."""


def preview(
    documents: Documents,
    tokenizer: PreTrainedTokenizerBase,
    *,
    number: int = 0,
    rows: int = _ROWS,
    run: int | None = _RUN,
    marks: Marks = GUILLEMETS,
) -> list[str]:
    """Returns lines that show the beginning of a document. Text with loss is marked, unless all
    tokens have loss.

    Args:
        documents: the documents.
        tokenizer: decodes the tokens.
        number: the index of the document, from 0.
        rows: the maximum number of lines of text.
        run: the maximum number of characters in a run of text with or without loss. The middle of
            a longer run is left out. None shows all of it.
        marks: the marks around text with loss.
    """
    begin, end = int(documents.begins[number]), int(documents.ends[number])
    ids, targets = documents.read(begin, min(end, begin + _TOKENS))
    borders = [0, *(np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist(), len(ids)]
    text = ""
    for first, last in itertools.pairwise(borders):
        part = _shortened(_plain(tokenizer.decode(ids[first:last].tolist())), run)
        text += f"{_BEGIN}{part}{_END}" if documents.flagged and targets[first] else part
    room = _ROW * rows
    if len(text) > room or end - begin > _TOKENS:
        text = f"{text[: room - len(_CUT) - 1]}{_CUT}"
        text += _END * (text.count(_BEGIN) - text.count(_END))
    marked = f"loss on {marks.meaning}" if documents.flagged else "loss on every token"
    which = f"document {number + 1:,}" if number else "the first document"
    return [
        f"{which}, {end - begin:,} tokens, {marked}:",
        *(
            "    " + text[at : at + _ROW].replace(_BEGIN, marks.begin).replace(_END, marks.end)
            for at in range(0, len(text), _ROW)
        ),
    ]


def _plain(text: str | list[str]) -> str:
    """Returns `text` with line ends and control characters written as escapes."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _shortened(text: str, run: int | None) -> str:
    """Returns `text` without its middle if it is longer than `run` characters."""
    if run is None or len(text) <= run:
        return text
    return f"{text[: run * 2 // 3]}{_CUT}{text[-run // 3 :]}"
