"""Adds marks to a chat template, so that its output shows which text belongs to which message.

Each loop over messages, or over their numbers, writes a mark before the text of each message, and
one after the last. Each `{% generation %}` block writes marks around its content. The marks are
Unicode noncharacters, which text does not contain. The rest of the output must not change, so the
caller compares the text without marks with the output of the original template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment

_NUMBER, MARK, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
"""The key of a message that has its number, and the first and the last character of a mark."""
_ITEM, _LOOP_ENDS, _OPENS, _CLOSES = "item", "end", "opens", "closes"
"""The first word of a mark. The number of a loop and of a message can follow."""
_CAPTURES = ("macro", "call", "filter", "set")
"""Blocks whose output the template can read or change before it is written. They get no marks."""
_BLOCKS = ("if", "with", "for", *_CAPTURES)
_VARYING = ("messages", "tools", "documents", "strftime_now")
"""Names whose values differ between conversations or between days."""


@dataclass(frozen=True)
class MarkedTemplate:
    """The source of a marked template, and properties of its output."""

    source: str
    """The template as text."""
    exact: bool
    """Whether its output without marks equals the original's for every conversation."""
    last_loop: str
    """Number of the last loop outside of other blocks, if the text after this loop depends only on
    the template's other arguments. Otherwise empty."""


class _Block(NamedTuple):
    """A block whose end has not been reached."""

    tag: str
    """First word of its statement."""
    number: int
    """Number that identifies it."""
    variable: str
    """Variable of a loop, or empty."""


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
    """Number of a message, from 0 -> its text, in order and without empty spans."""
    generated: list[TextSpan]
    """Text of `{% generation %}` blocks."""
    last_loop: str
    """Number of the outermost loop that wrote the last text of a message."""


def numbered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with their numbers, which a marked template needs."""
    return [{**message, _NUMBER: str(number)} for number, message in enumerate(messages)]


def marked_template(template: str, *, items: bool = True) -> MarkedTemplate:
    """Returns `template` with marks. Without `items`, only `{% generation %}` blocks get them.

    Raises jinja2.TemplateSyntaxError if `template` is not a valid template.
    """
    # These are the options of transformers. They remove white space while the template is split
    # into tokens, and the `+` in statements below keeps the rest of it.
    lexer = Environment(trim_blocks=True, lstrip_blocks=True)
    written: list[str] = []
    statement: list[str] | None = None
    open_blocks: list[_Block] = []
    exact, last_loop = not items, ""
    assigned: set[str] = set(_VARYING)
    after_loop: set[str] = set()
    for _, kind, value in lexer.lex(template):
        if kind == "block_begin":
            statement = []
        elif kind == "block_end":
            assert statement is not None
            words = [word for word in statement if not word.isspace()]
            assigned.update(_assigned(words))
            if words[0] == "endfor" and len(open_blocks) == 1:
                last_loop, after_loop = str(open_blocks[0].number), set()
            exact = exact and not (words[0] == "generation" and _captured(open_blocks))
            before, after = _marks(words, open_blocks, len(written))
            if not items and "generation" not in words[0]:
                before = after = ""
            written += [before, "{%+", *statement, "+%}", after]
            statement = None
        elif statement is not None:
            statement.append(value)
        elif kind == "data":
            written.append(_output(_literal(value)))
        elif kind in ("variable_begin", "variable_end"):
            written.append(value.strip("-+ \t\r\n"))
        elif not kind.startswith(("comment", "raw")):
            written.append(value)
        if kind == "name":
            after_loop.add(value)
    return MarkedTemplate("".join(written), exact, "" if assigned & after_loop else last_loop)


def _assigned(words: list[str]) -> set[str]:
    """Returns the names that a statement assigns to. Other names may be among them."""
    ends = {"for": "in", "set": "=", "macro": "(", "with": ""}
    if words[0] not in ends:
        return set()
    end = words.index(ends[words[0]]) if ends[words[0]] in words else len(words)
    return set(words[1:end])


def _captured(open_blocks: list[_Block]) -> bool:
    return any(block.tag in _CAPTURES for block in open_blocks)


def _marks(words: list[str], open_blocks: list[_Block], number: int) -> tuple[str, str]:
    """Returns the marks to write before and after a statement, and updates `open_blocks`.

    Args:
        words: the statement.
        number: the number of the block that the statement may open.
    """
    tag = words[0]
    captured = _captured(open_blocks)
    if tag in _BLOCKS and not (tag == "set" and "=" in words):
        open_blocks.append(_Block(tag, number, words[1] if tag == "for" else ""))
    elif tag.startswith("end") and open_blocks and tag == f"end{open_blocks[-1].tag}":
        number = open_blocks.pop().number
    if tag == "generation":
        return "", _mark(_OPENS)
    if tag == "endgeneration":
        return _mark(_CLOSES), ""
    if tag == "for" and not captured and words[2:3] == ["in"]:
        return "", _item(words[1], number)
    loop = next((block for block in reversed(open_blocks) if block.tag == "for"), None)
    if (
        loop
        and tag == "set"
        and not captured
        and words[2:3] == ["="]
        and words[4:] == ["[", loop.variable, "]"]
    ):
        return "", _item(words[1], loop.number)
    if tag == "endfor" and not captured:
        return "", _mark(f"{_LOOP_ENDS} {number}")
    return "", ""


def _item(name: str, loop: int) -> str:
    """Returns the mark before the text of the variable `name`, written only if it is a message."""
    own = f"{name}[{_literal(_NUMBER)}]"
    return _output(
        f"{_literal(f'{MARK}{_ITEM} {loop} ')} ~ {own} ~ {_literal(_CLOSE)} if {name} is mapping"
        f" and {own} is defined"
    )


def _mark(words: str) -> str:
    return _output(_literal(f"{MARK}{words}{_CLOSE}"))


def _output(expression: str) -> str:
    return f"{{{{ {expression} }}}}"


def _literal(text: str) -> str:
    """Returns `text` as a string literal of Jinja, which has the same escapes as Python."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unmarked(marked: str) -> Rendering:
    """Removes the marks from the output of a marked template, and returns what they show.

    The conversation itself must not contain `MARK`.
    """
    first, *parts = marked.split(MARK)
    pieces, length = [first], len(first)
    messages: dict[int, list[TextSpan]] = {}
    generated: list[TextSpan] = []
    opened: list[int] = []
    items: list[tuple[str, int]] = []
    """Loops that are running, each with the number of its current message."""
    begin = 0
    """Where the text of the last item begins."""
    last_loop = ""
    for part in parts:
        mark, _, text = part.partition(_CLOSE)
        word, *numbers = mark.split()
        if word == _OPENS:
            opened.append(length)
        elif word == _CLOSES:
            generated.append(TextSpan(opened.pop(), length))
        else:
            if items and length > begin:
                messages.setdefault(items[-1][1], []).append(TextSpan(begin, length))
                last_loop = items[0][0]
            loops = [loop for loop, _ in items]
            if numbers[0] in loops:
                del items[loops.index(numbers[0]) :]
            if word == _ITEM:
                items.append((numbers[0], int(numbers[1])))
            begin = length
        pieces.append(text)
        length += len(text)
    if items and length > begin:
        messages.setdefault(items[-1][1], []).append(TextSpan(begin, length))
        last_loop = items[0][0]
    return Rendering(
        "".join(pieces),
        {number: _joined(spans) for number, spans in messages.items()},
        generated,
        last_loop,
    )


def _joined(spans: list[TextSpan]) -> list[TextSpan]:
    """Returns `spans` with adjacent ones joined."""
    found = spans[:1]
    for span in spans[1:]:
        if span.begin == found[-1].end:
            found[-1] = TextSpan(found[-1].begin, span.end)
        else:
            found.append(span)
    return found
