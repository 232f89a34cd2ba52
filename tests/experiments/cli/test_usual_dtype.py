"""Tests of the dtype that `check`, `plan` and `sweep` take without `--dtype`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.experiments.cli import options
from megatrain.experiments.sweep import load_sweep
from megatrain.experiments.web.answer import answer
from megatrain.experiments.web.question import Question
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Plan

SIZE = ("--batch", 1, "--seq", 16)
SAID = "layers compute in fp32, because h200 has no rate for bf16; --dtype chooses another dtype\n"


def machine(*dtypes: str) -> HardwareSpec:
    rates = dict.fromkeys(dtypes, 60.0)
    return msgspec.structs.replace(HardwareSpec.load("h200"), peak_tflops=rates)


@pytest.mark.usefixtures("workplace", "searched_once", "without_advice")
@pytest.mark.parametrize(
    ("rates", "option", "dtype", "said"),
    [
        (("fp32",), (), "fp32", SAID),  # as `calibrate` writes without a GPU
        (("fp32",), ("--dtype", "fp32"), "fp32", ""),
        (("fp32", "bf16"), (), "bf16", ""),
        (("fp32", "bf16"), ("--dtype", "fp32"), "fp32", ""),
    ],
)
def test_the_usual_dtype_is_one_that_the_machine_has_a_rate_for(
    command: Callable[..., Any],
    rates: tuple[str, ...],
    option: tuple[str, ...],
    dtype: str,
    said: str,
) -> None:
    write_toml(Path("machine.toml"), machine(*rates), "a machine")
    words = ("tiny", "--hardware", "machine.toml", *SIZE, *option)
    checked = command("check", *words, "--json")
    assert (checked.status, checked.err) == (0, said)
    assert json.loads(checked.out)["workload"]["dtype"] == dtype
    planned = command("plan", *words, "--out", "new.toml")
    assert (planned.status, planned.err) == (0, said)
    assert Plan.load("new.toml").workload.dtype == dtype


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("rates", "option", "dtypes", "said"),
    [
        (("fp32",), (), ["fp32"], SAID),
        (("fp32",), ("--dtype", "fp32"), ["fp32"], ""),
        (("fp32",), ("--over", "dtype", "fp32"), ["fp32"], ""),
        (("fp32", "bf16"), (), ["bf16"], ""),
        (("fp32", "bf16"), ("--over", "dtype", "bf16", "fp32"), ["bf16", "fp32"], ""),
    ],
)
def test_a_sweep_takes_the_usual_dtype_unless_dtypes_are_swept(
    command: Callable[..., Any],
    rates: tuple[str, ...],
    option: tuple[str, ...],
    dtypes: list[str],
    said: str,
) -> None:
    write_toml(Path("machine.toml"), machine(*rates), "a machine")
    words = ("sweep", "tiny", "--hardware", "machine.toml", *SIZE, "--policy", "resident")
    outcome = command(*words, "--jobs", 1, "--out", "swept", *option)
    assert (outcome.status, outcome.err) == (0, said)
    rows = load_sweep("swept")
    assert (sorted(rows["dtype"]), rows["fits"].all()) == (dtypes, True)


def test_the_page_takes_the_usual_dtype_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Question, "machine", lambda _: machine("fp32"))
    question = Question(model="qwen2.5-0.5b", hardware="h200", batch="1", seq="256")
    name, first = next(iter(answer(question)))
    assert name == "first"
    assert first is not None
    assert first["verdict"]["workload"]["dtype"] == "fp32"


@pytest.mark.parametrize(
    ("rates", "usual"),
    [(("fp8", "fp32"), "fp32"), (("fp8",), "bf16"), (("fp32", "bf16"), "bf16")],
    ids=str,
)
def test_the_usual_dtype_is_never_fp8(rates: tuple[str, ...], usual: str) -> None:
    """Its products need a rate for bf16 as well."""
    assert options.usual_dtype(machine(*rates)) == usual
