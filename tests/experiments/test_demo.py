"""Tests of the demo with four training steps and a shortened calibration."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments import demo
from megatrain.experiments.cli import main as cli
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

FILES = {
    "plan.toml",
    "metrics.jsonl",
    "model",
    "trace.json",
    "timeline.png",
    "memory.png",
    "loss.png",
    "report.html",
}


def run_demo(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["demo", *(str(word) for word in words)])
    return demo.main()


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_output(out: Path, printed: str, steps: int) -> Plan:
    """Asserts that a demo of `steps` steps printed and wrote everything; returns its plan."""
    run = out / "run"
    assert {path.name for path in run.iterdir()} >= FILES
    assert len(losses(run)) == steps
    assert all(math.isfinite(loss) for loss in losses(run))
    assert all(f"=== {number}. " in printed for number in range(1, 7))
    assert all(
        f"$ megatrain {verb} " in printed
        for verb in ("calibrate", "plan", "train", "compare", "report")
    )
    assert all(str(run / name) in printed for name in FILES)
    return Plan.load(run / "plan.toml")


@pytest.mark.nightly
@pytest.mark.usefixtures("fast_calibration", "with_pictures")
def test_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo runs with its own model and corpus."""
    out = tmp_path / "demo"
    assert run_demo(monkeypatch, "--out", out, "--steps", 4, "--device", "cpu") == 0
    printed, complaint = capsys.readouterr()
    assert complaint == ""
    plan = check_output(out, printed, 4)
    assert 10e6 < plan.model.parameters < 30e6
    assert plan.device_limit_bytes < 4 * plan.model.parameters, "the weights alone must not fit"


def test_the_commands_of_a_demo_in_the_folder_of_an_earlier_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make_model: Any,
) -> None:
    """The demo's commands are valid in their order, and name files that earlier commands wrote.

    Each command is parsed and not run.
    """
    out = tmp_path / "demo"
    given: list[Any] = []

    def parsed(words: list[str]) -> int:
        given.append(cli.parse(words))
        (out / "run").mkdir(exist_ok=True)
        return 0

    monkeypatch.setattr(demo.cli, "main", parsed)
    monkeypatch.setattr(demo, "make_model", lambda folder, **_: make_model(folder))
    (out / "run").mkdir(parents=True)
    (out / "run" / "of an earlier demo").touch()
    (out / ".megatrain-demo").touch()
    assert run_demo(monkeypatch, "--out", out, "--steps", 4, "--device", "cpu") == 0
    printed, complaint = capsys.readouterr()
    assert complaint == ""
    assert all(f"=== {number}. " in printed for number in range(1, 7))
    calibrated, planned, trained, compared, reported = given
    verbs = [args.verb for args in given]
    assert verbs == ["calibrate", "plan", "train", "compare", "report"]
    assert str(calibrated.out) == planned.hardware
    assert str(planned.out) == str(trained.plan)
    assert [trained.out, *compared.runs, reported.run] == [out / "run"] * 3
    assert 0 < planned.device_memory < 4 * 57_632, "the weights alone must not fit"
    assert not (out / "run" / "of an earlier demo").exists()


@pytest.mark.parametrize("content", ["a folder", "a file"])
def test_files_that_no_demo_has_written_stay(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "thesis"
    kept = out / "run" / "chapter.txt" if content == "a folder" else out
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("years of work")
    assert run_demo(monkeypatch, "--out", out, "--steps", 4) == 2
    printed, complaint = capsys.readouterr()
    assert printed == ""
    found, allowed = "files that no demo has written", "a new folder, or one of an earlier demo"
    fix = "choose another folder with --out"
    refused = UserError(str(out), found=found, allowed=allowed, fix=fix)
    assert complaint == f"megatrain demo: {refused}\n"
    assert kept.read_text() == "years of work"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]


def test_a_mistake_in_the_demo_s_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(monkeypatch, "--steps", "0") == 2
    assert (
        capsys.readouterr().err
        == "megatrain demo: --steps: found '0'; allowed: a whole number >= 1; fix: write it like"
        " --steps 1\n"
    )
