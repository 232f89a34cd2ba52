"""Tokenizes texts of any length in bounded memory, with the same ids as if done at once.

A long text is tokenized in overlapping windows. Two neighbouring windows meet at a *cut*, and both
extend `CONTEXT` characters beyond it, so the artificial end of a window does not change the ids at
the cut. A cut must be a border between tokens in both windows:

* Tokenizing the characters before the cut gives the first ids of tokenizing the characters on both
  sides. So no token, added token or normalization crosses the cut.
* Both windows have the same ids around the cut.
* Unless the model is BPE, the cut is a border between two words of the pre-tokenizer. Words are
  tokenized one by one, and a pre-tokenizer splits from left to right.

In a BPE model, a cut may also be within a word: a sequence of tokens is the BPE encoding of a text
if and only if each pair of neighbouring tokens is the encoding of the pair's text. The pair at the
cut is, because it occurs in an encoding. If there is no place for a cut, the window grows until
there is one.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedTokenizerBase

CONTEXT = 1021
"""Characters on either side of a cut. The number is prime, so groups of digits that are counted
from different starts do not end at the same place by chance."""
_WINDOW = 2**17
"""The maximum number of characters in a window, unless no place for a cut is found."""
_ZONE = 2**12
"""Number of characters before the end of a window in which a place for a cut is searched."""
_TRIES = 8
"""Number of places for a cut that are tried for each pattern: this many throughout the last `_ZONE`
characters, and then as many at their end."""
_COMPARED = 8
"""Number of ids on either side of a cut that must be the same in both windows."""
_PLACES = tuple(
    map(re.compile, (r"(?<=\n)(?=\S)", r"(?<=\S)(?= \S)", r"(?<=\S)(?=\s)", r"(?<=\S)(?=\S)"))
)
"""Patterns of places for a cut: before a line, a blank, any white space, and anywhere. Places where
tokenizers split more often come first."""

BATCH_ITEMS, BATCH_SIZE = 1024, 2**21
"""Limits of a batch that is tokenized at once: the number of its texts, and of their characters."""

Item = TypeVar("Item")
Other = TypeVar("Other")


def in_batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yields lists of up to `BATCH_ITEMS` items.

    A list ends early with the item that brings its total size to `BATCH_SIZE` or more.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if len(batch) == BATCH_ITEMS or total >= BATCH_SIZE:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class Piece(NamedTuple):
    """The token ids of a part of a text."""

    ids: np.ndarray
    """[n] uint32, the token ids."""
    first: bool
    """Whether the text begins with this part."""
    last: bool
    """Whether the text ends with this part."""
    encoding: Encoding | None
    """Encoding of the window with this part, or None for a tokenizer written in Python."""
    skipped: int
    """Number of tokens of the encoding before the first token of this part."""
    shift: int
    """Difference between a character's place in the text and its place in the window."""

    def between(self, begin: int, end: int) -> slice:
        """Returns the slice of `ids` with characters of the text from `begin` to `end`.

        The tokenizer must be a fast one.
        """
        encoding = self.encoding
        assert encoding is not None, "the tokenizer does not report the places of its tokens"

        def place(token: int) -> tuple[int, int]:
            characters = encoding.token_to_chars(token)
            assert characters is not None, "a token without text"
            return characters

        tokens = range(self.skipped, self.skipped + len(self.ids))
        first = bisect_right(tokens, begin - self.shift, key=lambda token: place(token)[1])
        return slice(
            first,
            max(first, bisect_left(tokens, end - self.shift, key=lambda token: place(token)[0])),
        )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The place where two windows meet."""

    left: str
    """Characters before the cut."""
    right: str
    """Characters after the cut."""
    left_ids: list[int]
    """Ids of `left`."""
    right_ids: list[int]
    """Ids of `right`, as they follow `left_ids`."""


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The part of a text between two cuts."""

    text: str
    """The characters of this part, without the overlap."""
    begin: _Cut | None
    """The cut before this part, or None at the beginning of the text."""
    end: _Cut | None
    """The cut after this part, or None at the end of the text."""
    place: int
    """The number of characters of the text before this part."""

    @property
    def whole(self) -> str:
        """The text with its overlap on both sides."""
        before, after = self.begin.left if self.begin else "", self.end.right if self.end else ""
        return f"{before}{self.text}{after}"


class _Encoded(NamedTuple):
    """A window and its token ids."""

    window: _Window
    """The window."""
    ids: list[int]
    """Token ids of the window with its overlap."""
    encoding: Encoding | None
    """Encoding of the window, or None for a tokenizer written in Python."""

    @property
    def own(self) -> list[int]:
        """Ids of the window without its overlap."""
        end = self.window.end
        return self.ids[self.skipped : len(self.ids) - (len(end.right_ids) if end else 0)]

    @property
    def skipped(self) -> int:
        """Number of ids of the overlap before the window."""
        return len(self.window.begin.left_ids) if self.window.begin else 0

    @property
    def piece(self) -> Piece:
        """The window's ids as a part of the text."""
        begin, end, place = self.window.begin, self.window.end, self.window.place
        shift = place - (len(begin.left) if begin else 0)
        return Piece(
            np.array(self.own, dtype=np.uint32),
            begin is None,
            end is None,
            self.encoding,
            self.skipped,
            shift,
        )


class LongText:
    """Tokenizes texts of any length, without adding special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        self._within_words = type(model).__name__ == "BPE"

    def whole(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Returns the token ids of each text, [n] uint32."""
        pieces: list[list[np.ndarray]] = []
        for piece in self.encode((text, True) for text in texts):
            if piece.first:
                pieces.append([])
            pieces[-1].append(piece.ids)
        return [np.concatenate(ids) for ids in pieces]

    def encode(self, parts: Iterable[tuple[str, bool] | Other]) -> Iterator[Piece | Other]:
        """Yields the token ids of texts that are given in parts.

        Args:
            parts: pairs of a part of a text, and whether the text ends with it. Items of other
                types are yielded unchanged, in their order.
        """
        # Windows of a text that is not finished, and the items after them.
        held: list[_Encoded | Other] = []
        for batch in in_batches(
            self._windows(parts), lambda item: len(item.text) if isinstance(item, _Window) else 0
        ):
            windows = [item for item in batch if isinstance(item, _Window)]
            encoded = iter(self._encoded(windows) if windows else [])
            for item in batch:
                held.append(next(encoded) if isinstance(item, _Window) else item)
                yield from self._settled(held)
        assert not held, "a text is still open"

    # ---- windows ----

    def _windows(self, parts: Iterable[tuple[str, bool] | Other]) -> Iterator[_Window | Other]:
        """Yields texts as windows. Items that are not parts of texts are yielded unchanged."""
        text, begin, least, done = "", None, _WINDOW, 0
        for part in parts:
            if not isinstance(part, tuple):
                yield part
                continue
            for at in range(0, len(part[0]), _WINDOW):  # keeps the copies of `text` small
                text += part[0][at : at + _WINDOW]
                while len(text) >= least + CONTEXT:
                    place, cut = self._cut(text, least - _ZONE, least)
                    if cut is None:
                        least *= 2
                    else:
                        yield _Window(text=text[:place], begin=begin, end=cut, place=done)
                        text, begin, least, done = text[place:], cut, _WINDOW, done + place
            if part[1]:
                yield _Window(text=text, begin=begin, end=None, place=done)
                text, begin, least, done = "", None, _WINDOW, 0

    def _cut(self, text: str, low: int, high: int) -> tuple[int, _Cut | None]:
        """Returns a place from `low` to `high` and the cut at it, or 0 and None."""
        for places in _PLACES:
            matches = [match.start() for match in places.finditer(text, low, high)]
            step = max(1, len(matches) // _TRIES)
            spread, last = matches[::-step][:_TRIES], matches[: -_TRIES - 1 : -1]
            for place in dict.fromkeys([*spread, *last]):
                if cut := self._at(text, place, anywhere=places is _PLACES[-1]):
                    return place, cut
        return 0, None

    def _at(self, text: str, place: int, *, anywhere: bool) -> _Cut | None:
        """Returns the cut at `place`, or None if no cut is possible there.

        `anywhere` says that the characters around `place` do not suggest a border between tokens.
        """
        if unicodedata.combining(text[place]) or (anywhere and not self._tokenizer.is_fast):
            return None
        left, right = text[place - CONTEXT : place], text[place : place + CONTEXT]
        encoded = self._tokenized([left, left + right])
        left_ids, both = encoded["input_ids"]
        count = len(left_ids)
        if not 0 < count < len(both) or both[:count] != left_ids:
            return None
        if self._tokenizer.is_fast and not self._within_words:
            before, after = encoded.word_ids(1)[count - 1 : count + 1]
            if before == after or before is None or after is None:
                return None
        return _Cut(left=left, right=right, left_ids=left_ids, right_ids=both[count:])

    # ---- ids ----

    def _tokenized(self, texts: list[str]) -> BatchEncoding:
        """Tokenizes a batch of texts without special tokens."""
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )

    def _encoded(self, windows: list[_Window]) -> list[_Encoded]:
        """Tokenizes windows with their overlap."""
        encoded = self._tokenized([window.whole for window in windows])
        encodings: Sequence[Encoding | None] = encoded.encodings or [None] * len(windows)
        return [
            _Encoded(*fields)
            for fields in zip(windows, encoded["input_ids"], encodings, strict=True)
        ]

    def _settled(self, held: list[_Encoded | Other]) -> Iterator[Piece | Other]:
        """Removes and yields items from the front of `held` while the cuts after them are valid.

        Two windows whose ids do not agree at their cut are joined into one.
        """
        while held:
            first = held[0]
            if isinstance(first, _Encoded) and first.window.end is not None:
                at, following = next(
                    (
                        (at, item)
                        for at, item in enumerate(held[1:], 1)
                        if isinstance(item, _Encoded)
                    ),
                    (0, None),
                )
                if following is None:
                    return
                if not _meet(first, following):
                    joined = _Window(
                        text=first.window.text + following.window.text,
                        begin=first.window.begin,
                        end=following.window.end,
                        place=first.window.place,
                    )
                    del held[at]
                    (held[0],) = self._encoded([joined])
                    continue
            del held[0]
            yield first.piece if isinstance(first, _Encoded) else first


def _meet(before: _Encoded, after: _Encoded) -> bool:
    """Returns whether both windows have the ids of the cut between them."""
    cut = before.window.end
    assert cut is not None
    return (
        before.ids[-len(cut.right_ids) :] == cut.right_ids
        and after.ids[: len(cut.left_ids)] == cut.left_ids
        and _alike(before.own[::-1], cut.left_ids[::-1])
        and _alike(after.own, cut.right_ids)
    )


def _alike(left: list[int], right: list[int]) -> bool:
    """Returns whether two lists begin with the same ids. The first 8 are compared."""
    count = min(_COMPARED, len(left), len(right))
    return count > 0 and left[:count] == right[:count]
