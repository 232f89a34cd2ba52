"""LongText: ids of texts of any length in bounded memory, the same as if each text were tokenised at once.

A long text is tokenised in windows that overlap. Two neighbours meet at a *cut*, and each goes on for `CONTEXT` characters beyond it, so no window
sees a beginning or an end of a text where there is none. A cut is made only where tokens meet whichever side is looked at:

* the ids of the characters before it begin the ids of the characters around it, so no token, added token or normalisation reaches across;
* both windows have these very ids around it;
* unless the model is BPE, two words of the pre-tokeniser meet there. Words are tokenised one by one, and a pre-tokeniser splits from left to right.

For BPE tokens may also meet within a word: a sequence of tokens is a text's BPE encoding if and only if each two neighbours are the encoding of their
own text, and the two at the cut were found as neighbours. Where no such place is found a window grows until there is one.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from megatrain.runtime.data.in_batches import in_batches

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedTokenizerBase

CONTEXT = 1021
"""characters on either side of a cut; a prime number, so that groups of digits counted from another place do not meet at it by chance"""
_WINDOW = 2**17
_ZONE = 2**12
"""characters before the end of a window in which a cut is looked for"""
_TRIES = 8
_COMPARED = 8
"""ids on either side of a cut that both windows must have"""
_PLACES = tuple(map(re.compile, (r"(?<=\n)(?=\S)", r"(?<=\S)(?= \S)", r"(?<=\S)(?=\s)", r"(?<=\S)(?=\S)")))
"""where tokenisers split most often first: before a line, a blank, any white space, and anywhere"""

Other = TypeVar("Other")


class Piece(NamedTuple):
    """Ids of a part of a text."""

    ids: np.ndarray
    """[n] uint32"""
    first: bool
    last: bool
    encoding: Encoding | None
    """of the window that has the part; None for a tokenizer written in Python"""
    skipped: int
    """tokens of the encoding before the part's first one"""
    shift: int
    """a place in the window plus this is the place in the text"""

    def between(self, begin: int, end: int) -> slice:
        """Which of `ids` have a character of the text from place `begin` to place `end`. Only for fast tokenizers."""
        encoding = self.encoding
        assert encoding is not None, "the tokenizer does not say where in the text its tokens are"

        def place(token: int) -> tuple[int, int]:
            found = encoding.token_to_chars(token)
            assert found is not None, "a token that is of no text"
            return found

        tokens = range(self.skipped, self.skipped + len(self.ids))
        first = bisect_right(tokens, begin - self.shift, key=lambda token: place(token)[1])
        return slice(first, max(first, bisect_left(tokens, end - self.shift, key=lambda token: place(token)[0])))


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Where two windows meet."""

    left: str
    right: str
    """characters before and after it"""
    left_ids: list[int]
    right_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A part of a text from cut to cut. None: the text's own beginning or end."""

    text: str
    begin: _Cut | None
    end: _Cut | None
    place: int
    """characters of the text before it"""

    @property
    def whole(self) -> str:
        return f"{self.begin.left if self.begin else ''}{self.text}{self.end.right if self.end else ''}"


class _Encoded(NamedTuple):
    window: _Window
    ids: list[int]
    """of the window with what goes on beyond its cuts"""
    encoding: Encoding | None

    @property
    def own(self) -> list[int]:
        end = self.window.end
        return self.ids[self.skipped : len(self.ids) - (len(end.right_ids) if end else 0)]

    @property
    def skipped(self) -> int:
        """ids before the window's own"""
        return len(self.window.begin.left_ids) if self.window.begin else 0

    @property
    def piece(self) -> Piece:
        begin, end, place = self.window.begin, self.window.end, self.window.place
        shift = place - (len(begin.left) if begin else 0)
        return Piece(np.array(self.own, dtype=np.uint32), begin is None, end is None, self.encoding, self.skipped, shift)


class LongText:
    """The tokenizer's ids without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        self._within_words = type(model).__name__ == "BPE"

    def whole(self, texts: Iterable[str]) -> list[np.ndarray]:
        """The ids of each text, [n] uint32."""
        found: list[list[np.ndarray]] = []
        for piece in self.encode((text, True) for text in texts):
            if piece.first:
                found.append([])
            found[-1].append(piece.ids)
        return [np.concatenate(ids) for ids in found]

    def encode(self, parts: Iterable[tuple[str, bool] | Other]) -> Iterator[Piece | Other]:
        """`parts`: each a part of a text and whether the text ends with it. Whatever else stands among them comes back in its place."""
        held: list[_Encoded | Other] = []
        """of a text that goes on, and what has to wait for it"""
        for batch in in_batches(self._windows(parts), lambda item: len(item.text) if isinstance(item, _Window) else 0):
            windows = [item for item in batch if isinstance(item, _Window)]
            encoded = iter(self._encoded(windows) if windows else [])
            for item in batch:
                held.append(next(encoded) if isinstance(item, _Window) else item)
                yield from self._settled(held)
        assert not held, "a text is still open"

    # ---- windows ----

    def _windows(self, parts: Iterable[tuple[str, bool] | Other]) -> Iterator[_Window | Other]:
        text, begin, least, done = "", None, _WINDOW, 0
        for part in parts:
            if not isinstance(part, tuple):
                yield part
                continue
            for at in range(0, len(part[0]), _WINDOW):  # copies of what is left stay small
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
        for places in _PLACES:
            found = [match.start() for match in places.finditer(text, low, high)]
            step = max(1, len(found) // _TRIES)
            for place in dict.fromkeys([*found[::-step][:_TRIES], *found[: -_TRIES - 1 : -1]]):  # all over the zone, and its last ones
                if cut := self._at(text, place, anywhere=places is _PLACES[-1]):
                    return place, cut
        return 0, None

    def _at(self, text: str, place: int, *, anywhere: bool) -> _Cut | None:
        """The cut at `place`, where there can be one."""
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
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)

    def _encoded(self, windows: list[_Window]) -> list[_Encoded]:
        encoded = self._tokenized([window.whole for window in windows])
        encodings: Sequence[Encoding | None] = encoded.encodings or [None] * len(windows)
        return [_Encoded(*of_one) for of_one in zip(windows, encoded["input_ids"], encodings, strict=True)]

    def _settled(self, held: list[_Encoded | Other]) -> Iterator[Piece | Other]:
        """What is first in `held`, as far as the cut after it is known to be right. Windows that do not meet at theirs become one."""
        while held:
            first = held[0]
            if isinstance(first, _Encoded) and first.window.end is not None:
                at, then = next(((at, item) for at, item in enumerate(held[1:], 1) if isinstance(item, _Encoded)), (0, None))
                if then is None:
                    return
                if not _meet(first, then):
                    one = _Window(text=first.window.text + then.window.text, begin=first.window.begin, end=then.window.end, place=first.window.place)
                    del held[at]
                    (held[0],) = self._encoded([one])
                    continue
            del held[0]
            yield first.piece if isinstance(first, _Encoded) else first


def _meet(before: _Encoded, after: _Encoded) -> bool:
    """Whether both windows have the cut's ids around it."""
    cut = before.window.end
    assert cut is not None
    return (
        before.ids[-len(cut.right_ids) :] == cut.right_ids
        and after.ids[: len(cut.left_ids)] == cut.left_ids
        and _alike(before.own[::-1], cut.left_ids[::-1])
        and _alike(after.own, cut.right_ids)
    )


def _alike(left: list[int], right: list[int]) -> bool:
    count = min(_COMPARED, len(left), len(right))
    return count > 0 and left[:count] == right[:count]
