"""Tests of `--state` from the verdict to the exported model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from short_model import shortened

from megatrain.experiments.cli import options
from megatrain.experiments.cli.verdict import from_options
from megatrain.experiments.commands import check
from megatrain.experiments.run_report.model_card import model_card
from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
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
    # A constant rate does not depend on the number of steps.
    train = (*train, "--schedule.kind", "constant")
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
    assert f"found workload.state {state} in the checkpoint and {other}" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_verdict_names_a_format_that_is_not_exact(command: Command) -> None:
    words = ("check", shortened("qwen2.5-7b", 6), "--hardware", "rtx4090")
    words = (*words, "--device-memory", "8GiB", "--host-memory", "21GiB")
    outcome = command(*words, "--batch", 1)
    assert outcome.status == 3
    assert "master weights" not in outcome.out
    found = " ".join(good(command(*words, "--batch", 1, "--state", "master24")).split())
    assert "with 24-bit master weights and 8-bit moments (master24) fits" in found
    assert found.count("--state master24") == 2, "both next commands keep the format"


@pytest.mark.parametrize(
    ("memory", "dtype", "state"),
    [
        ("128GiB", "bf16", "exact"),
        ("64GiB", "bf16", "master24"),
        ("26GiB", "bf16", "bf16-sr"),
        ("64GiB", "fp8", "master24"),
    ],
)
def test_any_format_is_the_least_compressed_that_fits(memory: str, dtype: str, state: str) -> None:
    parser = options.OneLineParser()
    check.describe(parser)
    words = ["qwen2.5-7b", "--hardware", "rtx4090", "--host-memory", memory, "--policy"]
    args = parser.parse_args([*words, "overlapped", "--state", "any", "--dtype", dtype])
    hardware, model = HardwareSpec.load("rtx4090"), ModelSpec.load("qwen2.5-7b")
    assert from_options.with_fitting_state(args, hardware, model).state == state
    assert args.state == "any"


def test_if_no_format_fits_any_gives_what_the_smallest_lacks(command: Command) -> None:
    words = ("check", "qwen2.5-7b", "--hardware", "rtx4090", "--host-memory", "16GiB")
    outcome = command(*words, "--policy", "overlapped", "--state", "any")
    assert outcome.status == 3
    found = " ".join(outcome.out.split())
    assert "(bf16-sr) does not fit" in found
    assert "GiB too little" in found


def test_any_format_is_exact_where_no_other_is_possible(command: Command) -> None:
    words = ("check", "tiny", "--hardware", "rtx4090", "--state", "any", "--json")
    for more in (("--dtype", "fp32"), ("--policy", "zero_offload")):
        assert json.loads(good(command(*words, *more)))["workload"]["state"] == "exact"
    outcome = command("calibrate", "tiny", "--state", "any", "--out", "x.toml")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    planned = good(
        command("plan", "tiny", "--hardware", "h200", *WORK, "--state", "any", "--out", "any.toml")
    )
    assert "master weights" not in planned
    assert Plan.load(Path("any.toml")).workload.state == "exact"


def test_a_format_that_layers_cannot_have_is_not_calibrated(command: Command) -> None:
    words = ("calibrate", "tiny", "--dtype", "fp32", "--state", "master24", "--out", "x.toml")
    outcome = command(*words)
    assert outcome.status == 2
    assert "found master24 with dtype fp32" in outcome.err
    assert not Path("x.toml").exists()


def test_a_run_stores_gradients_in_8_bits_and_clips_by_moving_norms(command: Command) -> None:
    words = ("plan", "tiny", "--hardware", "h200", "--policy", "overlapped", *WORK)
    planned = good(command(*words, "--gradients", "8bit", "--out", "p.toml"))
    assert ") with gradients stored in 8 bits fits" in " ".join(planned.split())
    assert Plan.load(Path("p.toml")).workload.gradients == "8bit"
    good(command(*words, "--clipping", "adagc", "--out", "q.toml"))
    train = ("--data", "corpus", "--device", "cpu", "--steps", 2)
    for plan, norms, more in (("p", "exact", ()), ("q", "adagc", ("--adagc-warm-up", 1))):
        good(command("train", f"{plan}.toml", *train, *more, "--out", plan))
        rows = [json.loads(line) for line in Path(plan, "metrics.jsonl").read_text().splitlines()]
        assert all(row["gradient_norm"] > 0 for row in rows)
        factors = [row.get("clip_factor") for row in rows]
        assert factors == [None, None] if norms == "exact" else 0 < min(factors) <= 1
        stored = "| gradients | stored in 8 bits |" in model_card(Path(plan), "x")
        assert stored == (norms == "exact")


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
