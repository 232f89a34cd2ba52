"""Tables of the page: cells of text, or ops that a click shows in the timeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple


class Op(NamedTuple):
    """A cell, or a word, that is an op's id."""

    id: str

    def html(self) -> str:
        return f'<button class=op data-op="{escape(self.id)}">{escape(self.id)}</button>'


Cell = str | Op


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], left: Collection[int] = (0,), total: bool = False) -> str:
    """Columns but `left` are numbers, aligned at the right; with `total` the last row stands apart."""

    def row(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if column in left else ''}>{cell.html() if isinstance(cell, Op) else escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr{' class=total' if total and number == len(rows) else ''}>{row(cells, 'td')}</tr>" for number, cells in enumerate(rows, 1))
    top = f"<thead><tr>{row(head, 'th')}</tr></thead>" if any(head) else ""
    return f"<div class=wide><table>{top}<tbody>{body}</tbody></table></div>"
