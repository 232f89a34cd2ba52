"""Tests of progress bars: notes are readable on terminals of any encoding and width."""

from __future__ import annotations

import io
import re
import sys
import types
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.training import progress
from megatrain.experiments.cli.training.progress import ProgressBars
from megatrain.runtime.training.callback import EvaluationResult, Step
from megatrain.runtime.training.progress import TimeLeft
from megatrain.simulator.schedule.timeline import Timeline


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


def test_a_note_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "60")
    note = "training: 35 documents, 441,628 tokens in 432 rows of 1024; packing documents, 0.17%"
    path = f"wrote {'x' * 70}"
    bars = ProgressBars(1)
    bars.on_note(note)
    bars.on_note(path)
    bars.on_load(1)
    bars.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("training"))
    assert " ".join(lines[first : first + 2]).split() == note.split()
    assert max(map(len, lines[first : first + 2])) <= 60
    assert f"    {'x' * 70}" in lines, "a path stays whole"


class Morning(datetime):
    """A clock that has stopped."""

    @classmethod
    def now(cls, _: object = None) -> Morning:  # type: ignore[override]
        return cls(2026, 1, 2, 6, 11)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            80,
            [
                "load  100% of 7,615.6 M parameters",
                "train  342/12000  13.9 h left, until 20:05",
                "loss 2.2183  lr 1e-5  7,547 tokens/s  evaluation 2.7611 at step 300",
                "21.00 GiB device + 92.78 GiB host  step time predicted with error -1.3 %",
            ],
        ),
        (
            40,
            [
                "load  100% of 7,615.6 M parameters",
                "train  342/12000",
                "13.9 h left, until 20:05  loss 2.2183",
                "lr 1e-5  7,547 tokens/s",
                "evaluation 2.7611 at step 300",
                "21.00 GiB device + 92.78 GiB host",
                "step time predicted with error -1.3 %",
            ],
        ),
    ],
)
def test_nothing_is_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, expected: list[str]
) -> None:
    """The numbers are those of a long training of a large model."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(progress, "datetime", Morning)
    monkeypatch.setattr(TimeLeft, "after", lambda *_: 13.9 * 3600)
    config = types.SimpleNamespace(training=types.SimpleNamespace(steps=12000))
    sizes = {"device": 21.0 * 2**30, "host": 92.78 * 2**30}
    executor = types.SimpleNamespace(allocated=sizes.__getitem__)
    trainer: Any = types.SimpleNamespace(first_step=1, config=config, executor=executor)
    timeline = Timeline(name="measured", digest="", spans=())
    speed = {"seconds": 4.3, "tokens_per_second": 7547.2, "timeline": timeline}
    bars = ProgressBars(7_615_616_512)
    bars.on_load(7_615_616_512)
    bars.on_start(trainer)
    bars.on_evaluation(trainer, EvaluationResult(number=300, loss=2.7611, tokens=3, seconds=1))
    bars.compared("step time predicted with error -1.3 %")
    bars.on_step(trainer, Step(number=342, loss=2.2183, gradient_norm=1.0, rate=1e-5, **speed))
    bars.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    frame = text[text.rindex("load") :].rstrip().splitlines()
    assert [line for line in frame if len(line) > columns] == []
    shown = [re.sub("[━╸╺ ]{2,}", "  ", line).rstrip() for line in frame]
    assert shown == expected


def test_below_the_bar_are_rate_memory_the_evaluation_s_step_and_the_prediction(
    monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    """The terminal has 80 columns. The time at which the training ends is next to the bar."""
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
        r"[\d.]+ KiB device \+ [\d.]+ [KM]iB host  step time"
        r" ([\d,.]+ times the prediction|predicted with error [+-][\d.]+ %)",
        last,
    ), last
    assert "100% of 0.1 M parameters\n" in text
    assert "step 7/7" not in text, "no lines of a log"
