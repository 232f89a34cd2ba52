"""Tests of steps in state formats other than `exact`.

They cover failures, evaluation, the seed, and the memory of updates by PyTorch. `test_blockwise.py`
tests the arithmetic, and `test_schedule_invariance.py` every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted import Counted
from small_runs import everything

from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.optimizer import adamw, blockwise
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator.model.state_format import EXACT, FORMATS, UPDATE_COSTS
from megatrain.simulator.schedule.plan import Plan

OTHERS = [name for name in FORMATS if name != EXACT]


@pytest.mark.parametrize("state", OTHERS)
@pytest.mark.parametrize("policy", ["double_buffer", "resident", "overlapped"])
def test_a_step_that_is_not_finite_changes_nothing(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, state: str
) -> None:
    with session(executable(policy, state=state)) as running:
        running.step(1)
        before = everything(running)
        head = next(op for op in running.executor.schedule.ops if op.kind == "head")
        task = running.tasks[head.id]
        loss, work = running.executor._arenas.flat(head.writes[2], torch.float32, 1), task.run
        task.run = lambda: (work(), loss.fill_(float("inf")))
        with pytest.raises(FloatingPointError, match=r"^step 2: loss inf"):
            running.step(2)
        assert everything(running) == before


@pytest.mark.parametrize("state", OTHERS)
def test_an_evaluation_has_the_loss_of_the_next_step(
    executable: Callable[..., Plan], session: Callable[..., Any], state: str
) -> None:
    with session(executable("overlapped", state=state)) as running:
        running.step(1)
        found = running.executor.evaluate(running.batches(2))
        before = everything(running), running.executor.checksum()
        assert found.loss == running.step(2).loss
        assert (everything(running), running.executor.checksum()) != before


@pytest.mark.parametrize("state", OTHERS)
def test_loaded_weights_are_the_nearest_that_the_format_has(
    executable: Callable[..., Plan], session: Callable[..., Any], state: str
) -> None:
    plan = executable("resident", state=state)
    error = 2.0**-16 if state == "master24" else 2.0**-8
    with session(plan) as running:
        for layer in plan.model.stack.values():
            for name, master in running.state.masters(layer).items():
                wanted = random_weights(0)(layer.name, name, tuple(master.shape))
                assert master.dtype == torch.float32
                assert ((master - wanted).abs() <= error * wanted.abs()).all()


def test_the_seed_decides_rounding_at_random(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    for state in FORMATS:
        found = []
        for seed in (0, 0, 1):
            with session(executable("double_buffer", state=state), seed=seed) as running:
                running.step(1)
                found.append(everything(running))
        assert found[0] == found[1]
        assert (found[0] == found[2]) == (state == EXACT)


@pytest.mark.parametrize("low", [True, False])
def test_an_update_in_pytorch_has_room_for_its_temporaries(
    monkeypatch: pytest.MonkeyPatch, low: bool
) -> None:
    """Temporaries are counted for a block of another size, because they are proportional to it."""
    count = 2**14
    monkeypatch.setattr(adamw, "kernels", lambda _: None)
    monkeypatch.setattr(blockwise, "_CPU_BLOCK", count)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    residual = torch.zeros(count, dtype=torch.int8)
    moments = torch.zeros(2, blockwise.records(count), dtype=torch.uint8)
    gradient, clip = weights.float(), torch.tensor(0.5)
    with Counted() as counted:
        blockwise.update(
            weights,
            residual if low else None,
            moments,
            gradient,
            settings=AdamW(weight_decay=0.1),
            rate=1e-3,
            number=1,
            clip=clip,
            copy_to=torch.empty_like(weights),
        )
    costs = UPDATE_COSTS["block8"]
    held = costs.gpu_temporary_bytes / blockwise.GPU_BLOCK
    assert 0.7 * held < counted.peak / count < held
