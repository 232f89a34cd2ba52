"""ChatSession: what a user and a language model say in turn. transformers executes the model."""

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


class Sampling(NamedTuple):
    """How the tokens of an answer are chosen."""

    max_tokens: int
    """The most tokens of an answer."""
    temperature: float
    """Divides the logits; 0 for the most likely token."""
    seed: int
    """Seed of the random numbers."""


class ChatSession:
    """A language model in memory, and what was said so far."""

    def __init__(self, folder: Path, device: torch.device, sampling: Sampling) -> None:
        """Loads the model in `folder`, a Hugging Face folder, in the dtype of its weights.

        Raises UserError if transformers cannot load the model or the tokenizer.
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
        """Whether the tokenizer has a chat template. If not, the model continues a plain text."""
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._ends = self._end_tokens()
        torch.manual_seed(sampling.seed)

    def answer(self, prompt: str, on_text: Callable[[str], None]) -> None:
        """Generates an answer to `prompt`, and passes its text to `on_text` piece by piece.

        An answer that an exception ends, such as KeyboardInterrupt, is kept as far as it came.
        Raises UserError, and forgets `prompt`, if the conversation is too long for the model.
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
                    fix="say less, or begin a new conversation",
                )
            room = min(room, self._limit - len(ids))
        streamer = _Pieces(self._tokenizer, on_text)
        inputs = torch.tensor([ids], device=self._model.device)
        chosen: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        chosen["top_k"] = None
        if self._sampling.temperature:
            chosen = {"do_sample": True, "temperature": self._sampling.temperature}
        try:
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=room,
                eos_token_id=self._ends or None,
                pad_token_id=min(self._ends, default=0),
                streamer=streamer,
                **chosen,
            )
        except BaseException:
            streamer.end()
            raise
        finally:
            said = "".join(streamer.pieces)
            self._messages = [*messages, {"role": "assistant", "content": said}]
            self._text += f"{prompt}{said}\n"

    def forget(self) -> None:
        """Begins a new conversation."""
        self._messages, self._text = [], ""

    def _ids(self, messages: list[dict[str, str]], prompt: str) -> list[int]:
        """Returns the tokens that the model continues."""
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
        """Returns `messages` as the chat template writes them."""
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
        """Returns the tokens that end an answer.

        They are those of the generation config and of the tokenizer, and the special token that
        the chat template writes after an answer. A model that was trained on conversations ends
        its answers with the latter, although its generation config may not name it.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            return [END_OF_DOCUMENT]
        named = self._model.generation_config.eos_token_id
        ends = {*(named if isinstance(named, list) else [named]), self._tokenizer.eos_token_id}
        if self.templated:
            turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
            after = self._rendered(turns, prompted=False).rpartition(_ANSWER)[2].lstrip()
            first = self._tokenizer(after, add_special_tokens=False).input_ids[:1]
            ends |= {each for each in first if each in self._tokenizer.added_tokens_decoder}
        return sorted(each for each in ends if each is not None)


class _Pieces(TextStreamer):
    """Passes the text of an answer on as soon as whole words are known."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.pieces.append(text)
            self._on_text(text)
