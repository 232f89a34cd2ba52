"""CostModel: how long an op takes when it has its lane, the link and the host's memory to itself, and what disturbs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatrain.simulator.hardware import Workspace
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import ModelSpec, Workload

FIX = "run `megatrain calibrate` for this model and workload"


class CostModel(Protocol):
    """Durations of ops in integer nanoseconds, and what else the machine does to a schedule."""

    @property
    def contention(self) -> Mapping[str, Mapping[str, float]]:
        """Lane -> other lane -> rate of the first, (0, 1], while the other is busy too."""

    @property
    def dispatch_ns(self) -> Mapping[str, int]:
        """Lane -> time from an op being ready to its start."""

    @property
    def step_overhead_ns(self) -> int:
        """Host time per step outside the schedule."""

    def duration_ns(self, op: Op) -> int:
        """Time of `op` at full rate. Raises UserError where nothing is known of its kind or shape."""

    def extrapolated(self, op: Op) -> bool:
        """The duration lies outside what was measured."""

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        """Bytes of one decoder layer's saved activations, the largest's where they differ; where that was measured."""

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        """Peak device bytes besides the planned pools and saved activations, where that was measured."""


class Unmeasured:
    """A cost model that knows no measured sizes and flags nothing."""

    def extrapolated(self, op: Op) -> bool:
        return False

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        return None

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        return None
