"""Columns: what a row's columns are, and a row's value -> text, a prompt with its completion, or a conversation.

The layouts known, in the order in which they are looked for:

* messages: `messages`, a list of {role, content}; further keys of a message are handed to the chat template
* sharegpt: `conversations` or `conversation`, a list of {from, value}, and `system` where there is one
* prompt/completion: `prompt` and `completion`, both text or both lists of messages
* alpaca: `instruction` and `output`, and `input` and `system` where there are any
* text: `text`

With conversations, `tools` and `chat_template_kwargs` are handed to the chat template. Lists and objects may also be JSON text. Other columns are not
read; `Layout.ignored` names those that would change what a model learns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from megatrain.runtime.training.data_options import Columns
from megatrain.simulator.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool", "function_response": "tool"}
_CALL = "function_call"
"""sharegpt's role of a tool call; its value is the call as JSON. Also the key of a message's only call in OpenAI's older format"""
_TRAINED = ("weight", "train", "training")
"""keys of a message that say whether it has loss: OpenAI's is 0 or 1, Axolotl's true or false"""
_MATTER = (
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
"""columns that change what a model should learn"""


class Unusable(ValueError):
    """A row's value is not what its column should hold; the text says why, for the list of bad rows."""


@dataclass(frozen=True)
class Layout:
    """One way in which rows hold text."""

    name: Columns
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """columns of the rows that matter elsewhere, but are not read"""

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needed, *self.optional)


_WITH = ("tools", "chat_template_kwargs")
LAYOUTS = (
    Layout("messages", ("messages",), _WITH),
    Layout("sharegpt", ("conversations",), ("system", *_WITH)),
    Layout("sharegpt", ("conversation",), ("system", *_WITH)),
    Layout("prompt/completion", ("prompt", "completion"), _WITH),
    Layout("alpaca", ("instruction", "output"), ("input", "system")),
    Layout("text", ("text",)),
)


class Pair(NamedTuple):
    """Loss on the completion alone."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and what else the chat template is given."""

    messages: list[dict[str, Any]]
    """of `role` and `content`"""
    prompt: int = 0
    """as many messages at the beginning are the prompt; at least one of those after it is the assistant's"""
    silent: frozenset[int] = frozenset()
    """numbers from 0 of messages without loss, whatever their role"""
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def recognise(columns: Collection[str], wanted: Columns = "auto") -> Layout | None:
    """The first layout whose columns are all there."""
    layout = next((layout for layout in LAYOUTS if wanted in ("auto", layout.name) and set(layout.needed) <= set(columns)), None)
    return layout and replace(layout, ignored=tuple(name for name in _MATTER if name in columns and name not in layout.columns))


def unknown_columns(where: str, found: Collection[str], wanted: Columns) -> UserError:
    """For rows that no layout fits."""
    known = "; ".join(f"{layout.name}: {' + '.join(layout.needed)}" for layout in LAYOUTS if wanted in ("auto", layout.name))
    return UserError(f"{where}: columns", found=", ".join(sorted(found)) or "none", allowed=known, fix="rename the columns")


def extract(row: dict[str, Any], layout: Layout) -> str | Pair | Conversation:
    """What to train on. Raises Unusable where a column is missing or does not hold what its name says."""
    if layout.name == "text":
        return _string(row, "text")
    if layout.name == "alpaca":
        instruction, given = (_string(row, name) if row.get(name) is not None else "" for name in ("instruction", "input"))
        if not instruction:
            raise Unusable("no `instruction`")
        pair = _pair(f"{instruction}\n\n{given}" if given else instruction, _string(row, "output"), "output")
        question, answer = {"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.completion}
        return _conversation(row, layout, [*_system(row, layout), question, answer], prompt=0)
    values: dict[str, Any] = {name: _decoded(row[name], list) if isinstance(row.get(name), str) else row.get(name) for name in layout.needed}
    if layout.name == "prompt/completion" and not all(map(_messages, values.values())) and not any(isinstance(row.get(name), list) for name in values):
        return _pair(_string(row, "prompt"), _string(row, "completion"), "completion")
    for column, turns in values.items():
        if not isinstance(turns, list) or not turns:
            raise Unusable(f"`{column}` is not a list of messages{'' if len(values) == 1 else ', as the other column is'}")
    *prompt, last = [[_message(turn, number, column) for number, turn in enumerate(turns, 1)] for column, turns in values.items()]
    before = [*_system(row, layout), *(message for messages in prompt for message in messages)]
    return _conversation(row, layout, [*before, *last], prompt=len(before))


def _messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _conversation(row: dict[str, Any], layout: Layout, found: list[dict[str, Any]], prompt: int) -> Conversation:
    silent = frozenset(number for number, message in enumerate(found) if not _trained(message, number))
    if not any(message["role"] == "assistant" and number not in silent for number, message in enumerate(found) if number >= prompt):
        raise Unusable(f"no assistant turn{' with loss' if silent else ''} in `{layout.needed[-1]}`")
    messages = [{key: value for key, value in message.items() if key not in _TRAINED} for message in found]
    tools, arguments = (_optional(row, name, kind) if name in layout.optional else None for name, kind in (("tools", list), ("chat_template_kwargs", dict)))
    tools = [_decoded(tool, dict) if isinstance(tool, str) else tool for tool in tools or []]
    if not all(isinstance(tool, dict) for tool in tools):
        raise Unusable("`tools` is not a list of objects")
    return Conversation(messages=messages, prompt=prompt, silent=silent, tools=tools or None, arguments=arguments or {})


def alpaca_text(conversation: Conversation) -> Pair:
    """An alpaca row for a tokenizer without chat template: sections under the headings of the Alpaca data set (github.com/tatsu-lab/stanford_alpaca)."""
    *before, answer = (message["content"] for message in conversation.messages)
    system = f"{before[0]}\n\n" if len(before) == 2 else ""
    return Pair(f"{system}### Instruction:\n{before[-1]}\n\n### Response:\n", answer)


def _string(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise Unusable(f"no `{name}`" if value is None else f"`{name}` is not a string")
    return value


def _decoded(text: str, kind: type) -> Any:
    """The list or object that `text` is as JSON, otherwise `text` itself."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return text
    return value if isinstance(value, kind) else text


def _optional(row: dict[str, Any], name: str, kind: type) -> Any:
    value = row.get(name)
    if isinstance(value, str):
        value = _decoded(value, kind) if value.strip() else None
    if value is not None and not isinstance(value, kind):
        raise Unusable(f"`{name}` is not {'a list' if kind is list else 'an object'}")
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def _pair(prompt: str, completion: str, name: str) -> Pair:
    if not completion:
        raise Unusable(f"`{name}` is empty")
    return Pair(prompt, completion)


def _system(row: dict[str, Any], layout: Layout) -> list[dict[str, Any]]:
    """The column `system` as a message."""
    text = _string(row, "system") if "system" in layout.optional and row.get("system") is not None else ""
    return [{"role": "system", "content": text}] if text else []


def _trained(message: dict[str, Any], number: int) -> bool:
    """Whether the message may have loss."""
    for key in _TRAINED:
        if (value := message.get(key)) is not None and value not in (0, 1):
            raise Unusable(f"message {number + 1}: `{key}` is neither 0 nor 1, neither true nor false")
        if value is not None and not value:
            return False
    return True


def _message(turn: object, number: int, column: str) -> dict[str, Any]:
    """As the chat template takes it, without keys whose value is null."""
    where = f"message {number} of `{column}`"
    if not isinstance(turn, dict):
        raise Unusable(f"{where} is not an object")
    keys = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    role, content = (turn.get(key) for key in keys)
    others = {key: value for key, value in turn.items() if key not in keys and value is not None}
    if keys[0] == "from" and role == _CALL:
        role, content, others = "gpt", "", {**others, "tool_calls": _calls(content, where)}
    if not isinstance(role, str) or (role := _SHAREGPT_ROLES.get(role, role) if keys[0] == "from" else role) not in ROLES:
        known = (*ROLES, *_SHAREGPT_ROLES, _CALL) if keys[0] == "from" else ROLES
        raise Unusable(f"{where} has {f'the unknown {keys[0]} {role!r}' if isinstance(role, str) else f'no `{keys[0]}`'}; known: {', '.join(known)}")
    if role == "assistant" and _CALL in others and "tool_calls" not in others:  # OpenAI's older format
        others["tool_calls"] = _calls(others.pop(_CALL), where)
    if isinstance(others.get("tool_calls"), str):
        others["tool_calls"] = _decoded(others["tool_calls"], list)
    if not isinstance(others.get("tool_calls", []), list) or not all(isinstance(call, dict) for call in others.get("tool_calls", [])):
        raise Unusable(f"{where}: `tool_calls` is not a list of objects")
    if content is None and role == "assistant" and others.get("tool_calls"):
        return {"role": role, **others}
    return {"role": role, "content": _content(content, f"{where}: `{keys[1]}`"), **others}


def _content(content: object, where: str) -> str:
    """The text of a message: a string, or a list of parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable(f"{where} is not a string")
    for part in content:
        if not isinstance(part, str) and not (isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
            kind = f" of type {part['type']!r}" if isinstance(part, dict) and "type" in part else ""
            raise Unusable(f"{where} has a part{kind} that is not text")
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    """sharegpt's `function_call`, in OpenAI's format."""
    decoded = _decoded(value, object) if isinstance(value, str) else value
    calls = decoded if isinstance(decoded, list) else [decoded]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Unusable(f"{where}: a {_CALL} is not an object with `name` and `arguments`, or a list of such")
    return [{"type": "function", "function": call} for call in calls]
