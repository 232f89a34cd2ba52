"""Renders conversations with the chat template of a tokenizer, and finds the text of each message
in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from megatrain.runtime.data.chat import tool_calls
from megatrain.runtime.data.chat.marked_template import Captured, MarkedTemplate, marked_template
from megatrain.runtime.data.chat.marks import MARK, Rendering, numbered, unmarked, written_loops
from megatrain.runtime.data.columns import THOUGHTS, Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNSHOWN = (
    "the chat template does not show which text belongs to which message; {% generation %} in it"
    " would mark the text that the model generates"
)
"""The reason for a template in which marks are lost."""
_CHANGED = (
    "the chat template changes the text of messages after {{% {} %}} took it; {{% generation %}}"
    " in it would mark the text that the model generates"
)
"""The reason for a template that changes marked text, with the kind of the block."""


class Undetermined(Exception):
    """Raised if the text that the model generates cannot be found. The message is the reason."""


class ChatTemplate:
    """The chat template of `tokenizer`, which must have one. Renders with or without marks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        source: str | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Returns the output of the template.

        Args:
            conversation: has the tools and the other arguments of the template.
            messages: the messages to render.
            source: another template to use instead.
            prompt: whether to add the generation prompt.

        Raises Undetermined for every error of the template, because some conversations may be fine.
        """
        tools: Any = conversation.tools
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                chat_template=source,
                **conversation.arguments,
            )
        except Exception as error:
            raise Undetermined(
                f"the chat template reports: {' '.join(str(error).split()) or type(error).__name__}"
            ) from None
        return text

    def marked_source(
        self, conversation: Conversation, *, items: bool = True, captured: Captured = "marked"
    ) -> MarkedTemplate:
        """Returns the template for `conversation`, with marks (`marked_template`)."""
        source = self._tokenizer.get_chat_template(tools=conversation.tools)
        return marked_template(source, items=items, captured=captured)

    def checked(
        self, conversation: Conversation, messages: list[dict[str, Any]], *, items: bool
    ) -> Rendering:
        """Renders the marked template as `marked` does.

        In addition, raises Undetermined if a message contains the character that begins every mark.
        """
        if MARK.encode() in msgspec.json.encode(
            [messages, conversation.tools, conversation.arguments]
        ):
            raise Undetermined("a message contains U+FDD1, which is not a character of text")
        return self.marked(conversation, messages, items=items)

    def marked(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        *,
        items: bool = True,
        prompt: bool = False,
    ) -> Rendering:
        """Renders the marked template, and removes the marks from its output.

        Args:
            conversation: has the tools and the other arguments of the template.
            messages: the messages to render.
            items: whether to mark messages, and not only `{% generation %}` blocks.
            prompt: whether to add the generation prompt.

        Raises Undetermined if marks would change the text.
        """
        template = self.marked_source(conversation, items=items)
        inputs = numbered(messages) if items else messages
        if template.exact:
            rendering = unmarked(self.render(conversation, inputs, template.source, prompt=prompt))
            assert rendering is not None, "nothing changes these marks"
            return rendering
        plain = self.render(conversation, messages, prompt=prompt)
        reason = ""
        for captured in get_args(Captured):
            template = self.marked_source(conversation, items=items, captured=captured)
            try:
                marked = self.render(conversation, inputs, template.source, prompt=prompt)
            except Undetermined:  # the template raises an error because of the marks
                continue
            rendering = unmarked(marked)
            # A block may only inspect its text, such as a macro that returns whether there are
            # calls. It needs no marks.
            if (
                rendering is not None
                and rendering.text == plain
                and (captured != "unmarked" or not (reason or _misplaced(messages, rendering)))
            ):
                return rendering
            loops = [loop for loop in written_loops(marked) if loop in template.captures]
            reason = reason or (_CHANGED.format(template.captures[loops[0]]) if loops else "")
        raise Undetermined(reason or UNSHOWN)


def _misplaced(messages: Sequence[dict[str, Any]], rendering: Rendering) -> bool:
    """Returns whether the text of a message occurs only in the spans of other messages."""
    turns = {
        number: [rendering.text[begin:end] for begin, end in spans]
        for number, spans in rendering.messages.items()
        if messages[number]["role"] == "assistant"
    }
    between, end = [], 0
    for span in sorted(span for number in turns for span in rendering.messages[number]):
        between.append(rendering.text[end : span.begin])
        end = span.end
    between.append(rendering.text[end:])
    for number, message in enumerate(messages):
        allowed = turns.get(number, []) if message["role"] == "assistant" else between
        for text in _texts(message):
            if text in rendering.text and not any(text in place for place in allowed):
                return True
    return False


def _texts(message: dict[str, Any]) -> list[str]:
    """Returns the texts of a message: its content, its reasoning and the names of its calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts += [message.get(key) for key in THOUGHTS]
    texts += [tool_calls.function(call).get("name") for call in tool_calls.calls(message)]
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]
