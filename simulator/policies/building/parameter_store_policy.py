"""ParameterStorePolicy: a policy that only decides where weights and gradients are."""

from __future__ import annotations

from typing import ClassVar

from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.timed_builder import TimedBuilder
from megatrain.simulator.policies.building.training_step import ParameterStore, compute, declare
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan


class ParameterStorePolicy(Policy):
    """A policy whose step is `compute` on a `ParameterStore`. A subclass defines `storage`."""

    serial: ClassVar[bool] = False
    """Whether every op waits for the op before it."""

    def storage(self, builder: Builder, plan: Plan) -> ParameterStore:
        """Returns the parameter store of one step.

        Raises UserError if the policy cannot execute `plan`.
        """
        raise NotImplementedError

    def lower(self, plan: Plan) -> Schedule:
        return self._lowered(Builder(plan.policy, serial=self.serial), plan)

    def timed(self, plan: Plan) -> Schedule:
        """Returns what `ParameterStorePolicy.lower` returns, with `compiled` and `sizes` alone."""
        return self._lowered(TimedBuilder(plan.policy, serial=self.serial), plan)

    def _lowered(self, builder: Builder, plan: Plan) -> Schedule:
        compute(builder, plan, self.storage(builder, plan))
        return builder.build()

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """Returns a schedule with the buffers of `lower` and without its ops."""
        builder = Builder(plan.policy, serial=self.serial, merged=merged)
        declare(builder, plan, self.storage(builder, plan))
        return builder.build()
