"""Chat: conversations -> ids, and which of them an assistant turn is, by the tokenizer's own chat template.

A template that marks what the model generates (`{% generation %}`) says it itself. For another one, turns are found by rendering prefixes of the
conversation: a turn is what the messages up to it add to those before it with the generation prompt. Blanks that a template writes after the
turn's last special token are not part of it: generation has stopped there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.runtime.data.columns import Conversation
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.training.data_options import Loss
from megatrain.simulator.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Mismatch(Exception):
    """The template renders a turn otherwise once the conversation goes on, so that prefixes do not show where turns are."""


class Chat:
    """The chat template of `tokenizer`, which has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss: Loss, where: str) -> None:
        """Raises UserError for several templates without a default, and for a tokenizer that cannot say where in the text its tokens are."""
        self._tokenizer, self._loss, self._where = tokenizer, loss, where
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # several templates, none of them the default
            raise UserError(f"chat template of {where}", found=str(error), allowed="a default template", fix="name one of them `default`") from None
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]  # some are special in tokenizer.json alone
        self._special = tuple({*tokenizer.all_special_tokens, *added})
        self.marked = bool(_MARKER.search(template))
        if not tokenizer.is_fast:
            raise UserError(
                f"tokenizer {where}", found="one written in Python, without places in the text", allowed="one with a tokenizer.json", fix="convert it"
            )

    def encode(self, conversations: list[tuple[str, Conversation]]) -> list[np.ndarray | str]:
        """Of each conversation, named by its file and line: ids [n] uint32 flagged with TARGET, or why the template cannot render it.

        Raises UserError where turns cannot be found.
        """
        return self._by_markers([messages for _, messages in conversations]) if self.marked else self._by_prefixes(conversations)

    # ---- templates with generation markers ----

    def _by_markers(self, conversations: list[Conversation]) -> list[np.ndarray | str]:
        try:
            encoded: Any = self._tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        except Exception as error:  # a template is a program: whatever it raises is about this data
            return [_reason(error)] if len(conversations) == 1 else [self._by_markers([messages])[0] for messages in conversations]
        return [self._marked(ids, np.array(mask, dtype=bool)) for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)]

    def _marked(self, ids: list[int], mask: np.ndarray) -> np.ndarray | str:
        if self._loss == "last":
            begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
            mask[: begins[-1] if len(begins) else 0] = False
        return _flagged(ids, mask)

    # ---- other templates ----

    def _by_prefixes(self, conversations: list[tuple[str, Conversation]]) -> list[np.ndarray | str]:
        rendered: list[tuple[str, list[tuple[int, int]]] | str] = []
        for where, messages in conversations:
            try:
                rendered.append(self._turns(messages))
            except Mismatch as error:
                raise UserError(
                    f"chat template of {self._where}, {where}", found=str(error), allowed="a template that renders a turn alike whatever follows",
                    fix="mark what the model generates with {% generation %} in the template",
                ) from None  # fmt: skip
            except Exception as error:
                rendered.append(_reason(error))
        texts = [found[0] for found in rendered if not isinstance(found, str)]
        encoded = self._tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False) if texts else {}
        encodings = iter(zip(encoded.get("input_ids", []), encoded.get("offset_mapping", []), strict=True))
        return [found if isinstance(found, str) else self._spanned(found[1], *next(encodings)) for found in rendered]

    def _turns(self, messages: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and from where to where in it each assistant turn goes. Raises Mismatch, and whatever the template raises."""
        text = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], prompt=True)
            if not text.startswith(before):
                raise Mismatch(f"other text before message {index + 1} than where the conversation ends there")
            end = self._end(text, len(before), self._render(messages[: index + 1]), message["content"], index + 1)
            turn = text[len(before) : end]
            if turn.rstrip().endswith(self._special or ("\0",)):
                end = len(before) + len(turn.rstrip())
            spans.append((len(before), end))
        return text, spans

    def _end(self, text: str, begin: int, until_here: str, content: str, number: int) -> int:
        """Where the turn that begins at `begin` ends. Qwen3's template puts an empty thought into the last turn alone: there the content tells."""
        if text.startswith(until_here) and len(until_here) > begin:
            return len(until_here)
        for words in (content, content.strip()):
            if words and text.startswith(words, begin) and words in until_here[begin:]:
                closing = until_here[until_here.rindex(words) + len(words) :]
                if text.startswith(closing, begin + len(words)):
                    return begin + len(words) + len(closing)
        raise Mismatch(f"message {number} as another text than where the conversation ends with it")

    def _render(self, messages: Conversation, *, prompt: bool = False) -> str:
        text: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return text

    def _spanned(self, spans: list[tuple[int, int]], ids: list[int], offsets: list[tuple[int, int]]) -> np.ndarray | str:
        starts = np.array([start for start, _ in offsets], dtype=np.int64)
        mask = np.zeros(len(ids), dtype=bool)
        for begin, end in spans[-1:] if self._loss == "last" else spans:
            mask |= (starts >= begin) & (starts < end)
        return _flagged(ids, mask)


def _flagged(ids: list[int], mask: np.ndarray) -> np.ndarray | str:
    if not mask[1:].any():  # the first token is nobody's next
        return "the chat template shows no assistant turn"
    return np.array(ids, dtype=np.uint32) | np.where(mask, np.uint32(TARGET), np.uint32(0))


def _reason(error: Exception) -> str:
    return f"the chat template says: {' '.join(str(error).split()) or type(error).__name__}"
