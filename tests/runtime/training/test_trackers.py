"""Tests of trackers: each gets the numbers of steps and evaluations, and is closed.

A tracker that is not installed is refused before anything starts.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatrain.runtime.training import trackers as module
from megatrain.runtime.training.callback import EvaluationResult, Step
from megatrain.runtime.training.config import Config, Logging, TrainingSettings
from megatrain.runtime.training.trackers import (
    TensorBoard,
    Tracker,
    refuse_missing,
    step_values,
    trackers,
)
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert
from megatrain.simulator.schedule.plan import Plan, Prediction
from megatrain.simulator.schedule.timeline import Timeline

STEP = Step(
    number=7,
    loss=2.5,
    gradient_norm=0.5,
    rate=1e-3,
    seconds=2.0,
    tokens_per_second=16.0,
    timeline=Timeline(name="measured", digest="", spans=()),
)
EVALUATION = EvaluationResult(number=7, loss=1000.0, tokens=3, seconds=1.0)


class Fake:
    """A fake tracker: both its module and its run."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init(self, **keywords: Any) -> Fake:
        self.calls.append(
            (
                "init",
                keywords["project"],
                keywords["name"],
                keywords["config"]["config"]["training"]["steps"],
            )
        )
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def trainer(make_plan: Any) -> Any:
    plan: Plan = make_plan()
    predicted = Prediction(
        step_seconds=1.6,
        lower_bound_seconds=1.0,
        device_peak_bytes=1,
        host_peak_bytes=1,
        binding="compute",
    )
    sizes = {"device": 3 * 2**30, "host": 12 * 2**30}
    return types.SimpleNamespace(
        config=Config(training=TrainingSettings(steps=20)),
        plan=msgspec.structs.replace(plan, prediction=predicted),
        first_step=1,
        device=torch.device("cpu"),
        device_bytes_before=0,
        executor=types.SimpleNamespace(allocated=sizes.__getitem__),
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_number(
    name: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, installed = Fake(), types.ModuleType(name)
    installed.__spec__ = importlib.machinery.ModuleSpec(name, None)
    installed.init = fake.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, installed)
    settings = convert({"tracker": name, "name": "first"}, Logging, "")
    (tracker,), notes = trackers(settings, None)
    assert notes == []
    tracker.on_start(trainer)
    tracker.on_step(trainer, STEP)
    tracker.on_evaluation(trainer, EVALUATION)
    tracker.on_end(trainer, None)
    train = {
        "train/loss": 2.5,
        "train/learning_rate": 1e-3,
        "train/tokens_per_second": 16.0,
        "train/gradient_norm": 0.5,
        "step/seconds": 2.0,
        "step/predicted": 1.6,
        "step/prediction_error": pytest.approx(-0.2),
        "memory/device_GiB": 3.0,
        "memory/host_pools_GiB": 12.0,
    }
    peak = fake.calls[1][1].pop("memory/process_peak_GiB")
    assert 0.01 < peak < 1000
    assert fake.calls == [
        ("init", "megatrain", "first", 20),
        ("log", train, 7),
        ("log", {"evaluation/loss": 1000.0}, 7),
        "finish",
    ]


class Remembering:
    """A fake tracker's package that resumes a known run, or starts a new one."""

    def __init__(self, name: str) -> None:
        self.name, self.runs, self.asked = name, dict[str, list[int]](), list[dict[str, Any]]()

    def init(
        self,
        *,
        project: str,
        config: Any,
        name: str | None = None,
        resume: str = "never",
        **given: Any,
    ) -> Any:
        assert project == "mine"
        assert given.keys() <= ({"id"} if self.name == "wandb" else set())  # trackio has no ids
        key = given.get("id") if self.name == "wandb" else name
        if not (resume == "allow" and key in self.runs):
            key = f"run{len(self.runs)}"
            self.runs[key] = []
        self.asked.append(given)
        logged = self.runs[key]
        return types.SimpleNamespace(
            id=f"{key}", name=key, log=lambda _, step: logged.append(step), finish=lambda: None
        )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_training_continues_its_tracker_s_run(
    name: str, trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, installed = Remembering(name), types.ModuleType(name)
    installed.__spec__ = importlib.machinery.ModuleSpec(name, None)
    installed.init = package.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, installed)

    def train(first_step: int, project: str = "mine") -> None:
        trainer.first_step = first_step
        settings = convert({"tracker": name, "project": project}, Logging, "")
        (tracker,), _ = trackers(settings, tmp_path)
        tracker.on_start(trainer)
        tracker.on_step(trainer, dataclasses.replace(STEP, number=first_step))
        tracker.on_end(trainer, None)

    train(1)
    train(5)
    train(9)
    assert package.runs == {"run0": [1, 5, 9]}
    train(1)  # a new training; must not continue the other run
    train(3)
    assert package.runs == {"run0": [1, 5, 9], "run1": [1, 3]}
    (tmp_path / "tracker.json").write_text("{}")
    with pytest.raises(UserError, match=r"tracker\.json"):
        train(4)


def test_a_plan_without_prediction_and_clipping_logs_the_rest(trainer: Any) -> None:
    trainer.plan = msgspec.structs.replace(trainer.plan, prediction=None)
    found = step_values(trainer, dataclasses.replace(STEP, gradient_norm=None))
    assert not [name for name in found if "predicted" in name or "norm" in name]
    assert found["step/seconds"] == 2.0
    found = step_values(trainer, dataclasses.replace(STEP, clip_factor=0.25))
    assert found["train/clip_factor"] == 0.25


def test_with_a_gpu_device_memory_is_its_peak(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.device, trainer.device_bytes_before = torch.device("cuda"), 2**30
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 6 * 2**30)
    assert step_values(trainer, STEP)["memory/device_GiB"] == 5.0


@pytest.mark.parametrize(
    ("chosen", "field", "package"),
    [
        (Logging(tracker="wandb"), "tracker: wandb", "wandb"),
        (Logging(tracker="trackio"), "tracker: trackio", "trackio"),
        (Logging(tensorboard=True), "tensorboard", "tensorboard"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: Logging, field: str, package: str
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    for ask in (refuse_missing, lambda logging: trackers(logging, tmp_path)):
        with pytest.raises(
            UserError,
            match=(
                rf"^logging: {field}: found no package {package}; allowed: an installed package;"
                rf" fix: pip install {package}, or leave "
            ),
        ):
            ask(chosen)
    assert trackers(Logging(), tmp_path) == ([], [])
    with pytest.raises(UserError, match=r"^logging: tracker: wandb: found no package wandb;"):
        Tracker("wandb", "project")


def test_the_folder_of_an_offline_run_is_not_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python imports a folder without modules as a namespace package."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"^logging: tracker: wandb: found no package wandb;"):
        refuse_missing(Logging(tracker="wandb"))
    (tmp_path / "wandb" / "__init__.py").touch()
    importlib.invalidate_caches()
    refuse_missing(Logging(tracker="wandb"))


def test_without_a_run_folder_there_are_no_tensorboard_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.machinery.ModuleSpec("tensorboard", None)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: found)
    assert trackers(Logging(tensorboard=True), None) == (
        [],
        ["no TensorBoard files: there is no run folder"],
    )


def test_a_resume_that_fails_at_its_start_hides_nothing_in_tensorboard(
    tmp_path: Path, trainer: Any
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ((board,), _), steps = trackers(Logging(tensorboard=True), tmp_path), [1, 2, 3, 4]

    def shown() -> list[int]:
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
        return [scalar.step for scalar in events.Reload().Scalars("train/loss")]

    board.on_start(trainer)
    for number in steps:
        board.on_step(trainer, dataclasses.replace(STEP, number=number))
    board.on_end(trainer, None)
    trainer.first_step = 3
    board.on_start(trainer)
    board.on_end(trainer, ValueError("another callback"))
    assert shown() == steps
    board.on_start(trainer)
    board.on_step(trainer, dataclasses.replace(STEP, number=3))
    board.on_end(trainer, None)
    assert shown() == [1, 2, 3], "a step that is repeated replaces the later ones"


def test_tensorboard_files_hold_every_number(tmp_path: Path, trainer: Any) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (board,), notes = trackers(Logging(tensorboard=True), tmp_path)
    assert isinstance(board, TensorBoard)
    assert notes == []
    board.on_start(trainer)
    board.on_step(trainer, STEP)
    board.on_evaluation(trainer, EvaluationResult(number=7, loss=2.0, tokens=3, seconds=1.0))
    board.on_end(trainer, None)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert found["train/loss"] == [(7, 2.5)]
    assert found["evaluation/loss"] == [(7, 2.0)]
    assert found["step/prediction_error"] == [(7, pytest.approx(-0.2))]
    assert {name.partition("/")[0] for name in found} == {"train", "step", "memory", "evaluation"}
