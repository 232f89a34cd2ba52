"""Progress: what a training prints where no bars are drawn."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.training.progress import Progress


def lines(place: Path, prepare: Any, progress: Progress, **fields: Any) -> None:
    prepare(place, callbacks=[progress], steps=8, export=False, **fields).fit()


def test_the_first_steps_the_last_one_and_what_lies_between_are_printed(
    place: Path, prepare: Any
) -> None:
    told: list[str] = []
    every = {"evaluation.every_steps": 6, "over_steps": 1, "saving.every_minutes": 30}
    held_out = str(place / "corpus")
    given = {**every, "evaluation_data": held_out, "rate": 1e-5}
    lines(place, prepare, Progress(every_seconds=3600, write=told.append), **given)
    steps = [line for line in told if re.match(r"step \d+/8  ", line)]
    assert [line.partition("/")[0] for line in steps] == [f"step {n}" for n in (1, 2, 3, 8)]
    pattern = r"step 3/8  loss \d\.\d{4}  lr 1e-5  [\d,]+ tokens/s  \d+ s left"
    assert re.fullmatch(pattern, steps[2]), steps
    assert "left" not in steps[-1]
    rest = told[told.index(steps[2]) + 1 :]
    assert re.fullmatch(r"step 6  evaluation loss \d\.\d{4}, perplexity [\d.,]+", rest[0])
    assert rest[-1] == "step 8  checkpoint saved"
    assert "learning rate 1e-5, constant, 2 warm-up steps" in told, "notes are printed too"


def test_every_step_is_printed_when_its_time_has_come(place: Path, prepare: Any) -> None:
    told: list[str] = []
    lines(place, prepare, Progress(every_seconds=0, write=told.append))
    assert sum(line.startswith("step ") for line in told) == 8


@pytest.mark.parametrize("printed", [True, False])
def test_a_trainer_prints_its_progress_unless_told_not_to(
    place: Path, prepare: Any, capsys: pytest.CaptureFixture[str], printed: bool
) -> None:
    capsys.readouterr()
    prepare(place, None, steps=1, progress=printed).fit()
    assert ("step 1/1  loss " in capsys.readouterr().out) == printed


def test_a_log_that_cannot_be_written_or_lacks_a_character_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    Progress().on_note("\u00abo\u00bb")
    assert out.getvalue() == rb"\xabo\xbb" + b"\n"

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    Progress().on_note("lost")
