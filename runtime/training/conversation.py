"""ChatSession: a conversation with a language model, which transformers executes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, TextStreamer
from transformers.utils import logging

from megatrain.runtime.data.tokens.byte_level import END_OF_DOCUMENT, ByteTokenizer
from megatrain.runtime.data.tokens.tokenize import load_tokenizer
from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "An answer that no template has."
"""A made-up answer, whose place in the output of a chat template is searched for."""


class Sampling(NamedTuple):
    """Options for sampling the tokens of an answer."""

    max_tokens: int
    """The maximum number of tokens in an answer."""
    temperature: float
    """The divisor of the logits, or 0 to choose the most likely token."""
    seed: int
    """The seed of the random numbers."""


class ChatSession:
    """A language model in memory, and the conversation so far."""

    def __init__(self, folder: Path, device: torch.device, sampling: Sampling) -> None:
        """Loads the model in `folder`, a Hugging Face folder, in the dtype of its weights.

        This also sets the verbosity of transformers and torch's global seed. Raises UserError if
        transformers cannot load the model or the tokenizer.
        """
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        tokenizer = load_tokenizer(folder)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # damaged files can raise any error in the libraries
            raise UserError(
                f"model {folder}",
                found=" ".join(str(error).split()) or type(error).__name__,
                allowed="a language model that transformers can load",
                fix="export or fetch it again",
            ) from None
        self._model = model.to(device).eval()
        self._tokenizer: PreTrainedTokenizerBase | ByteTokenizer = tokenizer or ByteTokenizer()
        self._sampling = sampling
        self._limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.templated = tokenizer is not None and bool(tokenizer.chat_template)
        """Whether the tokenizer has a chat template. If not, the model continues plain text."""
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._ends = self._end_tokens()
        torch.manual_seed(sampling.seed)

    def answer(self, prompt: str, on_text: Callable[[str], None]) -> None:
        """Generates an answer to `prompt`, and passes its text to `on_text` piece by piece.

        If an exception such as KeyboardInterrupt ends the answer, the part generated so far is kept
        in the conversation. Raises UserError if the conversation is too long for the model. In this
        case `prompt` is not added to it.
        """
        messages = [*self._messages, {"role": "user", "content": prompt}]
        ids = self._ids(messages, prompt)
        room = self._sampling.max_tokens
        if self._limit:
            if len(ids) >= self._limit:
                raise UserError(
                    "conversation",
                    found=f"{len(ids):,} tokens",
                    allowed=f"less than the model's own limit of {self._limit:,}",
                    fix="shorten the prompt, or begin a new conversation",
                )
            room = min(room, self._limit - len(ids))
        streamer = _Pieces(self._tokenizer, on_text)
        inputs = torch.tensor([ids], device=self._model.device)
        options: dict[str, Any] = (
            {"do_sample": True, "temperature": self._sampling.temperature}
            if self._sampling.temperature
            else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        )
        try:
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=room,
                eos_token_id=self._ends or None,
                pad_token_id=min(self._ends, default=0),
                streamer=streamer,
                **options,
            )
        except BaseException:
            streamer.end()
            raise
        finally:
            answer = "".join(streamer.pieces)
            self._messages = [*messages, {"role": "assistant", "content": answer}]
            self._text += f"{prompt}{answer}\n"

    def forget(self) -> None:
        """Begins a new conversation."""
        self._messages, self._text = [], ""

    def _ids(self, messages: list[dict[str, str]], prompt: str) -> list[int]:
        """Returns the token ids of the conversation, which the model continues.

        Raises UserError if there are none.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            ids = self._tokenizer.encode(self._text + prompt)
        elif self.templated:
            text = self._rendered(messages, prompted=True)
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = self._tokenizer(self._text + prompt).input_ids
            if ids and ids[-1] == self._tokenizer.eos_token_id:
                ids = ids[:-1]
        if not ids:
            raise UserError("prompt", found="no text", allowed="a text", fix="write some text")
        return list(ids)

    def _rendered(self, messages: list[dict[str, str]], *, prompted: bool) -> str:
        """Returns `messages` rendered by the chat template, with the generation prompt if
        `prompted`.

        Raises UserError if the template cannot render them.
        """
        assert not isinstance(self._tokenizer, ByteTokenizer)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=prompted, tokenize=False
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                "chat template of the tokenizer",
                found=" ".join(str(error).split()),
                allowed="a template that can write turns of user and assistant",
                fix="correct chat_template.jinja in the model's folder",
            ) from None

    def _end_tokens(self) -> list[int]:
        """Returns the ids of the tokens that end an answer.

        They are the end-of-sequence tokens of the generation config and of the tokenizer, and the
        special token that the chat template writes after an answer. A model that was trained on
        conversations ends its answers with this token, even if its generation config does not name
        it.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            return [END_OF_DOCUMENT]
        named = self._model.generation_config.eos_token_id
        ends = {*(named if isinstance(named, list) else [named]), self._tokenizer.eos_token_id}
        if self.templated:
            turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
            after = self._rendered(turns, prompted=False).rpartition(_ANSWER)[2].lstrip()
            first = self._tokenizer(after, add_special_tokens=False).input_ids[:1]
            ends |= {token for token in first if token in self._tokenizer.added_tokens_decoder}
        return sorted(token for token in ends if token is not None)


class _Pieces(TextStreamer):
    """Passes the text of an answer on in pieces of whole words, and collects the pieces."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.pieces.append(text)
            self._on_text(text)
