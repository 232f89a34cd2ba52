"""Tests of runs that are killed while they switch to another plan."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from counted_costs import write_machine

from megatrain.simulator.schedule.plan import Plan

TRAIN = (
    "train",
    "double_buffer.toml",
    "--data",
    "corpus",
    "--data-cache",
    "cache",
    "--device",
    "cpu",
    "--steps",
    7,
    "--save-every",
    4,
)
OF_THE_PLAN = ("seconds", "tokens_per_second", "schedule", "check")
MOMENTS = {
    "before its checkpoint is complete": ("megatrain.runtime.checkpoint.checkpoint:replace", 2),
    "while the state is read": ("megatrain.runtime.checkpoint.checkpoint:read_tensors", 1),
    "before the folder has the plan": ("megatrain.runtime.training.run_folder:save_plan", 3),
    "in the first step": ("megatrain.runtime.execution.executor:Executor.step", 6),
    "before the first step": ("megatrain.runtime.training.progress:Progress.on_switch", 1),
}
"""(function, number of its call): the kill comes right before that call"""


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in OF_THE_PLAN}
        for line in lines
    ]


def adapting(place: Path) -> None:
    """Replaces the hardware file of the plan by one with which `--adapt` always switches."""
    write_machine(place)
    plan = place / "double_buffer.toml"
    plan.write_text(plan.read_text().replace('hardware = "h200"', 'hardware = "counted.toml"'))


@pytest.fixture(scope="module")
def straight(driver: Any, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an undisturbed run. Tests must not change it."""
    place: Path = tmp_path_factory.mktemp("straight") / "place"
    shutil.copytree(prepared, place)
    ended = driver.run(place, *TRAIN, "--out", "run")
    assert ended.status == 0, ended.text
    return place / "run"


@pytest.mark.parametrize(
    "moment",
    [
        "while the state is read",
        "before the folder has the plan",
        "in the first step",
        pytest.param("before its checkpoint is complete", marks=pytest.mark.nightly),
        pytest.param("before the first step", marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_killed_in_a_switch_continues_with_the_same_bits(
    driver: Any, workplace: Path, straight: Path, moment: str, leftovers: Any
) -> None:
    adapting(workplace)
    at = (*MOMENTS[moment], "SIGKILL")
    killed = driver.run(workplace, *TRAIN, "--adapt", "--out", "run", at=at)
    assert killed.status == -signal.SIGKILL, killed.text
    first = Plan.load(workplace / "double_buffer.toml").digest
    assert Plan.load(workplace / "run" / "plan.toml").digest == first
    ended = driver.run(workplace, "train", "--resume", "run", "--device", "cpu")
    assert ended.status == 0, ended.text
    if moment == "in the first step":
        lines = (workplace / "run" / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line)["schedule"] for line in lines} == {first}
    last = 4 if moment == "before its checkpoint is complete" else 5
    assert f"continues after step {last}\n" in ended.text
    run, model = workplace / "run", Path("model") / "model.safetensors"
    assert rows(run) == rows(straight)
    assert (run / model).read_bytes() == (straight / model).read_bytes()
    assert leftovers(workplace) == []


def test_a_signal_in_a_switch_is_handled_when_the_state_is_read(
    driver: Any, workplace: Path, straight: Path
) -> None:
    adapting(workplace)
    at = (*MOMENTS["while the state is read"], "SIGTERM")
    ended = driver.run(workplace, *TRAIN, "--adapt", "--out", "run", at=at)
    assert ended.status == 128 + signal.SIGTERM, ended.text
    assert "stopped after step 5; saved; continue with: megatrain train --resume run" in ended.text
    assert rows(workplace / "run") == rows(straight)[:5]
