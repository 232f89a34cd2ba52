"""Builds plans that keep as much state on the device as fits in its memory.

`Filling.filled` works in five steps:

1. Start from a placement in which the last layers save their activations. The backward pass needs
   these first, so they hold memory for the shortest time.
2. If attention takes at least a tenth of the recompute time, make a second variant that saves the
   attention output of as many recomputed layers as fit. If attention takes at least half, and layer
   inputs are offloaded, a third variant offloads the attention outputs that do not fit.
3. Fill the rest of the memory with weights, gradients and optimizer state, greedily in each of
   several orders. An order is a list of (class, layer) pairs: class by class, with gradients or low
   halves as the second class, layer by layer, or weights and gradients first. Layers come front to
   back, because the updates of the first layers are due first. The state of later layers can stream
   in during the forward pass.
4. State that stays on the device needs no slots. So compute the memory again, and fill the memory
   that has become free.
5. Drop the plans that do not fit in device or host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.costs import CostModel
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.planner.assessment import activations_bytes, plan_account, with_knobs
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.arithmetic import (
    StateClass,
    contributions,
    cost_keys,
    layer_state,
    part_elements,
    sums_on_device,
    updated_on_device,
)
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

CLASSES: tuple[StateClass, ...] = ("weights", "gradients", "master_low", "moments")
"""Classes of layer state that may stay on the device."""
GIB = 2**30
"""Bytes of a GiB."""

_TRIMMED: tuple[StateClass, ...] = ("moments", "master_low")  # classes that a plan gives up first
# Saving attention is tried if it takes at least this share of the recompute time. With less, it
# saves under 3 % of a step.
_LEAST_ATTENTION = 0.1
# Saved attention is offloaded only if attention takes at least this share of the recompute time.
_LEAST_OFFLOADED = 0.5


def ranges(layers: list[str], chosen: set[str]) -> str:
    """Returns the layers `chosen` as the text of a placement, in the order of `layers`. The decoder
    layers of `layers` are next to each other, and their numbers ascend by one.

    >>> ranges(["e", "0", "1", "2", "h"], {"e", "0", "1"}), ranges(["0", "1"], {"0", "1"})
    ('e,0-1', 'all')
    """
    if chosen.issuperset(layers):
        return "all"
    parts: list[str] = []
    run: list[str] = []
    for layer in [*layers, ""]:  # the last entry ends the last run
        is_chosen = layer in chosen
        if is_chosen and layer.isdigit():
            run.append(layer)
            continue
        if run:
            parts.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if is_chosen:
            parts.append(layer)
    return ",".join(parts)


@functools.lru_cache(maxsize=1024)
def last(decoders: int, count: int) -> str:
    """Returns the last `count` of the decoder layers, as the text of a placement. Cached because a
    search asks for the same numbers with many plans.
    """
    layers = [str(index) for index in range(decoders)]
    return ranges(layers, set(layers[decoders - count :]))


def host_updating(plan: Plan, every: int = 1) -> Plan:
    """Returns `plan` with streamed layers updated on the host.

    Args:
        plan: The plan to change.
        every: 1 chooses all layers whose weights are streamed, and 2 every second of them. Layers
            that only the device can update are never chosen.
    """
    layers, excluded = list(plan.model.stack), plan.placed("weights") | updated_on_device(plan)
    streamed = [layer for layer in layers if layer not in excluded]
    return with_knobs(
        plan,
        placement=msgspec.structs.replace(
            plan.knobs.placement, host_updated=ranges(layers, set(streamed[::every]))
        ),
    )


def host_share(plan: Plan) -> int:
    """Returns which of its streamed layers `plan` updates on the host: 0 if none, 1 if all, and 2
    if only some, usually every second one.
    """
    updated = plan.placed("host_updated")
    streamed = set(plan.model.stack) - plan.placed("weights") - updated_on_device(plan)
    return (1 if updated >= streamed else 2) if updated else 0


def updated_like(plan: Plan, other: Plan) -> Plan:
    """Returns `plan` with the same share of its streamed layers updated on the host as in `other`:
    all of them, every second one, or none.
    """
    if share := host_share(other):
        return host_updating(plan, every=share)
    return with_knobs(
        plan, placement=msgspec.structs.replace(plan.knobs.placement, host_updated="")
    )


def all_on_host(plan: Plan) -> str:
    """Returns the layers that the host can update, as the text of a placement."""
    return ranges(list(plan.model.stack), set(plan.model.stack) - updated_on_device(plan))


def in_slots(plan: Plan) -> set[str]:
    """Returns the layers whose weights pass through slots: streamed layers, and with several GPUs
    all layers, because each GPU keeps only a part of them.
    """
    return set(plan.model.stack) - (plan.placed("weights") if plan.gpus == 1 else set())


def classes_of(plan: Plan) -> list[StateClass]:
    """Returns the classes of state that the plan has. With fp32 weights there is no low half."""
    return [name for name in CLASSES if layer_state(plan, EMBEDDING)[name].bytes]


class Whole(NamedTuple):
    """The layers whose whole state is on the device: the embedding and some others."""

    layers: int
    """How many of the first decoder layers are among them."""
    head: bool = False
    """Whether the head is one of them. False if it is tied to the embedding."""


class Filling:
    """Builds plans that fill the device's memory, for one model and workload."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        accounts: dict[tuple[Knobs, int, int], Account] | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Prepares to fill plans of the model and workload of `plan`.

        Args:
            plan: The model, the workload, and the knobs that no result changes.
            costs: The machine's cost model.
            accounts: The memory of such plans, as far as it is known: knobs and limits of a plan ->
                its account. Results are added to it.
            more: Whether to fill plans in additional ways: with the gradient of a tied embedding
                first, with only the state of a tied embedding, and with all weights or gradients
                where the memory of their slots suffices.
        """
        self.costs, self.defers_update = costs, policies.find(plan.policy).defers_update(plan)
        self._more = more
        self._accounts = {} if accounts is None else accounts
        self.attention_layers = [
            layer.name
            for layer in plan.model.decoders
            if self._attention_share(plan, layer.name) >= _LEAST_ATTENTION
        ]
        """Decoder layers for which saving the attention output is worth its memory."""
        self.offloadable = {
            name
            for name in self.attention_layers
            if self._attention_share(plan, name) >= _LEAST_OFFLOADED
        }
        """The layers of `attention_layers` whose attention output may be kept in host memory."""
        self._layers = layers = list(plan.model.stack)
        first, rest = CLASSES[:2], CLASSES[2:]
        self._sizes = _state_bytes(plan, self.defers_update)
        self._smallest = min(self._sizes.values())
        """The bytes of the smallest (class, layer) pair."""
        orders: list[list[tuple[StateClass, str]]] = [
            [(name, layer) for name in CLASSES for layer in layers],
            [(name, layer) for layer in layers for name in CLASSES],
            [(name, layer) for name in first for layer in layers]
            + [(name, layer) for layer in layers for name in rest],
        ]
        self._tied = contributions(plan, EMBEDDING) > contributions(plan, "0")
        if more and self._tied:
            # The head adds to the gradient of a tied embedding, so each byte of it that stays on
            # the device saves a load and a store more than the gradient of another layer.
            orders.append([("gradients", EMBEDDING), *orders[0]])
        if self.defers_update:
            # Low halves are loaded and stored beside the forward pass, gradients only loaded there.
            # If copies delay the forward pass, low halves save more time than gradients.
            urgent: tuple[StateClass, ...] = ("weights", "master_low", "gradients", "moments")
            if "master_low" in classes_of(plan):  # otherwise it is the first order
                orders.append([(name, layer) for name in urgent for layer in layers])
        else:
            # The update of the embedding ends the step and overlaps with nothing. So the embedding
            # receives memory first, beginning with its moments, the largest part of its state.
            orders.append([(name, layer) for layer in layers for name in reversed(CLASSES)])
        self._orders = [
            [(*pair, self._sizes[pair]) for pair in order if pair in self._sizes]
            for order in orders
        ]
        """The orders in which (class, layer) pairs receive memory, each pair with its bytes."""

    def _attention_share(self, plan: Plan, layer: str) -> float:
        """Returns attention's share of the layer's recompute time, or 0 if the attention output
        cannot be saved.
        """
        # The CUDA kernels that return the tensors to save do not support fp32.
        fused = plan.model.fuses_scores(plan.workload)
        if plan.workload.dtype != "bf16" or not plan.model.can_save_attention(layer, fused=fused):
            return 0.0
        kept, full = (
            self.costs.duration_ns(
                Op(
                    id=f"R{layer}.m0",
                    lane="compute",
                    **cost_keys(plan, "recompute", layer, kept=kept),
                )
            )
            for kept in (True, False)
        )
        return 1 - kept / full if full else 0.0

    def account(self, plan: Plan) -> Account:
        """Returns the memory of `plan`. Results are cached."""
        key = plan.knobs, plan.device_limit_bytes, plan.host_limit_bytes
        if key not in self._accounts:
            self._accounts[key] = plan_account(
                plan, policies.outline(plan, merged=True), self.costs, advise=False
            )
        return self._accounts[key]

    def room(self, plan: Plan) -> int:
        """Returns the bytes of device memory that `plan` leaves free. Negative if it exceeds the
        limit.
        """
        account = self.account(plan)
        return account.device_limit_bytes - account.device_peak_bytes

    def most_saved(self, plan: Plan, placement: Placement) -> int:
        """Returns how many of the last decoder layers can save their activations in the memory that
        `placement` leaves free.

        Returns -1 if `placement` alone does not fit. The search is like bisection: memory never
        decreases with the number of saved layers, so each tried number excludes all smaller or all
        larger ones. The next number to try is extrapolated from the bytes of one saved layer.
        """
        layer_bytes = plan.knobs.micro_batch_group * activations_bytes(plan, self.costs)
        fits, least_not, count = -1, plan.model.layers + 1, 0
        while least_not - fits > 1:
            saving = msgspec.structs.replace(
                placement, saved_activations=last(plan.model.layers, count)
            )
            room = self.room(with_knobs(plan, placement=saving))
            fits, least_not = (count, least_not) if room >= 0 else (fits, count)
            count = min(max(count + room // layer_bytes, fits + 1), least_not - 1)
        return fits

    def saving_most(self, plan: Plan) -> Plan:
        """Returns `plan` with as many of the last layers as fit saving their activations."""
        placement, layers = plan.knobs.placement, plan.model.layers
        most = max(self.most_saved(plan, placement), 0)
        return with_knobs(
            plan, placement=msgspec.structs.replace(placement, saved_activations=last(layers, most))
        )

    def with_attention(self, plan: Plan, placement: Placement) -> Iterator[Placement]:
        """Yields `placement`, and variants that also save attention outputs of recomputed layers.

        The first variant saves the outputs of as many of the `attention_layers` as fit. The second
        is yielded if layer inputs are offloaded. It also offloads outputs that do not fit on the
        device, for as many layers as fit on the host.
        """
        yield placement
        held = with_knobs(plan, placement=placement)
        saved, work = held.placed("saved_activations"), plan.workload
        layers = [layer for layer in self.attention_layers if layer not in saved]
        if layers:
            output_bytes = max(plan.model.kept_attention(layer, work).bytes for layer in layers)
            each_on_device = plan.knobs.micro_batch_group * (output_bytes + 256)
            names = [layer.name for layer in plan.model.decoders]
            count = min(self.room(held) // each_on_device, len(layers))
            if count > 0:
                yield msgspec.structs.replace(
                    placement, saved_attention=ranges(names, set(layers[len(layers) - count :]))
                )
            # The copies of offloaded outputs need two slots on the device.
            on_device = max(self.room(held) // each_on_device - 2, 0)
            account = self.account(held)
            host_room = account.host_limit_bytes - account.host_peak_bytes
            each_on_host = plan.knobs.micro_batch_group * (output_bytes + 4096)
            others = layers[: len(layers) - on_device]
            moved = [layer for layer in others if layer in self.offloadable]
            moved = moved[max(len(moved) - max(host_room // each_on_host, 0), 0) :]
            if placement.offloaded_inputs and moved and count < len(layers):
                kept = {*moved, *layers[len(layers) - on_device :]}
                yield msgspec.structs.replace(
                    placement,
                    saved_attention=ranges(names, kept),
                    offloaded_attention=ranges(names, set(moved)),
                )

    def fills(self, plan: Plan, placement: Placement) -> Iterator[Plan]:
        """Yields `plan` with `placement` and as much more state on the device as fits, once for
        each order.

        The host updates the same share of the streamed layers as in `plan`. A result may not fit:
        the host may be too small, or `placement` alone may exceed the device's memory.
        """
        empty = with_knobs(plan, placement=placement)
        room = self.room(empty)
        for order in self._orders:
            first, chosen = self._added(empty, order, room)
            # State that stays on the device needs no slots, so there may be room for more.
            filled, chosen = self._added(first, order, self.room(first), chosen)
            variants = [(filled, chosen)]
            if self._more and (completed := self._completed(filled, chosen)):
                variants.append(
                    self._added(completed[0], order, self.room(completed[0]), completed[1])
                )
            for filled, chosen in variants:
                updated = updated_like(filled, plan)
                # Layers updated on the host need no state slots. The freed memory goes to layers
                # whose weights stay on the device, because the device updates these.
                if updated.knobs.placement.host_updated:
                    held = chosen["weights"]
                    resident = [entry for entry in order if entry[1] in held]
                    updated, _ = self._added(updated, resident, self.room(updated), chosen)
                yield updated

    def _completed(
        self, plan: Plan, chosen: dict[StateClass, set[str]]
    ) -> tuple[Plan, dict[StateClass, set[str]]] | None:
        """Returns `plan` with the weights or gradients of all layers on the device, or None if that
        does not fit or changes nothing.

        The memory comes from the slots, which are then not needed. So a class is completed only if
        it lacks at most as many layers as it has slots. `chosen` is as in `_added`, and the result
        as there.
        """
        completed, held = None, dict(chosen)
        slots_of: dict[StateClass, int] = {
            "weights": plan.knobs.weight_slots,
            "gradients": plan.knobs.gradient_slots,
        }
        for name, slots in slots_of.items():
            every = {layer for layer in plan.model.stack if (name, layer) in self._sizes}
            if 0 < len(every - held[name]) <= slots:
                text = {name: ranges(list(plan.model.stack), every)}
                other = with_knobs(
                    plan, placement=msgspec.structs.replace(plan.knobs.placement, **text)
                )
                if self.room(other) >= 0:
                    held[name] = every
                    completed = plan = other
        return (completed, held) if completed else None

    def _added(
        self,
        plan: Plan,
        order: list[tuple[StateClass, str, int]],
        room: int,
        chosen: dict[StateClass, set[str]] | None = None,
    ) -> tuple[Plan, dict[StateClass, set[str]]]:
        """Adds state to the device greedily, in the given order, until `room` bytes are used.

        Args:
            plan: The plan to add state to.
            order: (class, layer) pairs that can stay on the device, with their bytes. A pair that
                does not fit is skipped.
            room: Free bytes of device memory.
            chosen: For each class, the layers whose state is on the device already.

        Returns:
            The new plan, and for each class all layers whose state is now on the device.
        """
        if chosen and room < self._smallest:
            return plan, chosen
        held = {name: set(chosen[name]) if chosen else set[str]() for name in CLASSES}
        for name, layer, size in order:
            if size <= room and layer not in held[name]:
                room -= size
                held[name].add(layer)
                if room < self._smallest:
                    break
        texts = {name: ranges(self._layers, layers) for name, layers in held.items()}
        return (
            with_knobs(plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts)),
            held,
        )

    def whole(self, plan: Plan, kept: Whole) -> Plan:
        """Returns `plan` with all state of `kept` on the device, and all other layers updated on
        the host.

        `fills` would also keep a part of the next layer's state on the device. The host does not
        update such a layer, so the rest of its state would be copied to the device and back. If the
        host updates fast, even fewer layers on the device may be better.
        """
        layers = list(plan.model.stack)
        whole = {*layers[: kept.layers + 1], *([plan.model.head] if kept.head else [])}
        held = {
            name: ranges(layers, {layer for layer in whole if (name, layer) in self._sizes})
            for name in CLASSES
        }
        return host_updating(
            with_knobs(plan, placement=msgspec.structs.replace(plan.knobs.placement, **held))
        )

    def kept_whole(self, plan: Plan) -> Whole | None:
        """Returns the `kept` for which `whole(plan, kept)` equals `plan`, or None."""
        if not plan.placed("host_updated"):
            return None
        weights = plan.placed("weights")
        head = not plan.model.tied and plan.model.head in weights
        kept = Whole(len(weights) - 1 - head, head)
        return kept if kept.layers >= 0 and self.whole(plan, kept).knobs == plan.knobs else None

    def only_tied_embedding(self, plan: Plan) -> Iterator[Plan]:
        """Yields plans that fit, update all decoder layers on the host, and keep as much of a tied
        embedding's state on the device as fits, but no state of decoder layers.

        `fills` would also keep weights of decoder layers on the device, and the host does not
        update these. Copying the rest of their state may take longer than the host's updates.
        Yields nothing without a tied embedding, or if its weights do not fit.
        """
        if not (self._more and self._tied and all_on_host(plan)):
            return
        decoders = ranges(self._layers, set(self._layers) - {EMBEDDING} - updated_on_device(plan))
        classes = [name for name in CLASSES if (name, EMBEDDING) in self._sizes]
        for offloaded in ("", "all"):
            # All state is tried first, because slots that it does not need leave room for it.
            for count in range(len(classes), 0, -1):
                held = dict.fromkeys(classes[:count], "e")
                placement = Placement(offloaded_inputs=offloaded, host_updated=decoders, **held)
                other = with_knobs(plan, placement=placement)
                if self.account(other).fits:
                    yield other
                    break

    def filled(self, plan: Plan, base: Placement) -> Iterator[Plan]:
        """Yields the `fills` of `base` that fit, with and without saved attention."""
        for placement in self.with_attention(plan, base):
            for fill in dict.fromkeys(self.fills(plan, placement)):
                if self.account(fill).fits:
                    yield fill

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Yields plans that fit and differ little from `plan`.

        1. Plans that save activations for one layer fewer, as many layers, or one layer more.
        2. Plans that save as many layers or one more, filled to 1 GiB above the device's limit and
           then trimmed to it. State that stays on the device may free its slots, and a fill that
           stops at the limit does not find such plans.
        3. The plan with one more weight slot and less state on the device.
        4. If `whole` returned the plan: the same with one layer fewer, with one layer more, and
           with one layer fewer and one or two more weight slots. Each saves as many layers as
           `plan` or as many as fit.
        """
        yield from self._saving(plan, -1)
        yield from self.wider(plan)
        roomier = msgspec.structs.replace(plan, device_limit_bytes=plan.device_limit_bytes + GIB)
        for other in self.wider(roomier):
            other = self.trimmed(
                msgspec.structs.replace(other, device_limit_bytes=plan.device_limit_bytes)
            )
            if self.account(other).fits:
                yield other
        if another := self.with_another_slot(plan):
            yield another
        if kept := self.kept_whole(plan):
            more = [
                (with_knobs(plan, weight_slots=plan.knobs.weight_slots + slots), kept.layers - 1)
                for slots in (1, 2)
            ]
            for base, changed in ((plan, kept.layers - 1), (plan, kept.layers + 1), *more):
                if 0 <= changed <= plan.model.layers:
                    other = self.whole(base, kept._replace(layers=changed))
                    for saving in (other, self.saving_most(other)):
                        if saving.placed("host_updated") and self.account(saving).fits:
                            yield saving

    def with_other_inputs(self, plan: Plan) -> Iterator[Plan]:
        """Yields plans that fit and save as many layers as `plan`. Their layer inputs are offloaded
        if `plan` keeps its inputs on the device, and on the device otherwise.
        """
        placement = plan.knobs.placement
        yield from self.filled(
            plan,
            Placement(
                saved_activations=placement.saved_activations,
                offloaded_inputs="" if placement.offloaded_inputs else "all",
            ),
        )

    def with_another_slot(self, plan: Plan) -> Plan | None:
        """Returns `plan` with one more weight slot, and as much less state on the device as the
        slot needs.

        Returns None if no weights pass through slots, or if the result does not fit.
        """
        if not in_slots(plan):
            return None
        other = self.trimmed(with_knobs(plan, weight_slots=plan.knobs.weight_slots + 1))
        return other if self.account(other).fits else None

    def with_slots(self, plan: Plan, count: int) -> Plan | None:
        """Returns `plan` with `count` weight slots, and as much less state on the device as they
        need: first moments and low halves, then gradients. Returns None if it does not fit.
        """
        other = self.trimmed(with_knobs(plan, weight_slots=count))
        other = self.trimmed(other, ("gradients",))
        return other if self.account(other).fits else None

    def wider(self, plan: Plan) -> Iterator[Plan]:
        """Yields plans that fit and save as many layers as `plan`, or one more."""
        yield from self._saving(plan, 0)
        yield from self._saving(plan, 1)

    def trimmed(self, plan: Plan, classes: Sequence[StateClass] = _TRIMMED) -> Plan:
        """Returns `plan` with enough state of `classes` moved to the host that it fits in device
        memory.

        Each round moves one class of one layer. The candidates are the last layer of each class on
        the device. The smallest one that is enough is moved, and otherwise the largest one. If no
        such state is left, the result does not fit.
        """
        held = {
            name: [layer for layer in plan.model.stack if layer in plan.placed(name)]
            for name in classes
        }
        # A layer that leaves the device may need slots, so each round computes the memory again.
        while (lacking := -self.room(plan)) > 0:
            sizes = (
                (self._sizes.get((name, layers[-1]), 0), name)
                for name, layers in held.items()
                if layers
            )
            last_ones = [entry for entry in sizes if entry[0]]
            if not last_ones:
                break
            _, name = min(
                (entry for entry in last_ones if entry[0] >= lacking), default=max(last_ones)
            )
            held[name].pop()
            texts = {
                name: ranges(list(plan.model.stack), set(layers)) for name, layers in held.items()
            }
            plan = with_knobs(
                plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts)
            )
        return plan

    def with_fewer_layers(self, plan: Plan) -> Plan:
        """Returns `plan` with so much less state on the device that it fits in device memory: all
        state of the last layers there.

        The host updates the same share of the streamed layers as in `plan`. `trimmed` would give up
        one class of state and leave the weights, and the host does not update such layers. If no
        state is left, the result does not fit.
        """
        held, less = {name: plan.placed(name) for name in CLASSES}, plan
        layers = [layer for layer in self._layers if any(layer in kept for kept in held.values())]
        while layers and (lacking := -self.room(less)) > 0:
            while layers and lacking > 0:
                layer = layers.pop()
                lacking -= sum(
                    self._sizes.get((name, layer), 0) for name in CLASSES if layer in held[name]
                )
            texts = {name: ranges(self._layers, {*layers} & kept) for name, kept in held.items()}
            less = updated_like(
                with_knobs(plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts)),
                plan,
            )
        return less

    def _saving(self, plan: Plan, more: int) -> Iterator[Plan]:
        """Yields filled plans that save the activations of `more` more layers than `plan`."""
        count = len(plan.placed("saved_activations")) + more
        if 0 <= count <= plan.model.layers:
            yield from self.filled(
                plan,
                Placement(
                    saved_activations=last(plan.model.layers, count),
                    offloaded_inputs=plan.knobs.placement.offloaded_inputs,
                ),
            )


def _state_bytes(plan: Plan, defers_update: bool) -> dict[tuple[StateClass, str], int]:
    """Returns the bytes on the device of each (class, layer) pair that can stay there or stream.

    Bytes are rounded up to 256.
    """
    sizes = dict[tuple[StateClass, str], int]()
    for layer in plan.model.stack:
        state, elements = layer_state(plan, layer), part_elements(plan, layer)
        held = {name: state[name].whole(elements) for name in classes_of(plan)}
        if not defers_update and sums_on_device(plan, layer):
            # The update follows the backward pass at once, so the gradient never leaves the device.
            del held["gradients"]
        sizes |= {(name, layer): -(-size // 256) * 256 for name, size in held.items()}
    return sizes
