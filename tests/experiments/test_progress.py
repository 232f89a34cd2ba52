"""ProgressBars: notes on a terminal of any encoding."""

from __future__ import annotations

import io
import sys

import pytest

from megatrain.experiments.cli.progress import ProgressBars


def test_a_note_is_printed_where_the_terminal_lacks_its_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    bars = ProgressBars(1)
    bars.on_note("«ö»")
    bars.on_load(1)
    bars.close()
    sys.stdout.flush()
    assert rb"\xab\xf6\xbb" in out.getvalue()
