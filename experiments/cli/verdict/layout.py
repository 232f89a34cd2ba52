"""Lays out text in a terminal: labelled lines that are wrapped at its width, numbers and bars."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from megatrain.simulator.base.units import format_count

LABEL = 8
"""The width of the label before each line, in characters."""
_MOST, _LEAST = 80, 50
BAR = 20
"""The length of a bar in characters, unless the terminal is too narrow."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|[kMBT]|m?s)\b)")


def terminal_width(most: int = _MOST) -> int:
    """Returns the width to print in, in characters: the width of the terminal, but at least 50 and
    at most `most`. If standard output is no terminal and COLUMNS is not set, the result is `most`.
    """
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()):
        return most
    return min(max(shutil.get_terminal_size((most, 24)).columns, _LEAST), most)


def fitted(text: str, width: int | None = None) -> str:
    """Returns `text` with its lines wrapped at `width` columns. No word is broken.

    The default of `width` is the width of the terminal. If standard output is a file, `text` is
    returned unchanged.

    >>> print(fitted("training: 35 documents, 441,628 tokens in 432 rows", 30))
    training: 35 documents,
        441,628 tokens in 432 rows
    """
    if width is None:
        if not (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()):
            return text
        width = max(shutil.get_terminal_size((_MOST, 24)).columns, _LEAST)
    return "\n".join(
        "\n".join(
            textwrap.wrap(
                _BEFORE_UNIT.sub("\x00", line),
                width,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
        ).replace("\x00", " ")
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def labelled(label: str, text: str, width: int) -> list[str]:
    """Returns `text` after `label`, wrapped at `width` columns. A number stays with its unit.

    >>> labelled("Speed", "nine thousand tokens a second", 30)
    ['Speed   nine thousand tokens a', '        second']
    """
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub("\x00", text),
        width,
        initial_indent=f"{label:<{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_on_hyphens=False,
    )
    return [line.replace("\x00", " ") for line in lines]


def flowed(items: Iterable[str], width: int) -> list[str]:
    """Returns `items` behind an empty label, two spaces apart, as many to a line as fit.

    >>> flowed(["weights 6.1", "gradients 3.8", "optimizer 7.5"], 36)
    ['        weights 6.1  gradients 3.8', '        optimizer 7.5']
    """
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        else:
            lines.append(" " * LABEL + item)
    return lines


def command(words: Iterable[str], width: int, indent: int = LABEL) -> list[str]:
    """Returns the lines of a command, which can be pasted: all but the last end in a backslash.

    `indent` is the number of blanks before the first line, and further lines have four more. An
    option stays on the line of its value.

    >>> command(["megatrain", "plan", "tiny", "--batch", "32"], 32)
    ['        megatrain plan tiny \\\\', '            --batch 32']
    """
    parts: list[str] = []
    for word in words:
        if parts and parts[-1].startswith("--") and not word.startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [" " * indent + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) + 2 <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(" " * (indent + 4) + part)
    return lines


def rows(cells: list[tuple[str, ...]], width: int) -> list[str]:
    """Returns the lines of a table behind an empty label.

    The first and the last column are aligned to the left, the others to the right. A last cell that
    does not fit in `width` is moved to lines of its own. If the row is still too wide, the middle
    cells are moved to the next line, too.
    """
    columns = range(len(cells[0]) - 1)
    sizes = [max(len(row[column]) for row in cells) for column in columns]
    lines = []
    for row in cells:
        first = row[0].ljust(sizes[0])
        others = (
            row[column].rjust(sizes[column]) for column in columns if column and sizes[column]
        )
        line = "  ".join([" " * LABEL + first, *others])
        note = row[-1]
        if len(line) > width:
            lines.append(" " * LABEL + row[0])
            line = " " * (LABEL + 4) + "  ".join(filter(None, row[1:-1]))
        if note and len(line) + 2 + len(note) <= width:
            lines.append(f"{line}  {note}")
        else:
            lines.append(line.rstrip())
            indent = " " * (LABEL + 4)
            lines += textwrap.wrap(note, width, initial_indent=indent, subsequent_indent=indent)
    return lines


def shown_columns(sizes: Mapping[str, int], width: int, droppable: Sequence[str]) -> list[str]:
    """Returns the names of the columns that fit in `width` characters.

    `sizes` has the width of each column. Columns of `droppable` are left out in their order until
    the others fit.

    >>> shown_columns({"model": 20, "VRAM": 12, "RAM": 12}, 40, ["VRAM", "RAM"])
    ['model', 'RAM']
    """
    names = list(sizes)
    for dropped in droppable:
        if sum(sizes[name] for name in names) <= width:
            break
        names = [name for name in names if name != dropped]
    return names


def left_out(sizes: Iterable[str], shown: Iterable[str], width: int) -> list[str]:
    """Returns a line that lists the columns that are not shown, or no line if all are shown.

    >>> left_out(["model", "VRAM", "RAM"], ["model", "RAM"], 50)
    ['left out in 50 columns: VRAM']
    """
    names = [name for name in sizes if name not in shown]
    return [f"left out in {width} columns: {', '.join(names)}"] if names else []


def bar(part: float, whole: float, size: int = BAR) -> str:
    """Returns a bar of `size` characters that shows `part` of `whole`.

    >>> bar(30, 40)
    '###############.....'
    """
    filled = min(round(size * part / whole), size) if whole else 0
    return "#" * filled + "." * (size - filled)


def unit_of(size: float) -> tuple[str, int]:
    """Returns the largest binary unit up to GiB that is not larger than `size`, and its bytes.

    TiB is not used, because one decimal would be too coarse.
    """
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    return next(unit for unit in units if size >= unit[1] or unit[1] == 1)


def size(count: float) -> str:
    """Returns a number of bytes as text with at most one decimal.

    >>> size(60 * 2**30), size(25_000_000), size(2**30 * 1536)
    ('60 GiB', '23.8 MiB', '1,536 GiB')
    """
    unit, factor = unit_of(count)
    return f"{trimmed(count / factor)} {unit}"


def fixed(count: float) -> str:
    """Returns a number of bytes as text with exactly one decimal, so sizes in a column line up.

    >>> fixed(60 * 2**30)
    '60.0 GiB'
    """
    unit, factor = unit_of(count)
    return f"{count / factor:,.1f} {unit}"


def part_of(part: float, whole: float) -> str:
    """Returns the text of `part` for an output such as `1.0 of 2.0 GiB`, in which `whole` follows.

    The text has no unit if the unit is that of `whole`. Both arguments are in bytes.

    >>> part_of(2**33, 2**34), part_of(2**20, 2**34)
    ('8.0', '1.0 MiB')
    """
    _, factor = unit_of(whole)
    return f"{part / factor:,.1f}" if part >= factor or not part else fixed(part)


def trimmed(value: float) -> str:
    """Returns a number with one decimal, which is left out if it is zero."""
    return f"{value:,.1f}".removesuffix(".0")


def speed(tokens_per_second: float) -> str:
    """Returns tokens per second, with a decimal if they are few.

    >>> speed(9001.7), speed(0.84)
    ('9,002', '0.8')
    """
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"


def rough(value: float) -> str:
    """Returns a number with three significant digits.

    >>> rough(9001.7), rough(123456), rough(1.234)
    ('9,000', '123,000', '1.23')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:#.3g}"


def count(number: int) -> str:
    """Returns a count with at most three significant digits, with B for 10^9 as for parameters.

    >>> count(7_615_616_512), count(10**9), count(57_632)
    ('7.62 B', '1 B', '57.6 k')
    """
    return format_count(float(f"{number:.3g}")).replace(" G", " B")


def seconds(time: float) -> str:
    """Returns a duration with three significant digits.

    >>> seconds(3.6404), seconds(0.0123), seconds(536.9)
    ('3.64 s', '12.3 ms', '537 s')
    """
    if time >= 1:
        return f"{rough(time)} s"
    return f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} us"


def hours(time: float, *others: float) -> str:
    """Returns a number of hours as text in minutes, hours or days.

    `others` are the two ends of a range, which follows in the same unit. It is left out if both
    ends have the same text.

    >>> hours(2.0, 1.6, 2.5), hours(100), hours(0.5, 0.5, 0.501)
    ('2.0 hours (1.6 to 2.5)', '4.2 days', '30 minutes')
    """
    unit, factor, digits = (
        ("days", 1 / 24, 1)
        if time > 48
        else ("hours", 1.0, 1)
        if time >= 1
        else ("minutes", 60.0, 0)
    )
    first, *ends = (f"{value * factor:,.{digits}f}" for value in (time, *others))
    return f"{first} {unit}" + (f" ({ends[0]} to {ends[1]})" if len(set(ends)) == 2 else "")
