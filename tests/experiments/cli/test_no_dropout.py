"""Tests of `--no-dropout`, with which every verb accepts a model with dropout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.commands import calibrate
from megatrain.runtime.calibration.presets import CalibrationPreset
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan

WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16, "--dtype", "fp32")


@pytest.fixture
def dropping(workplace: Path) -> Path:
    """Returns the workplace with dropout in the config of its model."""
    path = workplace / "tiny" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.1}))
    return workplace


def test_a_model_with_dropout_is_planned_and_trained(
    dropping: Path, command: Callable[..., Any]
) -> None:
    words = (
        "plan",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--policy",
        "resident",
        "--out",
        "new.toml",
    )
    refused = command(*words)
    assert refused.status == 2
    assert (
        "model tiny: attention_dropout: found 0.1; allowed: 0; fix: make the plan with --no-dropout"
        in refused.err
    )
    planned = command(*words, "--no-dropout")
    assert planned.status == 0
    assert "for prediction only" not in planned.out
    assert Plan.load(dropping / "new.toml").workload.no_dropout
    trained = command(
        "train", "new.toml", "--data", "corpus", "--steps", 1, "--device", "cpu", "--out", "run"
    )
    assert trained.status == 0, trained.err
    assert (
        json.loads((dropping / "run" / "model" / "config.json").read_text())["attention_dropout"]
        == 0.1
    )


@pytest.mark.usefixtures("dropping")
def test_check_and_sweep_take_it(command: Callable[..., Any]) -> None:
    assert command("check", "tiny", "--hardware", "h200", *WORK, "--no-dropout").status == 0
    assert (
        command(
            "sweep",
            "tiny",
            "--hardware",
            "h200",
            *WORK,
            "--no-dropout",
            "--policy",
            "resident",
            "--jobs",
            1,
            "--out",
            "swept",
        ).status
        == 0
    )


@pytest.mark.usefixtures("dropping")
def test_calibrate_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "--out", "hardware.toml", *map(str, WORK)]
    assert cli.main(["calibrate", *words, "--device", "cpu"]) == 2
    refused = "attention_dropout: found 0.1; allowed: 0; fix: make the plan with --no-dropout"
    assert refused in capsys.readouterr().err
    assert not Path("hardware.toml").exists()
    parser = OneLineParser()
    calibrate.describe(parser)
    model = ModelSpec.load("tiny")
    workload, _ = calibrate._workloads(
        parser.parse_args([*words, "--no-dropout"]), model, CalibrationPreset((), 32, 1024, None)
    )
    assert workload.no_dropout
    assert config_of(model).attention_dropout == 0
