"""Searches plans that keep whole layers on the device: their whole state, or none of it.

The host updates all other layers. Such plans differ in the number of layers on the device, in the
memory that holds layer inputs, and in the weight slots. As many layers as fit save their
activations.
"""

from __future__ import annotations

import bisect

import msgspec

from megatrain.simulator.memory.account import Account
from megatrain.simulator.planner.assessment import with_knobs
from megatrain.simulator.planner.filling import Whole, last
from megatrain.simulator.planner.polishing import Polishing
from megatrain.simulator.planner.ranking import TIE
from megatrain.simulator.schedule.plan import Plan

_STEPS = 8  # steps from the smallest number of layers on the device to the largest
LEAST_HOST_GAIN = 1.004
"""The host updates more layers only if that is faster by this factor, because the speed of a host
varies more than the speed of a device. It is below 1.005 because a tested property is that more
memory never makes the chosen plan slower by 0.5 %."""


class WholeLayers(Polishing):
    """Searches plans of `Filling.whole`."""

    def with_whole_layers(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns the step time and the plan of the fastest of `plan` and plans of `Filling.whole`.

        They have as many weight slots as `plan`, or one for each streamed layer, so that it is
        loaded once a step. Evenly spaced numbers of layers are tried first, and then the numbers
        near the best one. `time` is the step time of `plan` in ns.
        """
        before = plan
        time, plan = self._of_whole(time, plan)
        limit = time / (LEAST_HOST_GAIN if plan is before else TIE)
        return self._fastest_whole(limit, plan, every_slot=True) or (time, plan)

    def _with_whole_head(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns the step time and the plan of the fastest of `plan` and plans like those of
        `with_whole_layers` that also keep the whole state of the head on the device, if it is not
        tied. `time` is the step time of `plan` in ns.
        """
        return (time, plan) if plan.model.tied else self._of_whole(time, plan, head=True)

    def _of_whole(self, time: float, plan: Plan, *, head: bool = False) -> tuple[float, Plan]:
        """Returns the step time and the plan of the fastest of `plan` and plans of `_fastest_whole`
        that keep layer inputs where `plan` does, on the device, or on the host. The arguments are
        those of `_fastest_whole`.
        """
        limit, placement = time / LEAST_HOST_GAIN, plan.knobs.placement
        for offloaded in dict.fromkeys((placement.offloaded_inputs, "", "all")):
            inputs = msgspec.structs.replace(placement, offloaded_inputs=offloaded)
            if faster := self._fastest_whole(limit, with_knobs(plan, placement=inputs), head=head):
                time, plan = faster
                limit = time / TIE
        return time, plan

    def _fastest_whole(
        self, limit_ns: float, base: Plan, *, head: bool = False, every_slot: bool = False
    ) -> tuple[float, Plan] | None:
        """Returns the step time and the plan of the fastest plan of `with_whole_layers` that keeps
        layer inputs where `base` does. With `head`, the head stays on the device. With
        `every_slot`, each streamed layer has a slot. Returns None if all take `limit_ns` or more.
        """
        tried = set[int]()
        best: tuple[float, int, Plan] | None = None
        size = max(base.model.layers // _STEPS, 1)
        # Often only the most layers that fit are faster than the limit.
        least, most = self._whole_counts(base, head=head, every_slot=every_slot)
        while size:
            near = (best[1] - size, best[1] + size) if best else (*range(least, most, size), most)
            counts = sorted({count for count in near if least <= count <= most} - tried)
            tried.update(counts)
            bounds = list[tuple[float, int, Plan]]()
            for count in counts:
                kept = Whole(count, head)
                if other := self._whole_layers_plan(base, kept, limit_ns, every_slot=every_slot):
                    bounds.append((self.lower_bound.step_ns(other), count, other))
            # With the lowest bounds first, fewer plans have to be simulated.
            fastest = best
            for bound, count, other in sorted(bounds, key=lambda entry: entry[:2]):
                if bound < limit_ns and (fastest is None or bound <= fastest[0]):
                    measured = (self.time(other), count, other)
                    fastest = min(fastest or measured, measured, key=lambda entry: entry[:2])
            # Slots and layers share the memory, so with `every_slot` only a few numbers of layers
            # near the best one are fast, and the first ones may miss them.
            if fastest is None or (fastest[0] >= limit_ns and not every_slot):
                break
            if fastest is best:
                size //= 2
            best = fastest
        return (best[0], best[2]) if best and best[0] < limit_ns else None

    def _whole_layers_plan(
        self, plan: Plan, kept: Whole, limit_ns: float, *, every_slot: bool = False
    ) -> Plan | None:
        """Returns `_whole` of `plan`, with as many layers as fit saving their activations.

        Returns None if it does not fit, if it streams no layer that the host can update, or if it
        would take `limit_ns` or more even if all layers saved their activations.
        """
        whole = self._whole(plan, kept, every_slot=every_slot)
        if (
            not whole.placed("host_updated")
            or self.lower_bound.step_ns(_saving(whole, plan.model.layers)) >= limit_ns
        ):
            return None
        chosen = self.filling.saving_most(_saving(whole, 0))
        return chosen if self.filling.account(chosen).fits else None

    def _whole(self, plan: Plan, kept: Whole, *, every_slot: bool) -> Plan:
        """Returns `Filling.whole` of `plan`. With `every_slot`, each streamed decoder layer has a
        weight slot.
        """
        whole = self.filling.whole(plan, kept)
        slots = max(plan.model.layers - kept.layers, plan.knobs.weight_slots)
        return with_knobs(whole, weight_slots=slots) if every_slot else whole

    def _whole_counts(
        self, plan: Plan, *, head: bool = False, every_slot: bool = False
    ) -> tuple[int, int]:
        """Returns the smallest and the largest number of decoder layers with which `_whole` of
        `plan` may fit.

        With fewer layers, the host has too little memory even if all layers save their activations
        and so offload no inputs. With more, the device has too little even if no layer saves them,
        or the host has no layer to update. The largest is 0 if no layer fits the device.
        """

        def account(count: int, saved: int) -> Account:
            whole = self._whole(plan, Whole(count, head), every_slot=every_slot)
            return self.filling.account(_saving(whole, saved))

        most = bisect.bisect_left(
            range(1, len(plan.model.stack) - 1 - head),
            True,
            key=lambda count: account(count, 0).device_peak_bytes > plan.device_limit_bytes,
        )
        layers = plan.model.layers
        least = bisect.bisect_left(
            range(most),
            True,
            key=lambda count: account(count, layers).host_peak_bytes <= plan.host_limit_bytes,
        )
        return least, most


def _saving(plan: Plan, layers: int) -> Plan:
    """Returns `plan` whose last `layers` decoder layers save their activations."""
    saved = last(plan.model.layers, layers)
    placement = msgspec.structs.replace(plan.knobs.placement, saved_activations=saved)
    return with_knobs(plan, placement=placement)
