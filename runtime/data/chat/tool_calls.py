"""Reads tool calls in messages, and converts their arguments between objects and JSON text.

In OpenAI's format, arguments are JSON text. Most chat templates expect objects, which the
documentation of transformers recommends. A few expect text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Messages = Sequence[dict[str, Any]]


def function(tool: object) -> dict[str, Any]:
    """Returns the object with the name and the arguments of a tool or a call.

    In OpenAI's format it is the value of `function`, otherwise the tool or the call itself.
    """
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return inner if isinstance(inner, dict) else {}


def calls(message: dict[str, Any]) -> list[Any]:
    """Returns the tool calls of a message, or an empty list."""
    value = message.get("tool_calls")
    return value if isinstance(value, list) else []


def left_out(message: dict[str, Any], text: str) -> bool:
    """Returns whether `text`, the rendering of `message`, lacks the name of one of its calls."""
    names = [function(call).get("name") for call in calls(message)]
    return any(isinstance(name, str) and name not in text for name in names)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of tool calls as objects.

    Raises ValueError, which names the message, if arguments are text but not a JSON object.
    """

    def decoded(value: Any, number: int) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return msgspec.json.decode(value or "{}", type=dict)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise ValueError(
                f"message {number}: the arguments of a tool call are not a JSON object"
            ) from None

    return _with_arguments(messages, decoded)


def with_texts(messages: Messages) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of tool calls as JSON text."""
    return _with_arguments(
        messages,
        lambda value, _: (
            json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        ),
    )


def shows_objects(messages: Messages, text: str) -> bool:
    """Returns whether `text` has the arguments of a call in Python's notation for a dict.

    A template that expects JSON text writes an object in this way.
    """
    values = [function(call).get("arguments") for message in messages for call in calls(message)]
    return any(isinstance(value, dict) and bool(value) and str(value) in text for value in values)


def _with_arguments(messages: Messages, change: Callable[[Any, int], Any]) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of calls changed by `change`.

    `change` takes the arguments and the number of the message, from 1.
    """
    return [
        (
            {**message, "tool_calls": [_changed(call, change, number) for call in calls(message)]}
            if calls(message)
            else message
        )
        for number, message in enumerate(messages, 1)
    ]


def _changed(call: Any, change: Callable[[Any, int], Any], number: int) -> Any:
    inner = function(call)
    if inner.get("arguments") is None:
        return call
    changed = {**inner, "arguments": change(inner["arguments"], number)}
    return changed if inner is call else {**call, "function": changed}
