"""Tests of `megatrain list`: every name with its properties, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.experiments.commands.listing import table
from megatrain.simulator import policies
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.machine import library as machines
from megatrain.simulator.model.families import FAMILIES, INSIDE, REFUSED, UNDESCRIBED
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.specs import library as models

NAMES = {
    "models": set(models()),
    "hardware": set(machines()),
    "policies": set(policies.registered()),
    "optimizers": {"adamw", "muon"},
    "families": {*FAMILIES, *INSIDE, *REFUSED, *UNDESCRIBED},
}


@pytest.mark.parametrize("columns", [80, 60, 50])
@pytest.mark.parametrize("kind", NAMES)
def test_every_name_is_listed_once(
    kind: str, columns: int, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = json.loads(command("list", kind, "--json").out)
    assert sorted(row["name"] for row in rows) == sorted(NAMES[kind])
    heading, *lines = command("list", kind).out.splitlines()
    assert heading.startswith("name")
    if lines[-1].startswith("left out in "):
        assert columns < 80
        lines.pop()
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == [row["name"] for row in rows]
    assert max(map(len, lines)) <= columns


def test_the_numbers_are_those_of_the_library(command: Any) -> None:
    rows = {row["name"]: row for row in json.loads(command("list", "models", "--json").out)}
    model = ModelSpec.load("mixtral-8x7b")
    assert rows["mixtral-8x7b"] == {
        "name": "mixtral-8x7b",
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layers": 32,
        "native_context": 32768,
        "family": "mixtral",
    }
    assert "mixtral-8x7b            46.7 B   12.9 B" in command("list", "models").out
    rows = {row["name"]: row for row in json.loads(command("list", "hardware", "--json").out)}
    machine = HardwareSpec.load("rtx4090")
    assert rows["rtx4090"]["gpu_bytes"] == machine.device_bytes
    assert rows["rtx4090"]["host_bytes"] == machine.host_bytes
    assert rows["dgx-spark"]["link_gb_per_s"] is None


def test_a_policy_says_what_it_does_and_whether_it_trains(command: Any) -> None:
    rows = json.loads(command("list", "policies", "--json").out)
    assert [row["name"] for row in rows if row["trains"]] == policies.names()
    assert all(row["what"] for row in rows)
    assert "Keeps all state on the device" in command("list", "policies").out


def test_a_measured_rate_is_shown_with_one_digit_like_datasheet_rates() -> None:
    rates = [{"name": "a", "link_gb_per_s": 7.9016}, {"name": "b", "link_gb_per_s": 26.0}]
    assert table(rates, 80).splitlines() == ["name  GB/s", "a      7.9", "b     26.0"]
