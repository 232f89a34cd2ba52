"""Documents as spans of one long array of tokens, which may be a memory-mapped file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

TARGET = 1 << 31
"""The bit that is set in a flagged token if the token is a target: a token with loss."""

_BLOCK = 2**22
"""Number of tokens that are read at a time."""


class JoinedTokens:
    """Arrays of tokens that are read as one array. They are not copied, and may be memory maps."""

    def __init__(self, parts: Sequence[np.ndarray | JoinedTokens]) -> None:
        self._parts = parts
        self._borders = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._borders[-1])

    @property
    def starts(self) -> np.ndarray:
        """[parts] int64, index of the first token of each part."""
        return self._borders[:-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        """Returns the tokens from `span.start` to `span.stop`. Both must be within the array."""
        first = int(np.searchsorted(self._borders, span.start, side="right")) - 1
        pieces = []
        for part, start in zip(self._parts[first:], self.starts[first:], strict=True):
            if start >= span.stop:
                break
            pieces.append(part[max(span.start - int(start), 0) : span.stop - int(start)])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Tokenized documents. Document i is `tokens[begins[i] : ends[i]]`, which is never empty.

    Choosing and cutting documents does not copy tokens.
    """

    tokens: np.ndarray | JoinedTokens
    """[n] uint16 or uint32, often memory-mapped."""
    begins: np.ndarray
    """[documents] int64, index of the first token of each document."""
    ends: np.ndarray
    """[documents] int64, index after the last token of each document."""
    flagged: bool = False
    """Whether tokens are uint32 with the bit `TARGET`. Otherwise, every token is a target."""
    whole: bool = False
    """Whether a document is kept in one row, such as a prompt with its answer. If it is too long,
    it is truncated. Otherwise, as with running text, a document may continue in another row."""
    digest: str = ""
    """Digest of all of `tokens`."""

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def lengths(self) -> np.ndarray:
        """[documents] int64, number of tokens of each document."""
        return self.ends - self.begins

    @property
    def total(self) -> int:
        """Number of tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def chosen_digest(self) -> str:
        """Digest of the documents: of `digest`, and of where each document is in `tokens`."""
        digest = hashlib.sha256(self.digest.encode())
        for places in (self.begins, self.ends):
            digest.update(places.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()[:16]

    @property
    def targets(self) -> int:
        """Number of tokens that are targets."""
        if not self.flagged:
            return self.total
        count = 0
        for first in range(0, len(self.tokens), _BLOCK):
            flags = self.tokens[first : min(first + _BLOCK, len(self.tokens))] >= TARGET
            before = np.concatenate([[0], np.cumsum(flags)])
            begins, ends = (np.clip(at - first, 0, len(flags)) for at in (self.begins, self.ends))
            count += int((before[ends] - before[begins]).sum())
        return count

    def chosen(self, which: np.ndarray) -> Documents:
        """Returns the documents that `which` selects, an array of indices or a mask."""
        return replace(self, begins=self.begins[which], ends=self.ends[which])

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of `tokens[begin:end]`, [n] int64, and the mask of targets, [n] bool."""
        raw = self.tokens[begin:end].astype(np.int64)
        return (
            (raw & (TARGET - 1), raw >= TARGET)
            if self.flagged
            else (raw, np.ones(len(raw), dtype=bool))
        )


def truncated(documents: Documents, sequence: int) -> tuple[Documents, int, int, int]:
    """Cuts documents to `sequence` tokens, and leaves out documents that then have no target.

    Returns the documents, the number of documents that were cut, the number of tokens that were cut
    off, and the number of documents that were left out.
    """
    long = np.flatnonzero(documents.lengths > sequence)
    if not len(long):
        return documents, 0, 0, 0
    ends = documents.ends.copy()
    ends[long] = documents.begins[long] + sequence
    cut = replace(documents, ends=ends)
    # The first token of a document is never predicted, so it is not counted as a target.
    useless = [
        index for index in long if not cut.read(cut.begins[index] + 1, cut.ends[index])[1].any()
    ]
    kept = np.ones(len(documents), dtype=bool)
    kept[useless] = False
    return cut.chosen(kept), len(long), int((documents.ends - ends).sum()), len(useless)
