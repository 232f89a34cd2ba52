"""Times: how long 1 B tokens take and how much energy the GPU uses, by model size and machine. It
takes about 50 s.

The plan is our best one for a step of 32 x 1,024 tokens with exact state and eager layers, on one
GPU.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.paper_data.answers import ours
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

MODELS = ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "gpt-oss-120b")
HOSTS = {"rtx3090": "128GiB", "rtx4090": "256GiB", "gh200-96": "447GiB", "h200": "1536GiB"}
"""Machine -> its host memory."""
WORK = Workload(batch=32, sequence=1024)
TOKENS = 1_000_000_000


def simulate() -> Any:
    """Returns the data of `TimeData` in paper_figures."""
    points = []
    for machine, host in HOSTS.items():
        library = HardwareSpec.load(machine)
        hardware = msgspec.structs.replace(library, host_bytes=parse_bytes(host))
        for name in MODELS:
            model = ModelSpec.load(name)
            found = ours(model, hardware, WORK)
            hours = TOKENS / found.tokens_per_s / 3600
            watts = hardware.watts
            points.append(
                {
                    "machine": machine,
                    "host": host,
                    "watts": watts,
                    "uncertainty": hardware.uncertainty,
                    "model": name,
                    "parameters": model.parameters,
                    "hours": hours,
                    "kwh": None if watts is None else watts * hours / 1000,
                    "ours": msgspec.to_builtins(found),
                }
            )
    return {"tokens": TOKENS, "points": points}
