"""BadRows: the rows that were left out, counted by the kind of reason."""

from __future__ import annotations

import re

from megatrain.runtime.data.formats import BadRow

_SHOWN = 5
_KINDS = 1000
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


class BadRows:
    """Reasons are of one kind if they differ only in numbers and in quoted text."""

    def __init__(self) -> None:
        self.count = 0
        self._kinds: dict[str, tuple[str, int]] = {}
        """by kind: the first row, and how many"""

    def add(self, row: BadRow) -> None:
        self.count += 1
        kind = _VARIES.sub("", row.reason)
        if kind in self._kinds or len(self._kinds) < _KINDS:
            first, count = self._kinds.get(kind, (str(row), 0))
            self._kinds[kind] = (first, count + 1)

    @property
    def shown(self) -> tuple[tuple[str, int], ...]:
        """The first row of each kind, and how many rows are of that kind: the first kinds, of which the very first row is one."""
        return tuple(self._kinds.values())[:_SHOWN]


def in_words(count: int, shown: tuple[tuple[str, int], ...]) -> str:
    """`count` bad rows, of which `shown` is known."""
    kinds = [f"{row}{f' (and {number - 1:,} more like it)' if number > 1 else ''}" for row, number in shown]
    others = count - sum(number for _, number in shown)
    kinds += [f"{others:,} for other reasons"] if others else []
    return f"{count:,} bad row{'' if count == 1 else 's'} left out, the first of each kind: {'; '.join(kinds)}"
