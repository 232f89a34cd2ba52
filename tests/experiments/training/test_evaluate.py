"""Tests of `megatrain eval`: the loss of a run's model on other data."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatrain.runtime.memory.fitting import LOADING_BYTES
from megatrain.runtime.training import evaluating
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan


def test_the_loss_on_the_same_data_is_that_of_the_run(
    prepared: Path, command: Any, tmp_path: Path
) -> None:
    """The weights differ from those at the start, which `--model` evaluates for comparison."""
    run = tmp_path / "run"
    other = prepared / "corpus" / "two.py"
    outcome = command(
        *("train", prepared / "plan.toml", "--data", prepared / "corpus" / "one.txt"),
        *("--eval-data", other, "--steps", 2, "--lr", "1e-4", "--device", "cpu", "--out", run),
    )
    assert (outcome.status, outcome.err) == (0, "")
    recorded = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    words = ("eval", run, "--data", other, "--device", "cpu")
    outcome = command(*words, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert found["loss"] == recorded["evaluation_loss"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert command(*words).out.splitlines()[-1] == (
        f"loss {found['loss']:.4f}, perplexity {found['perplexity']:,.2f}, over"
        f" {found['tokens']:,} tokens"
    )
    first = json.loads(command(*words, "--json", "--model", prepared / "tiny").out)
    assert first["tokens"] == found["tokens"]
    assert first["loss"] > found["loss"]


def test_a_host_that_is_too_small_is_refused_unless_the_machine_was_calibrated(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrections do not count as a calibration. Data is checked after the host's memory."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text((finished / "config.toml").read_text())
    (run / "model").symlink_to(finished / "model")
    plan = msgspec.structs.replace(Plan.load(finished / "plan.toml"), hardware="hardware.toml")
    plan.save(run / "plan.toml")
    monkeypatch.setattr(evaluating, "host_bytes", lambda: 2**20)
    for text, match in (
        ("[corrections]\ncompute = 2.0\n", "what this machine has"),
        ("[costs]\n", "no such file or folder"),
    ):
        (run / "hardware.toml").write_text(text)
        with pytest.raises(UserError, match=match):
            evaluating.evaluate_run(run, ("none.txt",), device=torch.device("cpu"))


def test_without_a_gpu_the_pools_of_both_must_fit_in_the_host(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = lower(Plan.load(finished / "plan.toml")).buffers
    pools = sum(each.allocated for each in buffers if not each.dynamic)
    monkeypatch.setattr(evaluating, "host_bytes", lambda: pools + LOADING_BYTES - 1)
    monkeypatch.setattr(evaluating, "is_calibrated", lambda _: False)
    with pytest.raises(DoesNotFit, match="device and host memory: found a plan that needs"):
        evaluating.evaluate_run(finished, ("none.txt",), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--data", "none.txt"), "data none.txt: found no such file or folder"),
        (("--data", "corpus", "--split", "dev"), "split: found 'dev'"),
        (("--data", "corpus", "--model", "none"), "model none: found no such folder"),
        ((), "found no --data"),
    ],
)
@pytest.mark.usefixtures("workplace")
def test_mistakes_give_one_line_errors(
    command: Any, finished: Path, words: tuple[str, ...], reason: str
) -> None:
    outcome = command("eval", finished, *words, "--device", "cpu")
    assert outcome.status == 2
    assert reason in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.usefixtures("workplace")
def test_a_run_without_a_model_says_how_to_export_one(
    command: Any, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("model"))
    with monkeypatch.context() as patch:  # it is said before the slow import
        patch.setitem(sys.modules, "megatrain.runtime.training.evaluating", None)
        outcome = command("eval", run, "--data", "corpus", "--device", "cpu")
    assert outcome.status == 2
    assert f"{run}: found no exported model" in outcome.err
    assert f"fix: megatrain export {run} --out MODEL, and pass --model MODEL" in outcome.err
    plan = Plan.load(run / "plan.toml")
    work = msgspec.structs.replace(plan.workload, accumulation=2)
    msgspec.structs.replace(plan, gpus=2, workload=work).save(run / "plan.toml")
    outcome = command("eval", run, "--data", "corpus", "--device", "cpu")
    assert f"{run}: found a run on 2 GPUs; allowed: a run on one GPU" in outcome.err
    outcome = command("eval", "corpus", "--data", "corpus")
    assert "corpus: found a folder without config.toml" in outcome.err
