"""Reads tool calls in messages, and converts their arguments between objects and JSON text.

In OpenAI's format, arguments are JSON text. Most chat templates expect objects, as transformers'
documentation recommends, and a few expect text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Messages = Sequence[dict[str, Any]]


def function(tool: object) -> dict[str, Any]:
    """Returns the object with the name of a tool or a call.

    In OpenAI's format it is the value of `function`, otherwise the tool or call itself.
    """
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return inner if isinstance(inner, dict) else {}


def calls(message: dict[str, Any]) -> list[Any]:
    """Returns the tool calls of a message."""
    found = message.get("tool_calls")
    return found if isinstance(found, list) else []


def left_out(message: dict[str, Any], text: str) -> bool:
    """Checks whether `text`, which a chat template wrote for `message`, lacks a call's name."""
    names = [function(call).get("name") for call in calls(message)]
    return any(isinstance(name, str) and name not in text for name in names)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """Returns the messages with arguments as objects.

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
    """Returns the messages with arguments as JSON text."""
    return _with_arguments(
        messages,
        lambda value, _: (
            json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        ),
    )


def shows_objects(messages: Messages, text: str) -> bool:
    """Checks whether `text` has arguments in Python's notation for a dict.

    A template that expects text writes an object in this way.
    """
    found = [function(call).get("arguments") for message in messages for call in calls(message)]
    return any(isinstance(value, dict) and bool(value) and str(value) in text for value in found)


def _with_arguments(messages: Messages, change: Callable[[Any, int], Any]) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of calls changed by `change`."""
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
