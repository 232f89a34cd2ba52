"""Tests of `--dtype fp8` from the verdict to the exported model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.schedule.plan import Plan

WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16)
FP8 = ("--dtype", "fp8", "--fp8-scaling", "tensorwise")
Command = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("workplace")


def good(outcome: Any) -> str:
    assert (outcome.status, outcome.err) == (0, "")
    return str(outcome.out)


def test_a_run_is_planned_trained_stopped_resumed_and_exported(command: Command) -> None:
    words = ("plan", "tiny", "--hardware", "h200", *WORK)
    planned = " ".join(good(command(*words, *FP8, "--out", "p.toml")).split())
    assert "of the layers' matrix products, by FLOPs, are in fp8 (tensorwise)" in planned
    work = Plan.load(Path("p.toml")).workload
    assert (work.dtype, work.fp8) == ("bf16", "tensorwise")
    good(command(*words, "--dtype", "fp8", "--out", "rowwise.toml"))
    good(command(*words, "--out", "plain.toml"))
    plans = [Plan.load(Path(f"{name}.toml")) for name in ("rowwise", "plain")]
    assert [plan.workload.fp8 for plan in plans] == ["rowwise", None]
    train = ("train", "p.toml", "--data", "corpus", "--device", "cpu", "--save-every", 2)
    # A constant rate does not depend on the number of steps.
    train = (*train, "--schedule.kind", "constant")
    good(command(*train, "--steps", 4, "--out", "straight"))
    good(command(*train, "--steps", 2, "--out", "run"))
    good(command("train", "--resume", "run", "--steps", 4, "--device", "cpu"))
    good(command("train", "plain.toml", *train[2:], "--steps", 4, "--out", "plain"))
    models = [
        (folder / "model.safetensors").read_bytes()
        for run in ("straight", "run", "plain")
        if (folder := newest_model(Path(run)))
    ]
    assert models[0] == models[1]
    assert models[0] != models[2]


def test_the_verdict_repeats_the_options(command: Command) -> None:
    check = ("check", "tiny", "--hardware", "h200", *WORK)
    text = " ".join(good(command(*check, *FP8)).replace("\\\n", "").split())
    assert text.count("--dtype fp8 --fp8-scaling tensorwise") == 2, "both next commands"
    text = good(command(*check, "--clipping", "adagc", "--compile"))
    assert text.replace("\\\n", "").count("--compile") == 2
    assert text.count("--clipping adagc") == 2
    found = json.loads(good(command(*check, "--json")))
    assert (found["fp8"], found["workload"]["fp8"]) == ("", None)


def test_a_scaling_without_fp8_is_refused(command: Command) -> None:
    for dtype in ((), ("--dtype", "fp32")):
        outcome = command("check", "tiny", "--hardware", "h200", *WORK, *dtype, *FP8[2:])
        assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        assert "--fp8-scaling: found tensorwise with --dtype" in outcome.err


def test_machines_without_fp8_are_refused_in_one_line(command: Command) -> None:
    outcome = command("check", "qwen2.5-7b", "--hardware", "rtx3090", *WORK, "--dtype", "fp8")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == (
        "megatrain: hardware rtx3090: peak_tflops: found no rate for fp8; allowed: a GPU with fp8"
        " matrix products, compute capability 8.9 or later, such as h200; fix: use --dtype bf16\n"
    )
