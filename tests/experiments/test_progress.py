"""Tests of the progress bars: a terminal of any encoding can show their notes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.training.progress import ProgressBars


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


def test_below_the_bar_are_rate_memory_the_evaluation_s_step_and_the_prediction(
    monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    """As on a terminal of 80 columns; the time at which the training ends is beside the bar."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "80")
    words = ("train", str(workplace / "plan.toml"), "--data", "corpus", "--steps", 7)
    more = ("--eval-fraction", "0.2", "--eval-every", 4, "--device", "cpu", "--out", "run")
    assert cli.main([str(word) for word in (*words, *more, "--no-export")]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    last = text[text.rindex("7/7") :]
    assert re.search(
        r"loss \d\.\d{4}  lr [\d.]+e-\d  [\d,]+ tokens/s  evaluation \d\.\d{4} at step 4\n"
        r"[\d.]+ KiB device \+ [\d.]+ [KM]iB host  step time [\d,.]+ times against prediction",
        last,
    ), last
    assert "100% of 0.1 M parameters\n" in text
    assert "step 7/7" not in text, "no lines of a log"
