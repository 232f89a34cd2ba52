"""Columns: what a row's columns are, and a row's value -> text, a prompt with its completion, or a conversation.

The layouts known, in the order in which they are looked for; other columns are not read:

* messages: `messages`, a list of {role, content}; further keys of a message are handed to the chat template
* sharegpt: `conversations` or `conversation`, a list of {from, value}, and `system` where there is one
* prompt/completion: `prompt` and `completion`
* alpaca: `instruction` and `output`, and `input` and `system` where there are any
* text: `text`
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatrain.runtime.training.data_options import Columns
from megatrain.simulator.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool", "function_response": "tool"}


class Unusable(ValueError):
    """A row's value is not what its column should hold; the text says why, for the list of bad rows."""


@dataclass(frozen=True)
class Layout:
    """One way in which rows hold text."""

    name: Columns
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.needed, *self.optional)


LAYOUTS = (
    Layout("messages", ("messages",)),
    Layout("sharegpt", ("conversations",), ("system",)),
    Layout("sharegpt", ("conversation",), ("system",)),
    Layout("prompt/completion", ("prompt", "completion")),
    Layout("alpaca", ("instruction", "output"), ("input", "system")),
    Layout("text", ("text",)),
)


class Pair(NamedTuple):
    """Loss on the completion alone."""

    prompt: str
    completion: str


Conversation = list[dict[str, Any]]
"""messages of `role` and `content`, at least one of them the assistant's"""


def recognise(columns: Collection[str], wanted: Columns = "auto") -> Layout | None:
    """The first layout whose columns are all there."""
    return next((layout for layout in LAYOUTS if wanted in ("auto", layout.name) and set(layout.needed) <= set(columns)), None)


def unknown_columns(where: str, found: Collection[str], wanted: Columns) -> UserError:
    """For rows that no layout fits."""
    known = "; ".join(f"{layout.name}: {' + '.join(layout.needed)}" for layout in LAYOUTS if wanted in ("auto", layout.name))
    return UserError(f"{where}: columns", found=", ".join(sorted(found)) or "none", allowed=known, fix="rename the columns")


def extract(row: dict[str, Any], layout: Layout) -> str | Pair | Conversation:
    """What to train on. Raises Unusable where a column is missing or does not hold what its name says."""
    if layout.name == "text":
        return _string(row, "text")
    if layout.name == "prompt/completion":
        return _pair(_string(row, "prompt"), _string(row, "completion"), "completion")
    if layout.name == "alpaca":
        instruction, given, system = (_string(row, name) if row.get(name) is not None else "" for name in ("instruction", "input", "system"))
        if not instruction:
            raise Unusable("no `instruction`")
        pair = _pair(f"{instruction}\n\n{given}" if given else instruction, _string(row, "output"), "output")
        return _with_system(system, [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.completion}])
    (column,) = layout.needed
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise Unusable(f"`{column}` is not a list of messages")
    messages = [_message(turn, number, column) for number, turn in enumerate(turns, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise Unusable(f"no assistant turn in `{column}`")
    system = _string(row, "system") if "system" in layout.optional and row.get("system") is not None else ""
    return _with_system(system, messages)


def alpaca_text(conversation: Conversation) -> Pair:
    """An alpaca row for a tokenizer without chat template: sections under the headings of the Alpaca data set (github.com/tatsu-lab/stanford_alpaca)."""
    *before, answer = (message["content"] for message in conversation)
    system = f"{before[0]}\n\n" if len(before) == 2 else ""
    return Pair(f"{system}### Instruction:\n{before[-1]}\n\n### Response:\n", answer)


def _string(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise Unusable(f"no `{name}`" if value is None else f"`{name}` is not a string")
    return value


def _pair(prompt: str, completion: str, name: str) -> Pair:
    if not completion:
        raise Unusable(f"`{name}` is empty")
    return Pair(prompt, completion)


def _with_system(system: str, messages: Conversation) -> Conversation:
    return [{"role": "system", "content": system}, *messages] if system else messages


def _message(turn: object, number: int, column: str) -> dict[str, Any]:
    """As the chat template takes it. Parquet writes null for a key that a message has not."""
    where = f"message {number} of `{column}`"
    if not isinstance(turn, dict):
        raise Unusable(f"{where} is not an object")
    keys = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    role, content = (turn.get(key) for key in keys)
    if not isinstance(role, str) or (role := _SHAREGPT_ROLES.get(role, role) if keys[0] == "from" else role) not in ROLES:
        known = (*ROLES, *_SHAREGPT_ROLES) if keys[0] == "from" else ROLES
        raise Unusable(f"{where} has {f'the unknown {keys[0]} {role!r}' if isinstance(role, str) else f'no `{keys[0]}`'}; known: {', '.join(known)}")
    if not isinstance(content, str):
        raise Unusable(f"{where}: `{keys[1]}` is not a string")
    others = {key: value for key, value in turn.items() if key not in keys and value is not None}
    return {"role": role, "content": content, **others}
