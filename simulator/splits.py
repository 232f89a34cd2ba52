"""Splits: how the tokens of a step are best cut into micro-batches, where the user says only how many tokens a step has.

A larger micro-batch loads weights for more tokens; a smaller one leaves memory for weights and optimizer state. So every batch whose rows fill the step
in whole micro-batches is tried, the largest first: those whose compute alone takes longer than the best so far, or that cannot fit, are left out; of the
others two placements are timed by the evaluator, until five splits in a row are slower than the best; the best one is searched in full, and the second
where it is close. The loss and the gradient are the same sums in every split, rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.assessment import Choice, plan_account, varied
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.errors import UserError
from megatrain.simulator.evaluator import another_ns, makespan_ns
from megatrain.simulator.filling import last
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.least import Least
from megatrain.simulator.placing import PlacementSearch
from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.planner import candidates, rank
from megatrain.simulator.slot_search import ONE_COPY, intervals
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

_FINALISTS = 2
_CLOSE = 1.05  # a second split within this of the first, quickly timed, is searched too
_PATIENCE = 5  # splits in a row that are slower than the best: smaller ones load weights more often, until they are so small that every layer is stored
_MOST_MICRO_BATCHES = 64
_PARTS = (0, 1)  # of the stored layers that fit


def splits(workload: Workload, step_tokens: int) -> list[Workload]:
    """`workload` with every batch and accumulation that make `step_tokens` of its sequences, the largest batch first. Raises UserError where none does.

    >>> [(split.batch, split.accumulation) for split in splits(Workload(batch=1, sequence=1024), 6144)]
    [(6, 1), (3, 2), (2, 3), (1, 6)]
    """
    rows, rest = divmod(step_tokens, workload.sequence)
    if rest or not rows:
        nearest = max(round(step_tokens / workload.sequence), 1) * workload.sequence
        raise UserError("--tokens-per-step", found=step_tokens, allowed=f"whole sequences of {workload.sequence} tokens", fix=f"say {nearest}, or change --seq")
    counts = [count for count in range(1, min(rows, _MOST_MICRO_BATCHES) + 1) if rows % count == 0]
    return [msgspec.structs.replace(workload, batch=rows // count, accumulation=count) for count in counts if rows // count <= 2**20]


def best_split(
    model: ModelSpec, hardware: HardwareSpec, workload: Workload, step_tokens: int, *, source: str = "", hardware_name: str = "",
    device_limit: int | None = None, host_limit: int | None = None, policies: list[str] | None = None,
) -> list[Choice]:  # fmt: skip
    """`candidates` of the split with the fastest choice. Raises UserError like `candidates` and `splits`."""
    tried = splits(workload, step_tokens)
    names = ["resident"] if hardware.unified else policy_library.contenders() if policies is None else policies
    times: list[tuple[int, int]] = []
    for index, work in enumerate(tried):
        if times and index - min(times)[1] > _PATIENCE:
            break
        costs = cost_model(hardware, model, work)
        plan = Plan(
            policy=next((name for name in names if policy_library.places(name)), names[0]), hardware=hardware.name, source=model.name, model=model,
            workload=work, device_limit_bytes=device_limit or hardware.device_bytes, host_limit_bytes=host_limit or hardware.host_bytes,
        )  # fmt: skip
        if not times or Least(plan, costs).compute_ns(varied(plan, placement=Placement(stored="all"))) < _CLOSE * min(times)[0]:
            times += [(min(found), index)] if (found := [_time(each, costs) for each in _quick(plan, costs)]) else []
    chosen = [tried[index] for time, index in sorted(times)[:_FINALISTS] if time < _CLOSE * min(times)[0]] or [tried[-1]]
    limits = {"device_limit": device_limit, "host_limit": host_limit}

    def searched(work: Workload, names: list[str] | None) -> list[Choice]:
        return candidates(model, hardware, work, source=source, hardware_name=hardware_name, policies=names, **limits)

    best, placing = searched(chosen[0], policies), [name for name in names if policy_library.places(name)]
    for work in chosen[1:]:
        if not placing or rank(searched(work, placing)[0]) < rank(best[0]):
            best = min(best, searched(work, policies), key=lambda choices: rank(choices[0]))
    return best


def _quick(plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """A few plans that fit."""
    if policy_library.places(plan.policy):
        search = PlacementSearch(plan, costs)
        layers = plan.model.layers
        for base in (Placement(), Placement(parked="all")):
            most = search.filling.most_stored(search.plan, base)
            if most < 0:
                continue
            for part in _PARTS:
                placed = search.filling.filled(search.plan, msgspec.structs.replace(base, stored=last(layers, part * most)))
                yield from [found for found, _ in zip(placed, range(1), strict=False)]
            return
        return
    for interval in intervals(plan.model.layers):
        for slots, slabs in ((2, 2), (1, 1)):
            small = varied(plan, weight_slots=slots, gradient_slots=slots, gradient_slabs=slabs, checkpoint_interval=interval)
            try:
                fits = plan_account(small, policy_library.outline(varied(small, chunk_bytes=ONE_COPY)), costs).fits
            except UserError:  # a policy for which some knob is fixed
                continue
            if fits:
                yield small
                break


def _time(plan: Plan, costs: CostModel) -> int:
    """Of a step with whole layers as copies; more than two micro-batches by what the second takes."""
    schedule = policy_library.lower(varied(plan, chunk_bytes=ONE_COPY, accumulation=2))
    return makespan_ns(schedule, costs) + max(plan.workload.accumulation - 2, 0) * another_ns(schedule, costs)
