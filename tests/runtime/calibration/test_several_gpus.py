"""Tests of `calibrate --several`: what ranks on the CPU measure, and refusals of ranks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
import torch
from started_ranks import Driver

from megatrain.experiments.cli import main as cli
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.runtime import machine
from megatrain.runtime.calibration.contention import run_together
from megatrain.runtime.calibration.several_gpus import _spread_of, fitted
from megatrain.runtime.calibration.timing import TimedRate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.several_gpus import MEASURED, CollectiveRate

CPU = torch.device("cpu")
CALIBRATED = Path(__file__).parents[2] / "shared" / "calibrations" / "default-set.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibration whose name of the device is that of this machine."""
    made = tmp_path_factory.mktemp("machines")
    one = HardwareSpec.load(str(CALIBRATED))
    assert one.costs is not None
    name = str(machine.describe(CPU)["device"])
    costs = msgspec.structs.replace(one.costs, measured_on=name)
    write_hardware(made / "one.toml", msgspec.structs.replace(one, costs=costs), "test")
    return made


def calibrate(driver: Driver, folder: Path, *words: list[str]) -> list[int]:
    """Runs the command on a rank for each of `words`, its options, and returns the statuses."""
    usual = ["calibrate", "--device", "cpu"]
    driver.start([[[*usual, *options]] for options in words], folder=str(folder), window_s=0.1)
    return driver.wait()


def test_two_ranks_measure_each_other(driver: Driver, folder: Path) -> None:
    """The new file is the old one with the measurements, and only rank 0 prints."""
    words = ["--several", "one.toml", "--out", "two.toml"]
    assert calibrate(driver, folder, words, words) == [0, 0], driver.printed(0)
    assert driver.printed(1) == ""
    assert "wrote two.toml: links of 2 GPUs: H2D " in driver.printed(0)
    before, after = (HardwareSpec.load(str(folder / name)) for name in ("one.toml", "two.toml"))
    assert before == msgspec.structs.replace(after, several=())
    (found,) = after.several
    assert (found.gpus, found.collective_bytes) == (2, 0)
    assert found.measured_on == machine.describe(CPU)["device"]
    assert set(found.spread) == set(MEASURED)
    for name in MEASURED[:4]:
        assert 0.01 < getattr(found, name) < 1000
    # Copies by two threads do not take less time than by one, except for noise.
    assert found.h2d_both_gb_per_s < 2 * found.h2d_gb_per_s
    assert 0.01 < found.exchange.gb_per_s < 1000
    assert 0.01 <= found.compute_beside_exchange <= 1
    sections = tomllib.loads((folder / "two.toml").read_text())["several"]
    assert [each["gpus"] for each in sections] == [2]


def test_ranks_refuse_before_they_measure(driver: Driver, folder: Path) -> None:
    """Another machine, and a rank with another file, are refused on all ranks."""
    known = {path.name for path in folder.iterdir()}
    words = ["--several", "h200", "--out", "new.toml"]
    assert calibrate(driver, folder, words, words) == [2, 2]
    for rank in range(2):
        assert driver.printed(rank).startswith(
            "megatrain: --several h200: found a machine with NVIDIA H200; allowed: one with "
        )
    other = msgspec.structs.replace(HardwareSpec.load(str(folder / "one.toml")), cores=3)
    write_hardware(folder / "other.toml", other, "test")
    words, others = (
        ["--several", name, "--out", "new.toml"] for name in ("one.toml", "other.toml")
    )
    assert calibrate(driver, folder, words, others) == [2, 2]
    assert "ranks: cores: found 3 on rank 1; allowed: 16, as on rank 0" in driver.printed(1)
    words = ["qwen2.5-0.5b", "--out", "new.toml"]
    assert calibrate(driver, folder, words, words) == [2, 2]
    assert "calibrate: found 2 ranks (WORLD_SIZE); allowed: one process" in driver.printed(0)
    made = {path.name for path in folder.iterdir() if path.suffix == ".toml"}
    assert made - known == {"other.toml"}


def test_fewer_gpus_than_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("megatrain.experiments.cli.options.refuse_missing_gpu", lambda _: None)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "new.toml"
    assert cli.main(["calibrate", "--several", "h200", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "ranks: GPUs: found 1; allowed: 2, one for each process" in error
    assert error.count("\n") == 1
    assert not out.exists()


# ---- parts


def test_a_latency_and_a_rate_are_fitted_to_the_times() -> None:
    sizes = (2**20, 2**24, 2**28)
    rate = fitted([(size, 30e-6 + size / 300e9) for size in sizes])
    assert rate == CollectiveRate(latency_ns=30_000, gb_per_s=300.0)
    rate = fitted([(100, 1e-6), (200, 3e-6)])  # a line with a negative latency
    assert rate.latency_ns == 0
    assert rate.gb_per_s == pytest.approx(13 / 150, rel=1e-4)
    rate = fitted([(100, 2e-6), (200, 1e-6)])  # more bytes in less time
    assert rate == CollectiveRate(latency_ns=0, gb_per_s=0.2)


def test_the_spread_of_collectives_is_that_of_all_their_time() -> None:
    """On four H200, a pause took 16 times as long as the smallest collective."""
    rate = CollectiveRate(latency_ns=0, gb_per_s=1.0)
    small, large = (1000, TimedRate(1e-6, 16.0)), (999_000, TimedRate(999e-6, 0.02))
    assert _spread_of([small, large], rate) == pytest.approx(0.016 + 0.02 * 0.999)
    assert _spread_of([(1000, TimedRate(2e-6, 0.0)), large], rate) == pytest.approx(0.02, rel=0.01)
    assert _spread_of([(1000, TimedRate(2e-6, 0.1))], rate) == pytest.approx(0.5)


def test_a_lane_with_a_count_runs_all_of_its_units() -> None:
    """The other lanes stop after it, and its units run even if another lane fails."""
    done = {"exchange": 0, "compute": 0}

    def work(lane: str) -> None:
        done[lane] += 1

    def failing() -> None:
        work("compute")
        raise ValueError("no more")

    threads = dict.fromkeys(done, 1)
    lanes = {lane: lambda lane=lane: work(lane) for lane in done}  # type: ignore[misc]
    rates = run_together(lanes, threads, CPU, counts={"exchange": 9})
    assert done["exchange"] == 9
    assert done["compute"] >= 5
    assert all(rate > 0 for lane in rates.values() for rate in lane)
    done["exchange"] = 0
    with pytest.raises(ValueError, match="no more"):
        run_together(lanes | {"compute": failing}, threads, CPU, counts={"exchange": 9})
    assert done["exchange"] == 9
