"""Tables of the page. A cell is text or an op. A click on an op shows it in the timeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple


class OpRow(NamedTuple):
    """The id of an op, as a cell or as a word in a text."""

    id: str
    """The id."""

    def html(self) -> str:
        """Returns a button that shows the op in the timeline."""
        return f'<button class=op data-op="{escape(self.id)}">{escape(self.id)}</button>'


Cell = str | OpRow


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    left: Collection[int] = (0,),
    total: bool = False,
) -> str:
    """Returns an HTML table. Columns in `left` are left-aligned, and the others right-aligned. With
    `total`, the last row is styled as a total.
    """

    def row(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if column in left else ''}>"
            f"{cell.html() if isinstance(cell, OpRow) else escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(
        f"<tr{' class=total' if total and number == len(rows) else ''}>{row(cells, 'td')}</tr>"
        for number, cells in enumerate(rows, 1)
    )
    top = f"<thead><tr>{row(head, 'th')}</tr></thead>" if any(head) else ""
    return f"<div class=wide><table>{top}<tbody>{body}</tbody></table></div>"
