"""Predict a training step: does it fit, how fast, what binds. Loads no torch.

>>> from megatrain.simulator import HardwareSpec, ModelSpec, Workload, search
>>> best = search(ModelSpec.load("qwen2.5-7b"), HardwareSpec.load("h200"), Workload(batch=32, sequence=1024), policies=["double_buffer"])[0]
>>> best.feasible, best.plan.policy
(True, 'double_buffer')
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.simulator.engine import simulate
    from megatrain.simulator.evaluator import bounds, evaluate
    from megatrain.simulator.hardware import HardwareSpec
    from megatrain.simulator.plan import Knobs, Plan
    from megatrain.simulator.planner import search
    from megatrain.simulator.policies import lower
    from megatrain.simulator.schedule import Schedule
    from megatrain.simulator.specs import ModelSpec
    from megatrain.simulator.timeline import Timeline
    from megatrain.simulator.verdict import Verdict, judge
    from megatrain.simulator.workload import Workload

__all__ = [
    "HardwareSpec",
    "Knobs",
    "ModelSpec",
    "Plan",
    "Schedule",
    "Timeline",
    "Verdict",
    "Workload",
    "bounds",
    "evaluate",
    "judge",
    "lower",
    "search",
    "simulate",
]

_HOMES = {
    "engine": ("simulate",), "evaluator": ("bounds", "evaluate"), "hardware": ("HardwareSpec",), "plan": ("Knobs", "Plan"), "planner": ("search",),
    "policies": ("lower",), "schedule": ("Schedule",), "specs": ("ModelSpec",), "timeline": ("Timeline",), "verdict": ("Verdict", "judge"),
    "workload": ("Workload",),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Loads a name's module when it is first asked for: the runtime imports the contract from here and must not pay for simpy and the planner."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
