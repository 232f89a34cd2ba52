"""Tool calls in messages: their names, and their arguments as objects or as JSON text.

OpenAI's format has arguments as JSON text. Most chat templates take objects, as transformers' documentation asks for; a few take the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Messages = Sequence[dict[str, Any]]


def function(tool: object) -> dict[str, Any]:
    """What has the name, of a tool or a call: in OpenAI's format the value of `function`, otherwise the tool or call itself."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return inner if isinstance(inner, dict) else {}


def calls(message: dict[str, Any]) -> list[Any]:
    """The tool calls of a message."""
    found = message.get("tool_calls")
    return found if isinstance(found, list) else []


def left_out(message: dict[str, Any], text: str) -> bool:
    """Whether `text`, which a chat template wrote of `message`, lacks the name of a call."""
    names = [function(call).get("name") for call in calls(message)]
    return any(isinstance(name, str) and name not in text for name in names)


def with_objects(messages: Messages) -> list[dict[str, Any]]:
    """The messages with arguments as objects. Raises ValueError where arguments are a text that is not a JSON object; the error says where."""

    def decoded(value: Any, number: int) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return msgspec.json.decode(value or "{}", type=dict)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise ValueError(f"message {number}: the arguments of a tool call are not a JSON object") from None

    return _with_arguments(messages, decoded)


def with_texts(messages: Messages) -> list[dict[str, Any]]:
    """The messages with arguments as JSON text."""
    return _with_arguments(messages, lambda value, _: json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value)


def shows_objects(messages: Messages, text: str) -> bool:
    """Whether `text` has arguments as Python writes them, as a template that takes text writes an object."""
    found = [function(call).get("arguments") for message in messages for call in calls(message)]
    return any(isinstance(value, dict) and bool(value) and str(value) in text for value in found)


def _with_arguments(messages: Messages, change: Callable[[Any, int], Any]) -> list[dict[str, Any]]:
    return [{**message, "tool_calls": [_changed(call, change, number) for call in calls(message)]} if calls(message) else message
            for number, message in enumerate(messages, 1)]  # fmt: skip


def _changed(call: Any, change: Callable[[Any, int], Any], number: int) -> Any:
    inner = function(call)
    if inner.get("arguments") is None:
        return call
    changed = {**inner, "arguments": change(inner["arguments"], number)}
    return changed if inner is call else {**call, "function": changed}
