"""Tests of fields that have no effect without another setting: they are refused, from the command
line, from a config file and from Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.training.config import Config, fields
from megatrain.runtime.training.trainer import Trainer
from megatrain.runtime.training.unused_fields import _NEEDS, refuse_unused
from megatrain.simulator.base.errors import UserError

EVALUATION = "without evaluation data; allowed: only with evaluation data, because it has no effect"
UNUSED: dict[str, tuple[object, dict[str, Any], str, dict[str, Any], str]] = {
    # field: its value, the other settings and the clipping with which it is unused, and used
    "evaluation.every_steps": (2, {}, "global", {"data.evaluation_fraction": 0.5}, "global"),
    "evaluation.over_steps": (1, {}, "global", {"data.evaluation_split": "test"}, "global"),
    "optimizer.max_norm": (2.0, {}, "update", {}, "layer"),
    "optimizer.adagc_factor": (2.0, {}, "global", {}, "adagc"),
    "optimizer.adagc_decay": (0.5, {}, "layer", {}, "adagc"),
    "optimizer.adagc_warm_up": (5, {}, "none", {}, "adagc"),
    "schedule.decay_steps": (
        2,
        {"schedule.kind": "linear"},
        "global",
        {"schedule.kind": "wsd"},
        "",
    ),
    "schedule.floor": (0.1, {"schedule.kind": "constant"}, "global", {}, "global"),
    "saving.export_dtype": ("fp32", {"saving.export": False}, "global", {}, "global"),
    "logging.project": ("mine", {}, "global", {"logging.tracker": "wandb"}, "global"),
    "logging.name": ("mine", {}, "global", {"logging.tracker": "trackio"}, "global"),
}


def test_every_field_that_needs_another_one_is_tested() -> None:
    named = [field for need in _NEEDS for field in need.fields]
    assert sorted(named) == sorted(UNUSED)
    assert set(named) <= fields().keys()


@pytest.mark.parametrize("field", UNUSED)
def test_a_field_without_effect_is_refused(field: str) -> None:
    value, others, clipping, enough, used = UNUSED[field]
    steps = {"training.steps": 9}
    refuse_unused(Config.load(None, {**steps, **others}), clipping)
    refuse_unused(Config.load(None, {**steps, **enough, field: value}), used)
    with pytest.raises(UserError, match=f"^config: {field}: found {value}, without "):
        refuse_unused(Config.load(None, {**steps, **others, field: value}), clipping)


def test_a_trainer_refuses_it_unless_the_caller_evaluates(place: Path, prepare: Any) -> None:
    with pytest.raises(UserError, match=f"^config: evaluation.every_steps: found 2, {EVALUATION}"):
        prepare(place, **{"evaluation.every_steps": 2})
    assert not (place / "run").exists()

    class Held:
        def batches(self) -> list[Any]:
            return []

    config = Config.load(None, {"training.steps": 2, "evaluation.every_steps": 2})
    Trainer(
        place / "plan.toml", None, place / "corpus", config, evaluation_data=Held(), device="cpu"
    )


def test_the_plan_decides_whether_settings_of_adagc_are_used(
    place: Path, prepare: Any, executable: Any
) -> None:
    with pytest.raises(
        UserError, match=r"^config: optimizer\.adagc_factor: found 2\.0, without cl"
    ):
        prepare(place, adagc_factor=2.0)
    executable("overlapped", vocabulary=300, dtype="fp32", clipping="adagc").save(
        place / "plan.toml"
    )
    prepare(place, adagc_factor=2.0)
    prepare(place, **{"optimizer.max_norm": 2.0})


def test_a_run_that_has_such_a_field_can_be_resumed(place: Path, run: Any, prepare: Any) -> None:
    """Earlier versions accepted it. Another value is refused."""
    run(place, **{"steps": 2, "saving.every_steps": 1})
    file = place / "run" / "config.toml"
    text = file.read_text()
    file.write_text(text.replace("[evaluation]\nevery_steps = 0", "[evaluation]\nevery_steps = 2"))
    assert file.read_text() != text
    fields = {"steps": 3, "saving.every_steps": 1, "evaluation.every_steps": 2}
    assert prepare(place, resume="newest", **fields).fit().steps == 3
    with pytest.raises(UserError, match=r"config: evaluation\.every_steps: found 3, without"):
        prepare(place, resume="newest", **{**fields, "evaluation.every_steps": 3})
