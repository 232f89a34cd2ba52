"""Tests of `megatrain convert`, which changes the state format of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.optimizer.adamw import join
from megatrain.runtime.optimizer.blockwise import decoded_first, decoded_second

Command = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("workplace", "without_advice")


@pytest.fixture
def run(command: Command) -> Path:
    """Returns a run of two steps in the format `exact`, with moving norms."""
    words = ("plan", "tiny", "--hardware", "h200", "--batch", 2, "--seq", 16, "--loss-chunk", 16)
    assert command(*words, "--clipping", "adagc", "--out", "p.toml").status == 0
    words = ("train", "p.toml", "--data", "corpus", "--device", "cpu", "--steps", 2)
    assert command(*words, "--schedule.kind", "constant", "--out", "run").status == 0
    return Path("run")


def tensors(run: Path) -> Mapping[str, torch.Tensor]:
    (folder,) = (run / "checkpoints").iterdir()
    found: dict[str, torch.Tensor] = {}
    for shard in Manifest.load(folder).shards:
        found |= load_file(folder / shard.file)
    return found


def masters(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the fp32 masters by layer."""
    layers = [name.removesuffix(".weights") for name in found if name.endswith(".weights")]
    return {
        layer: join(found[f"{layer}.weights"], found[f"{layer}.master_low"])
        if f"{layer}.master_low" in found
        else found[f"{layer}.weights"].float()
        for layer in layers
    }


def test_a_run_is_converted_to_another_format_and_back(command: Command, run: Path) -> None:
    before, files = tensors(run), sorted(path for path in run.rglob("*") if path.is_file())
    for state, error in (("master24", 2.0**-16), ("bf16-sr", 2.0**-8)):
        outcome = command("convert", "run", "--state", state, "--out", state)
        assert (outcome.status, outcome.err) == (0, "")
        assert f"the state after step 2 in {state} instead of exact" in outcome.out
        made = tensors(Path(state))
        for layer, master in masters(before).items():
            assert ((masters(made)[layer] - master).abs() <= error * master.abs()).all()
            assert made[f"{layer}.moving_norms"].equal(before[f"{layer}.moving_norms"])
            moments = made[f"{layer}.moments"]
            for which, decode in enumerate((decoded_first, decoded_second)):
                exact = before[f"{layer}.moments"][which]
                scale = exact.abs().max()
                assert (decode(moments[which]) - exact).abs().max() <= 0.02 * scale
        command("convert", state, "--state", "exact", "--out", f"{state}-exact")
        again = tensors(Path(f"{state}-exact"))
        for layer, master in masters(made).items():
            assert masters(again)[layer].equal(master), (
                "`exact` can store the values of every format"
            )
            assert again[f"{layer}.moments"][0].equal(decoded_first(made[f"{layer}.moments"][0]))
    for folder in ("master24", "bf16-sr-exact"):
        outcome = command("train", "--resume", folder, "--steps", 4, "--device", "cpu")
        assert outcome.status == 0, outcome.err
    assert sorted(path for path in run.rglob("*") if path.is_file()) == files
    assert command("train", "master24/plan.toml", "--resume", "run", "--steps", 4).status == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--state", "exact", "--out", "x"), "already; allowed: master24, bf16-sr;"),
        (("run", "--state", "bf16-sr", "--out", "run"), "something there already"),
        (("nowhere", "--state", "bf16-sr", "--out", "x"), "no such folder"),
        (("run", "--state", "bf16-sr", "--out", "x", "--from-step", 7), "no checkpoint of step 7"),
    ],
)
def test_invalid_conversions_are_refused(
    command: Command, run: Path, words: tuple[object, ...], message: str
) -> None:
    assert run.is_dir()
    outcome = command("convert", *words)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path("x").exists()


def test_a_run_with_muon_is_converted_to_another_format(command: Command) -> None:
    """Matrices of decoder layers have one moment, and other tensors two."""
    words = ("plan", "tiny", "--hardware", "h200", "--batch", 2, "--seq", 16, "--loss-chunk", 16)
    assert command(*words, "--optimizer", "muon", "--out", "m.toml").status == 0
    words = ("train", "m.toml", "--data", "corpus", "--device", "cpu", "--steps", 1)
    assert command(*words, "--schedule.kind", "constant", "--out", "muon").status == 0
    for state, source in (("master24", "muon"), ("exact", "master24")):
        outcome = command("convert", source, "--state", state, "--out", state)
        assert (outcome.status, outcome.err) == (0, "")
    first, coded, again = (tensors(Path(name)) for name in ("muon", "master24", "exact"))
    for layer, master in masters(first).items():
        values, records = first[f"{layer}.moments"], coded[f"{layer}.moments"].flatten()
        kept = again[f"{layer}.moments"]
        assert kept.shape == values.shape
        assert len(records) == values.numel() // 32 * 34
        count = len(master)
        ends = count, count // 32 * 34
        assert kept.flatten()[: ends[0]].equal(decoded_first(records[: ends[1]]))
        assert kept.flatten()[ends[0] :].equal(decoded_second(records[ends[1] :]))
        error = (kept - values).abs().view(-1, 32)
        assert (error <= 0.009 * values.abs().view(-1, 32).amax(1, keepdim=True)).all()
    outcome = command("train", "--resume", "master24", "--steps", 2, "--device", "cpu")
    assert outcome.status == 0, outcome.err


def test_a_run_that_has_only_one_format_is_not_converted(command: Command) -> None:
    words = ("plan", "tiny", "--hardware", "h200", "--batch", 2, "--seq", 16, "--loss-chunk", 16)
    assert command(*words, "--dtype", "fp32", "--out", "m.toml").status == 0
    words = ("train", "m.toml", "--data", "corpus", "--device", "cpu", "--steps", 1)
    assert command(*words, "--out", "wide").status == 0
    outcome = command("convert", "wide", "--state", "master24", "--out", "x")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert "dtype fp32 and optimizer adamw; allowed: exact, which such a run" in outcome.err


def test_a_conversion_that_fails_leaves_nothing(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.runtime.training import converting

    def fails(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(converting, "write_tensors", fails)
    before = sorted(Path().iterdir())
    assert command("convert", run, "--state", "bf16-sr", "--out", "x").status == 2
    assert sorted(Path().iterdir()) == before


def test_a_converted_run_is_on_the_disk_before_it_has_its_name(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, a folder with the name of the run must not be without its files."""
    from megatrain.runtime.training import converting

    synced: list[str] = []
    sync = converting.sync

    def recorded(path: Path) -> None:
        assert not Path("x").exists()
        synced.append(path.name.rpartition("-")[0] or path.name)
        sync(path)

    monkeypatch.setattr(converting, "sync", recorded)
    assert command("convert", run, "--state", "bf16-sr", "--out", "x").status == 0
    assert synced == ["step", "checkpoints", ".converting-x"]


def test_a_checkpoint_alone_is_converted(command: Command, run: Path) -> None:
    (folder,) = (run / "checkpoints").iterdir()
    shutil.copytree(folder, "alone/checkpoints/it")
    words = ("alone/checkpoints/it", "--from-step", 7, "--out", "x")
    for verb in (("convert", "--state", "master24"), ("export",)):
        outcome = command(*verb, *words)
        assert (outcome.status, Path("x").exists()) == (2, False)
        assert "found the checkpoint of step 2; allowed: a run that has" in outcome.err
        assert outcome.err.count("\n") == 1
    outcome = command("convert", "alone/checkpoints/it", "--state", "master24", "--out", "x")
    assert (outcome.status, outcome.err) == (0, "")
    assert "--resume" not in outcome.out
    (made,) = Path("x/checkpoints").iterdir()
    assert Manifest.load(made).workload.state == "master24"
    damaged = next(made.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    outcome = command("convert", made, "--state", "exact", "--out", "y")
    assert (outcome.status, Path("y").exists()) == (2, False)
