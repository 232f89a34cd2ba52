"""What every test shares: hypothesis without deadlines, `cuda` tests skipped where there is no GPU, and a maker of small plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.specs import ModelSpec, Workload

hypothesis.settings.register_profile("megatrain", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megatrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("cuda" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def small_plan(policy: str = "double_buffer", **changes: Any) -> Plan:
    """A plan for a model of a few thousand parameters. `changes` may name any field of the model, the workload, the knobs or the plan."""

    def chosen(into: type, **defaults: Any) -> dict[str, Any]:
        return {key: changes.pop(key, value) for key, value in defaults.items()} | {
            key: changes.pop(key) for key in list(changes) if key in into.__struct_fields__
        }

    model = ModelSpec(
        **chosen(ModelSpec, name="small", family="llama", layers=4, hidden=32, intermediate=96, heads=4, kv_heads=2, head_dim=8, vocabulary=256, tied=False)
    )
    workload = Workload(**chosen(Workload, batch=2, sequence=16))
    knobs = Knobs(**chosen(Knobs, weight_slots={"sequential": 1}.get(policy, 2), chunk_bytes=4096))
    defaults = {"hardware": "here.toml", "source": "small", "device_limit_bytes": 2**24, "host_limit_bytes": 2**26}
    return Plan(policy=policy, model=model, workload=workload, knobs=knobs, **{**defaults, **changes})


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return small_plan
