"""Tests of `megatrain train --ask`: answers of the trained model, and failures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments.cli.training import generation
from megatrain.experiments.run_report import pictures
from megatrain.runtime.training import conversation
from megatrain.runtime.training.answers import Answer, add_answer

ASKED = ("how are you?", "<b>how</b>")
TRAIN = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--steps", 3)
ASK = [word for question in ASKED for word in ("--ask", question)]


@pytest.fixture(autouse=True)
def talker(workplace: Path, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(workplace / "tiny")
    monkeypatch.setattr(pictures, "draw_loss", lambda *_: None)


def answers(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "answers.jsonl").read_text().splitlines()]


def shown(answer: str) -> str:
    """Returns an answer as a terminal shows it: without control characters."""
    return "".join(each for each in answer if each.isprintable() or each in "\n\t")


def test_ask_gives_the_answers_of_chat(command: Any) -> None:
    outcome = command(*TRAIN, *ASK, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    said = answers("run")
    assert [(row["step"], row["model"], row["question"]) for row in said] == [
        (3, "model", question) for question in ASKED
    ]
    end = "".join(f"\n> {row['question']}\n{shown(row['answer'])}\n" for row in said)
    assert outcome.out.endswith(end)
    words = ("--temperature", 0, "--max-tokens", 256, "--device", "cpu")
    chat = command("chat", "run", "--prompt", ASKED[1], *words)
    assert chat.out == f"{shown(said[1]['answer'])}\n"

    # from a config, and the same again
    outcome = command("train", "plan.toml", "--config", "run/config.toml", "--out", "again")
    assert (outcome.status, answers("again")) == (0, said)

    # The report has the answers, with escaped tags.
    assert command("report", "run").status == 0
    page = Path("run/report.html").read_text()
    assert "<h2>Samples</h2>" in page
    assert "<dt>&lt;b&gt;how&lt;/b&gt; (after step 3)</dt><dd>" in page
    Path("run/answers.jsonl").unlink()
    assert command("report", "run").status == 0
    assert "Samples" not in Path("run/report.html").read_text()


@pytest.mark.parametrize(
    ("option", "where", "shown"),
    [
        (("--ask", "Caf\udce9?"), "--ask", "'Caf\\udce9'"),
        (("--ask", "Caf\udce9" + 30 * "e"), "--ask", "'Caf\\udce9'"),
        (("--ask", 30 * "a" + "\udce9?"), "--ask", f"'{20 * 'a'}\\udce9'"),
        (("--set", 'evaluation.ask=["Caf\udce9"]'), "--set evaluation.ask", "'[\"Caf\\udce9'"),
        (("--set", "ask=Caf\udce9"), "--set ask", "'Caf\\udce9'"),
    ],
)
def test_a_question_that_is_not_utf_8_is_refused_in_one_line(
    command: Any, option: tuple[str, str], where: str, shown: str
) -> None:
    outcome = command(*TRAIN, *option, "--out", "refused")
    assert outcome.status == 2
    assert f"{where}: found bytes that are not UTF-8, {shown}; allowed: text" in outcome.err
    assert outcome.err.count("\n") == 1
    assert "rename" not in outcome.err
    assert not Path("refused").exists()


def test_the_answers_of_an_earlier_model_stay(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    given = [
        Answer(step=step, model=model, question=question, answer=answer)
        for step, model, question, answer in (
            (3, "model", "one", "a"),
            (3, "model", "two", "b"),
            (9, "model-9", "one", "c"),
            (3, "model", "one", "d"),
        )
    ]
    for each in given:
        add_answer(tmp_path / "run", each)
    found = answers(str(tmp_path / "run"))
    assert [row["answer"] for row in found] == ["b", "c", "d"]


def test_a_model_too_large_to_answer_does_not_fail_the_run(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, needed: int) -> None:
        generation._refuse_large(folder, needed, 1000, "host memory")

    monkeypatch.setattr(generation, "refuse_larger_than_host", refuse)
    outcome = command(*TRAIN, *ASK, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    last = outcome.out.splitlines()[-1]
    assert last.startswith("no answers: weights of ")
    assert " do not fit into 1000 B, the host memory that is free; " in last
    assert last.endswith("ask later with: megatrain chat run")
    assert not Path("run/answers.jsonl").exists()


@pytest.mark.parametrize("error", [RuntimeError("no kernel\nfor this"), KeyboardInterrupt()])
def test_a_failure_in_answering_is_no_failure_of_the_run(
    command: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(conversation.ChatSession, "answer", fail)
    outcome = command(*TRAIN, *ASK, "--out", "run")
    later = "ask later with: megatrain chat run\n"
    if isinstance(error, KeyboardInterrupt):
        assert outcome.err == f"megatrain: the run is finished; {later}"
        return
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith(f"no more answers: no kernel; {later}")


def test_a_question_that_is_too_long_does_not_prevent_other_answers(command: Any) -> None:
    outcome = command(*TRAIN, "--ask", "how are you " * 20, "--ask", "how", "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    assert "no answer: conversation: found " in outcome.out
    assert [row["question"] for row in answers("run")] == ["how"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ask", ""), "--ask: found no text; allowed: a text"),
        (("--ask", "how", "--no-export"), "--ask: found no model to ask, because of --no-export"),
    ],
)
def test_mistakes_give_one_line_errors(
    command: Any, words: tuple[object, ...], message: str
) -> None:
    outcome = command(*TRAIN, *words, "--out", "run")
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path("run").exists()
