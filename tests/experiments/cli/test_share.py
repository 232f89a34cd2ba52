"""Tests of `megatrain calibrate --share`, which writes a file for others, and of such files."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.host import processor
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.shared import SharedMachine

MEASURED = Path(__file__).parents[3] / "experiments" / "results" / "h200-heldout" / "hardware.toml"
CALIBRATE = (
    *("calibrate", "qwen2.5-0.5b", "--batch", "2", "--seq", "16", "--dtype", "bf16"),
    *("--device", "cpu"),
    *("--out", "here.toml", "--name", "my-own-name", "--share"),
)


@pytest.fixture
def shared(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Returns a function that runs a command in a folder whose `machines` has a shared file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRAIN_MACHINES", str(tmp_path / "machines"))
    measured = HardwareSpec.load(str(MEASURED))
    monkeypatch.setattr(
        "megatrain.runtime.calibration.calibrate.calibrate", lambda *_, **__: measured
    )
    outcome = command(*CALIBRATE, "machines/theirs.toml")
    assert (outcome.status, outcome.err) == (0, "")
    assert "wrote machines/theirs.toml, to share" in outcome.out
    return command


@pytest.mark.usefixtures("shared")
def test_a_shared_file_names_no_person_and_no_host(tmp_path: Path) -> None:
    text = (tmp_path / "machines" / "theirs.toml").read_text()
    content = tomllib.loads(text)
    words = {key: value for key, value in content.items() if isinstance(value, str)}
    assert words == {
        "gpu": "NVIDIA H200",
        "cpu": processor(),
        "date": "2026-11-22",
        "megatrain": version("megatrain"),
        "dtype": "bf16",
    }
    assert content.keys() <= set(SharedMachine.__struct_fields__)
    assert len(text) < 4096


def test_check_and_list_say_that_others_measured(shared: Callable[..., Any]) -> None:
    check = ("check", "qwen2.5-0.5b", "--hardware", "h200", "--batch", 4, "--policy", "resident")
    out = shared(*check, "--why").out
    assert " ".join(out.split()).count("measured 2026-11-22, by a file of others") == 2
    assert json.loads(shared(*check, "--json").out)["measured_by_others"] == "2026-11-22"
    rows = {row["name"]: row for row in json.loads(shared("list", "hardware", "--json").out)}
    assert rows["h200"]["measured_by_others"] == "2026-11-22"
    assert rows["l40s"]["measured_by_others"] is None
    heading, *lines = shared("list", "hardware").out.splitlines()
    assert heading.endswith("measured by others")
    (line,) = [line for line in lines if line.startswith("h200 ")]
    assert line.endswith("2026-11-22")


def test_an_empty_column_is_left_out(command: Callable[..., Any]) -> None:
    assert "measured" not in command("list", "hardware").out


def test_a_malformed_file_gives_a_one_line_error(
    shared: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "machines" / "theirs.toml").write_text("host = 1")
    outcome = shared("check", "qwen2.5-0.5b", "--hardware", "l40s")
    assert outcome.status == 2
    assert outcome.err.startswith(f"megatrain: {os.path.join(tmp_path, 'machines', 'theirs.toml')}")
    assert outcome.err.count("\n") == 1


def test_limits_of_memory_are_not_shared(command: Callable[..., Any], tmp_path: Path) -> None:
    for option in ("--device-memory", "--host-memory"):
        outcome = command(*CALIBRATE, tmp_path / "theirs.toml", option, "8GiB")
        assert outcome.status == 2
        assert f"--share: found {option} as well" in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_shared_file_as_hardware_names_the_folder_for_it(
    shared: Callable[..., Any], tmp_path: Path
) -> None:
    outcome = shared("check", "qwen2.5-0.5b", "--hardware", "machines/theirs.toml", "--batch", 4)
    assert outcome.status == 2
    assert "found a file of `megatrain calibrate --share`, measured on NVIDIA H200" in outcome.err
    assert f"fix: put it into {tmp_path / 'machines'}, or the folder that" in outcome.err
