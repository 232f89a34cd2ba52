"""Tests of `--optimizer FILE` and `--optimizer muon` from the plan to the exported model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outside_optimizers import TEXTS

from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.schedule.plan import Plan

WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16, "--dtype", "fp32")
Command = Callable[..., Any]


@pytest.fixture
def optimizer(workplace: Path) -> str:
    (workplace / "lion.py").write_text(TEXTS[1], encoding="utf-8")
    return "lion.py"


def good(outcome: Any) -> str:
    assert (outcome.status, outcome.err) == (0, "")
    return str(outcome.out)


@pytest.mark.parametrize("name", ["lion.py", "muon"])
@pytest.mark.usefixtures("optimizer")
def test_a_run_is_planned_trained_stopped_resumed_and_exported(command: Command, name: str) -> None:
    named = ("--optimizer", name)
    planned = good(command("plan", "tiny", "--hardware", "h200", *WORK, *named, "--out", "p.toml"))
    assert f"with optimizer {name} fits" in planned
    assert Plan.load(Path("p.toml")).workload.optimizer == name
    train = ("train", "p.toml", "--data", "corpus", "--device", "cpu", "--save-every", 2)
    # A constant rate does not depend on the number of steps.
    train = (*train, "--schedule.kind", "constant")
    good(command(*train, "--steps", 4, "--out", "straight"))
    good(command(*train, "--steps", 2, "--out", "run"))
    good(command("train", "--resume", "run", "--steps", 4, "--device", "cpu"))
    models = [
        (folder / "model.safetensors").read_bytes()
        for run in ("straight", "run")
        if (folder := newest_model(Path(run)))
    ]
    assert models[0] == models[1]
    good(command("export", "run", "--out", "exported"))
    assert Path("exported/model.safetensors").read_bytes() == models[0]


def test_a_run_is_not_resumed_with_another_optimizer(command: Command, optimizer: str) -> None:
    words = ("plan", "tiny", "--hardware", "h200", *WORK)
    good(command(*words, "--out", "adamw.toml"))
    good(command(*words, "--optimizer", optimizer, "--out", "lion.toml"))
    train = ("--data", "corpus", "--device", "cpu", "--save-every", 1)
    good(command("train", "adamw.toml", *train, "--steps", 1, "--out", "run"))
    outcome = command("train", "lion.toml", "--resume", "run", "--steps", 2, "--device", "cpu")
    assert outcome.status == 2
    assert "found workload.optimizer adamw in the checkpoint and lion.py" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--optimizer", "liom.py"), "optimizer: found no file liom.py; allowed: the path of a"),
        (("--optimizer", "liom"), "optimizer: found 'liom'; allowed: a name that `megatrain list"),
        (
            ("--optimizer", "lion.py", "--clipping", "update"),
            "workload: clipping: found update with optimizer lion.py; allowed: update with adamw",
        ),
    ],
)
@pytest.mark.usefixtures("optimizer")
def test_invalid_options_are_refused_in_one_line(
    command: Command, words: tuple[str, ...], message: str
) -> None:
    outcome = command("check", "tiny", "--hardware", "h200", *WORK, *words)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_planning_for_the_guide_s_optimizer_loads_no_torch(optimizer: str) -> None:
    program = (
        "import sys\nfrom megatrain.experiments.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    words = ["check", "tiny", "--hardware", "h200", *map(str, WORK), "--optimizer", optimizer]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_calibration_measures_adamw_alone(command: Command, optimizer: str) -> None:
    words = ("calibrate", "tiny", "--out", "here.toml", "--device", "cpu", *WORK)
    outcome = command(*words, "--optimizer", optimizer)
    assert outcome.status == 2
    assert "--optimizer: found lion.py; allowed: adamw, the only optimizer" in outcome.err
    assert not Path("here.toml").exists()
