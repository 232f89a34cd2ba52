"""Tests that an executor that is closed, or that another thread uses, says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import usable_device
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

IDS = torch.arange(32).view(2, 16)
USES: dict[str, Callable[[Executor], object]] = {
    "step": lambda executor: executor.step([Batch(IDS, IDS)], rate=1e-3, number=1),
    "evaluate": lambda executor: executor.evaluate([Batch(IDS, IDS)]),
    "checksum": lambda executor: executor.checksum(),
    "state": lambda executor: executor.state.tensors(),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_executor_is_named(
    executable: Callable[..., Plan], session: Callable[..., Any], use: str
) -> None:
    with session(executable(layers=1)) as running:
        pass
    with pytest.raises(UserError, match=r"^executor: found closed; allowed: an open executor; fix"):
        USES[use](running.executor)
    running.executor.close()


@pytest.mark.parametrize("use", [*USES, "close"])
def test_a_second_thread_is_refused_while_a_step_runs(
    executable: Callable[..., Plan], session: Callable[..., Any], use: str
) -> None:
    """A second step would wait forever, and a read would return weights before and after."""
    uses = {**USES, "close": Executor.close}
    begun, go_on = threading.Event(), threading.Event()
    with session(executable(layers=1)) as running:
        first = next(iter(running.executor.tasks.values()))
        original = first.run

        def wait() -> None:
            begun.set()
            go_on.wait(60)
            original()

        first.run = wait
        thread = threading.Thread(target=USES["step"], args=(running.executor,))
        thread.start()
        try:
            assert begun.wait(60)
            with pytest.raises(UserError, match="executor: found in use by another thread; "):
                uses[use](running.executor)
        finally:
            go_on.set()
            thread.join()
        first.run = original
        running.executor.evaluate([Batch(IDS, IDS)])


def test_a_device_is_a_name_or_a_torch_device(executable: Callable[..., Plan]) -> None:
    plan = executable(layers=1)
    with Executor(plan, config_of(plan.model), AdamW(), "cpu") as executor:
        assert executor.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["mps", "meta", "gpu", "cuda:99", torch.device("cuda", 99), 3.5])
def test_a_device_that_cannot_be_used_is_one_line(device: Any) -> None:
    with pytest.raises(
        UserError, match=r"^device: found .*; allowed: cpu, or a CUDA device"
    ) as error:
        usable_device(device)
    assert "\n" not in str(error.value)
