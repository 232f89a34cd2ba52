"""Tests of hardware files from others: what they contain, and what they replace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.costs import Datasheet, cost_model
from megatrain.simulator.hardware.machine import HardwareSpec, known_names, library
from megatrain.simulator.hardware.shared import SharedMachine, machines_folder, shared_machines
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.verdict.verdict import Verdict, judge

MEASURED = Path(__file__).parents[3] / "experiments" / "results" / "h200-heldout" / "hardware.toml"
Put = Callable[..., SharedMachine]


@pytest.fixture(scope="module")
def calibrated() -> HardwareSpec:
    return HardwareSpec.load(str(MEASURED))


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibrated: HardwareSpec) -> Put:
    """Returns a function that puts a file into the user's folder."""
    monkeypatch.setenv("MEGATRAIN_MACHINES", str(tmp_path))

    def write(name: str = "theirs", **changes: Any) -> SharedMachine:
        machine = calibrated.shared("EPYC 9654", "0.1.0")
        content = {**msgspec.to_builtins(machine), **changes}
        write_toml(tmp_path / f"{name}.toml", content, "A machine.")
        return machine

    return write


def test_a_file_replaces_the_library_s_estimates(put: Put, calibrated: HardwareSpec) -> None:
    before = HardwareSpec.load("h200")
    put()
    after = HardwareSpec.load("H200")
    assert after == HardwareSpec.of_gpu("NVIDIA H200")
    assert (before.measured_by_others, after.measured_by_others) == ("", "2026-11-22")
    assert after.h2d_curve == calibrated.h2d_curve != before.h2d_curve
    assert (after.cores, after.host_bytes) == (calibrated.cores, calibrated.host_bytes)
    assert calibrated.costs is not None
    assert after.contention == calibrated.costs.contention
    assert after.dispatch_ns == calibrated.costs.dispatch_ns
    assert (after.name, after.title, after.watts) == (before.name, before.title, before.watts)
    assert after.uncertainty == 0.1
    # The peak stays that of the datasheet, and the layers reach the measured rate.
    assert after.peak_tflops == before.peak_tflops
    reached = calibrated.linear_efficiency * calibrated.peak_tflops["bf16"]
    assert after.linear_efficiency * after.peak_tflops["bf16"] == pytest.approx(reached)
    assert after.datasheet_tflops("bf16") == before.peak_tflops["bf16"]
    model, work = ModelSpec.load("qwen2.5-0.5b"), Workload(batch=4, sequence=1024)
    assert isinstance(cost_model(after, model, work), Datasheet)
    assert HardwareSpec.load("l40s").measured_by_others == ""


def test_the_gpu_memory_of_a_machine_with_one_memory_is_at_most_the_whole(put: Put) -> None:
    put(gpu="NVIDIA GB10", device_bytes=2**37, host_bytes=2**36)
    machine = HardwareSpec.load("dgx-spark")
    assert machine.unified
    assert machine.device_bytes == machine.host_bytes == 2**36


def test_a_verdict_says_that_others_measured(put: Put) -> None:
    model, work = ModelSpec.load("qwen2.5-0.5b"), Workload(batch=4, sequence=1024)

    def verdict_on() -> Verdict:
        machine = HardwareSpec.load("h200")
        return judge(model, machine, work, policies=["resident"], advise=False)

    assert verdict_on().measured_by_others == ""
    put(date="2026-11-23")
    verdict = verdict_on()
    assert (verdict.calibrated, verdict.measured_by_others) == ("", "2026-11-23")


def test_a_gpu_that_the_library_lacks_has_the_name_of_its_file(put: Put) -> None:
    put("new-one", gpu="NVIDIA New One")
    machine = HardwareSpec.load("New-One")
    assert (machine.name, machine.title) == ("new-one", "NVIDIA New One")
    assert machine == HardwareSpec.of_gpu("NVIDIA New One")
    assert machine.datasheet_tflops("bf16") is None
    assert set(known_names()) - set(library()) >= {"new-one"}
    assert HardwareSpec.load("h200").measured_by_others == ""
    with pytest.raises(UserError, match="did you mean new-one"):
        HardwareSpec.load("new-onee")


@pytest.mark.parametrize("name", ["h200", "H-200", "rtx-4090"])
def test_the_error_for_a_file_named_like_another_machine_suggests_a_new_name(
    put: Put, name: str
) -> None:
    put(name, gpu="NVIDIA New One")
    with pytest.raises(UserError) as error:
        HardwareSpec.load("l40s")
    assert f"{name}.toml" in str(error.value)
    assert "whose GPU is not NVIDIA New One" in str(error.value)
    assert str(error.value).endswith("fix: rename it, or remove the file")
    assert str(error.value).isprintable()


def test_the_newest_of_several_files_counts(put: Put) -> None:
    put("a", date="2026-11-20", cores=1)
    put("b", date="2026-11-23", cores=2)
    put("c", date="2026-11-22", cores=3)
    assert HardwareSpec.load("h200").cores == 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"date": "yesterday"}, "date: found 'yesterday'; allowed: a date like 2026-11-23"),
        ({"gpu": "NVIDIA\x1b[2J H200"}, "gpu: found "),
        ({"cpu": ""}, "cpu: found ''"),
        ({"format": 2}, "format: found 2; allowed: 1"),
        ({"h2d_gb_per_s": -1.0}, "h2d_gb_per_s: found -1.0"),
        ({"matrix_tflops": 1e9}, "peak_tflops.bf16"),
        ({"host": "mine"}, "unknown key `host`"),
        ({"cores": "many"}, "cores: found"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(
    put: Put, changes: dict[str, Any], found: str
) -> None:
    put(**changes)
    for name in ("h200", "l40s"):
        with pytest.raises(UserError) as error:
            HardwareSpec.load(name)
        assert found in str(error.value)
        assert "theirs.toml" in str(error.value)
        assert str(error.value).endswith(", or remove the file")
        assert str(error.value).isprintable()


@pytest.mark.usefixtures("put")
def test_text_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_text("spoilt")
    with pytest.raises(UserError, match=r"theirs.toml: found text that is not TOML.*or remove"):
        HardwareSpec.load("h200")


def test_the_user_s_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shared_machines(lambda *_: None) == {}, "a folder that does not exist has no machines"
    monkeypatch.delenv("MEGATRAIN_MACHINES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert machines_folder() == tmp_path / "megatrain" / "machines"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machines_folder() == tmp_path / ".config" / "megatrain" / "machines"
