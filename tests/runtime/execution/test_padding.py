"""Tests of the padding between the tensors of a layer: it is not part of any gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.simulator.schedule.plan import Plan


@pytest.mark.parametrize(
    "policy", ["sequential", "double_buffer", "k_buffer", "resident", "overlapped"]
)
def test_old_contents_of_gradient_buffers_change_nothing(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str
) -> None:
    """Old contents of gradient buffers change no result.

    The model's norms have 36 elements and are padded to 64.
    """
    plan = executable(policy, layers=2, hidden=36, accumulation=2, clipping="global")
    layers = list(plan.model.stack.values())
    assert all(
        any(tensor.padded > tensor.elements for tensor in layer.tensors)
        for layer in layers
        if layer.name not in "eh"
    )
    found = []
    for dirty in (False, True):
        with session(plan) as running:
            if dirty:
                for buffer in running.executor.schedule.buffers:
                    if "gradient" in buffer.pool and not buffer.dynamic:
                        running.executor._arenas.flat(buffer.id, torch.uint8, buffer.bytes).fill_(
                            0x3F
                        )
            found.append(running.bits(steps=2))
            for layer in layers:
                moments = running.executor.memory().tensor(
                    running.state.home("moments", layer.name), torch.float32, (2, layer.elements)
                )
                start = 0
                for tensor in layer.tensors:
                    assert not moments[:, start + tensor.elements : start + tensor.padded].any()
                    start += tensor.padded
    assert found[0] == found[1]
