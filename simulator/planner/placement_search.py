"""Searches for the fastest placement: what each layer keeps on the device.

Device memory can be used in three ways, which save different work per byte:

* Each byte of resident weights saves 3 bytes of copies per step: two loads (for update and
  backward) and one store. A byte of gradients, low half of the master or moments saves 2 bytes.
* Saved activations of a layer save its recompute. They take many bytes.
* A saved attention output saves the part of the recompute that grows with the square of the
  sequence length. It takes few bytes.

Which use is best depends on the lane that limits the step. So the search compares many candidates,
and then improves the best one:

1. Build candidates (`_candidates`). The number of layers that save activations goes from none to as
   many as fit, in eight steps. `filling.py` gives the rest of the memory to layer state, in several
   orders. If the inputs of recomputed layers and the attention outputs worth saving do not fit on
   the device together, candidates that offload the inputs are added.
2. If the policy defers the update, add each candidate with its streamed layers updated on the host.
3. Rank the candidates (`_ranked`) and keep the best two. All are timed with few large copies. Lower
   bounds are computed first, so few plans have to be simulated.
4. Refine the best plan (`_refined`): try host updates of all, half or none of the streamed layers,
   and another size of copies.
5. Move to a faster neighbour as long as there is one (`_climbed`). A neighbour differs by one saved
   layer, by one weight slot, or in the memory that holds the layer inputs.
6. Refine the second-best plan in the same way, and try host updates for it, too. Climb from it if
   it is nearly as fast as the best plan now. If the climb ends at a faster plan, continue with
   both plans.
7. Try plans that update all streamed layers on the host and keep the whole state of the others on
   the device (`whole_layers.py`), and climb from the best one.
8. Try plans with fewer slots and more state on the device (`_with_fewer_slots`), and climb.
9. Try plans that save no activations and have as many weight slots as fit (`_with_many_slots`), and
   climb. With several GPUs, also try plans that save some activations less, or keep fewer
   gradients on the device.
10. Try larger copies, and give up state for them if they do not fit (`_with_larger_copies`).
11. Climb from a candidate with another share of host updates, if it is nearly as fast as the best
    plan (`_other_shares`).

A second search begins with candidates that are filled in additional ways (`Filling`). It replaces
nothing of the first one, because a climb from a better candidate may end at a worse plan.

With clipping by update, there are two searches, one with state slots that hold a whole layer and
one with the usual slots. The fastest result is returned.

`polished` improves the result of these searches (`polishing.py`). At last, it tries plans of step 7
that keep the state of the head on the device, too, and climbs from the best one.

With several GPUs, the plans are those of a rank, which owns a part of each layer. Layers on the
device pass through slots too, and no layer is updated on the host.

If no candidate of step 1 or 2 fits, these steps are repeated with fewer slots. If candidates with
all slots fit in slightly more host memory, a search begins from them, too (`_from_beyond`), because
a climb may end at a plan that fits. Plans that keep no state on the device and update all layers on
the host are always among the candidates, with the most slots with which one fits (`_on_host`). If
nothing fits with the fewest slots, there is no plan, and `nearest_miss` returns the one that
exceeds its limits by the fewest bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.costs import CostModel
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.planner.assessment import Estimate, RunnerUp, with_knobs
from megatrain.simulator.planner.filling import (
    CLASSES,
    Whole,
    all_on_host,
    classes_of,
    host_share,
    host_updating,
    in_slots,
    last,
    ranges,
    updated_like,
)
from megatrain.simulator.planner.polishing import if_faster
from megatrain.simulator.planner.ranking import FINALISTS, TIE
from megatrain.simulator.planner.whole_layers import LEAST_HOST_GAIN, WholeLayers
from megatrain.simulator.schedule.arithmetic import part_elements
from megatrain.simulator.schedule.plan import Placement, Plan

_STEPS = 8  # steps from no saved layer to as many as fit
_CHUNKS = 8  # the most copies of the largest decoder layer
_LEAST_CHUNK, _USUAL_CHUNK = 16 * 2**20, 64 * 2**20
_STATE_SHARE = 1 / 16  # the largest share of the device's memory for state slots
_CLASSES_BYTES = 8  # bytes of a state slot, for all classes, per byte of weights in a chunk
# One chunk is loaded, one updated, one stored, and one is spare. With 2 slots, a step of a 14B
# model on an H200 is predicted 2 % slower and takes 0.9 GiB less.
_STATE_SLOTS = 4
_LEAST_STEP = 1.0005  # the search goes on if a neighbour is faster by at least this factor
_MOST_REFINED = 1.05  # a candidate is not refined if it is slower than a limit by this factor
# The search also climbs from the second-best candidate, unless the best plan so far is faster by
# this factor.
_MOST_CLIMBED = 1.01
# The same for candidates whose streamed layers are all updated on the host, if the best plan
# updates some of them there. With 1.01, 7B was 16 % slower on a host with fast DRAM.
_MOST_SHARED = 1.04
_BEYOND = 1.03  # host memory of a search from which a plan may come that needs less
# Plans with fewer slots are tried if that frees at least this share of the device's memory.
_LEAST_FREED = 1 / 64
_FEWER_SLOTS: tuple[dict[str, int], ...] = (
    {},
    {"gradient_slots": 1, "state_slots": 2},
    {"weight_slots": 1, "gradient_slots": 1, "state_slots": 1, "exchange_bytes": 0},
)
"""Knobs that need less and less memory. They are tried in order until a plan fits."""


class PlacementSearch(WholeLayers):
    """Searches the placements and slots for one policy, model, workload and machine."""

    def __init__(self, plan: Plan, costs: CostModel, *, more: bool = False) -> None:
        """`more` is an argument of the search's `Filling`."""
        layer = (
            max(part_elements(plan, spec.name) for spec in plan.model.decoders)
            * DTYPE_BYTES[plan.workload.dtype]
        )
        # Bytes of a copy with which plans are ranked: at least half of the largest layer, or of a
        # rank's part of it.
        coarse = max(_USUAL_CHUNK, 2 ** ((layer // 2).bit_length()))
        room = 2 ** (
            int(
                _STATE_SHARE * plan.device_limit_bytes / (_STATE_SLOTS * _CLASSES_BYTES)
            ).bit_length()
            - 1
        )
        usual = max(
            min(max(_USUAL_CHUNK, 2 ** ((layer // _CHUNKS).bit_length())), room), _LEAST_CHUNK
        )
        first = with_knobs(
            plan,
            chunk_bytes=usual,
            state_slots=_STATE_SLOTS,
            weights_ahead=int(not policies.find(plan.policy).defers_update(plan)),
        )
        super().__init__(first, costs, coarse, more=more)

    def best(self, limit_ns: float = math.inf) -> Estimate | None:
        """Returns the fastest plan that fits, or None if none fits.

        Plans that are slower than a step time of `limit_ns` by more than `_MOST_REFINED` are
        skipped.
        """
        usual = self._usual()
        estimates = [
            estimate
            for fitting in (*map(self._fitting, self._whole_layers()), usual)
            if (estimate := self._best_of(fitting, limit_ns))
        ]
        if estimates:
            # A search may gain much, so the second one is not skipped if it begins with a plan that
            # is at least as fast as the first plan of this one.
            first = self.first_ns(limit_ns) / _MOST_REFINED
            fastest = min(estimate.step_seconds * 1e9 for estimate in estimates)
            other = PlacementSearch(self.plan, self.costs, more=True)
            known = set(usual)
            candidates = [plan for plan in other._usual() if plan not in known]
            if estimate := other._best_of(candidates, min(limit_ns, max(fastest, first))):
                estimates.append(estimate)
            limit_ns = min(limit_ns, fastest)
        best = min(estimates, key=lambda estimate: estimate.step_seconds, default=None)
        beyond = self._from_beyond(usual, limit_ns)
        if best is None or beyond is None:
            return best or beyond
        best = self.polished(best)  # as `beyond` is
        return min(best, beyond, key=lambda estimate: estimate.step_seconds)

    def polished(self, best: Estimate) -> Estimate:
        """Returns what `Polishing.polished` returns, or a faster plan that also keeps the whole
        state of the head on the device. It replaces nothing of the search, because a climb from
        such a plan may end at a slower one.
        """
        best = super().polished(best)
        time, plan = self._with_whole_head(self.time(best.plan), best.plan)
        if plan == best.plan:
            return best
        return if_faster(self._estimate(self._polished(self._climbed(time, plan)[1])), best)

    def _from_beyond(self, usual: Sequence[Plan], limit_ns: float) -> Estimate | None:
        """Returns the best plan of a search with `_BEYOND` times the host memory, polished, if it
        fits, or None.

        The search is made only if the `usual` candidates have fewer slots, because candidates with
        all slots do not fit in host memory. A climb from one of these may end at a plan that needs
        less host memory, because more of its state is on the device.
        """
        slots = self.plan.knobs.state_slots
        if not usual or usual[0].knobs.state_slots == slots:
            return None
        more = int(_BEYOND * self.plan.host_limit_bytes)
        beyond = PlacementSearch(
            msgspec.structs.replace(self.plan, host_limit_bytes=more), self.costs
        )
        first = beyond._usual()
        if not first or first[0].knobs.state_slots != slots:
            return None
        found = beyond.best(limit_ns)
        if found is None:
            return None
        plan = msgspec.structs.replace(
            beyond.polished(found).plan, host_limit_bytes=self.plan.host_limit_bytes
        )
        return self._estimate(plan) if self.filling.account(plan).fits else None

    def _usual(self) -> list[Plan]:
        """Returns the candidates that fit, with the most slots with which any fits. Results are
        cached.
        """
        known, key = self._known.usual, (self.plan, self._more)
        if key not in known:
            found = next(filter(None, map(self._fitting, _FEWER_SLOTS)), [])
            on_host = next(filter(None, map(self._on_host, _FEWER_SLOTS)), [])
            found += [plan for plan in on_host if plan not in found]
            known[key] = found
        return known[key]

    def improved(self, plan: Plan) -> Plan:
        """Returns the plan at the end of a climb from `plan`, which fits but was not found by
        `best`.
        """
        return self._climbed(self.time(plan), plan)[1]

    def rough_ns(self) -> float:
        """Returns a rough guess of the best step time, in ns: the lowest of the lower bounds of a
        few plans that fit.

        These plans save the activations of no layer or of as many as fit, and then hold as much
        state on the device as fits. Returns infinity if none of them fits.
        """
        layers, plans = self.plan.model.layers, list[Plan]()
        for base in (Placement(), Placement(offloaded_inputs="all")):
            most = self.filling.most_saved(self.plan, base)
            for saved in {0, max(most, 0)}:
                kept = msgspec.structs.replace(base, saved_activations=last(layers, saved))
                plans += self.filling.fills(self.plan, kept)
        return min(
            (self.lower_bound.step_ns(plan) for plan in plans if self.filling.account(plan).fits),
            default=math.inf,
        )

    def likely(self) -> tuple[float, Plan] | None:
        """Returns a plan that fits and is probably fast, and a lower bound of its step time in ns.

        It has the lowest bound of the plans that `best` begins with. No plan is lowered. Returns
        None if none of them fits.
        """
        fitting = self._usual()
        bounds = [self.lower_bound.step_ns(plan) for plan in fitting]
        return min(zip(bounds, fitting, strict=True), key=lambda entry: entry[0], default=None)

    def first_ns(self, limit_ns: float) -> float:
        """Returns the step time, in ns, of the fastest plan that `best` would refine. Returns
        infinity if no plan fits, or if `best` would skip all plans because of `limit_ns`.
        """
        fitting = self._usual()
        ranked = self._ranked(fitting, _MOST_REFINED * limit_ns)
        return min(map(self.time, ranked), default=math.inf)

    def _fitting(self, knobs: dict[str, int]) -> list[Plan]:
        """Returns the candidates that have `knobs` and fit."""
        candidates = list(dict.fromkeys(self._candidates(with_knobs(self.plan, **knobs))))
        if policies.find(self.plan.policy).defers_update(self.plan):
            # Updates on the host copy no optimizer state over the link, so they delay the first
            # forward pass less. Plans with them may be much faster.
            candidates += [
                other
                for other in dict.fromkeys(map(host_updating, candidates))
                if other not in candidates and self.filling.account(other).fits
            ]
        candidates += self.filling.only_tied_embedding(with_knobs(self.plan, **knobs))
        return list(dict.fromkeys(candidates))

    def _on_host(self, knobs: dict[str, int]) -> list[Plan]:
        """Returns the plans that have `knobs`, keep no state on the device, update all layers on
        the host, and fit. They need no slots for state on the device.
        """
        bases = (Placement(), Placement(offloaded_inputs="all"))
        lean = (with_knobs(self.plan, **knobs, placement=base) for base in bases)
        return [plan for plan in map(host_updating, lean) if self.filling.account(plan).fits]

    def _best_of(self, candidates: Sequence[Plan], limit_ns: float) -> Estimate | None:
        """Returns the best of the candidates, refined. Returns None if there are none, or if all of
        them are skipped because of `limit_ns`.
        """
        finals = [
            (self.time(plan), plan) for plan in self._ranked(candidates, _MOST_REFINED * limit_ns)
        ]
        if not finals:
            return None
        (time, plan), *others = sorted(finals, key=lambda entry: entry[0])
        time, plan = self._climbed(*self._refined(time, plan))
        if not plan.placed("host_updated"):
            # The number of saved layers may have changed, so host updates may be faster now.
            faster, other = self._with_host_updates(time, plan)
            time, plan = self._climbed(faster, other) if faster < time else (time, plan)
        found = self._improved(time, plan)
        if others:
            second = self._refined_like(*others[0], plan)
            if second[0] < _MOST_CLIMBED * time:
                second = self._climbed(*second)
            # The first plan is improved, too, because it may end at a faster plan.
            found += self._improved(*second) if second[0] < time else [second]
        found += self._other_shares(candidates, found)
        self.keep(found)
        (time, plan), *rivals = sorted(found, key=lambda entry: entry[0])
        rivals = [entry for entry in rivals if entry[1] != plan]
        if not rivals:
            return self._estimate(plan)
        slower, other = rivals[0]
        best = self._estimate(plan)
        runner_up_seconds = best.step_seconds * (slower / time)  # rounding cannot make it smaller
        if plan.micro_batches > 2:
            # The times above are extrapolated from two groups of micro-batches. The order is
            # decided by simulating the whole step.
            rival = self._estimate(other)
            best, rival = (rival, best) if rival.step_seconds < best.step_seconds else (best, rival)
            other, runner_up_seconds = rival.plan, rival.step_seconds
        runner_up = RunnerUp(policy=other.policy, knobs=other.knobs, step_seconds=runner_up_seconds)
        return msgspec.structs.replace(best, runner_up=runner_up)

    def _other_shares(
        self, candidates: Sequence[Plan], found: list[tuple[float, Plan]]
    ) -> list[tuple[float, Plan]]:
        """Returns plans, with their step times in ns, whose share of host updates no plan of
        `found` has.

        A climb hardly changes the share. So, for each share, another climb begins from the fastest
        candidate with it, if that is nearly as fast as the best plan.
        """
        results = list[tuple[float, Plan]]()
        with_all = [plan for plan in candidates if host_share(plan) == 1]
        for share, plans in (
            (0, [plan for plan in candidates if host_share(plan) == 0]),
            (1, with_all),
            (2, [host_updating(plan, every=2) for plan in with_all]),
        ):
            least, best = min(found, key=lambda entry: entry[0])
            factor = _MOST_SHARED if share == 1 and host_share(best) > 1 else _MOST_CLIMBED
            limit = factor * least
            if share in {host_share(plan) for time, plan in found if time < limit}:
                continue
            fitting = [other for other in plans if self.filling.account(other).fits]
            for start in self._ranked(fitting, limit)[:1]:
                time, plan = self._with_larger_copies(self.time(start), start)
                if time < limit:
                    time, plan = self._climbed(time, plan)
                    faster = time * factor < limit
                    results += self._improved(time, plan) if faster else [(time, plan)]
        return results

    def _improved(self, time: float, plan: Plan) -> list[tuple[float, Plan]]:
        """Returns (step time in ns, plan) after steps 7 to 10 of the search, and before each of
        them that found a faster plan.
        """
        found = [(time, plan)]
        for improved in (
            self.with_whole_layers,
            self._with_fewer_slots,
            self._with_many_slots,
            self._with_larger_copies,
        ):
            faster, other = improved(*found[-1])
            if faster < found[-1][0]:
                found.append(self._climbed(faster, other))
        return found

    def _everything(self, plan: Plan, base: Placement) -> Iterator[Plan]:
        """Yields plans that keep all state on the device and save activations of as many layers as
        fit. Yields nothing if the state does not fit.
        """
        everything = msgspec.structs.replace(base, **dict.fromkeys(classes_of(plan), "all"))
        spare = self.filling.most_saved(plan, everything)
        if spare >= 0:
            for placement in self.filling.with_attention(
                plan,
                msgspec.structs.replace(
                    everything, saved_activations=last(plan.model.layers, spare)
                ),
            ):
                candidate = with_knobs(plan, placement=placement)
                yield from [candidate] if self.filling.account(candidate).fits else []

    def least_ns(self) -> float:
        """Returns a lower bound, in ns, of the step time of every plan that fits.

        It is the time of the compute ops of an ideal plan. All state is on the host, as many layers
        as fit save their activations, and the others save their attention output if that is worth
        its memory.
        """
        lean, layers = (
            with_knobs(self.plan, **_FEWER_SLOTS[-1], chunk_bytes=_LEAST_CHUNK),
            self.plan.model.layers,
        )
        most = max(
            self.filling.most_saved(lean, base)
            for base in (Placement(), Placement(offloaded_inputs="all"))
        )
        kept = ranges(
            [layer.name for layer in self.plan.model.decoders], set(self.filling.attention_layers)
        )
        return self.lower_bound.compute_ns(
            with_knobs(
                lean,
                placement=Placement(
                    saved_activations=last(layers, max(most, 0)), saved_attention=kept
                ),
            )
        )

    def _whole_layers(self) -> list[dict[str, int]]:
        """Returns knobs with which the state slots hold a whole layer and one chunk more.

        They are used only with clipping by update. If all chunks of a layer are in slots, the layer
        is clipped and updated without loading its state twice. The additional slot lets the next
        layer's state arrive meanwhile. Two sizes of chunks are tried, because either may be faster.
        """
        if self.plan.workload.clipping != "update":
            return []
        layer = (
            max(spec.elements for spec in self.plan.model.decoders)
            * DTYPE_BYTES[self.plan.workload.dtype]
        )
        size = self.plan.knobs.chunk_bytes
        return [
            {"chunk_bytes": chunk, "state_slots": -(-layer // chunk) + 1}
            for chunk in (size, 2 * size)
        ]

    def _climbed(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Moves from `plan` to its fastest neighbour until no neighbour is faster.

        `time` is the step time of `plan` in ns. Returns the last plan and its time.
        """
        tried = {plan}
        while True:
            before = time
            for others in (self.filling.neighbours, self.filling.with_other_inputs):
                nearby = [other for other in dict.fromkeys(others(plan)) if other not in tried]
                tried.update(nearby)
                better = self.faster(time, plan, nearby) or self._with_another_slot(time, plan)
                time, plan = better or (time, plan)
                if time * _LEAST_STEP <= before:
                    break
            else:
                return time, plan

    def _with_another_slot(self, time: float, plan: Plan) -> tuple[float, Plan] | None:
        """Returns `plan` with one more weight slot and its time, or None if it is not faster.

        It is timed with the plan's own size of copies, because large copies would hide the gain.
        """
        other = self.filling.with_another_slot(plan)
        return (self.time(other), other) if other and self._is_faster(other, time) else None

    def _candidates(self, plan: Plan) -> Iterator[Plan]:
        """Yields the plans to rank. All of them fit. See step 1 in the module's docstring."""
        decoders, filling = plan.model.layers, self.filling
        for base in (Placement(), Placement(offloaded_inputs="all")):
            most = filling.most_saved(plan, base)
            if most < 0:
                continue
            yield from self._everything(plan, base)
            for saved in sorted({round(most * step / _STEPS) for step in range(_STEPS + 1)}):
                yield from filling.filled(
                    plan, msgspec.structs.replace(base, saved_activations=last(decoders, saved))
                )
            # If all attention outputs fit next to the inputs, offloading the inputs gains nothing.
            every = ranges(
                [layer.name for layer in plan.model.decoders], set(filling.attention_layers)
            )
            if (
                filling.room(
                    with_knobs(plan, placement=msgspec.structs.replace(base, saved_attention=every))
                )
                >= 0
            ):
                return

    def _refined_like(self, time: float, plan: Plan, best: Plan) -> tuple[float, Plan]:
        """Returns a step time and a plan: `plan` with the refinements of `best` if it fits and is
        faster with them, and otherwise `plan`.

        The refinements are the share of host updates, the bytes of a copy, and the weight slots.
        A plan with host updates keeps its share, so that the search begins from different plans.
        If the host updates no layer of the result, host updates of every second or of all streamed
        layers are tried, too. `time` is the step time of `plan` in ns.
        """
        alike = with_knobs(
            plan if plan.placed("host_updated") else updated_like(plan, best),
            chunk_bytes=best.knobs.chunk_bytes,
            weight_slots=best.knobs.weight_slots,
        )
        if alike.knobs != plan.knobs and self.filling.account(alike).fits:
            time, plan = min((time, plan), (self.time(alike), alike), key=lambda entry: entry[0])
        if plan.placed("host_updated"):
            return time, plan
        # The plan may stream other layers than `best`, so host updates may make it faster even if
        # they make `best` slower.
        limit = min(time, self.time(best)) / LEAST_HOST_GAIN
        for other in (host_updating(plan, every=2), host_updating(plan)):
            if (
                other.placed("host_updated")
                and self.filling.account(other).fits
                and self.lower_bound.step_ns(other) < limit
                and self.time(other) < limit
            ):
                time, plan = self.time(other), other
                limit = time / TIE
        return time, plan

    def _refined(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns a step time and a plan: `plan` with other host updates and another size of
        copies, where these make it faster by more than `TIE`.

        `time` is the step time of `plan` in ns.
        """
        time, plan = self._with_host_updates(time, plan)
        knobs = plan.knobs
        many = self._has_many_small_ops(plan)
        chunk = 4 * knobs.chunk_bytes if many else max(knobs.chunk_bytes // 4, _LEAST_CHUNK)
        # Smaller copies are tried only if the plan's own size is faster than large copies.
        if many or self._coarse(plan).step_ns > TIE * time:
            changed = with_knobs(plan, chunk_bytes=chunk)
            if (
                changed.knobs != knobs
                and self.filling.account(changed).fits
                and self.time(changed) * TIE < time
            ):
                time, plan = self.time(changed), changed
        return time, plan

    def _with_host_updates(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns the step time and the plan of the fastest of `plan` and its variants with host
        updates.

        In the variants, the host updates all streamed layers or every second one. If it updates
        all, the device is also filled again in every order, because another order may be best then.
        `time` is the step time of `plan` in ns.
        """
        if not all_on_host(plan):
            return time, plan
        updated = with_knobs(plan, placement=Placement(host_updated=all_on_host(plan)))
        bases = [
            msgspec.structs.replace(
                plan.knobs.placement, **dict.fromkeys(CLASSES, ""), offloaded_inputs=offloaded
            )
            for offloaded in ("", "all")
        ]
        fills = [other for base in bases for other in self.filling.fills(updated, base)]
        variants = [
            other
            for other in dict.fromkeys([host_updating(plan), host_updating(plan, every=2), *fills])
            if other.placed("host_updated")
            and other.knobs != plan.knobs
            and self.filling.account(other).fits
        ]
        for changed in self._ranked(variants, _MOST_REFINED * time):
            if self._is_faster(changed, time):
                time, plan = self.time(changed), changed
        return time, plan

    def _with_many_slots(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns the step time and the plan of the fastest of `plan` and plans with as many weight
        slots as fit.

        The slots take the memory of all saved activations, or also that of the moments and low
        halves on the device. Climbing adds one slot or layer at a time, so it finds no plan for
        which many more slots are faster but one more slot is not. With several GPUs, layers that
        stay in their slots until the backward pass are not gathered again. So the slots are also
        given the memory of a part of the saved activations, or that of as many moments, low halves
        and gradients as they need. `time` is the step time of `plan` in ns.
        """
        base, slots, usual = plan, plan.knobs.weight_slots, plan.knobs.placement
        streamed = sum(plan.model.stack[layer].kind == "decoder" for layer in in_slots(plan))
        fewer = msgspec.structs.replace(usual, saved_activations="")
        least = msgspec.structs.replace(fewer, master_low="", moments="")
        placements, chunk = [fewer, least], plan.knobs.chunk_bytes
        if plan.gpus > 1:
            count = len(plan.placed("saved_activations"))
            kept = {count, *(count - 2**power for power in range(count.bit_length()))} - {0}
            placements += [
                msgspec.structs.replace(usual, saved_activations=last(plan.model.layers, saved))
                for saved in sorted(kept, reverse=True)
            ]
        # Smaller copies leave memory for more slots.
        for placement, size in itertools.product(
            dict.fromkeys(placements), dict.fromkeys((chunk, max(chunk // 4, _LEAST_CHUNK)))
        ):
            lean = with_knobs(base, placement=placement, chunk_bytes=size)
            room = self.filling.room(lean)
            slot_bytes = room - self.filling.room(with_knobs(lean, weight_slots=slots + 1))
            more = min(room // slot_bytes, streamed - slots) if slot_bytes > 0 else 0
            if more <= 0 or (placement == usual and plan.gpus == 1):
                continue
            other = with_knobs(lean, weight_slots=slots + more)
            if self.filling.account(other).fits and self._is_faster(other, time):
                time, plan = self.time(other), other
        # Gradients may be the only state whose memory the slots can still take.
        more = streamed - slots if plan.gpus > 1 else 0
        while more > 0:
            if trimmed := self.filling.with_slots(base, slots + more):
                if self._is_faster(trimmed, time):
                    time, plan = self.time(trimmed), trimmed
                break
            more //= 2
        return time, plan

    def _with_larger_copies(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns the step time and the plan of the faster of two plans: `plan`, and `plan` with
        copies of four times its size, or of twice its size if these do not fit.

        If they do not fit in the memory that is left, moments and low halves are given up for them,
        or all state of the last layers. Larger copies are tried only if `plan` is slower than with
        the large copies of the ranking. `time` is the step time of `plan` in ns.
        """
        if self._coarse(plan).step_ns * TIE >= time:
            return time, plan
        for factor in (4, 2):
            other = with_knobs(plan, chunk_bytes=factor * plan.knobs.chunk_bytes)
            less = (other, self.filling.trimmed(other), self.filling.with_fewer_layers(other))
            fitting = [changed for changed in less if self.filling.account(changed).fits]
            if other.knobs.chunk_bytes <= self.coarse and fitting:
                best = min(fitting, key=self.lower_bound.step_ns)
                return (self.time(best), best) if self._is_faster(best, time) else (time, plan)
        return time, plan

    def _with_fewer_slots(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Returns the step time and the plan of the fastest of `plan` and plans with fewer slots.

        The memory of these slots holds more state, chosen by `Filling.wider` or by whole layers.
        Slots that take only a small share of the device's memory are kept. If `plan` does not keep
        whole layers on the device, a plan that does so is tried with the fewest slots. `time` is
        the step time of `plan` in ns.
        """
        knobs, room, limit = plan.knobs, self.filling.room(plan), time / LEAST_HOST_GAIN
        # With fewer slots, ops hardly wait less.
        waiting = self.waiting_ns(plan)
        fewer = {
            "state_slots": max(knobs.state_slots // 2, 1),
            "gradient_slots": max(knobs.gradient_slots - 1, 1),
            "weight_slots": max(knobs.weight_slots - 1, 1),
        }
        for count in range(1, len(fewer) + 1):
            other = with_knobs(plan, **dict(list(fewer.items())[:count]))
            if self.filling.room(other) - room < _LEAST_FREED * plan.device_limit_bytes:
                continue
            near = sorted(dict.fromkeys(self.filling.wider(other)), key=self.lower_bound.step_ns)
            near = near[:FINALISTS]
            if kept := self.filling.kept_whole(plan):
                for more in (kept, kept._replace(layers=kept.layers + 1)):
                    if whole := self._whole_layers_plan(other, more, time):
                        near.append(whole)
            for wider in near:
                # Large copies would hide the effect of slots, so the plan's own size is timed.
                if (
                    self.lower_bound.step_ns(wider) + waiting[0] < limit
                    and self._run(wider).bound_ns + waiting[1] < limit
                    and self.time(wider) < limit
                ):
                    time, plan = self.time(wider), wider
                    limit = time / LEAST_HOST_GAIN
        if self.filling.kept_whole(plan) is None:
            # Other layers are streamed then, so the waiting of `plan` says nothing.
            lean = with_knobs(plan, **fewer)
            _, most = self._whole_counts(lean)
            keeping = self._whole_layers_plan(lean, Whole(most), limit)
            if (
                keeping
                and max(self.lower_bound.step_ns(keeping), self._run(keeping).bound_ns) < limit
                and self.time(keeping) < limit
            ):
                time, plan = self.time(keeping), keeping
        return time, plan

    def may_fit(self) -> bool:
        """Returns whether `best` finds a plan, in less time than `best` takes."""
        return any(map(self._fitting, [*self._whole_layers(), *_FEWER_SLOTS]))

    def nearest_miss(self) -> Plan:
        """Returns the plan that exceeds its limits by the fewest bytes.

        It has the fewest slots, and either all state on the host or as much on the device as fits.
        """
        lean = with_knobs(self.plan, **_FEWER_SLOTS[-1])
        misses = []
        for base in (Placement(), Placement(offloaded_inputs="all")):
            plan = with_knobs(lean, placement=base)
            misses += [plan, next(self.filling.fills(lean, base))]
        return min(misses, key=lambda plan: self.filling.account(plan).excess_bytes)
