"""Packs documents into rows of exactly `sequence` tokens. There are three ways:

* `in_sequence`, for text: puts one document after the other, and cuts it where a row is full. The
  rest continues as a new document in the next row. Only the last row has padding, and no token is
  lost.
* `best_fit`, for prompts with answers, which must stay together: puts whole documents, the longest
  first, into the row with the least free space that is enough (best-fit decreasing, Coffman et al.
  1996). Each row ends with padding.
* `one_a_row`: puts each document into a row of its own.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from megatrain.runtime.data.documents import Documents


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Packed rows, as spans of the documents' tokens. All arrays are int64.

    Piece p is `tokens[begins[p] : ends[p]]`. Row r has the pieces `firsts[r]` to
    `firsts[r + 1] - 1`.
    """

    begins: np.ndarray
    """[pieces] index of the first token."""
    ends: np.ndarray
    """[pieces] index after the last token."""
    follows: np.ndarray
    """[pieces] index of the token that is the label of the last token, or -1 if it has no label."""
    firsts: np.ndarray
    """[rows + 1] index of the first piece of each row, and then the number of pieces."""

    def __len__(self) -> int:
        return len(self.firsts) - 1


def in_sequence(documents: Documents, order: np.ndarray, sequence: int, *, plain: bool) -> Rows:
    """Packs the documents one after the other, in the order `order`.

    With `plain`, they form one text: the last token of a document predicts the first token of the
    next document.
    """
    begins, ends = documents.begins[order], documents.ends[order]
    # Where each document starts in the stream of all tokens.
    starts = np.concatenate([[0], np.cumsum(ends - begins)])
    total = int(starts[-1]) - plain  # with `plain`, the very last token is only a label
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
    return Rows(
        begins=first,
        ends=last,
        follows=follows,
        firsts=np.append(np.searchsorted(cuts, rows), len(cuts)),
    )


def best_fit(documents: Documents, order: np.ndarray, sequence: int) -> Rows:
    """Packs whole documents of at most `sequence` tokens each.

    Documents of equal length are packed in the order `order`.
    """
    lengths = documents.lengths[order]
    longest_first = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(order), dtype=np.int64)
    rooms: list[int] = []  # distinct amounts of free space in rows, ascending
    rows_with: dict[int, list[int]] = {}  # free space -> rows with this free space
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
    return Rows(
        begins=documents.begins[chosen],
        ends=documents.ends[chosen],
        follows=np.full(len(chosen), -1),
        firsts=np.searchsorted(row_of[by_row], np.arange(count + 1)),
    )


def one_a_row(documents: Documents, order: np.ndarray, sequence: int) -> Rows:
    """Gives each document its own row, or several if it has more than `sequence` tokens."""
    begins, ends = documents.begins[order], documents.ends[order]
    pieces = -(-(ends - begins) // sequence)
    document = np.repeat(np.arange(len(order)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = begins[document] + number * sequence
    last = np.minimum(first + sequence, ends[document])
    return Rows(
        begins=first,
        ends=last,
        follows=np.where(last < ends[document], last, -1),
        firsts=np.arange(len(document) + 1),
    )
