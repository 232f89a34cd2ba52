"""Tests of steps that fail or are slow during a training. No finished step is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.memory.allocation_guard import AllocationGuard, Taken
from megatrain.runtime.training.callback import Callback
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.schedule.plan import Plan

Prepare = Callable[..., Trainer]
MODEL = Path("model") / "model.safetensors"


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(params=["double_buffer", "overlapped"])
def planned(request: Any, place: Path, executable: Callable[..., Plan]) -> Path:
    """Returns `place` with a plan that defers no updates, or with one that defers them."""
    plan = executable(
        request.param, vocabulary=300, dtype="fp32", accumulation=2, clipping="global"
    )
    plan.save(place / "plan.toml")
    return place


def test_a_step_that_allocates_memory_is_noted_once_and_loses_nothing(
    planned: Path, prepare: Prepare, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(planned, "straight", steps=6)
    looks = []

    def counts(_: AllocationGuard) -> tuple[Taken, int]:
        looks.append(True)
        return Taken(0, max(len(looks) - 7, 0), 0), 0  # retries in step 4 and in all later steps

    monkeypatch.setattr(AllocationGuard, "_counts", counts)
    notes = Notes()
    prepare(planned, callbacks=[notes], steps=6).fit()
    warnings = [note for note in notes.notes if "took memory" in note]
    assert len(warnings) == 1
    assert warnings[0].startswith("step 4: a step after the warm-up took memory: 0 bytes of the")
    assert (planned / "run" / MODEL).read_bytes() == (planned / "straight" / MODEL).read_bytes()
