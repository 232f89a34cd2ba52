"""Counts the rows that were left out, by the kind of reason."""

from __future__ import annotations

import re

from megatrain.runtime.data.formats import BadRow

_SHOWN = 5
_KINDS = 1000
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


class BadRows:
    """Number of bad rows, with one example for each kind of reason.

    Reasons that differ only in numbers and in quoted text are of the same kind.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of bad rows."""
        self._kinds: dict[str, tuple[str, int]] = {}
        """Kind of reason -> the first row of this kind, and the number of its rows."""

    def add(self, row: BadRow) -> None:
        """Counts a bad row. Only the first 1,000 kinds keep an example."""
        self.count += 1
        kind = _VARIES.sub("", row.reason)
        if kind in self._kinds or len(self._kinds) < _KINDS:
            first, count = self._kinds.get(kind, (str(row), 0))
            self._kinds[kind] = (first, count + 1)

    @property
    def shown(self) -> tuple[tuple[str, int], ...]:
        """The first row of each kind and the number of its rows, for the first 5 kinds."""
        return tuple(self._kinds.values())[:_SHOWN]


def describe_bad_rows(count: int, shown: tuple[tuple[str, int], ...]) -> str:
    """Returns a line that describes `count` bad rows, with the examples `shown`."""
    kinds = [
        f"{row}{f' (and {number - 1:,} more like it)' if number > 1 else ''}"
        for row, number in shown
    ]
    others = count - sum(number for _, number in shown)
    kinds += [f"{others:,} for other reasons"] if others else []
    return (
        f"{count:,} bad row{'' if count == 1 else 's'} left out, the first of each kind:"
        f" {'; '.join(kinds)}"
    )
