"""Tests that the names of pools do not change the trained bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pool_names import with_other_pool_names

from megatrain.runtime.execution import executor as module
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

MIXED = Placement(
    weights="0-1",
    moments="0",
    gradients="1",
    saved_activations="3",
    saved_attention="2",
    offloaded_inputs="0-1",
    host_updated="1",
)
CASES = [
    *((policy, {}) for policy in policies.names()),
    ("k_buffer", {"accumulation": 2, "clipping": "update"}),
    ("overlapped", {"placement": MIXED, "accumulation": 2}),
    pytest.param("overlapped", {"placement": MIXED, "tied": True}, marks=pytest.mark.nightly),
    pytest.param("overlapped", {"clipping": "update", "tied": True}, marks=pytest.mark.nightly),
    ("overlapped", {"clipping": "layer", "accumulation": 2, "dtype": "fp32"}),
    ("overlapped", {"clipping": "adagc"}),
]


@pytest.mark.parametrize(("policy", "changes"), CASES, ids=str)
def test_bits_are_the_same(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    changes: dict[str, Any],
) -> None:
    plan = executable(policy, **changes)
    with session(plan) as running:
        expected = running.bits(), running.executor.evaluate(running.batches(9)).loss
    flush, evaluation = policies.find(plan.policy).flush_update(plan), policies.evaluation(plan)
    monkeypatch.setattr(module, "flush_update", lambda _: flush and with_other_pool_names(flush))
    monkeypatch.setattr(module, "evaluation", lambda _: with_other_pool_names(evaluation))
    with session(plan, schedule=with_other_pool_names(policies.lower(plan))) as running:
        assert (running.bits(), running.executor.evaluate(running.batches(9)).loss) == expected
