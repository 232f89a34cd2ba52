"""marked_template: a chat template that also says which part of its output each message is.

Each loop over messages, or over their numbers, writes a mark before what it writes of a message, and one after its last item. Each `{% generation %}` block writes marks
around its content. The marks are Unicode noncharacters, which text does not contain. Nothing else of the output may change: whoever renders a marked
template compares the text without its marks with what the original writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import Environment

_NUMBER, _MARK, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
"""key of a message under which a marked template finds its number; what each mark begins and ends with"""
_ITEM, _LOOP_ENDS, _OPENS, _CLOSES = "item", "end", "opens", "closes"
"""a mark's first word; a loop's number follows, and a message's"""
_CAPTURES = ("macro", "call", "filter", "set")
"""blocks whose output the template may look at or change before it writes it: no marks there"""


class _Block(NamedTuple):
    """A statement that is still open."""

    tag: str
    number: int
    variable: str


class Span(NamedTuple):
    """Characters `begin` to `end` of a text."""

    begin: int
    end: int


@dataclass(frozen=True)
class Rendering:
    """What a marked template wrote, without the marks."""

    text: str
    messages: dict[int, list[Span]]
    """what was written of each message, by its number from 0, in order; empty parts are left out"""
    generated: list[Span]
    """what `{% generation %}` blocks wrote"""


def numbered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a marked template takes them."""
    return [{**message, _NUMBER: str(number)} for number, message in enumerate(messages)]


def marked_template(template: str) -> str:
    """The source of the marked template. Raises jinja2.TemplateSyntaxError where `template` cannot be read."""
    # as transformers has it; the tokens come without the white space that this removes, and `+` keeps what is left
    lexer = Environment(trim_blocks=True, lstrip_blocks=True)
    written: list[str] = []
    statement: list[str] | None = None
    open_blocks: list[_Block] = []
    for _, kind, value in lexer.lex(template):
        if kind == "block_begin":
            statement = []
        elif kind == "block_end":
            assert statement is not None
            before, after = _marks([word for word in statement if not word.isspace()], open_blocks, len(written))
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
    return "".join(written)


def _marks(words: list[str], open_blocks: list[_Block], number: int) -> tuple[str, str]:
    """What to write before and after a statement. `open_blocks`, each with its number, is updated; `number` is a new one."""
    tag = words[0]
    captured = any(block.tag in _CAPTURES for block in open_blocks)
    if tag in ("for", *_CAPTURES) and not (tag == "set" and "=" in words):
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
    if loop and tag == "set" and not captured and words[2:3] == ["="] and words[4:] == ["[", loop.variable, "]"]:
        return "", _item(words[1], loop.number)
    if tag == "endfor" and not captured:
        return "", _mark(f"{_LOOP_ENDS} {number}")
    return "", ""


def _item(name: str, loop: int) -> str:
    """The mark before what `loop` writes of `name`, where that is a message."""
    own = f"{name}[{_literal(_NUMBER)}]"
    return _output(f"{_literal(f'{_MARK}{_ITEM} {loop} ')} ~ {own} ~ {_literal(_CLOSE)} if {name} is mapping and {own} is defined")


def _mark(words: str) -> str:
    return _output(_literal(f"{_MARK}{words}{_CLOSE}"))


def _output(expression: str) -> str:
    return f"{{{{ {expression} }}}}"


def _literal(text: str) -> str:
    """As Jinja reads it back, which decodes escapes as Python does."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unmarked(marked: str) -> Rendering:
    """Of what a marked template wrote. Raises ValueError or IndexError where the text itself has what marks are made of."""
    first, *parts = marked.split(_MARK)
    pieces, length = [first], len(first)
    messages: dict[int, list[Span]] = {}
    generated: list[Span] = []
    opened: list[int] = []
    items: list[tuple[str, int]] = []
    """the loops that are running, and the message that each is at"""
    begin = 0
    """from where on the text is the last item's"""
    for part in parts:
        mark, _, text = part.partition(_CLOSE)
        word, *numbers = mark.split()
        if word == _OPENS:
            opened.append(length)
        elif word == _CLOSES:
            generated.append(Span(opened.pop(), length))
        else:
            if items and length > begin:
                messages.setdefault(items[-1][1], []).append(Span(begin, length))
            loops = [loop for loop, _ in items]
            if numbers[0] in loops:
                del items[loops.index(numbers[0]) :]
            if word == _ITEM:
                items.append((numbers[0], int(numbers[1])))
            begin = length
        pieces.append(text)
        length += len(text)
    if items and length > begin:
        messages.setdefault(items[-1][1], []).append(Span(begin, length))
    return Rendering("".join(pieces), {number: _joined(spans) for number, spans in messages.items()}, generated)


def _joined(spans: list[Span]) -> list[Span]:
    """Those that touch as one."""
    found = spans[:1]
    for span in spans[1:]:
        if span.begin == found[-1].end:
            found[-1] = Span(found[-1].begin, span.end)
        else:
            found.append(span)
    return found
