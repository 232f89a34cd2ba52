"""Tests of the hardware file: its comments, its layout, and that it is read back unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.experiments.files import hardware_file
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Plan

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
STORED = sorted(RESULTS.glob("*/hardware.toml"))


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.parent.name)
def test_a_stored_machine_reads_back_equal(stored: Path, tmp_path: Path) -> None:
    hardware = HardwareSpec.load(str(stored))
    write_hardware(tmp_path / "again.toml", hardware, "megatrain calibrate")
    assert HardwareSpec.load(str(tmp_path / "again.toml")) == hardware


@pytest.mark.usefixtures("without_advice")
def test_the_memory_of_the_process_is_stored_and_zero_in_files_without_it(
    tmp_path: Path, command: Any
) -> None:
    """`check` and `plan` add the memory of the process to the host memory of a plan."""
    stored = RESULTS / "h200-qwen2.5-3b" / "hardware.toml"
    assert "process_bytes" not in stored.read_text()
    hardware = HardwareSpec.load(str(stored))
    assert hardware.costs is not None
    assert hardware.costs.process_bytes == 0
    written, more = (
        tmp_path / "written.toml",
        msgspec.structs.replace(
            hardware, costs=msgspec.structs.replace(hardware.costs, process_bytes=3 * 2**30 + 1)
        ),
    )
    write_hardware(written, more, "megatrain calibrate")
    assert HardwareSpec.load(str(written)) == more
    words = ("qwen2.5-3b", "--policy", "double_buffer", "--hardware")
    checked, before = (
        json.loads(command("check", *words, path, "--json").out) for path in (written, stored)
    )
    assert checked["pools"] == {"host.process": 3 * 2**30 + 1, **before["pools"]}
    assert command("plan", *words, written, "--out", tmp_path / "plan.toml").status == 0
    planned = Plan.load(tmp_path / "plan.toml").prediction
    assert planned is not None
    assert (
        planned.host_peak_bytes
        == checked["host_peak_bytes"]
        == before["host_peak_bytes"] + 3 * 2**30 + 1
    )


def test_every_section_has_a_comment(tmp_path: Path) -> None:
    hardware = HardwareSpec.load(str(RESULTS / "h200-qwen2.5-7b-batches" / "hardware.toml"))
    write_hardware(tmp_path / "machine.toml", hardware, "megatrain calibrate")
    lines = (tmp_path / "machine.toml").read_text().splitlines()
    assert "`megatrain calibrate`" in lines[0]
    above = {line: lines[number - 1] for number, line in enumerate(lines) if number}
    parts = [
        f"costs.{field}"
        for field in CostTable.__struct_fields__
        if isinstance(getattr(hardware.costs, field), dict) and getattr(hardware.costs, field)
    ]
    for part in ("h2d_curve", "peak_tflops", "costs", "costs.turns", *parts):
        first = next(line for line in lines if re.match(rf"\[?{re.escape(part)}[] .]", line))
        assert above[first].startswith("# "), part
    assert not [line for line in lines if line.endswith(("= []", '= ""'))]
    assert not [line for line in lines if re.fullmatch(r"\s+\d+,", line)], (
        "each point of a curve is on one line"
    )
    assert lines.index("[costs.spread]") > max(
        number
        for number, line in enumerate(lines)
        if line.startswith(("[costs.compute", "[costs.curves"))
    ), "the spread is the last section"


def test_every_comment_belongs_to_an_existing_field() -> None:
    known = {
        *HardwareSpec.__struct_fields__,
        *(f"costs.{field}" for field in CostTable.__struct_fields__),
    }
    assert hardware_file._COMMENTS.keys() <= known
