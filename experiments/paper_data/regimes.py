"""Regimes: our best plan by tokens per step and device memory, for 7B on an H200 with 512 GiB of
host memory. The simulation takes about 3 min.

A plan for a smaller memory limit also fits a larger one. So a cell keeps the plan of a smaller
limit if that is faster.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.paper_data.answers import PredictedStep, ours
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

MODEL, MACHINE, SEQUENCE = "qwen2.5-7b", "h200-4x", 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEVICE_GIB = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 133)


def simulate() -> Any:
    """Returns the data of `Map` in paper_figures."""
    model, machine = ModelSpec.load(MODEL), HardwareSpec.load(MACHINE)
    cells, best = [], dict[int, PredictedStep]()
    for gib in DEVICE_GIB:
        hardware = msgspec.structs.replace(machine, device_bytes=gib * 2**30)
        for batch in BATCHES:
            found = [best[batch]] if batch in best else []
            found.append(ours(model, hardware, Workload(batch=batch, sequence=SEQUENCE)))
            best[batch] = max(found, key=lambda each: (each.fits, each.tokens_per_s))
            cells.append(
                {
                    "device_limit_gib": gib,
                    "tokens": batch * SEQUENCE,
                    **msgspec.to_builtins(best[batch]),
                }
            )
    return {
        "model": MODEL,
        "machine": MACHINE,
        "host_gib": machine.host_bytes / 2**30,
        "cells": cells,
    }
