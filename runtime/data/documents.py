"""Documents: tokenised text, as spans of one long array of tokens that may lie in a file and not in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

TARGET = 1 << 31
"""the bit of a flagged token that says: a prediction of this token has loss"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Document i is `tokens[begins[i] : ends[i]]`, and never empty. Nothing is copied where documents are chosen or cut."""

    tokens: np.ndarray
    """[n] uint16 or uint32, often memory-mapped"""
    begins: np.ndarray
    """[documents] int64"""
    ends: np.ndarray
    """[documents] int64"""
    flagged: bool = False
    """tokens are uint32 whose highest bit is `TARGET`; otherwise every token is a target"""
    whole: bool = False
    """a document means nothing without its beginning (a prompt and its answer), so it is truncated and never continued in another row"""
    digest: str = ""
    """of `tokens`, all of them"""

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def lengths(self) -> np.ndarray:
        """[documents] int64, in tokens."""
        return self.ends - self.begins

    @property
    def total(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def chosen(self, which: np.ndarray) -> Documents:
        """Those at the indices, or where the mask, `which` says."""
        return replace(self, begins=self.begins[which], ends=self.ends[which])

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [n] int64 of `tokens[begin:end]`, and which of them are targets, [n] bool."""
        raw = self.tokens[begin:end].astype(np.int64)
        return (raw & (TARGET - 1), raw >= TARGET) if self.flagged else (raw, np.ones(len(raw), dtype=bool))


def truncated(documents: Documents, sequence: int) -> tuple[Documents, int, int, int]:
    """`documents` cut to `sequence` tokens, those left out whose targets were all cut off.

    Also the number of documents cut, the number of tokens cut from them, and how many of these documents were left out.
    """
    long = np.flatnonzero(documents.lengths > sequence)
    if not len(long):
        return documents, 0, 0, 0
    ends = documents.ends.copy()
    ends[long] = documents.begins[long] + sequence
    cut = replace(documents, ends=ends)
    # the first token of a document is nobody's next token
    useless = [index for index in long if not cut.read(cut.begins[index] + 1, cut.ends[index])[1].any()]
    kept = np.ones(len(documents), dtype=bool)
    kept[useless] = False
    return cut.chosen(kept), len(long), int((documents.ends - ends).sum()), len(useless)
