"""Hardware files: the library's load, wrong ones are refused in one line that names the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator.errors import UserError
from megatrain.simulator.files import write_toml
from megatrain.simulator.hardware import CostTable, HardwareSpec
from megatrain.simulator.specs import ModelSpec

LIBRARY = Path(__file__).parents[2] / "simulator" / "library"


def changed(**changes: Any) -> HardwareSpec:
    return msgspec.convert({**msgspec.to_builtins(HardwareSpec.load("h200")), **changes}, HardwareSpec)


def table(**changes: Any) -> CostTable:
    base = {"measured_on": "here", "date": "2026-11-21", "curves": {"load_weights": [[1, 1], [2, 2]]}, "compute": {"forward": {"a": [5, 1]}}}
    return msgspec.convert({**base, **changes}, CostTable)


@pytest.mark.parametrize("name", sorted(file.stem for file in (LIBRARY / "hardware").glob("*.toml")))
def test_the_library_s_machines_load_and_name_their_source(name: str) -> None:
    hardware = HardwareSpec.load(name)
    assert hardware.name == name
    assert "20" in hardware.source
    for line in (LIBRARY / "hardware" / f"{name}.toml").read_text().splitlines():
        if "=" in line and not line.startswith(("#", "name", "source")):
            assert " # " in line, f"a number without its source: {line}"


@pytest.mark.parametrize(
    ("name", "parameters"), [("1.5b", 1_543_714_304), ("3b", 3_085_938_688), ("7b", 7_615_616_512), ("14b", 14_770_033_664), ("32b", 32_763_876_352)]
)
def test_the_library_s_models_have_their_published_size(name: str, parameters: int) -> None:
    """The last two digits of a name's size are what the model cards say: 1.54, 3.09, 7.61 (7.62), 14.7 (14.8), 32.5 (32.8) billion."""
    assert ModelSpec.load(f"qwen2.5-{name}").parameters == parameters


def test_a_calibrated_file_reads_back(tmp_path: Path) -> None:
    hardware = msgspec.structs.replace(
        changed(name="mine"), costs=table(curves={"norm@compute": [[0, 3]], "accumulate_gradients:add": [[1, 2]], "clip": [[0, 7]]})
    )
    write_toml(tmp_path / "mine.toml", hardware)
    assert HardwareSpec.load(str(tmp_path / "mine.toml")) == hardware


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"h2d_gb_per_s": -1.0}, "h2d_gb_per_s: found -1.0"),
        ({"d2h_gb_per_s": math.nan}, "d2h_gb_per_s: found nan"),
        ({"device_bytes": 0}, "device_bytes: found 0"),
        ({"host_gb_per_s": math.inf}, "host_gb_per_s: found inf"),
        ({"link_latency_ns": -5}, "link_latency_ns: found -5"),
        ({"compute_efficiency": 1.2}, "compute_efficiency: found 1.2"),
        ({"duplex_fraction": 0.0}, "duplex_fraction: found 0.0"),
        ({"peak_tflops": {"int8": 4.0}}, "peak_tflops.int8"),
        ({"peak_tflops": {"bf16": -4.0}}, "peak_tflops.bf16: found -4.0"),
        ({"contention": {"h2h": {"cpu": 0.5}}}, "contention: found 'h2h'"),
        ({"contention": {"h2d": {"h2d": 0.5}}}, "contention.h2d: found 'h2d'"),
        ({"contention": {"h2d": {"cpu": 0.0}}}, "contention.h2d.cpu: found 0.0"),
        ({"contention": {"h2d": {"cpu": 1.5}}}, "contention.h2d.cpu: found 1.5"),
        ({"dispatch_ns": {"gpu": 1}}, "dispatch_ns: found 'gpu'"),
        ({"dispatch_ns": {"cpu": -1}}, "dispatch_ns.cpu: found -1"),
    ],
)
def test_a_wrong_number_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as error:
        changed(**changes)
    assert complaint in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"curves": {"forward": [[1, 1]]}}, "costs.curves.forward"),
        ({"curves": {"norm@gpu": [[1, 1]]}}, "costs.curves.norm@gpu: found 'gpu'"),
        ({"curves": {"norm": []}}, "costs.curves.norm: found no point"),
        ({"curves": {"norm": [[1, -1]]}}, "costs.curves.norm: found a negative number"),
        ({"curves": {"norm": [[2, 1], [2, 3]]}}, "costs.curves.norm: found size 2 after 2"),
        ({"compute": {"norm": {"a": [5, 1]}}}, "costs.compute.norm"),
        ({"compute": {"forward": {"a": [5, -1]}}}, "costs.compute.forward.a: duration_ns: found -1"),
        ({"compute": {"forward": {"a": [0, 1]}}}, "costs.compute.forward.a: amount: found 0"),
        ({"activations": {"a": [0, 1]}}, "costs.activations.a: tokens: found 0"),
        ({"workspace": {"a": {"layer": 1, "head": -1}}}, "costs.workspace.a.head: found -1"),
        ({"step_overhead_ns": -1}, "costs.step_overhead_ns: found -1"),
        ({"contention": {"cpu": {"h2d": 2.0}}}, "costs: contention.cpu.h2d: found 2.0"),
    ],
)
def test_a_wrong_cost_table_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as error:
        table(**changes)
    assert complaint in str(error.value)


def test_a_missing_machine_names_those_there_are() -> None:
    with pytest.raises(UserError, match="allowed: a calibrated TOML file, or one of h200"):
        HardwareSpec.load("h300")
    with pytest.raises(UserError, match="no such file"):
        HardwareSpec.load("nowhere/h300.toml")


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    text = (LIBRARY / "hardware" / "h200.toml").read_text().replace("h2d_gb_per_s", "h2d_gbps")
    (tmp_path / "typo.toml").write_text(text)
    with pytest.raises(UserError, match="h2d_gbps"):
        HardwareSpec.load(str(tmp_path / "typo.toml"))
