"""ParameterStorePolicy: the base of policies that only decide where weights and gradients are."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.merged_builder import MergedBuilder
from megatrain.simulator.policies.building.timed_builder import TimedBuilder
from megatrain.simulator.policies.building.training_step import ParameterStore, compute, declare
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.schedule.plan import OF_DECODERS, Knobs, Placement, Plan


class ParameterStorePolicy(Policy):
    """A policy whose step is `compute` on a `ParameterStore`. A subclass defines `storage`."""

    serial: ClassVar[bool] = False
    """Whether every op waits for the op before it."""

    def storage(self, builder: Builder, plan: Plan) -> ParameterStore:
        """Returns the parameter store of one step. Raises UserError if the policy cannot execute
        `plan`.

        The store must not depend on which layers save or offload activations, because its buffers
        are cached for all plans that differ only in that.
        """
        raise NotImplementedError

    def lower(self, plan: Plan) -> Schedule:
        return self._lowered(Builder(plan.policy, serial=self.serial), plan)

    def lower_for_timing(self, plan: Plan) -> Schedule:
        """Returns what `lower` returns, without ops and buffers. If a subclass overrides `lower`,
        it is called instead.
        """
        if type(self).lower is not ParameterStorePolicy.lower:
            return self.lower(plan)
        return self._lowered(TimedBuilder(plan.policy, serial=self.serial), plan)

    def _lowered(self, builder: Builder, plan: Plan) -> Schedule:
        compute(builder, plan, self.storage(builder, plan))
        return builder.build()

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """Returns a schedule with the buffers of `lower` and without its ops."""
        if merged:
            blank = msgspec.structs.replace(
                plan, digest="", prediction=None, device_limit_bytes=1, host_limit_bytes=1
            )
            parts = (
                _stored(self, _without_activations(blank)),
                _computed(_only_activations(blank)),
            )
            return Schedule(policy=plan.policy, buffers=parts[0] + parts[1], ops=())
        builder = Builder(plan.policy, serial=self.serial)
        self.storage(builder, plan)
        declare(builder, plan)
        return builder.build()


def _without_activations(plan: Plan) -> Plan:
    """Returns `plan` with the activations of no layer placed."""
    placement = msgspec.structs.replace(plan.knobs.placement, **dict.fromkeys(OF_DECODERS, ""))
    return msgspec.structs.replace(
        plan, knobs=msgspec.structs.replace(plan.knobs, placement=placement)
    )


def _only_activations(plan: Plan) -> Plan:
    """Returns `plan` with default values of the knobs on which the buffers of activations do not
    depend.
    """
    knobs, placement = plan.knobs, plan.knobs.placement
    return msgspec.structs.replace(
        plan,
        knobs=Knobs(
            checkpoint_interval=knobs.checkpoint_interval,
            micro_batch_group=knobs.micro_batch_group,
            placement=Placement(**{name: getattr(placement, name) for name in OF_DECODERS}),
        ),
    )


@plugins.cached(maxsize=4096)
def _stored(policy: ParameterStorePolicy, plan: Plan) -> tuple[Buffer, ...]:
    """Returns the merged buffers of the policy's parameter store.

    Cached because a search asks for the same store with many placements of activations.
    """
    builder = MergedBuilder(plan.policy)
    policy.storage(builder, plan)
    return builder.build().buffers


@plugins.cached(maxsize=4096)
def _computed(plan: Plan) -> tuple[Buffer, ...]:
    """Returns the merged buffers of `compute`. Cached for the same reason as `_stored`."""
    builder = MergedBuilder(plan.policy)
    declare(builder, plan)
    return builder.build().buffers
