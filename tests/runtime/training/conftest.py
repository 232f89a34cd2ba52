"""Fixtures of the trainer's tests: a folder to train in, and trainers for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.training.callback import Callback
from megatrain.runtime.training.config import Config, full_name
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.schedule.plan import Plan

TEXT = "".join(
    f"def function_{index}(argument):\n    return argument + {index}\n\n" for index in range(200)
)


@pytest.fixture(scope="session")
def prepared_place(
    executable: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Returns a folder with a plan and its model, which `place` copies. Tests must not change it.

    All tests then begin with the same weights.
    """
    folder = tmp_path_factory.mktemp("place")
    plan = executable(vocabulary=300, dtype="fp32", accumulation=2)
    model = AutoModelForCausalLM.from_config(config_of(plan.model), dtype=torch.float32)
    model.save_pretrained(folder / "small")
    plan.save(folder / "plan.toml")
    return folder


@pytest.fixture
def place(prepared_place: Path, tmp_path: Path) -> Path:
    """Returns a folder with a plan, its model, and a corpus."""
    shutil.copytree(prepared_place, tmp_path, dirs_exist_ok=True)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.py").write_text(TEXT)
    return tmp_path


Prepare = Callable[..., Trainer]


@pytest.fixture
def prepare() -> Prepare:
    """Returns a function that makes a trainer for a `place`."""

    def make(
        place: Path,
        out: str | None = "run",
        *,
        callbacks: Sequence[Callback] = (),
        progress: bool = False,
        resume: Literal["newest", "scratch"] | int | None = None,
        **fields: Any,
    ) -> Trainer:
        """Makes a trainer. `fields` are config fields, as on the command line."""
        given = {
            "training.steps": 5,
            "schedule.kind": "constant",
            "schedule.rate": 1e-3,
            "schedule.warm_up_steps": 2,
            "saving.every_minutes": 0,
            **{full_name(name): value for name, value in fields.items()},
        }
        path = None if out is None else place / out
        return Trainer(
            place / "plan.toml",
            None,
            place / "corpus",
            Config.load(None, given),
            out=path,
            callbacks=callbacks,
            progress=progress,
            resume=resume,
            device=torch.device("cpu"),
        )

    return make


@pytest.fixture
def run(prepare: Prepare) -> Prepare:
    """Returns a function that makes a trainer and trains with it."""

    def make(place: Path, out: str | None = "run", **fields: Any) -> Trainer:
        trainer = prepare(place, out, **fields)
        trainer.fit()
        return trainer

    return make
