"""Policy: the interface of a scheduling policy."""

from __future__ import annotations

from typing import ClassVar

from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule


class PolicyWarning(UserWarning):
    """A search goes on without a policy."""


class Policy:
    """Writes one optimizer step as a program of ops over buffers.

    A subclass sets `name` and `knobs` and defines `lower`; everything else has a default.
    """

    name: ClassVar[str]
    """what `--policy` and a plan's `policy` call it"""
    knobs: ClassVar[tuple[str, ...]] = ()
    """fields of `Knobs` that `lower` reads, `placement` left out; the search varies these"""
    placements: ClassVar[tuple[str, ...]] = ()
    """fields of `Placement` that `lower` obeys"""
    prediction_only: ClassVar[bool] = False
    """the policy is another system's: it is simulated and compared, never executed or searched"""
    dominated_by: ClassVar[str] = ""
    """a policy that can do all that this one can; this one is then planned only by name"""

    goes_layer_by_layer: ClassVar[bool] = False
    """each micro-batch takes the layers in order, forward and back, with weights in slots of which the
    least recently used is reused; the search then has a lower bound that follows the lanes"""

    def lower(self, plan: Plan) -> Schedule:
        """Returns the schedule of one step of `plan`.

        Raises UserError for a plan that the policy cannot execute. The search goes on without it.
        """
        raise NotImplementedError

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """Returns a schedule with the buffers of `lower`; its ops may be left out. With `merged` the
        buffers of a pool may be one of the same total size.

        Override it where buffers are known without lowering: the search asks for them often.
        """
        return self.lower(plan)

    def defers_update(self, plan: Plan) -> bool:
        """Whether a step leaves its update to the next step."""
        return False

    def flush_update(self, plan: Plan) -> Schedule | None:
        """Returns the deferred update of a step of `plan` as a schedule on the step's buffers; None
        where no update is deferred.
        """
        return None

    @property
    def places_state(self) -> bool:
        """Whether the policy keeps each layer's weights, gradients and optimizer state where the
        plan's placement says.
        """
        return "weights" in self.placements
