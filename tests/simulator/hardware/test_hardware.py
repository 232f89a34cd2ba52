"""Tests of hardware files: the library's load, and a wrong one is an error that names the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec

LIBRARY = Path(__file__).parents[3] / "simulator" / "library"


def changed(**changes: Any) -> HardwareSpec:
    return msgspec.convert(
        {**msgspec.to_builtins(HardwareSpec.load("h200")), **changes}, HardwareSpec
    )


def table(**changes: Any) -> CostTable:
    base = {
        "measured_on": "here",
        "date": "2026-11-21",
        "curves": {"load_weights": [[1, 1], [2, 2]]},
        "compute": {"forward": {"a": [5, 1]}},
    }
    return msgspec.convert({**base, **changes}, CostTable)


@pytest.mark.parametrize(
    "name", sorted(file.stem for file in (LIBRARY / "hardware").glob("*.toml"))
)
def test_the_library_s_machines_load_and_are_dated(name: str) -> None:
    hardware = HardwareSpec.load(name)
    assert "20" in hardware.source


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("1.5b", 1_543_714_304),
        ("3b", 3_085_938_688),
        ("7b", 7_615_616_512),
        ("14b", 14_770_033_664),
        ("32b", 32_763_876_352),
    ],
)
def test_the_library_s_models_have_their_published_size(name: str, parameters: int) -> None:
    """The library's models have the size that their model cards give, up to rounding.

    The cards say 1.54, 3.09, 7.61, 14.7 and 32.5 billion parameters. The last three are 7.62, 14.8
    and 32.8 here.
    """
    assert ModelSpec.load(f"qwen2.5-{name}").parameters == parameters


def test_a_calibrated_file_reads_back(tmp_path: Path) -> None:
    hardware = msgspec.structs.replace(
        changed(name="mine"),
        costs=table(
            curves={
                "norm@compute": [[0, 3]],
                "accumulate_gradients:add": [[1, 2]],
                "clip": [[0, 7]],
            }
        ),
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
        ({"linear_efficiency": 1.2}, "linear_efficiency: found 1.2"),
        ({"attention_efficiency": 0.0}, "attention_efficiency: found 0.0"),
        ({"attention_half_tokens": -1}, "attention_half_tokens: found -1"),
        (
            {"h2d_gb_per_s": 55.4e9},
            (
                "h2d_gb_per_s: found 55400000000.0; allowed: a positive number, 0.001 to 5000; fix:"
                " correct h2d_gb_per_s"
            ),
        ),
        ({"h2d_gb_per_s": 1e-300}, "h2d_gb_per_s: found 1e-300"),
        ({"watts": 0.0}, "watts: found 0.0"),
        ({"uncertainty": 1.0}, "uncertainty: found 1.0"),
        ({"uncertainty": math.nan}, "uncertainty: found nan"),
        ({"cpu_adam_per_s": -6.2e9}, "cpu_adam_per_s: found -6200000000.0"),
        ({"thread_gb_per_s": 0}, "thread_gb_per_s: found 0"),
        (
            {"unified": True, "device_bytes": 2**40, "host_bytes": 2**39},
            "device_bytes: found 1099511627776; allowed: at most host_bytes",
        ),
        ({"h2d_curve": [[2, 1.0], [2, 2.0]]}, "h2d_curve: found 2 bytes after 2"),
        ({"d2h_curve": [[0, 1.0]]}, "d2h_curve: found a copy of 0 bytes"),
        ({"d2h_curve": [[1, math.nan]]}, "d2h_curve: found nan"),
        (
            {"h2d_curve": [[100, 1.0], [200, 3.0]]},
            "h2d_curve: found 200 bytes in less time than 100",
        ),
        (
            {"duplex_curve": [[1024, 60.0]]},
            "duplex_curve: found 60.0 GB/s each at 1024 bytes; allowed: at most the 55.4",
        ),
        ({"host_memory": {"gb_per_s": -1.0}}, "host_memory: gb_per_s: found -1.0"),
        (
            {"host_memory": {"gb_per_s": 1.0, "cpu_weight": math.inf}},
            "host_memory: cpu_weight: found inf",
        ),
        ({"peak_tflops": {}}, "peak_tflops: found no rate"),
        ({"peak_tflops": {"bf16": 989e12}}, "peak_tflops.bf16: found 989000000000000.0"),
        ({"duplex_fraction": 0.0}, "duplex_fraction: found 0.0"),
        ({"peak_tflops": {"int8": 4.0}}, "peak_tflops.int8"),
        ({"peak_tflops": {"bf16": -4.0}}, "peak_tflops.bf16: found -4.0"),
        ({"contention": {"h2h": {"cpu": 0.5}}}, "contention: found 'h2h'"),
        ({"contention": {"h2d": {"h2d": 0.5}}}, "contention.h2d: found 'h2d'"),
        ({"contention": {"compute": {"h2d+d2h": 0.5}}}, "contention.compute: found 'h2d+d2h'"),
        ({"contention": {"cpu": {"d2h+h2d": 0.5}}}, "contention.cpu: found 'd2h+h2d'"),
        ({"contention": {"cpu": {"h2d+d2h": 1.5}}}, "contention.cpu.h2d+d2h: found 1.5"),
        ({"contention": {"h2d": {"cpu": 0.0}}}, "contention.h2d.cpu: found 0.0"),
        ({"contention": {"h2d": {"cpu": 1.5}}}, "contention.h2d.cpu: found 1.5"),
        ({"dispatch_ns": {"gpu": 1}}, "dispatch_ns: found 'gpu'"),
        ({"dispatch_ns": {"cpu": -1}}, "dispatch_ns.cpu: found -1"),
        ({"step_overhead_ns": -1}, "step_overhead_ns: found -1"),
        (
            {"measured_by_others": "x"},
            "measured_by_others: found 'x'; allowed: a date like 2026-11-23; fix: correct the date",
        ),
        (
            {"measured_by_others": "2026-11-23", "gpu_names": []},
            "measured_by_others: found 2026-11-23, without gpu_names; allowed: a date like",
        ),
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
        (
            {"compute": {"forward": {"a": [5, -1]}}},
            "costs.compute.forward.a: duration_ns: found -1",
        ),
        ({"compute": {"forward": {"a": [0, 1]}}}, "costs.compute.forward.a: amount: found 0"),
        ({"activations": {"a": [0, 1]}}, "costs.activations.a: tokens: found 0"),
        ({"workspace": {"a": {"layer": 1, "head": -1}}}, "costs.workspace.a.head: found -1"),
        ({"attention": {"a": [[8, 0, 1]]}}, "costs.attention.a: forward_ns: found 0"),
        ({"attention": {"a": [[8, 1, 1], [8, 2, 2]]}}, "costs.attention.a: found sequence 8"),
        ({"step_overhead_ns": -1}, "costs.step_overhead_ns: found -1"),
        ({"process_bytes": -1}, "costs.process_bytes: found -1"),
        ({"contention": {"cpu": {"h2d": 2.0}}}, "costs: contention.cpu.h2d: found 2.0"),
    ],
)
def test_a_wrong_cost_table_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as error:
        table(**changes)
    assert complaint in str(error.value)


VALID = (LIBRARY / "hardware" / "h200.toml").read_text()
LINES = VALID.splitlines()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('h2d_gb_per_s = "55.4 GB/s"', "h2d_gb_per_s: found `str`; allowed: `float`"),
        ("h2d_curve = [[1, 2, 3]]", "h2d_curve"),
        ("watts = true", "watts: found `bool`"),
        ("cores = 16.5", "cores: found `float`"),
        ("compute_efficiency = 0.56", "unknown key `compute_efficiency`"),
        ("unified = 1", "unified: found `int`; allowed: `bool`"),
    ],
)
def test_a_wrong_type_in_a_file_gives_a_one_line_error_with_its_key(
    tmp_path: Path, line: str, complaint: str
) -> None:
    key = line.partition(" ")[0]
    kept = [other for other in LINES if not other.startswith(f"{key} =")]
    (tmp_path / "wrong.toml").write_text("\n".join([line, *kept]))
    with pytest.raises(UserError) as error:
        HardwareSpec.load(str(tmp_path / "wrong.toml"))
    assert complaint in str(error.value)
    assert len(str(error.value).splitlines()) == 1


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from(
        [
            2**63,
            10**400,
            -(10**400),
            "inf",
            "nan",
            "-0.0",
            "1e400",
            '"16"',
            "[]",
            "[[1, 1]]",
            "{}",
            "true",
            "1979-05-27",
        ]
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Returns a valid file with a few lines or characters changed."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["value", "drop", "double", "swap", "cut", "key"])):
            case "value":
                lines[index] = f"{lines[index].partition('=')[0]}= {draw(VALUES)}"
            case "drop":
                lines[index] = ""
            case "double":
                lines.insert(index, lines[index])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[index], lines[other] = lines[other], lines[index]
            case "cut":
                at = draw(st.integers(0, len(lines[index])))
                lines[index] = (
                    lines[index][:at] + draw(st.text(max_size=3)) + lines[index][at + 1 :]
                )
            case _:
                lines[index] = (
                    f"{draw(st.sampled_from(HardwareSpec.__struct_fields__))} = {draw(VALUES)}"
                )
    return "\n".join(lines)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.one_of(mutated(), mutated(), st.text(max_size=200)))
def test_any_text_is_a_machine_or_a_one_line_error(tmp_path: Path, text: str) -> None:
    """Any text is a machine with usable rates or a UserError."""
    path = tmp_path / "fuzzed.toml"
    path.write_text(text, encoding="utf-8", errors="replace", newline="")
    try:
        machine = HardwareSpec.load(str(path))
    except UserError:
        return
    for field in ("h2d_gb_per_s", "device_gb_per_s", "host_gb_per_s", "linear_efficiency"):
        assert 0 < getattr(machine, field) < math.inf
    assert all(
        0 < rate < math.inf
        for curve in (machine.h2d_curve, machine.d2h_curve, machine.duplex_curve)
        for _, rate in curve
    )


def test_the_error_for_an_unknown_machine_names_similar_ones() -> None:
    with pytest.raises(
        UserError,
        match=(
            r"or a name that `megatrain list hardware` prints, such as h200; fix: did you"
            r" mean h200"
        ),
    ):
        HardwareSpec.load("h300")
    with pytest.raises(UserError, match="no such file"):
        HardwareSpec.load("nowhere/h300.toml")


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "shared/calibrations/default-set.toml").read_text()
    for wrong in (
        text.replace("\nh2d_gb_per_s", "\nh2d_gbps"),
        text.replace("\n[costs]\n", "\n[costs]\nh2d_gbps = 1\n"),
    ):
        (tmp_path / "typo.toml").write_text(wrong)
        with pytest.raises(UserError, match="h2d_gbps"):
            HardwareSpec.load(str(tmp_path / "typo.toml"))


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("device_gb_per_s", 0.001, 1e6),
        ("host_gb_per_s", 0.001, 1e6),
        ("thread_gb_per_s", 0.001, 1e6),
        ("h2d_gb_per_s", 0.001, 5000),
        ("d2h_gb_per_s", 0.001, 5000),
        ("device_bytes", 2**20, 2**60),
        ("host_bytes", 2**20, 2**60),
        ("cores", 1, 2**16),
        ("cpu_update_per_s", 1, 1e15),
        ("cpu_adam_per_s", 1, 1e15),
        ("attention_half_tokens", 0, 2**20),
        ("link_latency_ns", 0, 10**9),
        ("watts", 0.001, 1e6),
        ("uncertainty", 0, 0.9),
        ("linear_efficiency", 1e-6, 1),
        ("attention_efficiency", 1e-6, 1),
    ],
)
def test_a_number_in_a_wrong_unit_is_outside_of_its_limits(
    field: str, least: float, most: float
) -> None:
    """The limits themselves are allowed."""
    plain = HardwareSpec.load("h200")
    for value in (least, most):
        assert getattr(msgspec.structs.replace(plain, **{field: value}), field) == value
    for value in (math.nextafter(least, -math.inf), math.nextafter(most, math.inf)):
        with pytest.raises(UserError, match=f"{field}: found"):
            msgspec.structs.replace(plain, **{field: value})
