"""Tests of bad rows: the list of kinds stays short, and all rows are counted."""

from __future__ import annotations

from pathlib import Path

from megatrain.runtime.data.rows.formats import BadRow, BadRows, describe_bad_rows

HERE = Path("rows.jsonl")


def spelt(number: int) -> str:
    """Returns the number in letters, because reasons that differ only in digits are one kind."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_a_thousand_kinds_are_kept_and_all_rows_are_counted() -> None:
    bad = BadRows()
    for number in range(1002):
        bad.add(BadRow(HERE, number + 1, f"reason {spelt(number)} at 7"))
    bad.add(BadRow(HERE, 2000, f"reason {spelt(999)} at 8"))
    bad.add(BadRow(HERE, 2001, "reason a at 9"))
    assert bad.count == 1004
    assert bad.shown[:2] == (("rows.jsonl:1: reason a at 7", 2), ("rows.jsonl:2: reason b at 7", 1))
    assert len(bad.shown) == 5
    kinds = dict(bad._kinds.values())
    assert len(kinds) == 1000
    assert kinds[f"rows.jsonl:1000: reason {spelt(999)} at 7"] == 2
    assert describe_bad_rows(bad.count, bad.shown).endswith("; 998 for other reasons")


def test_one_bad_row_is_described_in_the_singular() -> None:
    assert (
        describe_bad_rows(1, (("rows.jsonl:1: no `text`", 1),))
        == "1 bad row left out, the first of each kind: rows.jsonl:1: no `text`"
    )
