"""Tests of `--state` from the verdict to the exported model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.schedule.plan import Plan

WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16)
Command = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("workplace")


def good(outcome: Any) -> str:
    assert (outcome.status, outcome.err) == (0, "")
    return str(outcome.out)


@pytest.mark.parametrize("state", ["master24", "bf16-sr"])
def test_a_run_is_planned_trained_stopped_resumed_and_exported(
    command: Command, state: str
) -> None:
    words = ("plan", "tiny", "--hardware", "h200", *WORK)
    planned = good(command(*words, "--state", state, "--out", "p.toml"))
    assert f"({state}) fits" in " ".join(planned.split())
    assert Plan.load(Path("p.toml")).workload.state == state
    train = ("train", "p.toml", "--data", "corpus", "--device", "cpu", "--save-every", 2)
    train = (*train, "--schedule.kind", "constant")  # which does not depend on the steps
    good(command(*train, "--steps", 4, "--out", "straight"))
    good(command(*train, "--steps", 2, "--out", "run"))
    good(command("train", "--resume", "run", "--steps", 4, "--device", "cpu"))
    models = [
        (folder / "model.safetensors").read_bytes()
        for run in ("straight", "run")
        if (folder := newest_model(Path(run)))
    ]
    assert models[0] == models[1]
    good(command("export", "run", "--out", "exported"))
    assert Path("exported/model.safetensors").read_bytes() == models[0]
    good(command("export", "run", "--out", "wide", "--dtype", "fp32"))
    wide, narrow = (load_file(f"{name}/model.safetensors") for name in ("wide", "exported"))
    for name, values in wide.items():
        assert values.dtype == torch.float32
        assert ((values - narrow[name]).abs() <= 2.0**-8 * values.abs()).all()
    other = "bf16-sr" if state == "master24" else "exact"
    good(command(*words, "--state", other, "--out", "other.toml"))
    outcome = command("train", "other.toml", "--resume", "run", "--steps", 6, "--device", "cpu")
    assert outcome.status == 2
    assert f"found workload.state {state}; allowed: workload.state {other}" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_verdict_names_a_format_that_is_not_exact(command: Command) -> None:
    words = ("check", "qwen2.5-7b", "--hardware", "rtx4090", "--host-memory", "64GiB")
    outcome = command(*words, "--batch", 1)
    assert outcome.status == 3
    assert "master weights" not in outcome.out
    found = " ".join(good(command(*words, "--batch", 1, "--state", "master24")).split())
    assert "with 24-bit master weights and 8-bit moments (master24) fits" in found
    assert found.count("--state master24") == 2, "both next commands keep the format"


def test_only_exact_is_calibrated(command: Command) -> None:
    outcome = command("calibrate", "tiny", "--state", "master24", "--out", "x.toml")
    assert outcome.status == 2
    assert "--state: found master24; allowed: exact" in outcome.err


def test_a_run_stores_gradients_in_8_bits_and_clips_by_moving_norms(command: Command) -> None:
    words = ("plan", "tiny", "--hardware", "h200", "--policy", "overlapped", *WORK)
    planned = good(command(*words, "--gradients", "8bit", "--out", "p.toml"))
    assert "and gradients stored in 8 bits fits" in " ".join(planned.split())
    assert Plan.load(Path("p.toml")).workload.gradients == "8bit"
    good(command(*words, "--clipping", "adagc", "--out", "q.toml"))
    train = ("--data", "corpus", "--device", "cpu", "--steps", 2, "--adagc-warm-up", 1)
    for plan, norms in (("p", "exact"), ("q", "adagc")):
        good(command("train", f"{plan}.toml", *train, "--out", plan))
        rows = [json.loads(line) for line in Path(plan, "metrics.jsonl").read_text().splitlines()]
        assert all(row["gradient_norm"] > 0 for row in rows)
        factors = [row.get("clip_factor") for row in rows]
        assert factors == [None, None] if norms == "exact" else 0 < min(factors) <= 1


def test_gradients_in_8_bits_are_refused_where_they_are_not_stored(command: Command) -> None:
    for words, message in (
        (("calibrate", "tiny", "--out", "x.toml"), "--gradients: found 8bit; allowed: exact"),
        (
            ("check", "tiny", "--hardware", "h200", "--clipping", "layer"),
            "8bit with clipping layer",
        ),
        (("check", "tiny", "--hardware", "h200", "--policy", "resident"), "policy resident: grad"),
    ):
        outcome = command(*words, "--gradients", "8bit")
        assert outcome.status == 2
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
