"""Renders conversations with a chat template, and finds the tokens that have loss.

A turn is the text that the model generates for a message. It begins after the generation prompt,
and ends with the token that stops the model. If a template marks this text with `{% generation %}`,
these marks are used. For other templates, a marked copy of the template (`marked_template`) shows
which text belongs to which message. To find where the generation prompt ends in this text, the
messages before the turn are rendered again with the generation prompt. A template may render
earlier messages differently when a conversation continues.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from megatrain.runtime.data.chat import tool_calls
from megatrain.runtime.data.chat.chat_template import UNSHOWN, ChatTemplate, Undetermined
from megatrain.runtime.data.chat.marks import Rendering, TextSpan
from megatrain.runtime.data.columns import ROLES, THOUGHTS, Conversation, is_empty
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.data.long_text import LongText, Piece
from megatrain.runtime.data.options import Loss
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _Rendered(NamedTuple):
    """A conversation as text."""

    conversation: Conversation
    """The conversation, with the arguments of tool calls in the form that the template takes."""
    text: str
    """The whole conversation."""
    learned: list[TextSpan]
    """The spans with loss."""
    silent: Sequence[TextSpan] = ()
    """Parts of `learned` that have no loss after all."""

    def flagged(self, piece: Piece) -> np.ndarray:
        """Returns the token ids of `piece`, with TARGET set on tokens with a character in `learned`
        and cleared on tokens with a character in `silent`.

        As in transformers, a token that begins before a turn and ends in it is a target. The ids
        are changed in place.
        """
        for spans, flag in ((self.learned, TARGET), (self.silent, 0)):
            for span in spans:
                tokens = piece.between(*span)
                piece.ids[tokens] = piece.ids[tokens] & np.uint32(TARGET - 1) | np.uint32(flag)
        return piece.ids


class Chat:
    """Encodes conversations with the chat template of `tokenizer`, which must have one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss: Loss, where: str) -> None:
        """Prepares the template. `where` names the tokenizer in errors.

        Raises UserError if there are several templates and no default, or if the tokenizer does
        not report the places of its tokens in the text.
        """
        self._tokenizer, self._loss = tokenizer, loss
        self._long = LongText(tokenizer)
        self._template = ChatTemplate(tokenizer)
        self._prompts: dict[tuple[str, bytes], str] = {}
        """Template and its arguments -> its generation prompt, if this is always the same."""
        self._writing: set[tuple[str, str]] = set()
        """Templates and roles, whose texts they are known to write."""
        try:
            self.marked = bool(_MARKER.search(tokenizer.get_chat_template()))
            """Whether the template marks the text that the model generates."""
        except ValueError as error:  # several templates, and none of them is the default
            raise UserError(
                f"chat template of {where}",
                found=str(error),
                allowed="a default template",
                fix="name one of them `default`",
            ) from None
        # Some tokens are declared special in tokenizer.json only.
        added = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ]
        self._special = tuple(
            sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        )
        self._stops = re.compile(
            "|".join(re.escape(token) for token in self._special if token != tokenizer.bos_token)
            or r"(?!)"
        )
        self._without_tools = self._without_thought = self._with_stop = self._empty = 0
        self._without_text = Counter[str]()
        """Role -> number of conversations of which the template leaves out a message of the role.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"tokenizer {where}",
                found="a tokenizer written in Python, which does not report the places of tokens",
                allowed="one with a tokenizer.json",
                fix="convert it to a fast tokenizer",
            )

    def encode(self, conversations: list[Conversation]) -> list[np.ndarray | str]:
        """Returns the token ids of each conversation, or the reason why it cannot be used.

        Token ids are [n] uint32, with the bit TARGET set for targets.
        """
        results = [self._rendered(conversation) for conversation in conversations]
        rendered = [result for result in results if isinstance(result, _Rendered)]
        flagged: list[list[np.ndarray]] = []
        for piece in self._long.encode((conversation.text, True) for conversation in rendered):
            if piece.first:
                flagged.append([])
            flagged[-1].append(rendered[len(flagged) - 1].flagged(piece))
        encoded = [_with_targets(np.concatenate(pieces)) for pieces in flagged]
        for ids, found in zip(encoded, rendered, strict=True):
            if not isinstance(ids, str):
                self._count_omissions(found.conversation, found.text)
        remaining = iter(encoded)
        return [result if isinstance(result, str) else next(remaining) for result in results]

    def remarks(self) -> list[str]:
        """Returns remarks for the user on the conversations that were encoded so far."""
        lines = []
        if self._empty:
            lines.append(
                f"{counted(self._empty, 'assistant turn')} {'is' if self._empty == 1 else 'are'}"
                " empty"
            )
        if self._with_stop:
            lines.append(
                "the template has no token that ends a turn, so"
                f" {self._with_stop:,} conversations end with the token that begins the next"
                " message"
            )
        if self._without_thought:
            lines.append(
                "the template leaves out the reasoning in the last turn of"
                f" {self._without_thought:,} conversations"
            )
        if self._without_tools:
            lines.append(
                f"the template does not write the tools of {self._without_tools:,} conversations"
            )
        lines += [
            f"the chat template does not write the {role} message of"
            f" {counted(self._without_text[role], 'conversation')}"
            for role in ROLES
            if self._without_text[role]
        ]
        return lines

    # ---- one conversation ----

    def _rendered(self, conversation: Conversation) -> _Rendered | str:
        """Returns the rendered conversation, or the reason why it cannot be used."""
        result = self._tried(conversation, tool_calls.with_objects)
        if any(map(tool_calls.calls, conversation.messages)):
            if isinstance(result, str) or tool_calls.shows_objects(
                tool_calls.with_objects(conversation.messages), result.text
            ):
                as_text = self._tried(conversation, tool_calls.with_texts)
                result = result if isinstance(as_text, str) and isinstance(result, str) else as_text
            if isinstance(result, str) and "tool_calls" not in self._tokenizer.get_chat_template(
                tools=conversation.tools
            ):
                result = "the chat template writes no tool calls: it does not mention `tool_calls`"
        return result

    def _tried(
        self,
        conversation: Conversation,
        form: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    ) -> _Rendered | str:
        """Renders the conversation with the arguments of tool calls converted by `form`, or returns
        the reason why it cannot be used.
        """
        try:
            formed = replace(conversation, messages=form(conversation.messages))
            rendered = self._with_loss(formed)
            self._refuse_unwritten(formed)
            return rendered
        except (Undetermined, ValueError) as error:
            return str(error)

    def _with_loss(self, conversation: Conversation) -> _Rendered:
        """Renders the conversation, and finds the text with loss.

        Raises Undetermined if the text with loss cannot be found, or if the template leaves out a
        tool call.
        """
        messages = conversation.messages
        learned = self._learned(conversation)
        every = self._loss == "assistant" and not conversation.silent and not conversation.prompt
        calling = [number for number, message in enumerate(messages) if tool_calls.calls(message)]
        if self._loss == "all" and not conversation.silent and not calling:
            text = self._template.render(conversation, messages)
            return _Rendered(conversation, text, [TextSpan(0, len(text))])
        rendering = self._template.checked(
            conversation, messages, items=not (self.marked and every) or bool(calling)
        )
        if not rendering.messages and (calling or self._loss == "all"):
            raise Undetermined(UNSHOWN)
        for number in calling:
            if tool_calls.left_out(
                messages[number],
                "".join(rendering.text[begin:end] for begin, end in _written(rendering, number)),
            ):
                # The model would learn to answer without calling the tool.
                raise Undetermined(
                    f"the chat template leaves out the tool calls of message {number + 1}"
                )
        if self._loss == "all":
            silent = [
                span
                for number in conversation.silent
                for span in rendering.messages.get(number, [])
            ]
            everything = [TextSpan(0, len(rendering.text))]
            return _Rendered(conversation, rendering.text, everything, silent)
        if self.marked:
            return _Rendered(
                conversation,
                rendering.text,
                rendering.generated if every else _of_messages(rendering, learned),
            )
        spans = [span for number in learned for span in self._turn(conversation, rendering, number)]
        stop = (
            self._stop_after(conversation, rendering)
            if spans and spans[-1].end == len(rendering.text)
            else ""
        )
        if stop:
            self._with_stop += 1
            return _Rendered(
                conversation,
                rendering.text + stop,
                [*spans[:-1], TextSpan(spans[-1].begin, spans[-1].end + len(stop))],
            )
        return _Rendered(conversation, rendering.text, spans)

    def _learned(self, conversation: Conversation) -> list[int]:
        """Returns the numbers of the assistant messages with loss."""
        turns = [
            number
            for number, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and number >= conversation.prompt
        ]
        return [
            number
            for number in (turns[-1:] if self._loss == "last" else turns)
            if number not in conversation.silent
        ]

    def _refuse_unwritten(self, conversation: Conversation) -> None:
        """Raises Undetermined if the template writes a turn with loss, but no text of its message.

        A template for images may expect content as a list of parts, and write nothing of a string.
        The model would learn to end each turn at once. A template that is known to write answers is
        not checked again.
        """
        key = self._tokenizer.get_chat_template(tools=conversation.tools), "assistant"
        messages = conversation.messages
        for number in self._learned(conversation) if key not in self._writing else ():
            if not _has_text(messages[number]):
                continue
            text = self._template.render(conversation, messages)
            content = messages[number]["content"]
            try:
                if self._writes(conversation, text, number):
                    return
                # The template may write other keys of the message.
                alone = {"role": "assistant", "content": content}
                others = [*messages[:number], alone, *messages[number + 1 :]]
                if self._template.render(conversation, others) != text:
                    continue
                rendering = self._template.checked(conversation, messages, items=True)
            except Undetermined:
                continue
            if _written(rendering, number):
                raise Undetermined(
                    f"the chat template leaves out the text of message {number + 1}, which is a"
                    " string; a template for images may expect a list"
                )

    def _writes(self, conversation: Conversation, text: str, number: int) -> bool:
        """Returns whether the output of the template, which is `text`, has the text of message
        `number`: whether another text changes the output. If so, the template is known to write the
        texts of this role.

        The template may change texts, and other messages may have the same text, so a search in the
        output would not answer this. Raises Undetermined if the template refuses the other text.
        """
        messages = list(conversation.messages)
        role, content = messages[number]["role"], messages[number]["content"]
        # A letter that is not in the text differs from each part of it that a template may write.
        other = next(letter for letter in map(chr, count(ord("一"))) if letter not in content)
        messages[number] = {**messages[number], "content": other}
        if self._template.render(conversation, messages) == text:
            return False
        self._writing.add((self._tokenizer.get_chat_template(tools=conversation.tools), role))
        return True

    def _turn(
        self, conversation: Conversation, rendering: Rendering, number: int
    ) -> list[TextSpan]:
        """Returns the spans of the text that the model generates as message `number`.

        There are several spans if the template writes the result of a tool between calls.
        """
        spans = _written(rendering, number)
        if not rendering.messages:
            raise Undetermined(UNSHOWN)
        if not spans:
            return []
        begin = self._begin(conversation, rendering, number, spans[0])
        spans[0] = TextSpan(begin, spans[0].end)
        spans[-1] = TextSpan(spans[-1].begin, self._end(conversation, rendering, number, spans[-1]))
        return spans

    def _begin(
        self, conversation: Conversation, rendering: Rendering, number: int, span: TextSpan
    ) -> int:
        """Returns the place in `span` where the generation prompt for message `number` ends."""
        text, messages = rendering.text[span.begin : span.end], conversation.messages
        words = [
            value.strip()
            for key, value in messages[number].items()
            if key != "role" and isinstance(value, str) and value.strip()
        ]
        prompts = []
        # If the template writes no prompt before this message, the one after it is used.
        for before in (number, number + 1):
            try:
                prompt = (
                    self._prompt(conversation, rendering, messages[:before]) if before else None
                )
            except Undetermined:
                if before > number:
                    raise
                continue  # for example, because the template requires a user message first
            if prompt is None:
                continue
            # A template that trims messages may begin the prompt with the white space that usually
            # ends the previous message.
            rest = prompt.lstrip()
            space = prompt[: len(prompt) - len(rest)]
            if not text.startswith(space) and rendering.text.endswith(space, 0, span.begin):
                prompt = rest
            prompts.append(prompt)
            shared = _shared(prompt, text)
            if text[:shared].strip():
                break
        if not prompts:
            raise Undetermined(f"the chat template does not show where message {number + 1} begins")
        if shared == len(prompts[-1]):
            return span.begin + shared
        if (
            not text[:shared].strip()
            and any(prompts)
            and not text.lstrip().startswith(tuple(words) or "\0")
        ):
            raise Undetermined(
                f"the chat template does not begin message {number + 1} with the generation prompt"
            )
        # If the message itself begins like the rest of the prompt, this part is not the prompt.
        own = (
            at
            for at in range(shared)
            if any(text.startswith(word, at) and at + len(word) >= shared for word in words)
        )
        return span.begin + next(own, shared)

    def _prompt(
        self, conversation: Conversation, whole: Rendering, messages: list[dict[str, Any]]
    ) -> str | None:
        """Returns the generation prompt after `messages`, which are the first ones of `whole`.

        Returns None if the template writes none of these messages.
        """
        whole_spans = [span for number in range(len(messages)) for span in _written(whole, number)]
        if not whole_spans:
            return None
        marked = self._template.marked_source(conversation)
        key = (
            (marked.source, msgspec.json.encode(conversation.arguments))
            if marked.last_loop and marked.last_loop == whole.last_loop
            else None
        )
        if key in self._prompts:
            return self._prompts[key]
        prompted = self._template.marked(conversation, messages, prompt=True)
        prompted_spans = [
            span for number in range(len(messages)) for span in _written(prompted, number)
        ]
        if not prompted_spans:
            return None
        (begin, end), last = (
            max(spans, key=lambda span: span.end) for spans in (whole_spans, prompted_spans)
        )
        if last.end < len(prompted.text) or whole.text[begin:end] == prompted.text[last.begin :]:
            prompt = prompted.text[last.end :]
            if (
                key
                and prompted.last_loop == marked.last_loop
                and last.end
                == max(span.end for spans in prompted.messages.values() for span in spans)
            ):
                self._prompts[key] = prompt
            return prompt
        # The template may write the prompt as part of the last message.
        without = self._template.render(conversation, messages)
        return prompted.text[_shared(prompted.text, without) :]

    def _end(
        self, conversation: Conversation, rendering: Rendering, number: int, span: TextSpan
    ) -> int:
        """Returns the place where the model stops in message `number`, whose text is in `span`.

        If the text ends with a special token and white space, the model stops at the token.
        """
        text, eos = rendering.text, str(self._tokenizer.eos_token or "")
        last = number == len(conversation.messages) - 1
        # Some templates write the end-of-sequence token once, after the loop over messages.
        if last and eos and text.startswith(eos, span.end):
            return span.end + len(eos)
        turn = text[span.begin : span.end].rstrip()
        if turn.endswith(self._special or ("\0",)):
            return span.begin + len(turn)
        following = [
            other
            for other, spans in rendering.messages.items()
            if any(next_span.begin == span.end for next_span in spans)
        ]
        stop = (
            self._stops.match(text, span.end)
            if any(conversation.messages[other]["role"] != "assistant" for other in following)
            else None
        )
        # The token that begins the next message, such as GLM-4.5's <|user|>, stops the model.
        return stop.end() if stop else span.end

    def _stop_after(self, conversation: Conversation, rendering: Rendering) -> str:
        """Returns the token that would begin the next message, if it is what stops the model.

        Returns an empty string if the last turn ends with a special token, or if no special token
        begins the next message.
        """
        if rendering.text.rstrip().endswith(self._special or ("\0",)):
            return ""
        calls = tool_calls.calls(conversation.messages[-1])
        next_message = {"role": "tool" if calls else "user", "content": "x"}
        try:
            longer = self._template.marked(conversation, [*conversation.messages, next_message])
        except Undetermined:
            return ""
        # The last message may be rendered differently when another one follows.
        spans = longer.messages.get(len(conversation.messages) - 1)
        stop = self._stops.match(longer.text, spans[-1].end) if spans else None
        return stop.group() if stop else ""

    def _count_omissions(self, conversation: Conversation, text: str) -> None:
        """Counts conversations whose rendered `text` lacks messages, tools or reasoning, and turns
        with loss that are empty, for `remarks`.
        """
        self._empty += sum(
            message["role"] == "assistant" and is_empty(message)
            for number, message in enumerate(conversation.messages)
            if number >= conversation.prompt and number not in conversation.silent
        )
        self._without_text.update(self._unwritten_roles(conversation, text))
        names = [str(tool_calls.function(tool).get("name")) for tool in conversation.tools or ()]
        self._without_tools += bool(names) and not any(name in text for name in names)
        message = next(
            message for message in reversed(conversation.messages) if message["role"] == "assistant"
        )
        thoughts = [message.get(key) for key in THOUGHTS]
        thoughts += re.findall(r"<think>(.+?)</think>", str(message.get("content")), re.DOTALL)
        self._without_thought += any(
            isinstance(thought, str) and thought.strip() not in text for thought in thoughts
        )

    def _unwritten_roles(self, conversation: Conversation, text: str) -> set[str]:
        """Returns the roles with a message whose text the template leaves out of `text`.

        The assistant is not among them: other checks are made for its messages. To be fast, a text
        that is in `text` counts as written if the template is known to write texts of its role.
        """
        source = self._tokenizer.get_chat_template(tools=conversation.tools)
        unwritten: set[str] = set()
        plain = ""
        for number, message in enumerate(conversation.messages):
            role = message["role"]
            if (
                role in {"assistant", *unwritten}
                or not _has_text(message)
                or ((source, role) in self._writing and _has(text, message["content"]))
            ):
                continue
            # `text` may end with a token that the template does not write.
            plain = plain or self._template.render(conversation, conversation.messages)
            with contextlib.suppress(Undetermined):
                if not self._writes(conversation, plain, number):
                    unwritten.add(role)
        return unwritten


def _shared(one: str, other: str) -> int:
    """Returns the length of the common prefix of two strings."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _has_text(message: dict[str, Any]) -> bool:
    """Returns whether the content of `message` has more than white space."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _has(text: str, content: str) -> bool:
    """Returns whether `text` has `content`, as it is or as JSON, without the white space around."""
    stripped = content.strip()
    return stripped in text or any(
        json.dumps(stripped, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True)
    )


def _written(rendering: Rendering, number: int) -> list[TextSpan]:
    """Returns the spans of message `number` that have more than white space."""
    return [
        span
        for span in rendering.messages.get(number, ())
        if not rendering.text[span.begin : span.end].isspace()
    ]


def _of_messages(rendering: Rendering, numbers: list[int]) -> list[TextSpan]:
    """Returns the spans of `{% generation %}` blocks in the messages `numbers`.

    A block belongs to the last message that begins before it, even if it is after the loop.
    """
    begins = sorted(
        (span.begin, number)
        for number in rendering.messages
        for span in _written(rendering, number)
    )
    if not begins:
        raise Undetermined(UNSHOWN)
    places = [begin for begin, _ in begins]
    counted = [(bisect_right(places, span.begin), span) for span in rendering.generated]
    return [span for count, span in counted if count and begins[count - 1][1] in numbers]


def _with_targets(ids: np.ndarray) -> np.ndarray | str:
    """Returns `ids` if they have a target, otherwise the reason why they cannot be used."""
    # The first token is never predicted.
    return ids if (ids[1:] >= TARGET).any() else "the chat template shows no assistant turn"
