"""Tests of the comparison of state formats by their loss.

They cover the command on a tiny model, its continuation, the names of variants, the text, and the
statistics on made-up numbers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from megatrain.experiments.quality import __main__ as quality
from megatrain.experiments.quality import child, running, text, variant
from megatrain.experiments.quality.rows import Movement, QualityRow, RunSettings, RunSpec, load_rows
from megatrain.experiments.quality.summary import Spread, along, summarize_variants, table
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError

SETTINGS = RunSettings(
    hidden=32,
    layers=2,
    vocabulary=300,
    batch=2,
    sequence=16,
    steps=6,
    rate=1e-2,
    fine_tune_steps=2,
    fine_tune_rate=1e-6,
    evaluations=2,
    text_bytes=2**20,
    compiled=False,
)
WORDS = [
    *("--hidden", "32", "--layers", "2", "--vocabulary", "300", "--batch", "2", "--seq", "16"),
    *("--steps", "6", "--fine-tune-steps", "2", "--lr", "1e-2", "--evaluations", "2"),
    *("--variants", "exact,bf16-sr", "--seeds", "0,1", "--no-compile", "--text-bytes", "1MiB"),
    *("--device", "cpu", "--parallel", "2"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with files of text, one of them twice."""
    folder = tmp_path_factory.mktemp("outer") / "sources"
    folder.mkdir()
    for number in range(6):
        lines = [f"sheep = {number * line} + {line}  # of goat {line % 7}\n" for line in range(60)]
        (folder / f"module{number}.py").write_text("".join(lines))
    (folder / "again.py").write_text((folder / "module3.py").read_text())
    (folder / "picture.png").write_bytes(bytes(range(256)))
    return folder


class _Process:
    """A fake process that executes its run at once in this process."""

    started: list[str]
    fails: str
    interrupted_at: int

    def __init__(self, words: list[str], stdout: Any, **_: Any) -> None:
        self.returncode: int | None = None
        folder, text_of_spec, first_seed = words[-3:]
        spec = msgspec.json.decode(text_of_spec, type=RunSpec)
        if len(_Process.started) == _Process.interrupted_at:
            _Process.interrupted_at = -1
            raise KeyboardInterrupt
        _Process.started.append(spec.name)
        if spec.name == _Process.fails:
            stdout.write(b"Traceback\n  somewhere\nValueError: no luck\n")
            self.returncode = 1
        else:
            child.run(Path(folder), spec, int(first_seed))
            self.returncode = 0

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, _: int) -> None:
        pass

    def wait(self) -> int | None:
        return self.returncode


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[_Process]:
    """Replaces the processes of runs by `_Process`."""
    _Process.started, _Process.fails, _Process.interrupted_at = [], "", -1
    monkeypatch.setattr(running, "Popen", _Process)
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.0)
    return _Process


@pytest.mark.usefixtures("with_pictures")
def test_whole_command_is_interrupted_continued_and_shown(
    tmp_path: Path, sources: Path, processes: type[_Process], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path / "out"), "--text", str(sources), "--fine-tune", *WORDS]
    processes.interrupted_at, processes.fails = 2, "training-bf16-sr-seed0"
    assert quality.main(words) == 130
    assert "repeat the command to continue" in capsys.readouterr().err
    assert processes.started == ["training-exact-seed0", "training-bf16-sr-seed0"]

    processes.started.clear()
    assert quality.main(words) == 1
    assert "bf16-sr, seed 0: status 1: ValueError: no luck" in capsys.readouterr().out
    assert "training-exact-seed0" not in processes.started
    assert len(processes.started) == 7

    processes.started.clear()
    processes.fails = ""
    assert quality.main(words) == 0
    assert processes.started == ["training-bf16-sr-seed0"]
    shown = capsys.readouterr().out
    out = tmp_path / "out"
    result = json.loads((out / "quality.json").read_text())
    assert {run["name"] for run in result["runs"]} == {
        f"{part}-{name}-seed{seed}"
        for part in ("training", "fine-tune")
        for name in ("exact", "bf16-sr")
        for seed in (0, 1)
    }
    assert [(each["part"], each["variant"]) for each in result["summary"]] == [
        ("training", "exact"),
        ("training", "bf16-sr"),
        ("fine-tune", "exact"),
        ("fine-tune", "bf16-sr"),
    ]
    assert all(
        len(run["held_out"]) == (2 if run["name"].startswith("training") else 3)
        for run in result["runs"]
    )
    assert result["summary"][3]["movement"]["relative"] > 0
    assert result["summary"][2]["movement"]["cosine"] == pytest.approx(1.0)
    assert result["tokens"] == {"training": 192, "fine-tune": 64}
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")

    assert quality.main(["--show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in shown
    assert json.loads((out / "quality.json").read_text()) == result

    assert quality.main([*words, "--steps", "7"]) == 2
    assert "another steps" in capsys.readouterr().err


@pytest.mark.nightly
def test_interrupted_process_continues_to_the_same_losses(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal, a run continues from its checkpoint with the losses of an undisturbed run."""
    settings = msgspec.structs.replace(SETTINGS, steps=60)
    spec = RunSpec(
        part="training", variant="bf16-sr", seed=3, device="cpu", parallel=1, settings=settings
    )
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        text.prepare(
            folder / "data", [sources], settings.text_bytes, quality.model_config(settings)
        )
    metrics = stopped / "runs" / spec.name / "metrics.jsonl"

    def sleep(_: float) -> None:
        """Interrupts the command when the run has done some steps."""
        if metrics.is_file() and metrics.read_text().count("\n") >= 1:
            raise KeyboardInterrupt
        time.sleep(0.05)

    monkeypatch.setattr(running, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        running.run_all(stopped, [spec], 3, lambda _: None)
    monkeypatch.undo()
    assert not running.is_complete(stopped, spec)
    assert list((stopped / "runs" / spec.name / "checkpoints").iterdir())

    firsts = []
    monkeypatch.setattr(child.Trainer, "_loop", _noting(firsts, Trainer._loop))
    for folder in (stopped, whole):
        child.run(folder, spec, 3)
    assert firsts[0] > 1
    assert firsts[1] == 1
    (continued,), (straight,) = load_rows(stopped), load_rows(whole)
    assert continued.training == straight.training
    assert continued.held_out == straight.held_out
    assert continued.tokens == straight.tokens == 60 * 32


def _noting(firsts: list[int], loop: Any) -> Any:
    """Returns the Trainer method `loop`, which first records the number of the first step."""

    def noted(trainer: Any, *words: Any) -> Any:
        firsts.append(trainer.first_step)
        return loop(trainer, *words)

    return noted


def test_two_commands_in_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with (tmp_path / ".lock").open("wb") as lock:
        running._take(lock, tmp_path)
        with pytest.raises(UserError, match="runs of another command"):
            running.run_all(tmp_path, [], 0, lambda _: None)


@pytest.mark.cuda
def test_command_on_a_gpu(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes run with compiled layers, two at a time on one GPU."""
    out = tmp_path / "out"
    words = [*WORDS, "--hidden", "128", "--seq", "64", "--seeds", "0", "--compile", "--fine-tune"]
    words += ["--out", str(out), "--text", str(sources), "--device", "auto"]
    assert quality.main(words) == 0, capsys.readouterr().out
    for row in load_rows(out):
        assert all(3 < loss < 8 for _, loss in row.held_out)
        assert "cuda" in row.machine


# ---- variants


def test_a_variant_names_fields_of_the_workload() -> None:
    assert variant.fields_of("master24") == {"state": "master24"}
    assert variant.fields_of("exact+layer+fp32") == {
        "state": "exact",
        "clipping": "layer",
        "dtype": "fp32",
    }
    assert variant.fields_of("exact+adamw")["optimizer"] == "adamw"
    assert variant.variants("exact, exact,bf16-sr+none") == ["exact", "bf16-sr+none"]


def test_the_name_of_an_optional_field_selects_its_first_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Later:
        dtype: Literal["bf16", "fp32"]
        fp8: Literal["rowwise", "tensorwise"] | None = None
        other: Literal["fp32", "odd"] = "odd"
        optimizer: str = "adamw"
        state: str = "exact"

    monkeypatch.setattr(variant, "Workload", Later)
    assert variant.fields_of("exact+fp8") == {"state": "exact", "fp8": "rowwise"}
    assert variant.fields_of("exact+tensorwise+bf16") == {
        "state": "exact",
        "fp8": "tensorwise",
        "dtype": "bf16",
    }
    # a value of two fields
    with pytest.raises(UserError, match="fp32"):
        variant.fields_of("exact+fp32")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fp7", "'fp7'"),
        ("exact+wishful", "'wishful'"),
        ("exact+layer+global", "two words for clipping"),
        ("", "none"),
        ("layer", "'layer'"),
    ],
)
def test_an_unknown_variant_is_refused_by_name(words: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        variant.variants(words)


def test_a_variant_that_the_workload_refuses_ends_the_command(
    tmp_path: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variant is refused before any text is read."""
    words = ["--out", str(tmp_path / "out"), "--text", str(sources), *WORDS]
    assert quality.main([*words, "--variants", "bf16-sr+fp32"]) == 2
    assert "bf16-sr with dtype fp32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- text


def test_text_has_each_content_once_and_held_out_files_apart(tmp_path: Path, sources: Path) -> None:
    config = quality.model_config(SETTINGS)
    found = text.prepare(tmp_path / "one", [sources], 2**20, config)
    again = text.prepare(tmp_path / "two", [sources], 2**20, config)
    assert found == again
    assert (found.training.files, found.held_out.files, found.duplicates) == (5, 1, 1)
    training, held_out = (
        {json.loads(line)["text"] for line in (tmp_path / "one" / name).read_text().splitlines()}
        for name in (text.TRAINING, text.HELD_OUT_FILE)
    )
    assert not training & held_out
    assert len(training | held_out) == 6
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (
        tmp_path / "two" / "tokenizer.json"
    ).read_bytes()


def test_text_within_another_root_is_read_once(tmp_path: Path, sources: Path) -> None:
    found = text.prepare(
        tmp_path / "one", [sources.parent, sources], 2**20, quality.model_config(SETTINGS)
    )
    assert found.duplicates == 1


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="0 files"):
        text.prepare(tmp_path / "data", [tmp_path / "empty"], 2**20, {"vocab_size": 300})


# ---- statistics


def _row(name: str, seed: int, *losses: float, **changes: Any) -> QualityRow:
    part = changes.pop("part", "training")
    spec = RunSpec(part=part, variant=name, seed=seed, device="cpu", parallel=1, settings=SETTINGS)
    return QualityRow(
        spec=spec,
        training=((10, losses[-1]),),
        held_out=tuple((3 * number, loss) for number, loss in enumerate(losses, 1)),
        step_seconds=0.01,
        **changes,
    )


def test_statistics_of_made_up_rows() -> None:
    rows = [
        _row("bf16-sr", 0, 5.0, 3.13),
        _row("exact", 0, 5.0, 3.10),
        _row("bf16-sr", 1, 5.1, 3.24),
        _row("exact", 1, 5.0, 3.20),
        _row("bf16-sr", 2, 5.2, 3.05),
        _row("exact", 2, 5.0, 3.00),
    ]
    rows.append(
        QualityRow(
            spec=msgspec.structs.replace(rows[0].spec, variant="master24"), failure="no memory"
        )
    )
    exact, sr, master24 = summarize_variants(rows)
    assert (exact.variant, sr.variant, master24.variant) == ("exact", "bf16-sr", "master24")
    assert exact.held_out is not None
    assert exact.held_out.mean == pytest.approx(3.1)
    assert exact.held_out.deviation == pytest.approx(0.1)
    assert exact.difference is None
    assert sr.difference is not None
    assert sr.difference.mean == pytest.approx(0.04)
    # Differences of 0.03, 0.04 and 0.05 have a deviation of 0.01, divided by the root of 3.
    assert sr.difference.error == pytest.approx(0.01 / 3**0.5)
    assert [step for step, _ in sr.differences] == [3, 6]
    assert sr.differences[0][1].mean == pytest.approx(0.1)
    assert master24.held_out is None
    assert master24.failures == ("seed 0: no memory",)
    lines = table([exact, sr, master24]).splitlines()
    assert lines[0] == "from random weights"
    assert lines[3].split()[:6] == ["bf16-sr", "3", "3.1400", "0.0954", "+0.0400", "0.0058"]
    assert lines[4] == "master24, seed 0: no memory"


def test_one_seed_has_no_spread() -> None:
    assert Spread.of([2.0]) == Spread(mean=2.0, deviation=None, error=None, count=1)


def test_seeds_without_exact_are_not_compared() -> None:
    rows = [_row("exact", 0, 3.0), _row("bf16-sr", 0, 3.5), _row("bf16-sr", 1, 9.0)]
    found = summarize_variants(rows)[1].difference
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(0.5), 1)


def test_movement_relative_to_exact(tmp_path: Path) -> None:
    """Half of the movement in the same direction gives a progress of 0.5 and a cosine of 1."""
    moved = Movement(distance=1.0, relative=0.01, changed=0.5)
    rows = [
        _row(name, 0, 3.0, 2.9, part="fine-tune", movement=moved) for name in ("exact", "bf16-sr")
    ]
    (tmp_path / "runs").mkdir()
    for row, change in zip(rows, ([2.0, 0.0, 4.0], [1.0, 0.0, 2.0]), strict=True):
        np.save(tmp_path / "runs" / f"{row.spec.name}.npy", np.array(change, dtype=np.float32))
    summary = summarize_variants(rows, tmp_path)[1]
    assert summary.movement is not None
    assert summary.movement.progress == pytest.approx(0.5)
    assert summary.movement.cosine == pytest.approx(1.0)
    assert summary.gain is not None
    assert summary.gain.mean == pytest.approx(-0.1)
    assert along(np.array([1.0, 1.0]), np.array([1.0, -1.0])) == (0.0, 0.0)
    assert along(np.zeros(2), np.ones(2)) is None


def test_mean_losses_of_a_run() -> None:
    lines = [
        json.dumps({"step": step, "loss": float(step), "seconds": 0.5}) for step in range(1, 26)
    ]
    lines.append(json.dumps({"step": 25, "evaluation_loss": 2.5, "tokens": 7, "seconds": 1}))
    spec = RunSpec(
        part="training", variant="exact", seed=0, device="cpu", parallel=1, settings=SETTINGS
    )
    row = child.row_of(spec, lines)
    assert row.training == ((10, 5.5), (20, 15.5))
    assert row.held_out == ((25, 2.5),)
    assert row.tokens == 25 * 32


@pytest.mark.parametrize("words", [["--hidden", "200"], ["--seeds", "x"], ["--seeds", ","]])
def test_mistakes_in_options(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality.main(["--out", str(tmp_path / "out"), *words]) == 2
    assert words[0] in capsys.readouterr().err


def test_fine_tuning_needs_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "out"), "--variants", "bf16-sr", "--fine-tune"]
    assert quality.main(words) == 2
    assert "--fine-tune" in capsys.readouterr().err


def test_show_refuses_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality.main(["--show", str(tmp_path)]) == 2
    assert "no runs" in capsys.readouterr().err
