"""Cost models: two to predict with (`Calibrated`, `Datasheet`), one to check with (`Replayed`). They say how lanes slow each other; the engine applies it."""

from __future__ import annotations

from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.protocol import CostModel
from megatrain.simulator.costs.replayed import Replayed
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.sharing import Sharing
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

__all__ = ["Calibrated", "CostModel", "Datasheet", "Replayed", "cost_model"]


def cost_model(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> CostModel:
    """The calibrated model where the machine was measured, else the datasheet's."""
    table = hardware.costs
    if table is None:
        return Datasheet(hardware, model, workload)
    sharing = Sharing(table.contention, table.host_memory or hardware.host_memory, hardware.duplex_curve, table.turns or hardware.turns)
    datasheet = Datasheet(hardware, model, workload) if workload.dtype in hardware.peak_tflops else None
    return Calibrated(table, datasheet, sharing, Elementwise(model, workload))
