"""Recognizes the layout of a row's columns, and reads text, a prompt with its completion, or a
conversation from a row.

The layouts, in the order in which they are tried:

* messages: `messages`, a list of {role, content}. Other keys of a message are passed to the chat
  template.
* sharegpt: `conversations` or `conversation`, a list of {from, value}, and optionally `system`,
  which must be the same as a system turn at the beginning of the list
* prompt/completion: `prompt` and `completion`, both text or both lists of messages
* alpaca: `instruction` and `output`, and optionally `input` and `system`
* text: `text`

For conversations, `tools` and `chat_template_kwargs` are passed to the chat template. Lists and
objects may also be given as JSON text. Other columns are not read. `Layout.ignored` lists the
unread columns that would change what a model learns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from megatrain.runtime.data.options import Columns
from megatrain.simulator.base.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_CALL = "function_call"
"""In sharegpt, the role of a turn whose value is a tool call as JSON. In OpenAI's older format, the
key of a message's only tool call."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which a message can have its reasoning."""
_LOSS_KEYS = ("weight", "train", "training")
"""Keys of a message that state whether it has loss: 0 or 1 in OpenAI's format, true or false in
Axolotl's."""
_MEANINGFUL = (
    "system",
    "tools",
    "chat_template_kwargs",
    "functions",
    "parallel_tool_calls",
    "documents",
    "images",
    "image",
    "videos",
    "audios",
    "chosen",
    "rejected",
    "label",
    "weight",
)
"""Columns that change what a model should learn."""


class Unusable(ValueError):
    """Raised for a row with a value that does not fit its column. The message is for the user."""


@dataclass(frozen=True)
class Layout:
    """A set of columns from which training text is read."""

    name: Columns
    """Name of the layout."""
    needed: tuple[str, ...]
    """Columns that a row must have."""
    optional: tuple[str, ...] = ()
    """Columns that are read if a row has them."""
    ignored: tuple[str, ...] = ()
    """Columns of the rows that are not read, although other training programs use them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.needed, *self.optional)


_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
LAYOUTS = (
    Layout("messages", ("messages",), _TEMPLATE_COLUMNS),
    Layout("sharegpt", ("conversations",), ("system", *_TEMPLATE_COLUMNS)),
    Layout("sharegpt", ("conversation",), ("system", *_TEMPLATE_COLUMNS)),
    Layout("prompt/completion", ("prompt", "completion"), _TEMPLATE_COLUMNS),
    Layout("alpaca", ("instruction", "output"), ("input", "system")),
    Layout("text", ("text",)),
)
"""All layouts, in the order in which they are tried."""


class Pair(NamedTuple):
    """A prompt and its completion. By default, only the completion has loss."""

    prompt: str
    """Text of the prompt, which may be empty."""
    completion: str
    """Text of the completion."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and the other arguments of the chat template."""

    messages: list[dict[str, Any]]
    """Messages with the keys `role` and `content`."""
    prompt: int = 0
    """Number of messages at the beginning that form the prompt. At least one later message is from
    the assistant."""
    silent: frozenset[int] = frozenset()
    """Indices, from 0, of the messages without loss."""
    tools: list[dict[str, Any]] | None = None
    """Definitions of the tools that the assistant may call, or None."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the chat template."""


def recognize(columns: Collection[str], wanted: Columns = "auto") -> Layout | None:
    """Returns the first layout whose needed columns are all in `columns`, or None.

    `wanted` limits the search to the layout of this name, unless it is `auto`.
    """
    layout = next(
        (
            layout
            for layout in LAYOUTS
            if wanted in ("auto", layout.name) and set(layout.needed) <= set(columns)
        ),
        None,
    )
    return layout and replace(
        layout,
        ignored=tuple(
            name for name in _MEANINGFUL if name in columns and name not in layout.columns
        ),
    )


def unknown_columns(where: str, found: Collection[str], wanted: Columns) -> UserError:
    """Returns the error for rows with the columns `found`, which no layout fits."""
    known = ", or ".join(
        f"{' and '.join(layout.needed)} ({layout.name})"
        for layout in LAYOUTS
        if wanted in ("auto", layout.name)
    )
    return UserError(
        f"{where}: columns",
        found=", ".join(sorted(found)) or "none",
        allowed=known,
        fix="rename the columns of a row to those of one layout",
    )


def extract(row: dict[str, Any], layout: Layout) -> str | Pair | Conversation:
    """Returns the text, the prompt with its completion, or the conversation of a row.

    Raises Unusable if a column is missing or has a value of the wrong type.
    """
    if layout.name == "text":
        return _string(row, "text")
    if layout.name == "alpaca":
        instruction, context = (
            _string(row, name) if row.get(name) is not None else ""
            for name in ("instruction", "input")
        )
        if not instruction:
            missing = row.get("instruction") is None
            raise Unusable("no `instruction`" if missing else "`instruction` is empty")
        pair = _pair(
            f"{instruction}\n\n{context}" if context else instruction,
            _string(row, "output"),
            "output",
        )
        question, answer = (
            {"role": "user", "content": pair.prompt},
            {"role": "assistant", "content": pair.completion},
        )
        return _conversation(row, layout, [*_system(row, layout), question, answer], prompt=0)
    values: dict[str, Any] = {
        name: _decoded(row[name], list) if isinstance(row.get(name), str) else row.get(name)
        for name in layout.needed
    }
    if (
        layout.name == "prompt/completion"
        and not all(map(_is_messages, values.values()))
        and not any(isinstance(row.get(name), list) for name in values)
    ):
        return _pair(_string(row, "prompt"), _string(row, "completion"), "completion")
    for column, turns in values.items():
        if not isinstance(turns, list) or not turns:
            raise Unusable(
                f"`{column}` is not a list of"
                f" messages{'' if len(values) == 1 else ', as the other column is'}"
            )
    *prompt, last = [
        [_message(turn, number, column) for number, turn in enumerate(turns, 1)]
        for column, turns in values.items()
    ]
    system = _system(row, layout)
    if system and last[0]["role"] == "system":  # sharegpt, which has one list
        if system[0]["content"].strip() not in ("", last[0]["content"].strip()):
            raise Unusable(f"`system` differs from the system turn of `{layout.needed[-1]}`")
        system = []
    before = [*system, *(message for messages in prompt for message in messages)]
    return _conversation(row, layout, [*before, *last], prompt=len(before))


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _conversation(
    row: dict[str, Any], layout: Layout, turns: list[dict[str, Any]], prompt: int
) -> Conversation:
    """Returns the conversation of `turns`, the messages of `row` with their loss keys.

    The first `prompt` of them are the prompt. Raises Unusable if no assistant message after them
    has loss, or if all that have are empty.
    """
    silent = frozenset(
        number for number, message in enumerate(turns) if not _may_have_loss(message, number)
    )
    learned = [
        message
        for number, message in enumerate(turns)
        if message["role"] == "assistant" and number not in silent and number >= prompt
    ]
    with_loss = " with loss" if silent else ""
    if not learned:
        raise Unusable(f"no assistant turn{with_loss} in `{layout.needed[-1]}`")
    if all(map(is_empty, learned)):
        raise Unusable(f"every assistant turn{with_loss} in `{layout.needed[-1]}` is empty")
    messages = [
        {key: value for key, value in message.items() if key not in _LOSS_KEYS} for message in turns
    ]
    tools, arguments = (
        _optional(row, name, kind) if name in layout.optional else None
        for name, kind in (("tools", list), ("chat_template_kwargs", dict))
    )
    tools = [_decoded(tool, dict) if isinstance(tool, str) else tool for tool in tools or []]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("`tools` is not a list of objects")
    return Conversation(
        messages=messages,
        prompt=prompt,
        silent=silent,
        tools=tools or None,
        arguments=arguments or {},
    )


def is_empty(message: dict[str, Any]) -> bool:
    """Returns whether a message has no text, no reasoning and no tool call. Blanks are no text."""
    texts = [message.get(key) for key in ("content", *THOUGHTS)]
    return not message.get("tool_calls") and not any(
        text.strip() if isinstance(text, str) else text for text in texts
    )


def alpaca_text(conversation: Conversation) -> Pair:
    """Returns an alpaca row as text with headings, for a tokenizer without a chat template.

    The headings are those of the Alpaca data set (github.com/tatsu-lab/stanford_alpaca).
    """
    *before, answer = (message["content"] for message in conversation.messages)
    system = f"{before[0]}\n\n" if len(before) == 2 else ""
    return Pair(f"{system}### Instruction:\n{before[-1]}\n\n### Response:\n", answer)


def _string(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise Unusable(f"no `{name}`" if value is None else f"`{name}` is not a string")
    return value


def _decoded(text: str, kind: type) -> Any:
    """Returns the value that `text` contains as JSON if it is a `kind`, otherwise `text` itself."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return text
    return value if isinstance(value, kind) else text


def _optional(row: dict[str, Any], name: str, kind: type) -> Any:
    """Returns the value of an optional column, or None. Raises Unusable for a wrong type."""
    value = row.get(name)
    if isinstance(value, str):
        value = _decoded(value, kind) if value.strip() else None
    if value is not None and not isinstance(value, kind):
        raise Unusable(f"`{name}` is not {'a list' if kind is list else 'an object'}")
    return (
        {key: inner for key, inner in value.items() if inner is not None}
        if isinstance(value, dict)
        else value
    )


def _pair(prompt: str, completion: str, name: str) -> Pair:
    if not completion.strip():
        raise Unusable(f"`{name}` is empty")
    return Pair(prompt, completion)


def _system(row: dict[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """Returns the column `system` as a list of one message, or an empty list."""
    text = (
        _string(row, "system")
        if "system" in layout.optional and row.get("system") is not None
        else ""
    )
    return [{"role": "system", "content": text}] if text else []


def _may_have_loss(message: dict[str, Any], number: int) -> bool:
    """Returns whether none of the loss keys of message `number`, from 0, is 0 or false.

    Raises Unusable for any other value than 0, 1, true and false.
    """
    for key in _LOSS_KEYS:
        if (value := message.get(key)) is not None and value not in (0, 1):
            raise Unusable(
                f"message {number + 1}: `{key}` is neither 0 nor 1, neither true nor false"
            )
        if value is not None and not value:
            return False
    return True


def _message(turn: object, number: int, column: str) -> dict[str, Any]:
    """Returns a turn as a message for the chat template, without keys whose value is null.

    `number` is the number of the turn, from 1. Raises Unusable if the turn is malformed.
    """
    where = f"message {number} of `{column}`"
    if not isinstance(turn, dict):
        raise Unusable(f"{where} is not an object")
    keys = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    role, content = (turn.get(key) for key in keys)
    others = {key: value for key, value in turn.items() if key not in keys and value is not None}
    if keys[0] == "from" and role == _CALL:
        role, content, others = "gpt", "", {**others, "tool_calls": _calls(content, where)}
    if (
        not isinstance(role, str)
        or (role := _SHAREGPT_ROLES.get(role, role) if keys[0] == "from" else role) not in ROLES
    ):
        known = (*ROLES, *_SHAREGPT_ROLES, _CALL) if keys[0] == "from" else ROLES
        raise Unusable(
            f"{where} has"
            f" {f'the unknown {keys[0]} {role!r}' if isinstance(role, str) else f'no `{keys[0]}`'};"
            f" known: {', '.join(known)}"
        )
    if (
        role == "assistant" and _CALL in others and "tool_calls" not in others
    ):  # OpenAI's older format
        others["tool_calls"] = _calls(others.pop(_CALL), where)
    if isinstance(others.get("tool_calls"), str):
        others["tool_calls"] = _decoded(others["tool_calls"], list)
    if not isinstance(others.get("tool_calls", []), list) or not all(
        isinstance(call, dict) for call in others.get("tool_calls", [])
    ):
        raise Unusable(f"{where}: `tool_calls` is not a list of objects")
    if content is None and role == "assistant" and others.get("tool_calls"):
        return {"role": role, **others}
    return {"role": role, "content": _content(content, f"{where}: `{keys[1]}`"), **others}


def _content(content: object, where: str) -> str:
    """Returns the text of a message, whose content is a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable(f"{where} is not a string")
    for part in content:
        if not isinstance(part, str) and not (
            isinstance(part, dict)
            and part.get("type", "text") == "text"
            and isinstance(part.get("text"), str)
        ):
            kind = f" of type {part['type']!r}" if isinstance(part, dict) and "type" in part else ""
            raise Unusable(f"{where} has a part{kind} that is not text")
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    """Returns the tool calls in `value`, a `function_call`, as a list in OpenAI's format."""
    decoded = _decoded(value, object) if isinstance(value, str) else value
    calls = decoded if isinstance(decoded, list) else [decoded]
    if not calls or not all(
        isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls
    ):
        raise Unusable(
            f"{where}: a {_CALL} is not an object with `name` and `arguments`, or a list of such"
        )
    return [{"type": "function", "function": call} for call in calls]
