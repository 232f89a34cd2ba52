"""Computes everything that `megatrain check` reports about a model on a machine.

`judge` searches for the best plan and explains it. `explain` simulates one choice to find the
exposed time of each lane, computes the longest context and the largest batch that would fit, and
tries changes that would help. `summarize` reports only what the choice itself contains.

All numbers are predictions. The step is expected between `step_seconds_low` and
`step_seconds_high`. This range follows from the uncertainty of datasheet rates, or from the spread
of the calibration. `extrapolated` names ops whose cost is extrapolated beyond the measured sizes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base import plugins
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.costs import CostModel, cost_model, costs_of
from megatrain.simulator.costs.datasheet import Datasheet, attention_points
from megatrain.simulator.engine.discrete_event import play
from megatrain.simulator.engine.exposed import WAITING, exposed_ns, slowed_ns
from megatrain.simulator.hardware.cost_table import LAYER_KINDS
from megatrain.simulator.hardware.machine import HardwareSpec, library
from megatrain.simulator.memory.formulas import rebuilt_estimate
from megatrain.simulator.model.metrics import mfu, tflops_6n, tokens_per_second
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import LEAST_PIECE, Workload
from megatrain.simulator.planner.assessment import Choice, Estimate, RunnerUp
from megatrain.simulator.planner.attention_kernel import kernel_gain
from megatrain.simulator.planner.capacity import (
    MemoryFootprint,
    largest_batch,
    longest_context,
    usable,
)
from megatrain.simulator.planner.loss_chunk import least_chunks
from megatrain.simulator.planner.search import best_estimate, candidates
from megatrain.simulator.schedule import Sizes, has_saved_attention
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict import notes
from megatrain.simulator.verdict.advice import Adviser
from megatrain.simulator.verdict.marginal_memory import MarginalMemory, one_more_gib
from megatrain.simulator.verdict.multi_gpu import MultiGpu, NetworkCost, network_cost, predicted
from megatrain.simulator.verdict.step_range import step_range
from megatrain.simulator.verdict.suggestion import Suggestion


class TrainingEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Time and energy of training on a number of tokens, without start, evaluation and saving."""

    tokens: int
    """Tokens to train on."""
    hours: float
    """Hours of training: tokens / tokens_per_second / 3600, with all GPUs together."""
    hours_low: float | None = None
    """Hours if each step takes the lower end of its range. None if there is no range, or if one GPU
    was calibrated and the hours are those of several."""
    hours_high: float | None = None
    """Hours if each step takes the upper end of its range. None if `hours_low` is None."""
    days: float
    """Days of training: hours / 24."""
    energy_kwh: float | None
    """Energy of all GPUs in kWh: board power x hours / 1000. On a machine with unified memory, the
    power is that of the whole package. None if the power is not known."""
    watts: float | None
    """Power of one GPU in watts. None if it is not known."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model fits a machine, how fast it trains, what limits it, and what would help.

    Sizes are in bytes, and times in seconds. The fields are the keys of `--json`.
    """

    model: str
    """Name of the model."""
    parameters: int
    """Number of all parameters."""
    active_parameters: int
    """Number of parameters that one token uses. It is smaller in a mixture of experts."""
    hardware: str
    """Name of the machine."""
    machine: str = ""
    """The machine's name as people write it, such as `RTX 4090`."""
    host_memory_assumed: bool = False
    """Whether the size of the host memory is only the usual one for this machine, neither measured
    nor given by the user."""
    unified: bool
    """Whether CPU and GPU share one memory. The device's bytes are then the whole memory, and
    nothing is copied."""
    gpus: int
    """Number of GPUs that share a step. All bytes of memory are for one of them."""
    hosts: int = 1
    """Number of hosts that have these GPUs."""
    network: NetworkCost | None = None
    """What the network between the hosts costs. None for one host."""
    workload: Workload
    """The workload of a step."""
    model_longest_row: int | None = None
    """The longest sequence that the model's config allows, in tokens. None if the config does not
    say."""
    policy: str
    """Name of the chosen policy."""
    knobs: dict[str, object]
    """Knobs that the policy reads, with their values. Empty for a policy of another system."""
    batch_chosen: bool = False
    """Whether the planner chose the batch because the user named none."""
    chunk_chosen: bool = False
    """Whether the planner chose the loss chunk because the user named none."""
    kernel_chosen: bool = False
    """Whether the planner chose the attention kernel, or none, because the user named none."""
    kernel_gain: float | None = None
    """How much faster the layers compute with the kernel that the planner chose than with PyTorch's
    choice: 0.1 is 10 % faster. None if the planner chose no kernel."""
    prediction_only: bool
    """Whether the policy models another system, so the runtime cannot execute it."""
    cuda: bool = True
    """`HardwareSpec.cuda` of the machine: whether the runtime can train on it."""
    feasible: bool
    """Whether the plan fits in memory."""
    fits_if: str = ""
    """The condition under which the plan fits, in words, if the memory of some ops is not known.
    Empty if it is known, or if the plan does not fit."""
    fits_if_bytes: int | None = None
    """The most device memory that these ops may take in addition to the prediction, in bytes. None
    if their memory is known."""
    binding: str
    """What limits the plan. If it fits, this is the lane with the most work. If not, it is the
    largest pool of the memory that is too small."""
    step_seconds: float
    """Predicted seconds of one step."""
    step_seconds_low: float | None
    """Lower end of the range of the step time. None if the plan does not fit, if the calibration
    has no spread, or if the plan is for several GPUs of a calibrated machine and this number was
    not measured together."""
    step_seconds_high: float | None
    """Upper end of the range of the step time. None if `step_seconds_low` is None."""
    tokens_per_second: float
    """Predicted tokens per second."""
    tokens_per_second_low: float | None = None
    """Tokens per second if a step takes `step_seconds_high`. None if `step_seconds_low` is None."""
    tokens_per_second_high: float | None = None
    """Tokens per second if a step takes `step_seconds_low`. None if `step_seconds_low` is None."""
    tflops_6n: float
    """6 x all parameters x tokens/s, in TFLOPS. For a mixture of experts this exceeds what the GPU
    computes. See `tflops_6n_active`."""
    tflops_6n_active: float
    """6 x the parameters that one token uses x tokens/s, in TFLOPS."""
    mfu: float | None
    """Model FLOPs utilisation: the model's FLOPs as a share of the GPU's peak by its datasheet.
    None if the library has no datasheet of the GPU with a peak for the dtype."""
    matmul_rate_share: float | None = None
    """The model's FLOPs as a share of the rate of a large matrix product that the calibration
    measured. None if the machine was not calibrated."""
    lower_bound_seconds: float
    """Lower bound of the step time in seconds, for any order of the plan's ops."""
    lower_bound_lane: str
    """Lane that sets the lower bound."""
    exposed_seconds: dict[str, float] = {}
    """Lane -> seconds in which the lane ran and compute did not. If several lanes ran, the time is
    divided among them. `waiting` is the time in which no lane ran. See `exposed.py`."""
    step_shares: dict[str, float] = {}
    """How the GPU spends a step, as name -> share of the step. `compute` is the time in which
    layers are computed. The other names say what compute waits for: the optimizer on the host
    (`host_optimizer`) or on the device (`device_optimizer`), `copies`, `other_gpus`, or
    `nothing_else`, which is dispatch and the host's time between steps. The shares add up to 1.
    Empty if the plan was not simulated."""
    attention_seconds: float = 0.0
    """Seconds of a step that attention kernels take, without their projections. An estimate if the
    kernel was not measured alone. 0 if the plan was not simulated, or if the time is not known
    (`_attention_ns`)."""
    slowed_seconds: float = 0.0
    """Seconds by which compute ops take longer because other lanes run at the same time."""
    streams: bool = True
    """Whether anything is copied between host and device. If not, the model and all of its state
    stay on the device."""
    lane_seconds: dict[str, float]
    """Lane -> sum of the durations of its ops, in seconds."""
    device_peak_bytes: int
    """Peak of device memory."""
    device_limit_bytes: int
    """Limit of device memory."""
    host_peak_bytes: int
    """Peak of host memory."""
    host_limit_bytes: int
    """Limit of host memory."""
    pools: dict[str, int]
    """Pool -> bytes."""
    classes: dict[str, dict[str, int]]
    """Place (`device` or `host`) -> class of data -> bytes."""
    calibrated: str
    """Date of the calibration. Empty if costs come from datasheet rates, or from a cost model from
    outside the package."""
    cost_model: str = ""
    """The cost model from outside the package, or an empty text."""
    measured_by_others: str = ""
    """Date on which others measured the machine's rates. Empty if they are estimates, or if the
    machine was calibrated."""
    gpus_measured: int = 0
    """For a plan for several GPUs, the number of GPUs that were measured together and whose rates
    the prediction uses. 0 if no several GPUs were measured."""
    gpus_measured_date: str = ""
    """The date of this measurement, or empty."""
    uncertainty: float | None
    """Relative uncertainty of datasheet rates. None if the machine was calibrated."""
    extrapolated: dict[str, int]
    """Kind of op -> number of ops whose cost is extrapolated beyond the measured sizes. The number
    is 0 if the ops were not counted."""
    longest_context: int | None = None
    """Most tokens of a sequence that fit, with one sequence per micro-batch. None if it was not
    computed."""
    longest_context_in_pieces: int | None = None
    """The same with layers that compute pieces of tokens, for a long sequence whose plan has no
    pieces. None if it was not computed, or if pieces allow no longer context."""
    largest_batch: int | None = None
    """Most sequences per micro-batch that fit, at the workload's sequence length. None if it was
    not computed."""
    documents: str = ""
    """The cost of keeping attention inside documents, or their length, in words. Empty if it costs
    nothing and rows are one document, or if rows are not packed from several documents."""
    fp8: str = ""
    """Which matrix products are in fp8 and which are not, in words. Empty without fp8."""
    eager: str = ""
    """Which layers are not compiled although the workload is, in words. Empty if there are none."""
    reason: str = ""
    """Why the plan does not fit, in one line. Empty if it fits."""
    runner_up: RunnerUp | None = None
    """The second-best plan. None if no other plan fits."""
    one_more_gib: tuple[MarginalMemory, ...] = ()
    """Effect of one more GiB, for device and host. Empty if it was not computed."""
    advice: tuple[Suggestion, ...] = ()
    """Changes that would help, the best first."""
    training: TrainingEstimate | None = None
    """Time and energy of training. None if the number of tokens was not given, or if the plan does
    not fit."""
    multi_gpu: MultiGpu | None = None
    """Estimate for several GPUs. None for one GPU."""


def _knobs(plan: Plan) -> dict[str, object]:
    """Returns the knobs that the plan's policy reads and that have an effect on this model and
    number of GPUs, in the order of `Knobs`.
    """
    policy = policy_library.find(plan.policy)
    read = {*policy.knobs, *(["placement"] if policy.placements else [])}
    if not rebuilt_estimate(plan.model, plan.workload):
        read.discard("rebuild_outputs")
    if plan.gpus == 1:
        read.discard("exchange_bytes")
    return {
        field: getattr(plan.knobs, field) for field in plan.knobs.__struct_fields__ if field in read
    }


def summarize(
    choice: Choice,
    hardware: HardwareSpec,
    *,
    tokens: int | None = None,
    kernel_chosen: bool = False,
) -> Verdict:
    """Returns the verdict on a choice without simulating or searching again.

    If `tokens` is given, the verdict includes the time and energy of training on that many tokens.
    With `kernel_chosen`, the planner chose the attention kernel, and the verdict has its gain.
    """
    plan, account, limits = choice.plan, choice.account, choice.bounds
    work, seconds = plan.workload, choice.step_seconds
    peer = policy_library.find(plan.policy).prediction_only
    peak, matmul = hardware.datasheet_tflops(work.dtype), hardware.peak_tflops.get(work.dtype)
    low: float | None = None
    high: float | None = None
    if hardware.costs is None or choice.feasible:
        low, high = step_range(choice.plan, choice.step_seconds, hardware)
    unknown = notes.unknown_memory(choice, hardware)
    left = plan.device_limit_bytes - account.device_peak_bytes
    several = hardware.measured_together(plan.gpus_per_host)
    verdict = Verdict(
        model=plan.model.name,
        parameters=plan.model.parameters,
        active_parameters=plan.model.active_parameters,
        hardware=hardware.name,
        machine=_title(hardware),
        host_memory_assumed=(
            plan.hardware in library() and plan.host_limit_bytes == hardware.host_bytes
        ),
        unified=hardware.unified,
        gpus=plan.gpus,
        hosts=plan.hosts,
        network=network_cost(choice, hardware),
        workload=work,
        model_longest_row=plan.model.longest_row,
        policy=plan.policy,
        knobs={} if peer else _knobs(plan),
        kernel_chosen=kernel_chosen,
        kernel_gain=(
            kernel_gain(plan.model, hardware, work) if kernel_chosen and work.attention else None
        ),
        prediction_only=peer,
        cuda=hardware.cuda,
        feasible=choice.feasible,
        fits_if=(
            f"compiled layers with {unknown}, which nobody measured, take at most"
            f" {format_bytes(left)} more than eager ones"
            if unknown
            else ""
        ),
        fits_if_bytes=left if unknown else None,
        binding=limits.binding if choice.feasible else account.binding,
        step_seconds=seconds,
        step_seconds_low=low,
        step_seconds_high=high,
        tokens_per_second=tokens_per_second(work, seconds),
        tokens_per_second_low=tokens_per_second(work, high) if high else None,
        tokens_per_second_high=tokens_per_second(work, low) if low else None,
        tflops_6n=tflops_6n(plan.model, work, seconds),
        tflops_6n_active=tflops_6n(plan.model, work, seconds)
        * plan.model.active_parameters
        / plan.model.parameters,
        mfu=mfu(plan.model, work, seconds, peak, plan.gpus) if peak else None,
        matmul_rate_share=(
            mfu(plan.model, work, seconds, matmul, plan.gpus) if matmul and hardware.costs else None
        ),
        lower_bound_seconds=limits.lower_bound_ns / 1e9,
        lower_bound_lane=limits.latest,
        streams=choice.streams,
        lane_seconds={lane: time / 1e9 for lane, time in limits.lanes_ns.items()},
        device_peak_bytes=account.device_peak_bytes,
        device_limit_bytes=account.device_limit_bytes,
        host_peak_bytes=account.host_peak_bytes,
        host_limit_bytes=account.host_limit_bytes,
        pools=dict(account.pools),
        classes=account.classes,
        calibrated=hardware.costs.date if hardware.costs and not hardware.cost_model else "",
        cost_model=hardware.cost_model,
        measured_by_others="" if hardware.costs else hardware.measured_by_others,
        gpus_measured=several.gpus if several else 0,
        gpus_measured_date=several.date if several else "",
        uncertainty=None if hardware.costs else hardware.uncertainty,
        extrapolated=dict.fromkeys(choice.extrapolated, 0),
        documents=notes.documents(plan.model, work),
        eager=notes.eager(plan.model, work),
        fp8=notes.fp8(plan.model, work),
        reason="" if choice.feasible else notes.change_needed(choice, hardware),
        runner_up=choice.runner_up,
    )
    return (
        verdict
        if tokens is None
        else msgspec.structs.replace(verdict, training=train_for(verdict, hardware, tokens))
    )


def _title(hardware: HardwareSpec) -> str:
    """Returns the machine's name as people write it."""
    known = HardwareSpec.of_gpu(hardware.costs.measured_on) if hardware.costs else None
    return hardware.title or (known.title if known else "") or f"machine {hardware.name}"


_WAITS = {
    "cpu": "host_optimizer",
    "update": "device_optimizer",
    "h2d": "copies",
    "d2h": "copies",
    "exchange": "other_gpus",
    WAITING: "nothing_else",
}
"""What compute waits for, by the lane that is busy in that time."""


def _shares(exposed: dict[str, float], makespan_ns: int, step_seconds: float) -> dict[str, float]:
    """Returns `Verdict.step_shares`, from the exposed ns by lane and the makespan of the step."""
    step_ns = step_seconds * 1e9
    shares = {"compute": (makespan_ns - sum(exposed.values())) / step_ns}
    for lane, time in exposed.items():
        shares[_WAITS[lane]] = shares.get(_WAITS[lane], 0.0) + time / step_ns
    shares["nothing_else"] = 1 - sum(
        share for name, share in shares.items() if name != "nothing_else"
    )
    return shares


def train_for(verdict: Verdict, hardware: HardwareSpec, tokens: int) -> TrainingEstimate | None:
    """Returns the time and energy of training on `tokens` tokens, or None if the plan does not fit.

    If the verdict is also on several GPUs, all of them train on these tokens together, unless they
    cannot train this workload.
    """
    several = verdict.multi_gpu
    if several and several.refused:
        several = None
    used = several or verdict
    if not used.feasible:
        return None
    gpus = several.gpus if several else 1
    hours = tokens / used.tokens_per_second / 3600
    unknown = several is not None and hardware.costs is not None  # no range of all GPUs
    low, high = (
        None if end is None or unknown else hours * end / verdict.step_seconds
        for end in (verdict.step_seconds_low, verdict.step_seconds_high)
    )
    return TrainingEstimate(
        tokens=tokens,
        hours=hours,
        hours_low=low,
        hours_high=high,
        days=hours / 24,
        energy_kwh=None if hardware.watts is None else gpus * hardware.watts * hours / 1000,
        watts=hardware.watts,
    )


def explain(
    choice: Choice,
    hardware: HardwareSpec,
    names: list[str] | None = None,
    *,
    gpus: int = 1,
    hosts: int = 1,
    tokens: int | None = None,
    advise: bool = True,
    marginal: bool = True,
    chunk_chosen: bool = False,
    kernel_chosen: bool = False,
) -> Verdict:
    """Returns the full verdict on a choice: all that `described` and `explored` report.

    Args:
        choice: The plan to explain.
        hardware: The machine of the plan.
        names: Policies that advice may choose, and that several GPUs may use. The default is every
            policy that may be the fastest.
        gpus: Number of GPUs. If there are several, the verdict predicts their speed.
        hosts: Number of hosts that have these GPUs.
        tokens: Tokens to train on, for time and energy.
        advise: Whether to try changes that would help. This takes most of the time.
        marginal: Whether to predict the gain of one more GiB, for `one_more_gib`.
        chunk_chosen: Whether the planner chose the loss chunk. The longest context and the largest
            batch are then computed for any chunk that the planner may choose.
        kernel_chosen: Whether the planner chose the attention kernel, or none. It then also chooses
            one for other machines and models.

    Raises UserError if a host cannot have that many GPUs.
    """
    verdict = described(
        choice,
        hardware,
        gpus=gpus,
        hosts=hosts,
        tokens=tokens,
        chunk_chosen=chunk_chosen,
        kernel_chosen=kernel_chosen,
        names=names,
    )
    return explored(verdict, choice, hardware, names, advise=advise, marginal=marginal)


def described(
    choice: Choice,
    hardware: HardwareSpec,
    *,
    gpus: int = 1,
    hosts: int = 1,
    tokens: int | None = None,
    chunk_chosen: bool = False,
    kernel_chosen: bool = False,
    shared_work: Workload | None = None,
    names: list[str] | None = None,
) -> Verdict:
    """Returns the verdict on a choice with its simulated times, but without the results of other
    plans, which `explored` adds.

    `shared_work` is the workload of each of several GPUs that share a step. None means that of the
    plan. `names` are the policies that may share it. The other arguments are those of `explain`.
    Raises UserError as `explain` does.
    """
    plan, verdict = choice.plan, summarize(choice, hardware, kernel_chosen=kernel_chosen)
    costs = costs_of(plan, hardware)
    schedule = policy_library.lower(plan)
    sizes = costs.sizes(schedule)
    counts = Counter(sizes.which)
    flagged: dict[str, int] = defaultdict(int)
    for index, op in enumerate(sizes.ops):
        if costs.extrapolated(op):
            flagged[op.kind] += counts[index]
    timeline = play(schedule, costs)
    exposed = exposed_ns(timeline)
    # With a host whose speed varies, the expected step is longer than one at the mean speed.
    waits, makespan_ns, seconds = exposed, timeline.makespan_ns, verdict.step_seconds
    if costs.host_factors:
        played_ns = makespan_ns + costs.step_overhead_ns
        if (late := round(1e9 * seconds) - played_ns) > 0:
            waits, makespan_ns = exposed | {"cpu": exposed.get("cpu", 0) + late}, makespan_ns + late
        else:
            seconds = played_ns / 1e9
    verdict = msgspec.structs.replace(
        verdict,
        attention_seconds=_attention_ns(hardware, plan, sizes, costs) / 1e9,
        slowed_seconds=slowed_ns(timeline, schedule, costs) / 1e9,
        exposed_seconds={lane: time / 1e9 for lane, time in exposed.items()},
        step_shares=_shares(waits, makespan_ns, seconds),
        extrapolated=dict(flagged),
        reason="" if choice.feasible else notes.lacking(choice.account),
        chunk_chosen=chunk_chosen,
        multi_gpu=(
            None
            if gpus == 1
            else predicted(choice, schedule, hardware, costs, gpus, shared_work, hosts, names)
        ),
    )
    if tokens is not None:
        verdict = msgspec.structs.replace(verdict, training=train_for(verdict, hardware, tokens))
    return verdict


def _attention_ns(hardware: HardwareSpec, plan: Plan, sizes: Sizes, costs: CostModel) -> float:
    """Returns the time of the attention kernels of a step. Layers that saved their attention do not
    compute it again.

    Returns 0 if the time is not known. A calibration measures the kernel alone, with rows of 512
    tokens and more, and the time of a shorter row on a CPU can come out longer than its layer. So
    shorter rows have no time, and neither has a kernel that takes longer than its layers.
    """
    points = attention_points(hardware.costs, plan.model, plan.workload)
    if points and plan.workload.sequence < points[0][0]:
        return 0.0
    sheet, counts = Datasheet(hardware, plan.model, plan.workload), Counter(sizes.which)
    layers = [
        (counts[index], op)
        for index, op in enumerate(sizes.ops)
        if op.kind in LAYER_KINDS and not has_saved_attention(op.shape)
    ]
    attention = sum(count * sheet.attention_ns(op.kind, op.layer) for count, op in layers)
    whole = sum(count * costs.duration_ns(op) for count, op in layers)
    return attention if attention < whole else 0.0


def explored(
    verdict: Verdict,
    choice: Choice,
    hardware: HardwareSpec,
    names: list[str] | None = None,
    *,
    advise: bool = True,
    marginal: bool = True,
) -> Verdict:
    """Adds to a verdict of `described` the results of other plans than the chosen one.

    They are the longest context, also in pieces of tokens, the largest batch, the gain of one more
    GiB (if `marginal`), and changes that would help (if `advise`). `verdict` is the result of
    `described` for `choice`. The other arguments are those of `explain`.
    """
    plan = choice.plan
    costs = cost_model(hardware, plan.model, plan.workload)
    names = policy_library.contenders() if names is None else names
    footprints = _footprints(choice, hardware, costs, names)
    works = least_chunks(plan.workload, hardware) if verdict.chunk_chosen else (plan.workload,)
    verdict = msgspec.structs.replace(
        verdict,
        one_more_gib=one_more_gib(choice, hardware, costs) if marginal else (),
        longest_context=(longest := longest_context(footprints, *works) if footprints else None),
        longest_context_in_pieces=_longest_in_pieces(choice, hardware, names, longest),
        largest_batch=largest_batch(footprints, *works) if footprints else None,
    )
    if not (advise and footprints):
        return verdict
    # If the chosen policy places state, the search has found it faster than the other policies.
    searched = [plan.policy] if policy_library.find(plan.policy).places_state else names

    def search_again(
        work: Workload, device_limit: int, host_limit: int, most_seconds: float = math.inf
    ) -> Estimate | None:
        return best_estimate(
            plan.model,
            hardware,
            work,
            device_limit=device_limit,
            host_limit=host_limit,
            policies=searched,
            most_seconds=most_seconds,
        )

    adviser = Adviser(
        choice,
        hardware,
        costs,
        names,
        search_again,
        footprints,
        kernel_chosen=verdict.kernel_chosen,
    )
    return msgspec.structs.replace(verdict, advice=adviser.suggestions())


def _longest_in_pieces(
    choice: Choice, hardware: HardwareSpec, names: list[str], longest: int | None
) -> int | None:
    """Returns `Verdict.longest_context_in_pieces`. `longest` is the longest context without
    pieces.
    """
    plan, work = choice.plan, choice.plan.workload
    if work.token_piece or work.fp8:
        return None
    if plan.model.pieces_obstacle(compiled=work.compiled):
        return None
    work = msgspec.structs.replace(work, token_piece=LEAST_PIECE)
    costs = cost_model(hardware, plan.model, work)
    plan = msgspec.structs.replace(plan, workload=work)
    found = longest_context(list(usable(plan, hardware, costs, names)), work)
    return found if found > (longest or 0) else None


def _footprints(
    choice: Choice, hardware: HardwareSpec, costs: CostModel, names: list[str]
) -> list[MemoryFootprint]:
    """Returns the footprints of the plans of the policies `names` that need the least memory, and
    of `choice` if it fits.
    """
    footprints = list(usable(choice.plan, hardware, costs, names))
    if choice.feasible and footprints:
        # The chosen plan may need less memory than the others, because state on the device needs
        # no slots.
        footprints.append(MemoryFootprint(choice.plan, costs))
    return footprints


@plugins.unchanging()
def judge(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
    gpus: int = 1,
    hosts: int = 1,
    tokens: int | None = None,
    advise: bool = True,
) -> Verdict:
    """Searches for the best plan and returns the verdict on it.

    Args:
        model: The model to train.
        hardware: The machine.
        workload: The workload of a step.
        device_limit: Device memory in bytes. The default is the machine's.
        host_limit: Host memory in bytes. The default is the machine's.
        policies: Policies to search, as in `search`.
        gpus: Number of GPUs. If there are several, the verdict predicts their speed.
        hosts: Number of hosts that have these GPUs.
        tokens: Tokens to train on, for time and energy.
        advise: Whether to try changes that would help. This takes most of the time.

    Raises UserError as `search` does, and if a host cannot have that many GPUs.
    """
    best = candidates(
        model,
        hardware,
        workload,
        device_limit=device_limit,
        host_limit=host_limit,
        policies=policies,
    )[0]
    return explain(best, hardware, policies, gpus=gpus, hosts=hosts, tokens=tokens, advise=advise)
