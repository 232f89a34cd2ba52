"""Packing: documents -> rows of exactly `sequence` tokens, as spans. Three ways:

* `in_sequence`: one document after the other, cut where a row is full. No padding but in the last row; a document that is cut goes on as a
  new document in the next row, and no token is lost. For text.
* `best_fit`: whole documents, the longest first, each into the row with the least room that still holds it (best-fit decreasing, Coffman et
  al. 1996). Rows end in what padding is left over. For a prompt and its answer, which mean nothing apart.
* `one_a_row`: no packing.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from megatrain.runtime.data.documents import Documents


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Row r consists of the pieces `firsts[r]` up to `firsts[r + 1]`; piece p is `tokens[begins[p] : ends[p]]`. All arrays int64."""

    begins: np.ndarray
    ends: np.ndarray
    follows: np.ndarray
    """index of the token that follows a piece's last one and is its label, or -1"""
    firsts: np.ndarray

    def __len__(self) -> int:
        return len(self.firsts) - 1


def in_sequence(documents: Documents, order: np.ndarray, sequence: int, *, plain: bool) -> Rows:
    """The documents in `order`. `plain`: as one text without borders, where a document's last token predicts the next document's first."""
    begins, ends = documents.begins[order], documents.ends[order]
    starts = np.concatenate([[0], np.cumsum(ends - begins)])  # of each document in the stream of all tokens
    total = int(starts[-1]) - plain  # the very last token is only a label
    rows = np.arange(0, total, sequence)
    cuts = np.union1d(starts[:-1][starts[:-1] < total], rows)
    stops = np.append(cuts[1:], total)
    document = np.searchsorted(starts, cuts, side="right") - 1
    first = begins[document] + cuts - starts[document]
    last = first + stops - cuts
    if plain:
        after = np.searchsorted(starts, stops, side="right") - 1
        follows = begins[after] + stops - starts[after]
    else:
        follows = np.where(last < ends[document], last, -1)
    return Rows(begins=first, ends=last, follows=follows, firsts=np.append(np.searchsorted(cuts, rows), len(cuts)))


def best_fit(documents: Documents, order: np.ndarray, sequence: int) -> Rows:
    """Documents of at most `sequence` tokens; `order` breaks ties between equally long ones."""
    lengths = documents.lengths[order]
    longest_first = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(order), dtype=np.int64)
    rooms: list[int] = []  # ascending, without repetition
    rows_with: dict[int, list[int]] = {}  # room -> rows that have it
    count = 0
    for index, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = count, sequence
            count += 1
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rows_with[room], rooms[at]
        row_of[index] = row
        if room > length:
            if room - length not in rows_with:
                bisect.insort(rooms, room - length)
            rows_with.setdefault(room - length, []).append(row)
    by_row = np.argsort(row_of, kind="stable")
    chosen = order[by_row]
    return _whole(documents, chosen, np.searchsorted(row_of[by_row], np.arange(count + 1)))


def one_a_row(documents: Documents, order: np.ndarray, sequence: int) -> Rows:
    """A document a row; one of more than `sequence` tokens goes on in rows of its own."""
    begins, ends = documents.begins[order], documents.ends[order]
    pieces = -(-(ends - begins) // sequence)
    document = np.repeat(np.arange(len(order)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = begins[document] + number * sequence
    last = np.minimum(first + sequence, ends[document])
    return Rows(begins=first, ends=last, follows=np.where(last < ends[document], last, -1), firsts=np.arange(len(document) + 1))


def _whole(documents: Documents, chosen: np.ndarray, firsts: np.ndarray) -> Rows:
    nothing = np.full(len(chosen), -1)
    return Rows(begins=documents.begins[chosen], ends=documents.ends[chosen], follows=nothing, firsts=firsts)
