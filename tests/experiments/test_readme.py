"""The README shows what the commands print: predictions move with the machines' files and the planner, and the page has to follow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments import cli, readers_questions

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
"""(language, text)"""


def test_the_example_of_check_is_today_s(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [line for line in README.splitlines() if line.startswith("$ megatrain check qwen2.5-7b --hardware h200 --device-memory")]
    assert cli.main(command.split()[2:]) == 0
    printed = capsys.readouterr().out
    assert command + "\n" + printed in README


def test_the_answers_to_readers_questions_are_today_s(capsys: pytest.CaptureFixture[str]) -> None:
    readers_questions.main()
    missing = [line for line in capsys.readouterr().out.splitlines() if line and line not in README]
    assert not missing, "run `python -m megatrain.experiments.readers_questions` and put what it prints into README.md"


def test_the_library_s_example_trains(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands there, but for fewer steps; it is short."""
    (code,) = [text for language, text in BLOCKS if language == "python" and "Trainer(" in text]
    assert len([line for line in code.splitlines() if line]) <= 10
    shorter = code.replace("steps=300", "steps=4").replace("every_steps=100", "every_steps=2")
    exec(compile(shorter, "README.md", "exec"), {"__name__": "readme"})
    run = workplace / "RUN"
    assert (run / "metrics.jsonl").read_text().count("\n") == 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert (run / "model" / "model.safetensors").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("line", [line for line in README.splitlines() if line.startswith("megatrain train ")])
def test_every_option_that_it_shows_is_one(line: str) -> None:
    cli.parse(re.split(r" {3,}", line)[0].split()[1:])


def test_the_commands_on_training_do_what_is_said(workplace: Path, command: Any, make_tokenizer: Any) -> None:
    """In a fiftieth of the steps."""
    (block,) = [text for _, text in BLOCKS if "--save-every" in text]
    (workplace / "chat.jsonl").write_text("".join(json.dumps({"text": f"row {number} of the data"}) + "\n" for number in range(200)))
    make_tokenizer(workplace / "tiny")
    (workplace / "other-plan.toml").write_bytes((workplace / "plan.toml").read_bytes())
    for line in block.splitlines():
        words = re.split(r" {3,}", line)[0].split()[1:]
        outcome = command(*[str(int(word) // 50) if word.isdigit() else word for word in words], "--device", "cpu", "--data-cache", "cache")
        assert (outcome.status, outcome.err) == (0, ""), line
    assert sorted(path.name for path in (workplace / "RUN" / "checkpoints").iterdir()) == ["step-00000008", "step-00000010"]
