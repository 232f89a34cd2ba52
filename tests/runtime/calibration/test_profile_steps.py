"""Tests of the steps that are profiled: what runs, on which data, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.runtime.calibration import profile_steps as module
from megatrain.runtime.calibration.compute_alone import compute_alone, fill
from megatrain.runtime.calibration.profile_steps import StepProfile
from megatrain.runtime.execution.executor import Executor, StepResult
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import serialized
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")


def profiled(plan: Plan, **options: Any) -> StepProfile:
    return module.profile_steps(plan, config_of(plan.model), CPU, steps=1, seconds=0, **options)


def test_steps_are_numbered_and_train_random_weights_at_a_low_rate(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of zeros would be too fast, and a high rate could make the weights infinite."""
    plan, step = executable("resident"), Executor.step
    numbers, rates, norms = list[int](), list[float](), list[float]()

    def recorded(self: Executor, batches: Any, *, rate: float, number: int) -> StepResult:
        result = step(self, batches, rate=rate, number=number)
        numbers.append(number)
        rates.append(rate)
        norms.append(result.gradient_norm or 0)
        return result

    monkeypatch.setattr(Executor, "step", recorded)
    profiled(plan)
    assert numbers == list(range(1, WARM_UP_STEPS + 2))
    assert 0 < min(rates) <= max(rates) < 1e-3
    assert min(norms) > 0, "the weights are zeros"


def test_without_a_gpu_the_pools_are_all_that_is_reported_of_memory(
    executable: Callable[..., Plan],
) -> None:
    """The memory of activations is not known there, and is not reported as 1 byte either."""
    plan = executable("double_buffer")
    found, sizes = profiled(plan), {"device": 0, "host": 0}
    for buffer in lower(plan).buffers:
        sizes[buffer.place] += 0 if buffer.dynamic else buffer.allocated
    assert (found.device_peak_bytes, found.host_bytes) == (sizes["device"], sizes["host"])
    assert (found.peaks, found.saved_bytes, found.evaluation) == ({}, 0, None)


def test_a_given_schedule_is_executed_instead_of_the_plans_own(
    executable: Callable[..., Plan],
) -> None:
    plan = executable("double_buffer")
    alone = serialized(lower(plan))
    assert profiled(plan, schedule=alone).schedule == alone != lower(plan)


def test_with_documents_a_row_has_one_of_a_single_token_and_one_with_the_rest(
    executable: Callable[..., Plan],
) -> None:
    plan = executable(batch=2, sequence=8, accumulation=3, documents=True)
    batches = module._batches(plan, torch.Generator().manual_seed(0))
    assert len(batches) == 3
    assert [batch.documents.tolist() for batch in batches] == [[[0] + [1] * 7] * 2] * 3
    assert all(batch.ids.shape == batch.labels.shape == (2, 8) for batch in batches)
    assert not batches[0].ids.equal(batches[0].labels)
    (plain,) = module._batches(executable(), torch.Generator().manual_seed(0))
    assert plain.documents is None


def test_a_buffer_of_weights_has_those_of_the_first_layer_that_uses_it(
    executable: Callable[..., Plan],
) -> None:
    """In a whole step, copies replace them. To fill a buffer for every layer would take longer
    than the steps.
    """
    plan, asked = executable("double_buffer"), list[str]()
    schedule, drawn = compute_alone(plan), random_weights(0, CPU)

    def weights(layer: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if layer not in asked:
            asked.append(layer)
        return drawn(layer, name, shape)

    first: dict[str, str] = {}
    for op in schedule.ops:
        if op.kind != "embed_backward":
            first.setdefault(op.reads[0], op.layer or op.kind)
    with Executor(plan, config_of(plan.model), AdamW(), CPU, schedule=schedule) as executor:
        fill(executor, weights)
    assert len(first) < len(plan.model.stack)
    assert len(asked) == len(set(first.values()))
    assert {layer for layer in asked if layer.isdigit()} == {
        layer for layer in first.values() if layer.isdigit()
    }
