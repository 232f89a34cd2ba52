"""Assessment: predicts the memory, the step time and the lower bounds of one plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base import plugins
from megatrain.simulator.costs import CostModel
from megatrain.simulator.costs.remembered import costs_sizes
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.engine.evaluator import LowerBounds, bounds
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.memory.account import (
    PROCESS,
    TUNING,
    Account,
    account,
    peak_workspace_bytes,
)
from megatrain.simulator.memory.formulas import (
    activation_estimates,
    activations_estimate,
    added_transients,
    rebuilt_estimate,
    tuning_bytes,
    workspace_estimate,
)
from megatrain.simulator.model.attention_masks import lasting_mask_bytes, mask_bytes
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import LANES, OFFLOADING, Buffer, DataClass, Op, Schedule
from megatrain.simulator.schedule.arithmetic import blocks_of, part_elements
from megatrain.simulator.schedule.plan import Knobs, Plan, Prediction


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """The second-best plan."""

    policy: str
    """Name of the policy."""
    knobs: Knobs | None = None
    """The knobs of the plan. None if only a lower bound of its step time is known."""
    step_seconds: float
    """Predicted seconds of one step, or a lower bound if `at_least` is set."""
    at_least: bool = False
    """Whether `step_seconds` is a lower bound. The policy was not searched, because no choice of
    its knobs can be faster than this bound."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """One plan with its predicted memory and time.

    If the plan does not fit, `account` names the limit that binds and a change that would help.
    """

    plan: Plan
    """The plan."""
    account: Account
    """The predicted memory of the plan against its limits."""
    step_seconds: float
    """Predicted seconds of one step: the engine's makespan plus the host's time outside the
    schedule."""
    streams: bool = True
    """Whether anything is copied between host and device."""
    runner_up: RunnerUp | None = None
    """The next best plan that fits, of this policy or of another. None if no other was tried."""

    @property
    def feasible(self) -> bool:
        """Whether the plan fits in its memory limits."""
        return self.account.fits


class Choice(Estimate, frozen=True, kw_only=True):
    """An estimate whose plan has its digest and prediction, with what limits the step."""

    bounds: LowerBounds
    """What limits the step time: each lane's work, the critical path, and a lower bound."""
    extrapolated: tuple[str, ...] = ()
    """Kinds of ops whose cost is extrapolated beyond the measured sizes."""


def assess(plan: Plan, costs: CostModel, seconds: float | None = None) -> Choice:
    """Returns the predicted memory, time and bounds of `plan`.

    The plan is not changed, except that its digest and prediction are filled in. `seconds` is the
    plan's `step_seconds` if they are known, so that it is not simulated. Raises UserError if the
    policy cannot lower the plan, or if a policy from outside the package makes an incorrect
    schedule.
    """
    schedule = policy_library.lower(plan)
    policy_library.check_outside(plan)
    memory = plan_account(plan, schedule, costs)
    limits = bounds(schedule, costs)
    seconds = step_seconds(schedule, costs) if seconds is None else seconds
    prediction = Prediction(
        step_seconds=seconds,
        lower_bound_seconds=limits.lower_bound_ns / 1e9,
        device_peak_bytes=memory.device_peak_bytes,
        host_peak_bytes=memory.host_peak_bytes,
        binding=limits.binding if memory.fits else memory.binding,
    )
    flagged = tuple(sorted({op.kind for op in costs.sizes(schedule).ops if costs.extrapolated(op)}))
    plan = msgspec.structs.replace(plan, digest=schedule.digest, prediction=prediction)
    return Choice(
        plan=plan,
        account=memory,
        step_seconds=seconds,
        streams=streams(schedule),
        bounds=limits,
        extrapolated=flagged,
    )


def estimate(plan: Plan, costs: CostModel) -> Estimate:
    """Returns the memory and the time that `assess` predicts, in a third of the time.

    Raises UserError if the policy cannot lower the plan.
    """
    schedule = schedule_to_time(plan, costs)
    return Estimate(
        plan=plan,
        account=plan_account(plan, policy_library.outline(plan, merged=True), costs),
        step_seconds=step_seconds(schedule, costs),
        streams=streams(schedule),
    )


def streams(schedule: Schedule) -> bool:
    """Returns whether the schedule copies anything between host and device."""
    return not {LANES.index("h2d"), LANES.index("d2h")}.isdisjoint(schedule.compiled.lanes)


def step_seconds(schedule: Schedule, costs: CostModel) -> float:
    """Returns the expected makespan plus the host's time outside the schedule, in seconds."""
    return (expected_ns(schedule, costs) + costs.step_overhead_ns) / 1e9


def expected_ns(
    schedule: Schedule,
    costs: CostModel,
    played: Callable[[Schedule, CostModel], float] = makespan_ns,
) -> float:
    """Returns the mean makespan in ns over the speeds of the host (`CostModel.host_factors`).

    If the schedule has no ops on the lane `cpu`, or the host's speed does not vary, this is the
    makespan. `played` returns the makespan of a schedule under a cost model.
    """
    if not costs.host_factors or LANES.index("cpu") not in schedule.compiled.lanes:
        return played(schedule, costs)
    return statistics.fmean(
        played(schedule, ScaledCosts(costs, lambda op: op, {"cpu": factor}))
        for factor in costs.host_factors
    )


def schedule_to_time(plan: Plan, costs: CostModel) -> Schedule:
    """Returns a schedule of `plan` that is complete enough for `costs` to predict its step time.

    Its ops and buffers may be missing if `costs` uses only `Schedule.sizes`, as the cost models of
    this package do.
    """
    if costs_sizes(costs):
        return policy_library.lower_for_timing(plan)
    return policy_library.lower_uncached(plan)


def plan_account(
    plan: Plan, schedule: Schedule, costs: CostModel, *, advise: bool = True
) -> Account:
    """Returns the memory of a plan's schedule under the plan's limits. `advise` is an argument of
    `account`.

    On a calibrated machine, the sizes of activations and workspace are measured. On other machines
    they are estimated. Both describe this project's runtime, so they are not added for policies of
    other systems. The schedules of those policies list everything that their ops allocate.
    """
    if policy_library.find(plan.policy).prediction_only:
        return account(schedule, plan.device_limit_bytes, plan.host_limit_bytes, None, 0)
    schedule, held = _without_reused(plan, schedule, layer_activations(plan, costs))
    measured = costs.workspace(plan.model, plan.workload)
    op_workspace = measured or _estimated_workspace(plan.model, plan.workload)
    # What a layer does not save exists again in its backward pass.
    op_workspace = msgspec.structs.replace(
        op_workspace, layer=op_workspace.layer + _rebuilt_bytes(plan)
    )
    workspace = peak_workspace_bytes(op_workspace, schedule, held)
    if measured is None:
        workspace += costs.library_bytes
    workspace += costs.collective_bytes(plan.gpus)
    if plan.workload.documents:
        # Each micro-batch of a group has its own masks, and all masks exist until the head is done.
        workspace += (plan.knobs.micro_batch_group - 1) * mask_bytes(plan.model, plan.workload)
    extra = {}
    if any(buffer.place == "host" for buffer in schedule.buffers):
        extra = {PROCESS: costs.process_bytes, TUNING: tuning_bytes(plan.model, plan.workload)}
    return account(
        schedule,
        plan.device_limit_bytes,
        plan.host_limit_bytes,
        held,
        workspace,
        {pool: size for pool, size in extra.items() if size},
        advise=advise,
    )


@plugins.cached(maxsize=16)
def _estimated_workspace(model: ModelSpec, workload: Workload) -> Workspace:
    """Returns `workspace_estimate` with the attention masks that exist during the head and the
    updates. A measured workspace has these, too.
    """
    estimate = workspace_estimate(model, workload)
    masks = lasting_mask_bytes(model, workload)
    return msgspec.structs.replace(
        estimate, head=estimate.head + masks, update=estimate.update + masks
    )


def activations_bytes(plan: Plan, costs: CostModel) -> int:
    """Returns the bytes of the saved activations of one decoder layer for one micro-batch. If
    layers differ, it is the largest.

    The number is measured if the machine was calibrated, and otherwise `activations_estimate`. The
    outputs that the plan's layers rebuild (`Knobs.rebuild_outputs`) are subtracted.
    """
    model, workload = plan.model, plan.workload
    size = costs.activations_bytes(model, workload) or activations_estimate(model, workload)
    return size - _rebuilt_bytes(plan)


def layer_activations(plan: Plan, costs: CostModel) -> Mapping[str, int]:
    """Returns decoder layer -> the bytes of its saved activations for one micro-batch: those of the
    largest layer (`activations_bytes`), in proportion to the estimates of both layers. If its own
    estimate is larger, it is used, because the largest layer's may be too large.
    """
    return _in_proportion(plan.model, plan.workload, activations_bytes(plan, costs))


@plugins.cached(maxsize=16)  # a search asks for the same sizes hundreds of times
def _in_proportion(model: ModelSpec, workload: Workload, largest: int) -> Mapping[str, int]:
    estimates = activation_estimates(model, workload)
    most = max(estimates.values())
    return {
        layer: max(-(-largest * size // most), min(size, largest))
        for layer, size in estimates.items()
    }


def slot_bytes(plan: Plan, sizes: Mapping[str, int]) -> dict[DataClass, int]:
    """Returns the bytes of a slot for the activations of a recomputed layer, and of a slot for
    those of a layer that saves them, for one micro-batch. `sizes` are those of `layer_activations`.

    The first is the largest of `sizes`. The second is the mean of all layers that save activations.
    It includes the most bytes by which temporary tensors of one of these layers exceed the
    workspace.
    """
    largest, saved = max(sizes.values()), plan.placed("saved_activations")
    if not saved:
        return {"activations": largest, "saved_activations": largest}
    added, group = added_transients(plan.model, plan.workload), plan.knobs.micro_batch_group
    total = group * sum([sizes[layer] for layer in saved]) + max([added[layer] for layer in saved])
    return {"activations": largest, "saved_activations": -(-total // (group * len(saved)))}


def _rebuilt_bytes(plan: Plan) -> int:
    """Returns the bytes of the outputs that each decoder layer of the plan rebuilds."""
    return rebuilt_estimate(plan.model, plan.workload) if plan.knobs.rebuild_outputs else 0


def _without_reused(
    plan: Plan, schedule: Schedule, sizes: Mapping[str, int]
) -> tuple[Schedule, dict[DataClass, int]]:
    """Returns `schedule` without the recompute slots that reuse memory of saved layers, and the
    bytes of its slots. `sizes` are those of `layer_activations`.

    The framework allocates saved and recomputed activations from the same memory. The activations
    of all layers in `saved_activations` exist at once only at the end of the forward pass. When a
    block of layers is recomputed, the layers above it have finished their backward pass and freed
    their activations. So the peak is the larger of two numbers: the activations of all saved
    layers, and the largest sum, over the recomputed blocks, of the block's activations and those of
    the saved layers below it. On an H200, a step of a 3B model with 32 x 4,096 tokens took 13.6 %
    less memory than with a slot for every recomputed layer.
    """
    held, saved = slot_bytes(plan, sizes), plan.placed("saved_activations")
    if not saved:
        return schedule, held
    group, most, below = plan.knobs.micro_batch_group, 0, 0
    for block in blocks_of(plan):
        if (first := str(block[0])) in saved:
            below += group * sizes[first]
        else:
            most = max(most, below + len(block) * held["activations"])
    extra = max(most - group * len(saved) * held["saved_activations"], 0)
    count = -(-extra // held["activations"])
    kept, slots = list[Buffer](), 0
    for buffer in schedule.buffers:
        slots += buffer.data == "activations"
        if buffer.data != "activations" or slots <= count:
            kept.append(buffer)
    if count:
        held["activations"] = -(-extra // count)
    return msgspec.structs.replace(schedule, buffers=tuple(kept)), held


def without_unused_inputs(plan: Plan) -> Plan:
    """Returns `plan` without offloaded inputs if all decoder layers save their activations.

    The schedule is the same, because only inputs of recomputed layers are offloaded.
    """
    placement = plan.knobs.placement
    if placement.saved_activations != "all" or not placement.offloaded_inputs:
        return plan
    return with_knobs(plan, placement=msgspec.structs.replace(placement, offloaded_inputs=""))


def with_knobs(
    plan: Plan, *, layers: int | None = None, groups: int | None = None, **knobs: Any
) -> Plan:
    """Returns `plan` with new values for the given knobs, and optionally shortened.

    Args:
        plan: The plan to change.
        layers: The most decoder layers of the result. None keeps all.
        groups: The most groups of micro-batches of the result. Each group is then shortened to at
            most two micro-batches, the fewest whose gradients are summed. None keeps all.
        knobs: New values of fields of `Knobs`.
    """
    model, work = plan.model, plan.workload
    chosen = msgspec.structs.replace(plan.knobs, **knobs)
    if groups and work.accumulation > 1:
        group_count = plan.micro_batches // chosen.micro_batch_group
        group = min(chosen.micro_batch_group, 2)
        chosen = msgspec.structs.replace(chosen, micro_batch_group=group)
        work = msgspec.structs.replace(
            work,
            accumulation=min(groups, group_count) * group * plan.gpus,
            sum_group=group if work.sum_group > 1 else 1,
        )
    return msgspec.structs.replace(
        plan, model=model.shortest(layers) if layers else model, workload=work, knobs=chosen
    )


def first_knobs(plan: Plan) -> Knobs:
    """Returns the knobs from which a search for plans like `plan` begins. They are the defaults,
    with two exceptions. Layers rebuild outputs if they can and the policy reads `rebuild_outputs`,
    because this takes less memory. Several GPUs exchange the gradient of a decoder layer in about
    four pieces, which have half the memory of the gradient.
    """
    reads = "rebuild_outputs" in policy_library.find(plan.policy).knobs
    return Knobs(
        rebuild_outputs=int(reads and rebuilt_estimate(plan.model, plan.workload) > 0),
        exchange_bytes=exchanged_bytes(plan) // 2 if plan.gpus > 1 else 0,
    )


def exchanged_bytes(plan: Plan) -> int:
    """Returns the bytes of the largest gradient of a decoder layer that several GPUs exchange."""
    width = 4 if plan.workload.sum_group > 1 else DTYPE_BYTES[plan.workload.dtype]
    return plan.gpus * width * max(part_elements(plan, spec.name) for spec in plan.model.decoders)


def group_sizes(plan: Plan) -> list[int]:
    """Returns the sizes that a micro-batch group of `plan` may have, the smallest first.

    They are the divisors of the micro-batches of a rank, or only 1 if the policy has no groups or
    the model's embedding and head are tied.
    """
    accumulation = plan.micro_batches
    if "micro_batch_group" not in policy_library.find(plan.policy).knobs or plan.model.tied:
        return [1]
    return [size for size in range(1, accumulation + 1) if accumulation % size == 0]


class InShortGroups(ScaledCosts):
    """The cost model for a plan whose groups `with_knobs` has shortened to two micro-batches.

    Ops that run once per micro-batch take longer, so a shortened group takes as long as a whole
    one. With groups of 8, for example, they take four times as long as with `costs`.
    """

    def __init__(self, costs: CostModel, group: int) -> None:
        """`group` is the number of micro-batches in a whole group."""
        super().__init__(costs, lambda op: op)
        self._factor = group / min(group, 2)

    def duration_ns(self, op: Op) -> int:
        per_micro_batch = op.lane == "compute" or op.kind in OFFLOADING
        return math.ceil(self.costs.duration_ns(op) * (self._factor if per_micro_batch else 1))


def memory_taken(choice: Choice) -> tuple[int, tuple[int, ...]]:
    """Returns a sort key that puts the plan with the fewest bytes first, on device and host
    together, and breaks ties by the knobs.
    """
    return (
        choice.account.device_peak_bytes + choice.account.host_peak_bytes,
        msgspec.structs.astuple(choice.plan.knobs),
    )
