"""Tests of deferred updates: readers of weights or moments see all updates applied.

Reading changes no bit of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.checkpoint.manifest import RunState
from megatrain.runtime.execution.checksum import checksum
from megatrain.runtime.files.model_files import export, random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan


def _exported(running: Any, folder: Any) -> bytes:
    export(
        running.executor.state,
        running.plan,
        config_of(running.plan.model),
        folder / running.plan.policy,
    )
    return bytes((folder / running.plan.policy / "model.safetensors").read_bytes())


def _saved(running: Any, folder: Any) -> bytes:
    save(running.executor, RunState(step=2, loss=None), folder / running.plan.policy)
    return bytes((folder / running.plan.policy / "state-00001.safetensors").read_bytes())


def _moments(running: Any, _: Any) -> bytes:
    found = []
    for layer in running.plan.model.stack.values():
        home = running.executor.state.home("moments", layer.name)
        found.append(
            running.executor.memory().flat(home, torch.float32, 2 * layer.elements).clone()
        )
    return bytes(torch.cat(found).numpy().tobytes())


READERS: dict[str, Callable[[Any, Any], object]] = {
    "masters": lambda running, _: running.masters(),
    "export": _exported,
    "checkpoint": _saved,
    "checksum": lambda running, _: running.executor.checksum(),
    "moments": _moments,
    "evaluation": lambda running, _: running.executor.evaluate(running.batches(9)).loss,
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_sees_every_step(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Any, reader: str
) -> None:
    seen = []
    for policy in ("k_buffer", "overlapped"):
        with session(executable(policy, layers=3, clipping="global")) as running:
            first = READERS[reader](running, tmp_path / "before")
            for number in (1, 2):
                running.step(number)
            seen.append(READERS[reader](running, tmp_path / "after"))
            assert first != seen[-1]
    assert seen[0] == seen[1]


def test_reading_between_steps_changes_no_bit(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the weights between steps changes neither the weights nor the checksum of a step.

    The checksum is of the weights that the forward pass used.
    """
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    plan = executable("overlapped", layers=3, clipping="global")
    found = []
    for reads_after in ((), (1, 2, 3, 4), (2,), (3, 4)):
        with session(plan) as running:
            results = []
            for number in (1, 2, 3, 4):
                result = running.step(number)
                results.append((result.loss, result.gradient_norm, result.checksum))
                if number in reads_after:
                    running.masters()
            found.append((results, running.masters()))
    assert found == [found[0]] * 4


def test_the_checksum_of_a_step_with_a_deferred_update_is_of_the_weights_that_it_used(
    executable: Callable[..., Plan], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with session(executable("overlapped", layers=3, clipping="global")) as running:
        executor = running.executor
        for number in (1, 2, 3):
            before = executor.checksum()
            reported = running.step(number).checksum
            unflushed = checksum(running.plan, executor.schedule, executor._arenas)
            assert reported == unflushed == before
            assert executor.checksum() != before


def test_loaded_weights_are_not_overwritten_by_a_deferred_update(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Any
) -> None:
    with session(executable("overlapped", layers=3, clipping="global")) as running:
        start = running.masters()
        save(running.executor, RunState(step=0, loss=None), tmp_path / "start")
        running.step(1)
        running.state.load(random_weights(0))
        running.executor.flush_update()
        assert running.masters() == start
        running.step(1)
        restore(running.executor, tmp_path / "start", {})
        running.executor.flush_update()
        assert running.masters() == start


def test_a_closed_executor_applies_nothing(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable("overlapped", layers=3, clipping="global")) as running:
        running.step(1)
    with pytest.raises(UserError, match="executor: found closed"):
        running.masters()
