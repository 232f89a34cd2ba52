"""Chooses the loss chunk, the number of tokens whose logits exist at one time.

With larger chunks, the head's matrix is read and its gradient summed fewer times. But their logits
take more device memory, which leaves less for state and saved activations. The candidates are the
powers of two from 128 to 16,384 and the whole micro-batch:

1. Begin with 2,048 tokens. Go to the next larger chunk as long as that is faster by 0.5 %, and then
   to the next smaller one as long as that is not slower by 0.3 %. Chunks below 1,024 tokens must be
   faster by 1 %. Few chunks have to be tried, because the step time first falls and then rises as
   the chunk grows.
2. The time of a chunk is the step time of the plan from which the search of placements would
   continue (`PlacementSearch.first_ns`). It depends on both the time of the head and its memory.
   For policies that do not obey every field of the placement, it is the step time that the search
   of their slots finds.
3. If that leads to less than 1,024 tokens, the whole search is made with this chunk and with 1,024
   tokens, or the whole micro-batch if it is smaller. The faster one is chosen.
4. If no plan fits with the first chunks, begin with the largest chunk below 1,024 tokens with which
   a plan fits.

The calibration of a machine measures the head with some chunks. The times of other chunks are
derived from these (`costs/calibrated.py`), so another chunk is chosen only if it is faster by 1 %
or more, or if no plan fits otherwise. If a calibration does not say what chunk it measured, no time
can be derived, and the default chunk is kept.

The chosen chunk is not the best in every case, because whole searches are only compared
in step 3.

With several GPUs, these are the times and the memory of the plans that share the step
(`shared_step.py`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, costs_of
from megatrain.simulator.costs.measured_shapes import measured_chunks
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import group_sizes, with_knobs
from megatrain.simulator.planner.capacity import fitting
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import fastest, plans_of
from megatrain.simulator.planner.shared_step import in_groups, least_fitting, of_all, shares
from megatrain.simulator.planner.slot_search import SlotSearch
from megatrain.simulator.schedule.plan import Plan

_TIE = 1.003
"""Plans whose times differ by less than this factor count as equally fast, because the compared
plans are not refined. The smaller chunk is then chosen, since it leaves more memory. On a
calibrated machine, a chunk that was measured is preferred instead."""
_LARGER = 1.005
"""A larger chunk must be faster by this factor, because its logits leave less memory for what a
whole search changes. With 1.003, 7B without clipping on an RTX 4090 was 8 % slower."""
_CLEARLY = 1.01
"""Chunks below 1,024 tokens must be faster by this factor, because whole searches follow."""
_FIRST = 2048
_USUAL = (1024, 2048, 4096, 8192, 16384)
_SMALLER = (512, 256, 128)
"""Chunks that are tried if 1,024 tokens are faster than 2,048, or if no plan fits with them."""
_WHOLE = 2**31  # the most tokens of a loss chunk
_DERIVED = 1.01  # a chunk that was not measured must be faster by this factor


def with_loss_chunk(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
    gpus: int = 1,
    hosts: int = 1,
) -> Workload:
    """Returns `workload` with the loss chunk that the planner chooses.

    The loss chunk of `workload` is kept in five cases: no plan fits with any chunk, the machine has
    no costs for the workload, its calibration does not say what chunk it measured, all policies
    are only for prediction, or several `gpus` cannot share the step. `workload` is that of each
    GPU. `hosts` is the number of hosts that have the GPUs. The other arguments are those of
    `candidates`.

    Raises UserError for an unknown policy, as `candidates` does.
    """
    plans = [
        plan
        for plan in plans_of(
            model,
            hardware,
            workload,
            device_limit=device_limit,
            host_limit=host_limit,
            policies=policies,
        )
        if not policy_library.find(plan.policy).prediction_only
    ]
    if gpus > 1:
        able = [plan for plan in plans if shares(plan, gpus, hosts)]
        plans = [of_all(plan, hardware, gpus, hosts) for plan in able]
    measured = _measured(hardware, model, workload)
    if not plans or measured == {0}:
        return workload
    try:
        chunk = _ChunkSearch(plans, hardware, measured).best()
    except UserError:  # the search of plans raises it again
        return workload
    return msgspec.structs.replace(workload, loss_chunk=chunk)


def least_chunks(workload: Workload, hardware: HardwareSpec) -> tuple[Workload, ...]:
    """Returns two copies of `workload`, with the loss chunks that may need the least memory.

    The first has the smallest chunk that the planner may choose. The second has one chunk for the
    whole micro-batch, which can need less memory because the gradients of several chunks are summed
    in fp32. On a calibrated machine only `workload` is returned, because the bytes of other chunks
    were not measured.
    """
    if hardware.costs and hardware.costs.compute.get("head"):
        return (workload,)
    return tuple(
        msgspec.structs.replace(workload, loss_chunk=chunk) for chunk in (_SMALLER[-1], _WHOLE)
    )


def _measured(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> set[int]:
    """Returns the loss chunks with which the head of `model` was measured on the machine.

    The set has 0 if the calibration does not say its loss chunk, and is empty if the machine was
    not calibrated.
    """
    return measured_chunks(hardware.costs, model, workload) if hardware.costs else set()


class _ChunkSearch:
    """Compares loss chunks for one workload. `plans` has one plan for each allowed policy."""

    def __init__(self, plans: list[Plan], hardware: HardwareSpec, measured: set[int]) -> None:
        placing = [plan for plan in plans if policy_library.find(plan.policy).places_state]
        self._plans, self._fastest = plans, placing[:1] or plans
        self._hardware, self._measured = hardware, measured
        self._times: dict[int, float] = {}

    def best(self) -> int:
        """Returns the chosen chunk, or the chunk of the workload if no plan fits with any."""
        work = self._plans[0].workload
        below: list[int] = [chunk for chunk in _USUAL if chunk < work.tokens]
        whole = next((chunk for chunk in _USUAL if chunk >= work.tokens), work.tokens)
        usual: set[int] = {*below, whole, *self._measured}
        smaller = [chunk for chunk in _SMALLER if chunk < work.tokens]
        chunks: list[int] = sorted({*smaller, *usual})
        index = min(bisect.bisect_left(chunks, _FIRST), len(chunks) - 1)
        index = self._best_from(chunks, self._best_from(chunks, index, 1), -1)
        if self._time(chunks[index]) < math.inf:
            return self._confirmed(chunks[index], min({*below, whole}))
        if not any(map(self._fits, (whole, _SMALLER[-1]))):
            return work.loss_chunk
        for start in range(index, -1, -1):
            if self._time(chunks[start]) < math.inf:
                return chunks[self._best_from(chunks, start, -1)]
        return next(filter(self._fits, (*sorted(usual), *_SMALLER)))

    def _best_from(self, chunks: Sequence[int], index: int, step: int) -> int:
        """Returns the index of the last of the sorted `chunks` on a walk from `index` by `step` (1
        or -1) that goes on as long as the next chunk is faster.
        """
        while 0 <= index + step < len(chunks):
            limit = self._time(chunks[index])
            if chunks[index + step] in _SMALLER:
                limit /= _CLEARLY
            elif not self._measured:
                limit *= _TIE if step < 0 else 1 / _LARGER
            if self._time(chunks[index + step], limit) >= limit:
                break
            index += step
        return index

    def _time(self, chunk: int, limit: float = math.inf) -> float:
        """Returns a step time in ns to compare chunks by. Returns infinity if no plan was found to
        fit, or if no plan comes near `limit`. Results are cached.
        """
        if chunk not in self._times:
            derived = _DERIVED if self._measured and chunk not in self._measured else 1.0
            times = [
                _step_ns(*self._with_costs(plan, chunk), limit / derived) for plan in self._fastest
            ]
            self._times[chunk] = derived * min(times)
        return self._times[chunk]

    def _confirmed(self, chunk: int, usual: int) -> int:
        """Returns `chunk`, or the larger chunk `usual` if whole searches do not find a faster plan
        with `chunk`.
        """
        if chunk >= usual or math.isinf(self._time(usual)):
            return chunk
        least = self._searched_ns(usual)
        return chunk if self._searched_ns(chunk, least) < least else usual

    def _searched_ns(self, chunk: int, most_ns: float = math.inf) -> float:
        """Returns the step time that whole searches find with this chunk in ns. Returns `most_ns`
        if every plan takes that long or longer.
        """
        derived = _DERIVED if self._measured and chunk not in self._measured else 1.0
        found = [most_ns]
        for plan, costs in (self._with_costs(plan, chunk) for plan in self._fastest):
            if not policy_library.find(plan.policy).obeys_everything:
                found.append(self._time(chunk))
            elif best := fastest(_searches(plan, costs), min(found) / derived):
                found.append(derived * best.step_seconds * 1e9)
        return min(found)

    def _fits(self, chunk: int) -> bool:
        """Returns whether any of the plans that need the least memory fits with this chunk."""
        plan, costs = self._with_costs(self._plans[0], chunk)
        if plan.gpus > 1:
            return least_fitting(plan, self._hardware) is not None
        names = [plan.policy for plan in self._plans]
        return fitting(plan, self._hardware, costs, names) is not None

    def _with_costs(self, plan: Plan, chunk: int) -> tuple[Plan, CostModel]:
        """Returns `plan` with a loss chunk, and its costs."""
        work = msgspec.structs.replace(plan.workload, loss_chunk=chunk)
        plan = msgspec.structs.replace(plan, workload=work)
        return plan, costs_of(plan, self._hardware)


def _step_ns(plan: Plan, costs: CostModel, limit: float) -> float:
    """Returns a step time of the policy of `plan` in ns. Returns infinity if no plan was found to
    fit, or if no plan comes near `limit`.
    """
    if not policy_library.find(plan.policy).obeys_everything:
        choice = SlotSearch(plan, costs).best()
        return choice.step_seconds * 1e9 if choice.feasible else math.inf
    best = math.inf
    for search in _searches(plan, costs):
        best = min(best, search.first_ns(min(limit, best)))
    return best


def _searches(plan: Plan, costs: CostModel) -> list[PlacementSearch]:
    """Returns the searches of placements with the smallest and the largest groups of
    micro-batches.
    """
    sizes = group_sizes(plan)
    return [
        PlacementSearch(
            with_knobs(plan, micro_batch_group=size) if plan.gpus == 1 else in_groups(plan, size),
            costs,
        )
        for size in dict.fromkeys((sizes[0], sizes[-1]))
    ]
