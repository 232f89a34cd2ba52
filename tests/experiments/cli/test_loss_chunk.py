"""Tests of `--loss-chunk`: a given chunk is kept, and a chosen one is the same in all verbs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from short_model import SHORT, checked, out

from megatrain.experiments.cli import main as cli
from megatrain.experiments.web.answer import answer
from megatrain.experiments.web.question import Question
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.loss_chunk import with_loss_chunk
from megatrain.simulator.schedule.plan import Plan

WORK = ("--batch", "8", "--seq", "1024")
MODEL = ("config.json", "--hardware", "rtx4090")

pytestmark = pytest.mark.usefixtures("short_config", "without_advice")


def next_plan(printed: str) -> list[str]:
    """Returns the words of the command that writes the plan of a verdict."""
    joined = " ".join(line.strip().removesuffix("\\").strip() for line in printed.splitlines())
    return shlex.split(joined.partition("megatrain plan ")[2].partition(" #")[0])


def test_check_plan_and_the_page_choose_the_same_chunk(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected = with_loss_chunk(
        SHORT,
        HardwareSpec.load("rtx4090"),
        Workload(batch=8, sequence=1024, documents=True, short_recompute=True),
    )
    verdict = checked(capsys, *MODEL, *WORK)
    assert verdict["workload"] == msgspec.to_builtins(expected)
    assert expected.loss_chunk != 1024
    plan = tmp_path / "plan.toml"
    out(capsys, "plan", *MODEL, *WORK, "--out", str(plan))
    assert Plan.load(plan).workload == expected
    assert f"loss_chunk = {expected.loss_chunk}" in plan.read_text()
    asked = {"config": json.dumps(SHORT.config), "hardware": "rtx4090", "batch": "8"}
    page = dict(answer(Question.read(asked)))["verdict"]
    assert page
    assert page["verdict"]["workload"] == verdict["workload"]
    assert page["verdict"]["chunk_chosen"]


def test_a_chunk_that_is_named_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chunk = 1024
    words = (*WORK, "--loss-chunk", str(chunk))
    verdict = checked(capsys, *MODEL, *words)
    assert (verdict["workload"]["loss_chunk"], verdict["chunk_chosen"]) == (chunk, False)
    plan = tmp_path / "plan.toml"
    out(capsys, "plan", *MODEL, *words, "--tokens-per-step", "8192", "--out", str(plan))
    assert Plan.load(plan).workload.loss_chunk == chunk
    printed = out(capsys, "check", *MODEL, *words)
    train = printed.partition("megatrain train ")[2].partition("#")[0]
    assert f"--loss-chunk {chunk}" in train
    assert next_plan(printed).count("--loss-chunk") == 1


@pytest.mark.parametrize(
    "words", [("--seq", "256"), ("--tokens-per-step", "8192")], ids=["batch", "tokens"]
)
def test_the_next_command_writes_the_plan_of_the_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """`train` chooses the chunk together with the size of a step."""
    verdict = checked(capsys, *MODEL, *words)
    printed = out(capsys, "check", *MODEL, *words)
    out(capsys, "plan", *next_plan(printed))
    plan = Plan.load(tmp_path / "plan.toml")
    assert msgspec.to_builtins(plan.workload) == verdict["workload"]
    assert plan.prediction
    assert plan.prediction.step_seconds == verdict["step_seconds"]
    assert "--loss-chunk" not in printed.partition("megatrain train ")[2].partition("#")[0]


def test_a_model_that_fits_with_small_chunks_only_is_planned_with_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("--device-memory", "1.1GiB", "--batch", "2")
    verdict = checked(capsys, *MODEL, *small)
    assert verdict["feasible"]
    assert verdict["workload"]["loss_chunk"] < 1024
    assert verdict["largest_batch"] >= 2
    assert cli.main(["check", *MODEL, *small, "--loss-chunk", "1024", "--json"]) == 3
    capsys.readouterr()
    assert checked(capsys, *MODEL, *small, "--state", "any")["workload"] == verdict["workload"]


def test_other_commands_keep_the_default() -> None:
    for words in (
        ["sweep", "tiny", "--hardware", "h200", "--out", "x"],
        ["calibrate", "--out", "x"],
    ):
        assert cli.parse(words).loss_chunk == 1024


def test_why_says_how_many_tokens_have_logits(capsys: pytest.CaptureFixture[str]) -> None:
    printed = " ".join(out(capsys, "check", *MODEL, *WORK, "--loss-chunk", "512", "--why").split())
    assert "logits of 512 tokens at a time" in printed
