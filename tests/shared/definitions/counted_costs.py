"""A cost model in which an op only takes its dispatch time, and a machine with this cost model.

The measured durations of a run do not change its predictions. So whether `--adapt` switches does
not depend on the machine that runs the tests.
"""

from __future__ import annotations

import math
from pathlib import Path

from megatrain.experiments.cli.training import adaptation
from megatrain.simulator.base.files import read_toml, write_toml
from megatrain.simulator.costs import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec, library
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import LANES, Op


class Counted(Datasheet):
    def __init__(self, hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> None:
        super().__init__(hardware, model, workload)
        self.dispatch_ns = dict.fromkeys(LANES, 10**6)

    def duration_ns(self, op: Op) -> int:
        return 0


def cost_model(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> Counted:
    # A switch takes an unknown time on this machine, so any gain must suffice.
    adaptation.LEAST_GAIN = -math.inf
    return Counted(hardware, model, workload)


def write_machine(folder: Path) -> None:
    """Writes `counted.toml`, an H200 with this cost model, to the folder."""
    machine = read_toml(library()["h200"], dict)
    write_toml(folder / "counted.toml", {**machine, "cost_model": __file__}, "A machine.")
