"""Predicts a training step: whether it fits in memory, how long it takes, and what limits it. It
does not import torch.

>>> from megatrain.simulator import HardwareSpec, ModelSpec, Workload, search
>>> model, machine = ModelSpec.load("qwen2.5-7b"), HardwareSpec.load("h200")
>>> workload = Workload(batch=32, sequence=1024)
>>> best = search(model, machine, workload, policies=["double_buffer"])[0]
>>> best.feasible, best.plan.policy
(True, 'double_buffer')
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.simulator.engine.discrete_event import simulate
    from megatrain.simulator.engine.evaluator import bounds, evaluate
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.model.workload import Workload
    from megatrain.simulator.planner.search import search
    from megatrain.simulator.policies import lower
    from megatrain.simulator.schedule import Schedule
    from megatrain.simulator.schedule.plan import Knobs, Plan
    from megatrain.simulator.schedule.timeline import Timeline
    from megatrain.simulator.verdict.verdict import Verdict, judge

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
    "engine.discrete_event": ("simulate",),
    "engine.evaluator": ("bounds", "evaluate"),
    "hardware.machine": ("HardwareSpec",),
    "model.specs": ("ModelSpec",),
    "model.workload": ("Workload",),
    "planner.search": ("search",),
    "policies": ("lower",),
    "schedule": ("Schedule",),
    "schedule.plan": ("Knobs", "Plan"),
    "schedule.timeline": ("Timeline",),
    "verdict.verdict": ("Verdict", "judge"),
}


def __getattr__(name: str) -> object:
    """Imports the module of a public name on first use. The runtime imports `Plan` and `Schedule`
    from here and should not have to load simpy and the planner.
    """
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for completion in a notebook."""
    return __all__
