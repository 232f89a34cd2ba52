"""Tokenizes rows, and finds the tokens that are targets.

The tokens of a text are the beginning-of-sequence token, if the tokenizer adds one, the text's own
tokens, and the end-of-sequence token. A prompt and its completion are tokenized as one text. The
first tokens that are the same when the prompt is tokenized alone are the prompt, and the others are
the completion. So a token across the border belongs to the completion. Rows are tokenized in
batches, which the tokenizers library distributes over the machine's cores.
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

from megatrain.runtime.data.chat.marked_template import marked_template
from megatrain.runtime.data.chat.targets import Chat
from megatrain.runtime.data.columns import (
    Conversation,
    Layout,
    Pair,
    Unusable,
    alpaca_text,
    extract,
    recognize,
)
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.data.long_text import LongText, in_batches
from megatrain.runtime.data.options import Loss
from megatrain.runtime.data.rows.formats import BadRow, TextRow
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_config, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "tekken.json",
)
_CONFIG_KEYS = ("model_type", "tokenizer_class", "auto_map")
"""Keys of config.json from which transformers chooses the class of the tokenizer."""

Piece = tuple[np.ndarray, bool]
"""Token ids, and whether the document ends with them."""


def load_tokenizer(
    folder: Path, *, chat_template: str = "", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of a Hugging Face folder, or None if the folder has none.

    Args:
        folder: the model's folder.
        chat_template: file with a chat template that replaces the tokenizer's own, or empty.
        trust_remote_code: whether code in the folder may be run.

    Raises UserError if the tokenizer cannot be loaded, if the file is not a template, or if the
    tokenizer has its own code and `trust_remote_code` is not set. In this case the code is not run.
    """
    if not tokenizer_files(folder):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # damaged files can raise any error in the libraries
        reason = " ".join(str(error).split()) or type(error).__name__
        refused = "trust_remote_code" in reason and not trust_remote_code
        fix = (
            "read that code, and pass --trust-remote-code if it may run"
            if refused
            else "save it again with save_pretrained"
        )
        raise UserError(
            f"tokenizer {folder}",
            found=reason,
            allowed="a tokenizer that transformers can load",
            fix=fix,
        ) from None
    # Packing cuts documents, so the tokenizer's warning about a long text would be misleading.
    tokenizer.model_max_length = 2**62
    if chat_template:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def read_chat_template(file: str) -> str:
    """Returns the text of a chat template.

    Raises UserError if the file cannot be read or is not a Jinja template.
    """
    text = read_text(Path(file))
    try:
        marked_template(text)
    except TemplateSyntaxError as error:
        raise UserError(
            f"chat template {file}",
            found=f"{error.message} (line {error.lineno})",
            allowed="a Jinja template",
            fix="correct the file",
        ) from None
    return text


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of the tokenizer in `folder`."""
    return sorted(
        {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    )


def tokenizer_digest(folder: Path, tokenizer: object = None) -> str:
    """Returns the SHA-256 of everything that determines the token ids of a text, in hexadecimal.

    It covers the contents of `tokenizer_files`, Python code in `folder`, the keys of config.json
    that concern the tokenizer, and the code of `tokenizer`, which may come from another repository.
    """
    files = {*tokenizer_files(folder), *folder.glob("*.py")}
    for kind in type(tokenizer).__mro__:
        if kind.__module__.startswith("transformers_modules") and (
            code := sys.modules[kind.__module__].__file__
        ):
            files |= {*Path(code).parent.glob("*.py")}
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    config = read_config(folder / "config.json") if (folder / "config.json").is_file() else None
    values = [config.get(key) for key in _CONFIG_KEYS] if isinstance(config, dict) else []
    digest.update(json.dumps([values, type(tokenizer).__name__], sort_keys=True).encode())
    return digest.hexdigest()


class Encoder:
    """Tokenizes rows of one layout."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: Layout,
        loss: Loss,
        where: str,
        chat_template: str = "",
    ) -> None:
        """Prepares the tokenizer for rows of `layout`.

        Args:
            tokenizer: the tokenizer, with the chat template to use.
            layout: the layout of all rows.
            loss: the tokens that have loss.
            where: names the tokenizer in errors.
            chat_template: the file of the template, if it is not the tokenizer's own. It is only
                shown to the user.

        Raises UserError if rows are messages and the tokenizer has no chat template.
        """
        self.layout = layout
        self._template = chat_template or "of the tokenizer"
        self._tokenizer, self._loss = tokenizer, loss
        self._chat = (
            Chat(tokenizer, loss, where)
            if layout.name != "text" and tokenizer.chat_template
            else None
        )
        if not self._chat and layout.name in ("messages", "sharegpt"):
            raise UserError(
                f"tokenizer {where}",
                found="no chat template",
                allowed=f"one, for {layout.name} rows",
                fix="name a template with --chat-template, or use an instruction-tuned model's",
            )
        self._rendered = False
        self.flagged = layout.name != "text"
        """Whether ids have the bit TARGET."""
        specials = tokenizer("", verbose=False)["input_ids"]
        self._before = (
            specials[:1]
            if tokenizer.bos_token_id is not None and specials[:1] == [tokenizer.bos_token_id]
            else []
        )
        self._after = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._long = LongText(tokenizer)

    @property
    def templated(self) -> bool:
        """Whether any row was rendered by a chat template. A prompt and a completion that are text
        are not rendered.
        """
        return self._rendered

    def describe(self) -> str:
        """Returns a phrase that says how rows are read, with remarks on the rows encoded so far."""
        ignored = (
            [f"columns that are not read: {', '.join(self.layout.ignored)}"]
            if self.layout.ignored
            else []
        )
        return "; ".join(
            [self._described(), *ignored, *(self._chat.remarks() if self._chat else ())]
        )

    def _described(self) -> str:
        """Returns a phrase with the layout, the chat template and the tokens with loss."""
        pairs = "loss on every token" if self._loss == "all" else "loss on the completion"
        if self._chat and self.layout.name != "prompt/completion":
            where = {
                "assistant": "all assistant turns",
                "last": "the last assistant turn",
                "all": "every token",
            }[self._loss]
            how = (
                ""
                if self._loss == "all"
                else (
                    ", found by its"
                    f" {'generation markers' if self._chat.marked else 'loop over messages'}"
                )
            )
            return f"{self.layout.name}, chat template {self._template}, loss on {where}{how}"
        if self.layout.name == "alpaca":
            return (
                "alpaca, with headings because the tokenizer has no chat template,"
                f" {pairs.replace('completion', 'output')}"
            )
        if self.layout.name == "prompt/completion":
            return f"prompt/completion, {pairs}"
        return "text, loss on every token" + (
            ""
            if self._after
            else "; the tokenizer has no end-of-sequence token, so no token separates documents"
        )

    def encode(self, rows: Iterable[TextRow | BadRow]) -> Iterator[Piece | BadRow | None]:
        """Yields the token ids of each row, [n] uint32. If `flagged`, targets have the bit TARGET.

        A long text is yielded in several pieces. For a row with empty text, None is yielded. Bad
        rows are yielded unchanged, and so are new BadRows for rows that cannot be encoded.
        """
        if self.layout.name == "text":
            yield from self._texts(rows)
        else:
            for batch in in_batches(
                rows, lambda row: _characters(row.value) if isinstance(row, TextRow) else 0
            ):
                yield from self._examples(batch)

    def _texts(self, rows: Iterable[TextRow | BadRow]) -> Iterator[Piece | BadRow | None]:
        """Yields the token ids of rows of text, with the tokens before and after a text."""
        empty = True
        for piece in self._long.encode(
            _text(row, self.layout) if isinstance(row, TextRow) else row for row in rows
        ):
            if isinstance(piece, BadRow):
                yield piece
                continue
            empty = not len(piece.ids) and (piece.first or empty)
            if piece.last and empty:
                yield None
                continue
            before = self._before if piece.first and piece.ids[:1].tolist() != self._before else []
            after = self._after if piece.last and piece.ids[-1:].tolist() != self._after else []
            yield np.concatenate([before, piece.ids, after]).astype(np.uint32), piece.last

    def _examples(self, batch: Sequence[TextRow | BadRow]) -> Iterator[Piece | BadRow]:
        """Yields the token ids of a batch of conversations or of prompts with completions."""
        examples = [
            _example(row, self.layout) if isinstance(row, TextRow) else row for row in batch
        ]
        if not self._chat and self.layout.name == "alpaca":
            examples = [
                alpaca_text(example) if isinstance(example, Conversation) else example
                for example in examples
            ]
        pairs = iter(self._pairs([example for example in examples if isinstance(example, Pair)]))
        conversations = [example for example in examples if isinstance(example, Conversation)]
        self._rendered |= bool(self._chat and conversations)
        chats = iter(
            self._chat.encode(conversations)
            if self._chat
            else ["messages, and the tokenizer has no chat template"] * len(conversations)
        )
        for row, example in zip(batch, examples, strict=True):
            if isinstance(example, BadRow):
                yield example
                continue
            ids = next(pairs if isinstance(example, Pair) else chats)
            yield BadRow(row.file, row.line, ids) if isinstance(ids, str) else (ids, True)

    def _pairs(self, pairs: list[Pair]) -> Iterator[np.ndarray | str]:
        """Yields the token ids of each pair, or the reason why the pair cannot be used."""
        prompts, wholes = (
            self._long.whole(texts)
            for texts in (
                [pair.prompt for pair in pairs],
                [pair.prompt + pair.completion for pair in pairs],
            )
        )
        for prompt, whole in zip(prompts, wholes, strict=True):
            least = min(len(prompt), len(whole))
            shared = next(iter(np.flatnonzero(prompt[:least] != whole[:least]).tolist()), least)
            before = [] if whole[:1].tolist() == self._before else self._before
            after = [] if whole[-1:].tolist() == self._after else self._after
            ids = np.concatenate([before, whole, after]).astype(np.uint32)
            ids[0 if self._loss == "all" else len(before) + shared :] |= np.uint32(TARGET)
            yield ids if (ids[1:] >= TARGET).any() else "the completion has no token"


def _text(row: TextRow, layout: Layout) -> tuple[str, bool] | BadRow:
    """Returns the text of a row and whether its document ends with it, or a bad row."""
    if isinstance(row.value, bytes):
        # The bytes were valid UTF-8 when the file was checked. If the file changed after that, it
        # is refused once all of it is tokenized.
        return row.value.decode(errors="replace"), row.closes
    example = _example(row, layout)
    assert isinstance(example, str | BadRow)
    return example if isinstance(example, BadRow) else (example, True)


def _example(row: TextRow, layout: Layout) -> str | Pair | Conversation | BadRow:
    """Returns the training example of a row of a table, or a bad row if it cannot be used."""
    assert isinstance(row.value, dict)
    try:
        return extract(row.value, layout)
    except Unusable as error:
        other = None if row.value.keys() >= set(layout.needed) else recognize(row.value.keys())
        return BadRow(
            row.file,
            row.line,
            f"{error}; the row has the columns of {other.name}" if other else str(error),
            other.name if other else "",
        )


def _characters(value: object) -> int:
    """Returns the approximate number of characters to tokenize in a row's value."""
    if isinstance(value, str | bytes):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inner))
