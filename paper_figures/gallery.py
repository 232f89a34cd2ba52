"""Builds figures by name into a folder: `pictures/NAME.pdf`, `.png` and `.csv`. If all are built,
it also writes a page, `README.md`, that shows them.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

from megatrain.paper_figures import (
    figure1,
    figure2,
    figure3,
    figure4,
    figure5,
    figure6,
    figure7,
    table1,
    table3,
    table4,
    table7,
    tables8_9,
)
from megatrain.paper_figures.article import introduction
from megatrain.paper_figures.beyond_the_paper import (
    card_memory,
    formats,
    pareto,
    predicted_measured,
    ratio,
    regimes,
    robustness,
    times,
)
from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, as_csv
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_text
from megatrain.simulator.hardware.shared import library_only

FIGURES: dict[str, Callable[[Results], Drawn]] = {
    "figure1": figure1.draw,
    "ratio": ratio.draw,
    "figure2": figure2.draw,
    "figure3": figure3.draw,
    "figure4": figure4.draw,
    "figure5": figure5.draw,
    "figure6": figure6.draw,
    "figure7": figure7.draw,
    "table1": table1.draw,
    "table3": table3.draw,
    "table4": table4.draw,
    "table7": table7.draw,
    "tables8_9": tables8_9.draw,
    "times": times.draw,
    "regimes": regimes.draw,
    "card_memory": card_memory.draw,
    "pareto": pareto.draw,
    "formats": formats.draw,
    "predicted_measured": predicted_measured.draw,
    "robustness": robustness.draw,
}
_OTHER_NAMES = {"table8": "tables8_9", "table9": "tables8_9"}


def known(names: Sequence[str], allowed: Sequence[str] = tuple(FIGURES)) -> list[str]:
    """Returns the full names of figures in the order of `allowed`, each once. Without `names`, it
    returns `allowed`. `fig5` stands for figure5, and `table8` for tables8_9. Raises UserError for
    an unknown name.
    """
    found = []
    for name in names:
        full = _OTHER_NAMES.get(
            name, f"figure{name[3:]}" if name.startswith("fig") and name[3:].isdigit() else name
        )
        if full not in allowed:
            near = difflib.get_close_matches(full, allowed, 1)
            raise UserError(
                "figures",
                found=repr(name),
                allowed=", ".join(allowed),
                fix=f"did you mean {near[0]}?" if near else "name one of these",
            )
        found.append(full)
    return [name for name in allowed if name in found] if names else list(allowed)


def draw(name: str, results: Results) -> Drawn:
    """Returns one figure, with its caption above it. Raises UserError if a result is missing or
    malformed.
    """
    with matplotlib.rc_context(style.RC):
        drawn = FIGURES[name](results)
        style.caption(drawn.figure, textwrap.fill(drawn.caption, drawn.caption_columns))
        return drawn


@library_only()
def build(names: Sequence[str], results: Results, out: Path) -> list[Path]:
    """Draws figures, writes them into `out` and returns the paths of the written files. Machines
    have the library's own estimates, not those that the user's shared calibrations contain.

    Raises UserError if a result is missing or malformed, or if `out` cannot be written.
    """
    figures, written = {}, []
    for name in known(names):
        figures[name] = drawn = draw(name, results)
        written += style.save(drawn.figure, out / "pictures", name)
        write_text(path := out / "pictures" / f"{name}.csv", as_csv(drawn.rows))
        written.append(path)
        drawn.figure.clear()
    if len(figures) == len(FIGURES):
        write_text(out / "README.md", page(figures, results))
        written.append(out / "README.md")
    return written


def page(figures: dict[str, Drawn], results: Results) -> str:
    """Returns the page in Markdown: the introduction, and every figure with the paper's claim and
    our finding.
    """
    parts = [introduction(figures, results)]
    for name, drawn in figures.items():
        parts += [
            f"### {drawn.title}\n",
            f"![{drawn.title}](pictures/{name}.png)\n",
            _wrapped(f"*{drawn.caption}* [Values](pictures/{name}.csv)"),
            _wrapped(f"**Claimed:** {drawn.claim}"),
            _wrapped(f"**Found:** {drawn.finding}"),
        ]
    return "\n".join(parts)


def _wrapped(paragraph: str) -> str:
    """Returns a paragraph in lines of at most 100 columns."""
    return textwrap.fill(paragraph, 100, break_on_hyphens=False, break_long_words=False) + "\n"
