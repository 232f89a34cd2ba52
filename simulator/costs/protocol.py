"""CostModel: how long an op takes when it has its lane, the link and the host's memory to itself, and what disturbs it."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Protocol

from megatrain.simulator.hardware import Workspace
from megatrain.simulator.schedule import Op, Schedule, Sizes
from megatrain.simulator.sharing import Demand, Sharing
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

FIX = "run `megatrain calibrate` for this model and workload"


class CostModel(Protocol):
    """Durations of ops in integer nanoseconds, and what else the machine does to a schedule."""

    @property
    def dispatch_ns(self) -> Mapping[str, int]:
        """Lane -> time from an op being ready to its start."""

    @property
    def step_overhead_ns(self) -> int:
        """Host time per step outside the schedule."""

    @property
    def process_bytes(self) -> int:
        """Host memory that a process with state on the host takes beside its pools; 0 where that was not measured."""

    def sizes(self, schedule: Schedule) -> Sizes:
        """One op of each cost, and for every op of the schedule which of them it costs as: the players ask once a size, not once an op."""

    def duration_ns(self, op: Op) -> int:
        """Time of `op` at full rate. Raises UserError where nothing is known of its kind or shape."""

    def demand(self, op: Op) -> Demand | None:
        """What `op` shares with ops that run at the same time; None where it neither disturbs another nor is disturbed."""

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        """Millionths of full speed at which ops with these demands, on different lanes, run together; each at least 1."""

    def extrapolated(self, op: Op) -> bool:
        """The duration lies outside what was measured."""

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        """Bytes of one decoder layer's saved activations, the largest's where they differ; where that was measured."""

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        """Peak device bytes besides the planned pools and saved activations, where that was measured."""


class Shared(abc.ABC):
    """What cost models have in common: ops of one size cost the same, and share what `sharing` says."""

    sharing: Sharing
    process_bytes = 0

    def sizes(self, schedule: Schedule) -> Sizes:
        return schedule.sizes

    @abc.abstractmethod
    def duration_ns(self, op: Op) -> int:
        """As in CostModel."""

    def touched_bytes(self, op: Op) -> int:
        """Bytes that an op of the cpu lane reads and writes."""
        return 0

    def demand(self, op: Op) -> Demand | None:
        return self.sharing.demand(op.lane, self.touched_bytes(op) if op.lane == "cpu" else op.bytes, self.duration_ns(op), op.kind)

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        return self.sharing.rates(busy)


class Unmeasured(Shared):
    """A cost model that knows no measured sizes and flags nothing."""

    def extrapolated(self, op: Op) -> bool:
        return False

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        return None

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        return None
