"""CostModel: the interface of cost models. A cost model says how long an op takes while nothing
else runs, and how ops slow each other down.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Protocol

from megatrain.simulator.costs.contention import ContentionModel, Demand
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Op, Schedule, Sizes
from megatrain.simulator.schedule.operands import exchange_kernels

FIX = "run `megatrain calibrate` for this model and workload"


class CostModel(Protocol):
    """The protocol of a cost model. Durations are in integer nanoseconds."""

    @property
    def dispatch_ns(self) -> Mapping[str, int]:
        """Time from an op being ready to its start, by lane."""

    @property
    def step_overhead_ns(self) -> int:
        """Host time per step outside the schedule, in nanoseconds."""

    @property
    def process_bytes(self) -> int:
        """Host memory in bytes that a process with state on the host needs in addition to its
        pools, or 0 if it was not measured.
        """

    @property
    def library_bytes(self) -> int:
        """Device memory in bytes that libraries for matrix products keep. A measured `workspace`
        includes it.
        """

    def collective_bytes(self, gpus: int) -> int:
        """Returns the device memory in bytes that NCCL keeps on each of `gpus` GPUs, 0 with one
        GPU. A measured `workspace` does not include it.
        """

    @property
    def host_factors(self) -> tuple[float, ...]:
        """Factors on the time of ops of the lane `cpu`, which are equally likely. Empty if the
        host's speed does not vary, or if this was not measured.
        """

    def sizes(self, schedule: Schedule) -> Sizes:
        """Returns the ops of the schedule grouped by cost. Simulators then ask for one duration for
        each size, not for each op.
        """

    def duration_ns(self, op: Op) -> int:
        """Returns the time of `op` at full speed, in nanoseconds. Raises UserError if its kind or
        shape is unknown.
        """

    def demand(self, op: Op) -> Demand | None:
        """Returns what `op` needs of the resources that it shares with other ops. None means that
        it neither slows another op nor is slowed.
        """

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        """Returns the speed of each op in `busy`, in millionths of full speed and at least 1, while
        all of these ops run at the same time on different lanes.
        """

    def extrapolated(self, op: Op) -> bool:
        """Checks whether the duration of `op` is outside the measured range."""

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        """Returns the measured bytes of a decoder layer's saved activations, or None if they were
        not measured. If layers differ, it is the largest number.
        """

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        """Returns the measured peak device bytes in addition to the pools and the saved
        activations, or None if they were not measured.
        """


class ContendedCosts(abc.ABC):
    """Base class of cost models. Ops of one size cost the same, and `sharing` says how ops slow
    each other down.
    """

    sharing: ContentionModel
    """The resources that the lanes share."""
    process_bytes = library_bytes = 0
    host_factors: tuple[float, ...] = ()

    def sizes(self, schedule: Schedule) -> Sizes:
        return schedule.sizes

    @abc.abstractmethod
    def duration_ns(self, op: Op) -> int:
        """Returns the time of `op` at full speed."""

    def collective_bytes(self, gpus: int) -> int:
        """Returns 0."""
        return 0

    def touched_bytes(self, op: Op) -> int:
        """Returns the bytes that an op of the lane `cpu` reads and writes."""
        return 0

    def demand(self, op: Op) -> Demand | None:
        return self.sharing.demand(
            op.lane,
            self.touched_bytes(op) if op.lane == "cpu" else op.bytes,
            self.duration_ns(op),
            op.kind,
            high_priority=op.high_priority,
            kernels=exchange_kernels(op),
        )

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        return self.sharing.rates(busy)


class EstimatedCosts(ContendedCosts):
    """Base class of cost models without measured bytes. No duration counts as extrapolated."""

    def extrapolated(self, op: Op) -> bool:
        return False

    def activations_bytes(self, model: ModelSpec, workload: Workload) -> int | None:
        return None

    def workspace(self, model: ModelSpec, workload: Workload) -> Workspace | None:
        return None
