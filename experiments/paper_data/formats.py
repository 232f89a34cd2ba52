"""Formats: device and host memory of a training step by model size and state format. The simulation
takes about 2 s.

The numbers are the memory account of our schedule, with every pool. The step has one sequence of
1,024 tokens, all state is on the host, and there is no memory limit.
"""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.figure4 import MODELS
from megatrain.simulator.memory.account import account
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import outline
from megatrain.simulator.schedule.plan import Knobs, Plan


def simulate() -> Any:
    """Returns the data of `FormatSize` in paper_figures for each model and state format."""
    found = []
    for name in MODELS:
        model = ModelSpec.load(name)
        for state, made in FORMATS.items():
            plan = Plan(
                policy="overlapped",
                hardware="any",
                source=name,
                model=model,
                workload=Workload(batch=1, sequence=1024, state=state),
                device_limit_bytes=2**59,
                host_limit_bytes=2**59,
                knobs=Knobs(chunk_bytes=2**28),
            )
            needed = account(outline(plan), 2**59, 2**59, None, 0)
            found.append(
                {
                    "model": name,
                    "parameters": model.parameters,
                    "state": state,
                    "what": made.what,
                    "host_gb": needed.host_peak_bytes / 1e9,
                    "device_gb": needed.device_peak_bytes / 1e9,
                }
            )
    return found
