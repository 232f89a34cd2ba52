"""MetricsFile: the file `metrics.jsonl` of a run, one line per step and one per evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatrain.runtime.training.stopped_run import last_checkpoint, metrics_line, readable
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_text

METRICS = "metrics.jsonl"
"""The name of the file in a run folder."""
FORMER = "metrics-before-resume.jsonl"
"""The name of a copy of the file as it was before a resume from an earlier step. It exists as long
as the run has later checkpoints, so one of them can still be resumed without a loss of lines."""


class _Line(NamedTuple):
    """A line of the file."""

    step: int
    """The number of the step."""
    is_evaluation: bool
    """Whether it is the line of an evaluation."""
    text: str
    """The line with its end."""


class MetricsFile:
    """The metrics of a run.

    A resume repeats steps whose lines the file has. These lines are removed when the first repeated
    one is written, not before, so a resume that fails earlier changes nothing.
    """

    def __init__(self, run: Path) -> None:
        """Uses the file in the folder `run`, which need not exist."""
        self.path = run / METRICS
        self._run, self._former = run, run / FORMER

    def append(self, row: Mapping[str, object]) -> None:
        """Appends `row` as one line of JSON.

        Infinity and NaN are written as null, because JSON cannot represent them. Raises UserError
        if the line cannot be written.
        """
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(metrics_line(plain))
                file.flush()
                # After a power failure, the metrics must have all steps of the newest checkpoint.
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                str(self.path),
                found=str(error.strerror).lower(),
                allowed="a disk with room",
                fix="free some space or name another folder",
            ) from None

    def mend(self) -> int:
        """Removes damaged lines, and restores lines that an earlier resume removed and that belong
        to a checkpoint which still exists. Returns the number of damaged lines.
        """
        kept, damaged = readable(self.path)
        lines = _lines(kept)
        known = {line[:2] for line in lines}
        newest = last_checkpoint(self._run)
        missing = [
            line
            for line in _lines(readable(self._former)[0])
            if line[:2] not in known and line.step <= newest
        ]
        if missing:
            lines = sorted(lines + missing, key=lambda line: line[:2])
        text = _text(lines)
        if not self.path.is_file() or self.path.read_bytes() != text.encode():
            write_text(self.path, text)
        return damaged

    def has_steps_before(self, first: int) -> bool:
        """Returns whether a line is of a step before `first`."""
        return any(step < first for step, _ in readable(self.path)[0])

    def cut(self, first: int, evaluated: int | None = None) -> None:
        """Removes the lines of the steps from `first` on, because these are repeated, and those of
        the evaluation after step `evaluated`.

        If a checkpoint of a removed step exists, the whole file is copied to `FORMER` before.
        """
        lines = _lines(readable(self.path)[0])
        kept = [
            line
            for line in lines
            if line.step < first and not (line.is_evaluation and line.step == evaluated)
        ]
        if len(kept) == len(lines):
            return
        if last_checkpoint(self._run) >= first:
            write_text(self._former, _text(lines))
        write_text(self.path, _text(kept))

    def forget_former(self, done: int) -> None:
        """Removes `FORMER` unless a checkpoint is of a step after `done`. The file has all lines of
        the steps up to `done`.
        """
        if self._former.is_file() and last_checkpoint(self._run) <= done:
            self._former.unlink(missing_ok=True)


def _lines(readable_lines: list[tuple[int, str]]) -> list[_Line]:
    return [
        _Line(step, "evaluation_loss" in json.loads(text), text) for step, text in readable_lines
    ]


def _text(lines: list[_Line]) -> str:
    return "".join(line.text for line in lines)
