"""Adds marks to a chat template, so its output shows which text belongs to which message.

Each loop over messages, or over their numbers, writes a mark before the text of each message, and
another one after the last. Each `{% generation %}` block writes marks around its content. The rest
of the output must not change, so the caller compares the text without marks with the output of the
original template.

A `set`, `macro`, `call` or `filter` block captures text: the template can read or change it before
it is written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jinja2 import Environment

from megatrain.runtime.data.chat.marks import (
    CLOSE,
    CLOSES,
    ITEM,
    LOOP_ENDS,
    MARK,
    NUMBER,
    OPENS,
    mark,
)

_STATE = "megatrain_loops"
"""Variable of a marked template. Its `messages` is a list with an element for each running loop,
the innermost first: whether the loop has had a message."""
_CAPTURES = ("macro", "call", "filter", "set")
"""Blocks that capture text."""
_BLOCKS = ("if", "with", "for", *_CAPTURES)
"""Statements that open a block, which an `end` statement closes."""
_VARYING = ("messages", "tools", "documents", "strftime_now")
"""Names whose values differ between conversations or between days."""


Captured = Literal["marked", "trimmable", "unmarked"]
"""How loops in blocks that capture text are marked: like all loops (`marked`), with white space at
the ends of the captured text moved outside of the marks, where `trim` finds it (`trimmable`), or
not at all (`unmarked`)."""
_OUTER = "megatrain_outer"
"""Macro that moves white space at the ends of a text outside of the marks there."""
_OUTER_MACRO = f"""
{{%- macro {_OUTER}(text) -%}}
{{%- set n = namespace(go=true, before="", first="", text=text, last="", after="") -%}}
{{%- for _ in text.split("{MARK}") if n.go -%}}
{{%- set part = n.text.lstrip() -%}}
{{%- set n.before = n.before ~ n.text[:(n.text | length) - (part | length)] -%}}
{{%- set n.text = part -%}}
{{%- set n.go = part.startswith("{MARK}") -%}}
{{%- if n.go -%}}
{{%- set n.first = n.first ~ part.partition("{CLOSE}")[0] ~ "{CLOSE}" -%}}
{{%- set n.text = part.partition("{CLOSE}")[2] -%}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- set n.go = true -%}}
{{%- for _ in text.split("{MARK}") if n.go -%}}
{{%- set part = n.text.rstrip() -%}}
{{%- set n.after = n.text[part | length:] ~ n.after -%}}
{{%- set n.text = part -%}}
{{%- set n.go = part.endswith("{CLOSE}") -%}}
{{%- if n.go -%}}
{{%- set n.last = "{MARK}" ~ part.rpartition("{MARK}")[2] ~ n.last -%}}
{{%- set n.text = part.rpartition("{MARK}")[0] -%}}
{{%- endif -%}}
{{%- endfor -%}}
{{{{- n.before ~ n.first ~ n.text ~ n.last ~ n.after -}}}}
{{%- endmacro -%}}
"""


@dataclass(frozen=True)
class MarkedTemplate:
    """The source of a marked template, and properties of its output."""

    source: str
    """The template as text."""
    exact: bool
    """Whether its output without marks equals the original's for every conversation."""
    last_loop: str
    """Number of the last loop outside of other blocks, if the text after this loop does not depend
    on the conversation or the day. Otherwise empty."""
    captures: dict[str, str]
    """Number of a loop in a block that captures text -> the kind of this block, such as `set`."""


class _Block(NamedTuple):
    """A block whose end has not been reached yet."""

    tag: str
    """The first word of its statement."""
    number: int
    """A number that identifies the block."""
    variable: str
    """The variable of a loop. Empty for other blocks."""


@functools.lru_cache(maxsize=32)
def marked_template(
    template: str, *, items: bool = True, captured: Captured = "marked"
) -> MarkedTemplate:
    """Returns `template` with marks.

    Args:
        template: the source of the template.
        items: whether loops over messages write marks. If not, only `{% generation %}` blocks do.
        captured: how loops in blocks that capture text, such as `{% set %}`, are marked.

    Raises jinja2.TemplateSyntaxError if `template` is not a valid template.
    """
    # These are the options of transformers. With them, the lexer removes white space. The `+` in
    # the statements that are written below keeps the rest of it.
    lexer = Environment(trim_blocks=True, lstrip_blocks=True)
    written = [_statement(f" set {_STATE} = namespace(messages=[]) ")] if items else []
    written += [_OUTER_MACRO] if captured == "trimmable" else [""]
    statement: list[str] | None = None
    open_blocks: list[_Block] = []
    exact, last_loop = not items, ""
    captures: dict[str, str] = {}
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
            capture = _capture(open_blocks)
            exact = exact and not (words[0] == "generation" and capture)
            count = sum(block.tag in _CAPTURES for block in open_blocks)
            before, after = _marks(words, open_blocks, len(written))
            if words[0] == "for" and capture:
                captures[str(len(written))] = capture
            if "generation" not in words[0] and not (
                items and (captured != "unmarked" or not capture)
            ):
                before = after = ""
            if captured == "trimmable":
                opened = sum(block.tag in _CAPTURES for block in open_blocks) - count
                if opened > 0:
                    after += _statement(f" set {_OUTER}_text ")
                if opened < 0:
                    before += _statement(" endset ") + _output(f"{_OUTER}({_OUTER}_text)")
            written += [before, _statement("".join(statement)), after]
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
    return MarkedTemplate(
        "".join(written), exact, "" if assigned & after_loop else last_loop, captures
    )


def _assigned(words: list[str]) -> set[str]:
    """Returns the names that a statement assigns to, possibly with other names."""
    ends = {"for": "in", "set": "=", "macro": "(", "with": ""}
    if words[0] not in ends:
        return set()
    end = words.index(ends[words[0]]) if ends[words[0]] in words else len(words)
    return set(words[1:end])


def _capture(open_blocks: list[_Block]) -> str:
    """Returns the kind of the innermost open block that captures text, or an empty string."""
    return next((block.tag for block in reversed(open_blocks) if block.tag in _CAPTURES), "")


def _marks(words: list[str], open_blocks: list[_Block], number: int) -> tuple[str, str]:
    """Returns the marks to write before and after a statement, and updates `open_blocks`.

    Args:
        words: the words of the statement.
        open_blocks: the open blocks, the innermost last.
        number: the number of the block that the statement may open.
    """
    tag = words[0]
    # `set` with a filter can have `=` among the filter's arguments.
    assigns = next((word for word in words if word in ("=", "|")), "") == "="
    if tag in _BLOCKS and not (tag == "set" and assigns):
        open_blocks.append(_Block(tag, number, words[1] if tag == "for" else ""))
    elif tag.startswith("end") and open_blocks and tag == f"end{open_blocks[-1].tag}":
        number = open_blocks.pop().number
    if tag == "generation":
        return "", _output(_literal(mark(OPENS)))
    if tag == "endgeneration":
        return _output(_literal(mark(CLOSES))), ""
    if tag == "for":
        return _begin(), _item(words[1], number) if words[2:3] == ["in"] else ""
    if tag == "endfor":
        return "", _end(number)
    loop = next((block for block in reversed(open_blocks) if block.tag == "for"), None)
    if loop and tag == "set" and words[2:3] == ["="] and words[4:] == ["[", loop.variable, "]"]:
        return "", _item(words[1], loop.number)
    return "", ""


def _begin() -> str:
    """Returns the statement to write before a loop."""
    return _remember(f"[false] + {_STATE}.messages")


def _item(name: str, loop: int) -> str:
    """Returns statements that write a mark if the variable `name` is a message."""
    own = f"{name}[{_literal(NUMBER)}]"
    before, after = (_literal(part) for part in mark(f"{ITEM} {loop} |").split("|"))
    return (
        _statement(f" if {name} is mapping and {own} is defined ")
        + _output(f"{before} ~ {own} ~ {after}")
        + _remember(f"[true] + {_STATE}.messages[1:]")
        + _statement(" endif ")
    )


def _end(loop: int) -> str:
    """Returns statements that write a mark after a loop if it was over messages."""
    own = _literal(mark(f"{LOOP_ENDS} {loop}"))
    return _output(f"{own} if {_STATE}.messages[0]") + _remember(f"{_STATE}.messages[1:]")


def _remember(messages: str) -> str:
    """Returns the statement that sets the state of the running loops to an expression."""
    return _statement(f" set {_STATE}.messages = {messages} ")


def _statement(words: str) -> str:
    return f"{{%+{words}+%}}"


def _output(expression: str) -> str:
    return f"{{{{ {expression} }}}}"


def _literal(text: str) -> str:
    """Returns `text` as a string literal of Jinja, which has the same escapes as Python."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
