"""Tests of the line about a stopped run: its last step, its checkpoint, and how to continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.runtime.training.stopped_run import (
    how_it_stopped,
    last_step,
    metrics_line,
    no_checkpoint,
    readable,
)


@pytest.mark.parametrize(
    ("steps", "checkpoints", "words"),
    [
        (0, [], "stopped before the first step; not saved; begin again with: "),
        (1, [], "stopped after step 1; not saved; begin again with: "),
        (3, [3], "stopped after step 3; saved; continue with: "),
        (3, [1, 2], "stopped after step 3; saved after step 2; continue with: "),
    ],
)
def test_the_line_names_the_last_step_and_the_newest_checkpoint(
    tmp_path: Path, steps: int, checkpoints: list[int], words: str
) -> None:
    if steps:
        lines = [f'{{"step": {number}}}\n' for number in range(1, steps + 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for number in checkpoints:
        (tmp_path / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)
    again = "" if checkpoints else " --from-scratch"
    assert how_it_stopped(tmp_path) == f"{words}megatrain train --resume {tmp_path}{again}"


def test_a_run_with_a_model_but_no_checkpoint_names_the_model(tmp_path: Path) -> None:
    """The last checkpoint may not be written although the model was exported, on a full disk."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    line = f"stopped after step 1; no checkpoint was saved, but the model is in {model}"
    assert how_it_stopped(tmp_path) == line
    assert str(no_checkpoint(tmp_path)) == (
        f"{tmp_path}: found no checkpoint to continue from, but a trained model, {model}; allowed:"
        " a run with a checkpoint; fix: train again with another --out"
    )


def test_an_incomplete_line_of_the_metrics_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert last_step(tmp_path) == 1


def test_a_changed_character_of_the_metrics_is_noticed(tmp_path: Path) -> None:
    """Each character of a line is replaced in turn, also by another digit."""
    lines = [metrics_line({"step": step, "loss": 2.5 - step / 7}) for step in (1, 2, 3)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(lines))
    assert readable(file) == (list(enumerate(lines, 1)), 0)
    number = lines[1].index('"check"')
    for at, old in enumerate(lines[1][:-1]):
        if not number <= at < number + len('"check"'):  # without this key it is an older line
            for new in ("0" if old != "0" else "1", "x"):
                file.write_text(lines[0] + lines[1][:at] + new + lines[1][at + 1 :] + lines[2])
                assert readable(file) == ([(1, lines[0]), (3, lines[2])], 1), (at, new)


def test_a_line_of_an_older_version_has_no_checksum(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 4, "loss": 1.5}\n')
    assert readable(file) == ([(4, '{"step": 4, "loss": 1.5}\n')], 0)
