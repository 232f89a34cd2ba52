"""The README shows what the commands print: predictions move with the machines' files and the planner, and the page has to follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.experiments import cli, readers_questions

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_example_of_check_is_today_s(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [line for line in README.splitlines() if line.startswith("$ megatrain check qwen2.5-7b --hardware h200 --device-memory")]
    assert cli.main(command.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert command + "\n" + printed in README


def test_the_answers_to_readers_questions_are_today_s(capsys: pytest.CaptureFixture[str]) -> None:
    readers_questions.main()
    missing = [line for line in capsys.readouterr().out.splitlines() if line and line not in README]
    assert not missing, "run `python -m megatrain.experiments.readers_questions` and put what it prints into README.md"
