"""Policy: the base class of scheduling policies."""

from __future__ import annotations

from typing import ClassVar

from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Placement, Plan


class PolicyWarning(UserWarning):
    """The warning that a search leaves out a policy."""


class Policy:
    """Writes one optimizer step as a program of ops over buffers.

    A subclass sets `name` and `knobs` and defines `lower`. Everything else has a default.
    """

    name: ClassVar[str]
    """The name in `--policy` and in a plan's `policy`."""
    knobs: ClassVar[tuple[str, ...]] = ()
    """The fields of `Knobs` that `lower` reads, without `placement`. The search varies them."""
    placements: ClassVar[tuple[str, ...]] = ()
    """The fields of `Placement` that `lower` obeys."""
    prediction_only: ClassVar[bool] = False
    """Whether this is the policy of another system. Such a policy is simulated and compared. It is
    never executed or searched."""
    updates_on_host: ClassVar[bool] = False
    """Whether the CPU updates every layer. Such a policy cannot be used with an optimizer that
    multiplies matrices. The search then skips it, unless it is the only one."""
    streams: ClassVar[bool] = True
    """Whether a step copies data between host and device memory. A machine with unified memory has
    nothing to copy, so only policies without copies are used there."""
    shards: ClassVar[bool] = False
    """Whether the policy can share a step among several GPUs (`Plan.gpus`)."""
    dominated_by: ClassVar[str] = ""
    """The name of a policy that can do everything that this one can, or empty. The search skips a
    dominated policy, unless it is named."""
    goes_layer_by_layer: ClassVar[bool] = False
    """Whether each micro-batch visits the layers in order, forward and backward, and streamed
    weights always reuse the least recently used slot. For such a policy, the search computes a
    lower bound lane by lane (`planner/lower_bound.py`)."""

    def lower(self, plan: Plan) -> Schedule:
        """Returns the schedule of one step of `plan`.

        Raises UserError if the policy cannot execute `plan`. The search then skips this plan.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define it")

    def lower_for_timing(self, plan: Plan) -> Schedule:
        """Returns a schedule with the `compiled` and `sizes` of the one that `lower` returns. Its
        ops and buffers may be missing.

        The search calls this method often. Override it if this is faster than lowering.
        """
        return self.lower(plan)

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """Returns a schedule with the buffers of the one that `lower` returns. Its ops may be
        missing.

        With `merged`, the buffers of a pool may be merged into one of the same total size. The
        search calls this method often. Override it if the buffers are known without lowering.
        """
        return self.lower(plan)

    def defers_update(self, plan: Plan) -> bool:
        """Returns whether a step of `plan` defers its update to the next step."""
        return False

    def flush_update(self, plan: Plan) -> Schedule | None:
        """Returns the deferred update of a step of `plan` as a schedule on the step's buffers.

        Returns None if no update is deferred.
        """
        return None

    @property
    def places_state(self) -> bool:
        """Whether the policy keeps each layer's weights, gradients and optimizer state where the
        plan places them.
        """
        return "weights" in self.placements

    @property
    def obeys_everything(self) -> bool:
        """Whether the policy obeys every field of the placement."""
        return {*Placement.__struct_fields__} <= {*self.placements}
