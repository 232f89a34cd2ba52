"""Tokenisation: rows -> ids, and which of them are targets.

Text: what the tokenizer puts before a text, the text, and its end-of-sequence token. A prompt with its completion: tokenised as one text; what
both the prompt alone and the whole begin with is the prompt, the rest the completion, so that a token across the border is the completion's.
Batches of rows are tokenised at a time, which the tokenizers library spreads over the machine's cores.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import TemplateSyntaxError

from megatrain.runtime.data.chat import Chat
from megatrain.runtime.data.columns import Conversation, Layout, Pair, Unusable, alpaca_text, extract, recognise
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.data.formats import BadRow, Row
from megatrain.runtime.data.in_batches import in_batches
from megatrain.runtime.data.long_text import LongText
from megatrain.runtime.data.marked_template import marked_template
from megatrain.runtime.training.data_options import Loss
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_json, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.tiktoken", "spiece.model", "tekken.json")
_OF_CONFIG = ("model_type", "tokenizer_class", "auto_map")
"""of config.json, by which transformers chooses the tokenizer's class"""

Piece = tuple[np.ndarray, bool]
"""ids, and whether the document ends with them"""


def load_tokenizer(folder: Path, *, chat_template: str = "", trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face folder, None where it has none; with the chat template in the file `chat_template`, if one is named.

    Raises UserError for one that cannot be loaded, for a file that is not a template, and, unless `trust_remote_code`, for a tokenizer that brings code
    of its own: none of it is run.
    """
    if not tokenizer_files(folder):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever its files make the libraries raise
        reason = " ".join(str(error).split()) or type(error).__name__
        refused = "trust_remote_code" in reason and not trust_remote_code
        fix = "read that code, and pass --trust-remote-code if it may run" if refused else "save it again with save_pretrained"
        raise UserError(f"tokenizer {folder}", found=reason, allowed="a tokenizer that transformers can load", fix=fix) from None
    tokenizer.model_max_length = 2**62  # documents are cut by packing: its warning of a long text would mean nothing
    if chat_template:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def read_chat_template(file: str) -> str:
    """The text of a chat template. Raises UserError where it cannot be read, or is not Jinja."""
    text = read_text(Path(file))
    try:
        marked_template(text)
    except TemplateSyntaxError as error:
        raise UserError(f"chat template {file}", found=f"{error.message} (line {error.lineno})", allowed="a Jinja template", fix="correct the file") from None
    return text


def tokenizer_files(folder: Path) -> list[Path]:
    """What a tokenizer in `folder` is made of."""
    return sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})


def tokenizer_digest(folder: Path, tokenizer: object = None) -> str:
    """Of all that decides the ids of a text: the content of `tokenizer_files`, code in `folder`, what config.json says of the tokenizer, and the
    code of `tokenizer`, which may come from another repository.
    """
    files = {*tokenizer_files(folder), *folder.glob("*.py")}
    for kind in type(tokenizer).__mro__:
        if kind.__module__.startswith("transformers_modules") and (code := sys.modules[kind.__module__].__file__):
            files |= {*Path(code).parent.glob("*.py")}
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    told = [config.get(key) for key in _OF_CONFIG] if isinstance(config, dict) else []
    digest.update(json.dumps([told, type(tokenizer).__name__], sort_keys=True).encode())
    return digest.hexdigest()


class Encoder:
    """Rows of one layout, tokenised."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: Layout, loss: Loss, where: str, chat_template: str = "") -> None:
        """`where` names the tokenizer, and `chat_template` the file of the template, where it is not the tokenizer's own. Raises UserError where rows of messages have no chat template to go through."""
        self.layout = layout
        self._template = chat_template or "of the tokenizer"
        self._tokenizer, self._loss = tokenizer, loss
        self._chat = Chat(tokenizer, loss, where) if layout.name != "text" and tokenizer.chat_template else None
        if not self._chat and layout.name in ("messages", "sharegpt"):
            raise UserError(
                f"tokenizer {where}", found="no chat template", allowed=f"one, for {layout.name} rows",
                fix="name a template with --chat-template, or take an instruction-tuned model's",
            )  # fmt: skip
        self.flagged = layout.name != "text"
        """whether ids carry TARGET"""
        specials = tokenizer("", verbose=False)["input_ids"]
        self._before = specials[:1] if tokenizer.bos_token_id is not None and specials[:1] == [tokenizer.bos_token_id] else []
        self._after = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._long = LongText(tokenizer)

    @property
    def templated(self) -> bool:
        """Whether rows go through the tokenizer's chat template."""
        return self._chat is not None

    def describe(self) -> str:
        """What rows are taken for, and what a user should know of those encoded so far, in words."""
        ignored = [f"columns that are not read: {', '.join(self.layout.ignored)}"] if self.layout.ignored else []
        return "; ".join([self._described(), *ignored, *(self._chat.remarks() if self._chat else ())])

    def _described(self) -> str:
        pairs = "loss on every token" if self._loss == "all" else "loss on the completion"
        if self._chat and self.layout.name != "prompt/completion":
            where = {"assistant": "all assistant turns", "last": "the last assistant turn", "all": "every token"}[self._loss]
            how = "" if self._loss == "all" else f", found by its {'generation markers' if self._chat.marked else 'loop over messages'}"
            return f"{self.layout.name}, chat template {self._template}, loss on {where}{how}"
        if self.layout.name == "alpaca":
            return f"alpaca, headings instead of a chat template, which the tokenizer has not, {pairs.replace('completion', 'output')}"
        if self.layout.name == "prompt/completion":
            return f"prompt/completion, {pairs}"
        return "text, loss on every token" + ("" if self._after else "; the tokenizer has no end-of-sequence token, so nothing stands between documents")

    def encode(self, rows: Iterable[Row | BadRow]) -> Iterator[Piece | BadRow | None]:
        """Each row's ids [n], uint32, flagged where `flagged` says so; of a long text in several pieces. None: a row of text without any."""
        if self.layout.name == "text":
            yield from self._texts(rows)
        else:
            for batch in in_batches(rows, lambda row: _characters(row.value) if isinstance(row, Row) else 0):
                yield from self._examples(batch)

    def _texts(self, rows: Iterable[Row | BadRow]) -> Iterator[Piece | BadRow | None]:
        nothing = True
        for found in self._long.encode(_text(row, self.layout) if isinstance(row, Row) else row for row in rows):
            if isinstance(found, BadRow):
                yield found
                continue
            nothing = not len(found.ids) and (found.first or nothing)
            if found.last and nothing:
                yield None
                continue
            before = self._before if found.first and found.ids[:1].tolist() != self._before else []
            after = self._after if found.last and found.ids[-1:].tolist() != self._after else []
            yield np.concatenate([before, found.ids, after]).astype(np.uint32), found.last

    def _examples(self, batch: Sequence[Row | BadRow]) -> Iterator[Piece | BadRow]:
        found = [_example(row, self.layout) if isinstance(row, Row) else row for row in batch]
        if not self._chat:
            found = [alpaca_text(value) if isinstance(value, Conversation) and self.layout.name == "alpaca" else value for value in found]
        pairs = iter(self._pairs([value for value in found if isinstance(value, Pair)]))
        conversations = [value for value in found if isinstance(value, Conversation)]
        chats = iter(self._chat.encode(conversations) if self._chat else ["messages, and the tokenizer has no chat template"] * len(conversations))
        for row, value in zip(batch, found, strict=True):
            ids = value if isinstance(value, BadRow) else next(pairs if isinstance(value, Pair) else chats)
            if isinstance(ids, str):
                yield BadRow(row.file, row.line, ids)
            else:
                yield ids if isinstance(ids, BadRow) else (ids, True)

    def _pairs(self, pairs: list[Pair]) -> Iterator[np.ndarray | str]:
        prompts, wholes = (self._long.whole(texts) for texts in ([pair.prompt for pair in pairs], [pair.prompt + pair.completion for pair in pairs]))
        for prompt, whole in zip(prompts, wholes, strict=True):
            least = min(len(prompt), len(whole))
            shared = next(iter(np.flatnonzero(prompt[:least] != whole[:least]).tolist()), least)
            before = [] if whole[:1].tolist() == self._before else self._before
            after = [] if whole[-1:].tolist() == self._after else self._after
            ids = np.concatenate([before, whole, after]).astype(np.uint32)
            ids[0 if self._loss == "all" else len(before) + shared :] |= np.uint32(TARGET)
            yield ids if (ids[1:] >= TARGET).any() else "the completion has no token"


def _text(row: Row, layout: Layout) -> tuple[str, bool] | BadRow:
    """Text, and whether its document ends with it."""
    if isinstance(row.value, bytes):
        return row.value.decode(errors="replace"), row.closes  # read and found valid just now: if the file has changed since, `open_data` refuses it
    found = _example(row, layout)
    assert isinstance(found, str | BadRow)
    return found if isinstance(found, BadRow) else (found, True)


def _example(row: Row, layout: Layout) -> str | Pair | Conversation | BadRow:
    assert isinstance(row.value, dict)
    try:
        return extract(row.value, layout)
    except Unusable as error:
        other = None if row.value.keys() >= set(layout.needed) else recognise(row.value.keys())
        return BadRow(row.file, row.line, f"{error}; the row has the columns of {other.name}" if other else str(error), other.name if other else "")


def _characters(value: object) -> int:
    """About as many as there are to tokenise."""
    if isinstance(value, str | bytes):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))
