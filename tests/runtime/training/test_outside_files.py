"""Tests of runs whose policy, optimizer or cost model is in a file of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forget import forget

from megatrain.runtime.training.callback import Callback
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import OPTIMIZERS
from megatrain.simulator.policies.registry import POLICIES
from megatrain.simulator.schedule.plan import Plan

POLICY = """
import msgspec
from megatrain.simulator.policies.k_buffer import KBuffer


class Mine(KBuffer):
    name = "mine"

    def lower(self, plan):
        knobs = msgspec.structs.replace(plan.knobs, weight_slots=2)
        return super().lower(msgspec.structs.replace(plan, knobs=knobs))

    def buffers(self, plan, *, merged=False):
        return self.lower(plan)
"""
EDITED = POLICY.replace("weight_slots=2", "weight_slots=3")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget(POLICIES, OPTIMIZERS)
    yield
    forget(POLICIES, OPTIMIZERS)


@pytest.fixture
def mine(place: Path) -> Path:
    """Returns the policy file of the plan in `place`."""
    (place / "mine.py").write_text(POLICY, encoding="utf-8")
    plan = msgspec.structs.replace(Plan.load(place / "plan.toml"), policy=str(place / "mine.py"))
    digest = policies.lower(plan).digest
    msgspec.structs.replace(plan, digest=digest).save(place / "plan.toml")
    return place / "mine.py"


@pytest.mark.parametrize("edited", [EDITED, "raise RuntimeError", None])
def test_an_edit_does_not_reach_a_training_that_runs(
    place: Path, mine: Path, run: Callable[..., Any], edited: str | None
) -> None:
    """The policy is needed again for the evaluation after the edit."""
    evaluated = []

    class Editor(Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            if edited is None:
                mine.unlink(missing_ok=True)
            else:
                mine.write_text(edited, encoding="utf-8")

        def on_evaluation(self, trainer: Any, evaluation: Any) -> None:
            evaluated.append(evaluation.number)

    (place / "held_out.txt").write_text("def function(argument):\n    return argument\n" * 50)
    settings = {"evaluation_data": str(place / "held_out.txt"), "evaluation.every_steps": 1}
    trainer = run(place, callbacks=[Editor()], steps=2, export=False, **settings)
    assert evaluated == [1, 2]
    with pytest.raises(UserError, match=r"plan: digest|while it was loaded|no file"):
        policies.verified(trainer.plan)


def test_an_edit_before_a_training_begins_is_noticed(
    place: Path, mine: Path, prepare: Callable[..., Any]
) -> None:
    trainer = prepare(place, steps=1, export=False)
    mine.write_text(EDITED, encoding="utf-8")
    with pytest.raises(UserError, match="plan: digest"):
        trainer.fit()
    assert not (place / "run" / "plan.toml").exists()
