"""Marks in the output of a chat template, which show the message that each text belongs to.

A mark consists of Unicode noncharacters. Text does not contain them, and filters such as `upper` do
not change them. `marked_template` adds marks to a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

NUMBER, MARK, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
"""The key under which a message has its number, and the first and last character of a mark."""
ITEM, LOOP_ENDS, OPENS, CLOSES = "item", "end", "opens", "closes"
"""The first word of a mark: before a message, after a loop over messages, and at the beginning and
the end of a `{% generation %}` block. The numbers of the loop and of the message can follow."""
_HIDDEN = {ord(letter): 0xFDD3 + place for place, letter in enumerate("0123456789 cdeilmnopst")}
"""Code of a character in the words of a mark -> code of the noncharacter that is written."""
_SHOWN = {hidden: chr(shown) for shown, hidden in _HIDDEN.items()}
"""Code of a noncharacter -> the character that it stands for."""


class TextSpan(NamedTuple):
    """The characters of a text from `begin` up to, but not including, `end`."""

    begin: int
    """Index of the first character."""
    end: int
    """Index after the last character."""


@dataclass(frozen=True)
class Rendering:
    """The output of a marked template, without the marks."""

    text: str
    """The whole output."""
    messages: dict[int, list[TextSpan]]
    """Number of a message, from 0 -> the spans of its text, in order. No span is empty."""
    generated: list[TextSpan]
    """The spans of `{% generation %}` blocks."""
    last_loop: str
    """Number of the outermost loop that wrote the last text of a message, or empty."""


def numbered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with their numbers, which a marked template needs."""
    return [{**message, NUMBER: hidden(str(number))} for number, message in enumerate(messages)]


def hidden(words: str) -> str:
    """Returns words of a mark as noncharacters."""
    return words.translate(_HIDDEN)


def written_loops(marked: str) -> list[str]:
    """Returns the numbers of the loops that wrote messages in the output of a marked template."""
    starts = (part.partition(CLOSE)[0].translate(_SHOWN).split() for part in marked.split(MARK)[1:])
    return [words[1] for words in starts if words[:1] == [ITEM] and words[1:]]


def mark(words: str) -> str:
    """Returns the mark with these words."""
    return MARK + hidden(words) + CLOSE


def unmarked(marked: str) -> Rendering | None:
    """Removes the marks from the output of a marked template, and returns the text with its spans.

    Returns None if marks are damaged or out of order. The conversation itself must not contain
    `MARK`.
    """
    first, *parts = marked.split(MARK)
    pieces, length = [first], len(first)
    messages: dict[int, list[TextSpan]] = {}
    generated: list[TextSpan] = []
    opened: list[int] = []
    items: list[tuple[str, int]] = []  # running loops, each with its current message
    begin = 0  # where the text of the last item begins
    last_loop = ""
    for part in parts:
        words, closed, text = part.partition(CLOSE)
        word, *numbers = words.translate(_SHOWN).split() or [""]
        loops = [loop for loop, _ in items]
        if word == OPENS and closed:
            opened.append(length)
        elif word == CLOSES and closed and opened:
            generated.append(TextSpan(opened.pop(), length))
        elif closed and (word == ITEM or (word == LOOP_ENDS and numbers[0] in loops)):
            if items and length > begin:
                messages.setdefault(items[-1][1], []).append(TextSpan(begin, length))
                last_loop = items[0][0]
            if numbers[0] in loops:
                del items[loops.index(numbers[0]) :]
            if word == ITEM:
                items.append((numbers[0], int(numbers[1])))
            begin = length
        else:
            return None
        pieces.append(text)
        length += len(text)
    if items or opened:
        return None
    return Rendering(
        "".join(pieces),
        {number: _joined(spans) for number, spans in messages.items()},
        generated,
        last_loop,
    )


def _joined(spans: list[TextSpan]) -> list[TextSpan]:
    """Returns `spans`, with adjacent spans joined."""
    joined = spans[:1]
    for span in spans[1:]:
        if span.begin == joined[-1].end:
            joined[-1] = TextSpan(joined[-1].begin, span.end)
        else:
            joined.append(span)
    return joined
