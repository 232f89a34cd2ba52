"""Tests of the examples in README.md and docs/: they show what the commands print today.

Predictions change with the hardware files and the planner, and the pages must then be updated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pages import COMMANDS, PAGES, blocks, name, read, words

from megatrain.experiments import readers_questions
from megatrain.experiments.cli import main as cli
from megatrain.simulator import Plan

README, CLI, TRAINING, ANSWERS = "README.md", "docs/cli.md", "docs/training.md", "docs/answers.md"
REFERENCE = "docs/reference.md"


def test_the_example_of_check_is_today_s(capsys: pytest.CaptureFixture[str]) -> None:
    """The README has the command's whole output, and the page on the command line the command."""
    (command,) = [
        line for page, line in COMMANDS if page == README and line.startswith("$ megatrain check")
    ]
    assert cli.main(words(command)) == 0
    printed = capsys.readouterr().out
    assert command + "\n" + printed in read(README)
    assert (CLI, command.removeprefix("$ ")) in COMMANDS


_QUICK = ("14B on an H200 with 128 GB of host memory?",)
"""the question with the fastest answer; nightly tests ask the others"""


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(question, marks=[] if question[0] in _QUICK else pytest.mark.nightly)
        for question in readers_questions.QUESTIONS
    ],
    ids=lambda question: question[0],
)
def test_the_answers_to_readers_questions_are_today_s(
    question: tuple[str, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(readers_questions, "QUESTIONS", (question,))
    readers_questions.main()
    printed = capsys.readouterr().out.strip()
    assert f"\n\n{printed}\n" in read(ANSWERS).strip() + "\n", (
        "run `python -m megatrain.experiments.readers_questions` and put its output into"
        " docs/answers.md"
    )


def test_the_answers_have_the_questions_in_their_order() -> None:
    headings = [line[3:] for line in read(ANSWERS).splitlines() if line.startswith("## ")]
    assert headings == [question for question, _ in readers_questions.QUESTIONS]


def test_the_library_s_example_trains(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example has at most ten lines and trains. The test reduces its number of steps."""
    (code,) = [block.text for block in blocks(TRAINING) if block.language == "python"]
    assert len([line for line in code.splitlines() if line]) <= 10
    shorter = code.replace("steps=300", "steps=4").replace("every_steps=100", "every_steps=2")
    exec(compile(shorter, TRAINING, "exec"), {"__name__": "readme"})
    run = workplace / "RUN"
    assert (run / "metrics.jsonl").read_text().count("\n") == 4
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    assert (run / "model" / "model.safetensors").exists()
    assert "step 4/4  loss " in capsys.readouterr().out


def test_the_simulator_s_example_prints_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block.text for block in blocks(CLI) if block.language == "python"]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, CLI, "exec"), names)
    assert capsys.readouterr().out.startswith("True ")
    verdict = names["verdict"]
    assert cli.main(["check", "qwen2.5-7b", "--hardware", "h200", "--batch", "32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["workload"] == msgspec.to_builtins(verdict.workload)
    assert report["step_seconds"] == verdict.step_seconds


def execute_example(place: int) -> None:
    """Executes the Python example of the reference that has `place` others before it."""
    code = [block.text for block in blocks(REFERENCE) if block.language == "python"][place]
    exec(compile(code, REFERENCE, "exec"), {"__name__": "readme"})


def test_the_reference_s_example_predicts_the_time_of_its_plan(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execute_example(0)
    step, timeline = map(float, capsys.readouterr().out.split())
    assert 0.9 * step < timeline < step
    prediction = Plan.load(workplace / "plan.toml").prediction
    assert prediction is not None
    assert prediction.step_seconds == step


@pytest.mark.usefixtures("workplace")
def test_the_reference_s_example_prints_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    execute_example(1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("schedule ")
    assert lines[1].startswith("buffer ")
    assert int(lines[-1]) > 0


def test_the_reference_s_example_predicts_other_depths(capsys: pytest.CaptureFixture[str]) -> None:
    execute_example(2)
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in found[::3]] == [["28", "overlapped"], ["56", "overlapped"]]
    assert [row[2] for row in found] == ["True"] * 6
    for shallow, deep in zip(found[:3], found[3:], strict=True):
        assert 1.6 < float(deep[3]) / float(shallow[3]) < 2.4


@pytest.mark.usefixtures("workplace")
def test_the_reference_s_example_executes_steps(capsys: pytest.CaptureFixture[str]) -> None:
    execute_example(3)
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [number for number, *_ in steps] == ["1", "2", "3"]
    assert all(float(loss) > 0 for _, loss, _ in steps)


def test_every_example_of_python_is_executed() -> None:
    """This test lists the pages with Python examples, because each example needs a test.

    Those tests are above, in test_contributing.py and in simulator/test_outside_plugins.py.
    """
    pages = [
        name(page) for page in PAGES for block in blocks(name(page)) if block.language == "python"
    ]
    assert pages == ["docs/adding.md"] * 4 + [CLI, *[REFERENCE] * 4, TRAINING]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_that_is_shown_can_be_parsed(page: str, line: str) -> None:
    given = cli.parse(words(line))
    assert given.verb == words(line)[0], page
    if given.verb == "train":
        assert (given.out is None) != (given.resume is None), "a run needs --out or --resume"


def test_every_verb_is_shown() -> None:
    assert {words(line)[0] for page, line in COMMANDS if page == CLI} == set(cli.VERBS)


def test_the_commands_of_the_training_page_work(
    workplace: Path, command: Any, make_tokenizer: Any
) -> None:
    """The commands run with 2 % of their steps."""
    (block,) = [block for block in blocks(TRAINING) if "--resume" in block.text]
    (workplace / "chat.jsonl").write_text(
        "".join(json.dumps({"text": f"row {number} of the data"}) + "\n" for number in range(200))
    )
    make_tokenizer(workplace / "tiny")
    (workplace / "other-plan.toml").write_bytes((workplace / "plan.toml").read_bytes())
    for line in block.text.splitlines():
        short = [str(int(word) // 50) if word.isdigit() else word for word in words(line)]
        outcome = command(*short, "--device", "cpu", "--data-cache", "cache")
        assert (outcome.status, outcome.err) == (0, ""), line
    assert sorted(path.name for path in (workplace / "RUN" / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000010",
    ]


@pytest.mark.nightly
@pytest.mark.usefixtures("fast_calibration")
@pytest.mark.parametrize(
    ("page", "beginning"), [(README, "megatrain train MODEL"), (TRAINING, "megatrain calibrate")]
)
def test_the_commands_from_a_model_to_a_trained_model_work(
    page: str,
    beginning: str,
    workplace: Path,
    tmp_path: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands run with a tiny model and short sequences."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    (block,) = [block for block in blocks(page) if block.text.startswith(beginning)]
    (workplace / "plan.toml").unlink()
    replaced = {"MODEL": "tiny", "DATA": "corpus", "chat.jsonl": "corpus", "2048": "16"}
    fp32, cpu = ("--dtype", "fp32", "--loss-chunk", "16"), ("--device", "cpu")
    more = {"calibrate": (*fp32, *cpu), "plan": fp32, "train": cpu, "compare": ()}
    for line in block.text.splitlines():
        given = words(line)
        outcome = command(*(replaced.get(word, word) for word in given), *more[given[0]])
        assert outcome.status == 0, outcome.err
    assert (workplace / "RUN" / "model" / "model.safetensors").exists()
