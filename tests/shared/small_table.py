"""A calibration of a few points, and a copy of a few bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.schedule import Op

SHAPE = "qwen2-2048x11008-16:2x128-v151936/{}x1024-bf16"


def table(**changes: Any) -> CostTable:
    base: dict[str, Any] = {
        "measured_on": "here",
        "date": "2026-11-21",
        "curves": {
            "load_weights": ((1000, 110), (2000, 210), (4000, 350)),
            "clip": ((0, 7),),
            "norm": ((1000, 50),),
            "norm@compute": ((1000, 5),),
        },
        "compute": {"forward": {SHAPE.format(8): (80, 800), SHAPE.format(32): (320, 3000)}},
    }
    return msgspec.convert({**base, **changes}, CostTable)


def load(size: int) -> Op:
    return Op(id="W0.c0", lane="h2d", bytes=size)
