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

_NUMBER, MARK, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
"""key of a message under which a marked template finds its number; what each mark begins and ends with"""
_ITEM, _LOOP_ENDS, _OPENS, _CLOSES = "item", "end", "opens", "closes"
"""a mark's first word; a loop's number follows, and a message's"""
_CAPTURES = ("macro", "call", "filter", "set")
"""blocks whose output the template may look at or change before it writes it: no marks there"""
_BLOCKS = ("if", "with", "for", *_CAPTURES)
_VARYING = ("messages", "tools", "documents", "strftime_now")
"""names whose values differ from conversation to conversation, or from day to day"""


@dataclass(frozen=True)
class MarkedTemplate:
    """The source of a marked template, and what is known of what it writes."""

    source: str
    exact: bool
    """whether its text without the marks is the original's, whatever the conversation is"""
    last_loop: str
    """the number of the last loop that stands in no other block, if the text after it depends on nothing but the template's further arguments"""


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
    last_loop: str
    """the number of the outermost loop that wrote the last part of a message"""


def numbered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a marked template takes them."""
    return [{**message, _NUMBER: str(number)} for number, message in enumerate(messages)]


def marked_template(template: str, *, items: bool = True) -> MarkedTemplate:
    """Without `items`, only `{% generation %}` blocks are marked. Raises jinja2.TemplateSyntaxError where `template` cannot be read."""
    # as transformers has it; the tokens come without the white space that this removes, and `+` keeps what is left
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
    """The names that a statement gives values to, and perhaps more."""
    ends = {"for": "in", "set": "=", "macro": "(", "with": ""}
    if words[0] not in ends:
        return set()
    end = words.index(ends[words[0]]) if ends[words[0]] in words else len(words)
    return set(words[1:end])


def _captured(open_blocks: list[_Block]) -> bool:
    return any(block.tag in _CAPTURES for block in open_blocks)


def _marks(words: list[str], open_blocks: list[_Block], number: int) -> tuple[str, str]:
    """What to write before and after a statement. `open_blocks`, each with its number, is updated; `number` is a new one."""
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
    if loop and tag == "set" and not captured and words[2:3] == ["="] and words[4:] == ["[", loop.variable, "]"]:
        return "", _item(words[1], loop.number)
    if tag == "endfor" and not captured:
        return "", _mark(f"{_LOOP_ENDS} {number}")
    return "", ""


def _item(name: str, loop: int) -> str:
    """The mark before what `loop` writes of `name`, where that is a message."""
    own = f"{name}[{_literal(_NUMBER)}]"
    return _output(f"{_literal(f'{MARK}{_ITEM} {loop} ')} ~ {own} ~ {_literal(_CLOSE)} if {name} is mapping and {own} is defined")


def _mark(words: str) -> str:
    return _output(_literal(f"{MARK}{words}{_CLOSE}"))


def _output(expression: str) -> str:
    return f"{{{{ {expression} }}}}"


def _literal(text: str) -> str:
    """As Jinja reads it back, which decodes escapes as Python does."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unmarked(marked: str) -> Rendering:
    """Of what a marked template wrote. The conversation itself must not contain `MARK`."""
    first, *parts = marked.split(MARK)
    pieces, length = [first], len(first)
    messages: dict[int, list[Span]] = {}
    generated: list[Span] = []
    opened: list[int] = []
    items: list[tuple[str, int]] = []
    """the loops that are running, and the message that each is at"""
    begin = 0
    """from where on the text is the last item's"""
    last_loop = ""
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
        messages.setdefault(items[-1][1], []).append(Span(begin, length))
        last_loop = items[0][0]
    return Rendering("".join(pieces), {number: _joined(spans) for number, spans in messages.items()}, generated, last_loop)


def _joined(spans: list[Span]) -> list[Span]:
    """Those that touch as one."""
    found = spans[:1]
    for span in spans[1:]:
        if span.begin == found[-1].end:
            found[-1] = Span(found[-1].begin, span.end)
        else:
            found.append(span)
    return found
