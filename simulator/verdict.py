"""Verdict: all that `megatrain check` says of a model on a machine, computed once and only formatted afterwards.

`judge` searches for the best plan, plays it for what is exposed, finds how much more would fit, and tries what would help. `brief` is the same
of one choice without what has to be tried. Predictions only: how far off they may be is `step_seconds_low` to `step_seconds_high`, by what a datasheet's
rates are worth or by the spreads of a calibration, and `extrapolated` names ops whose cost lies outside of what was measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.advice import Adviser, Suggestion
from megatrain.simulator.assessment import Choice, RunnerUp, varied
from megatrain.simulator.capacity import Footprint, largest_batch, longest_context, usable
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.costs.within_spread import WithinSpread
from megatrain.simulator.engine import simulate
from megatrain.simulator.evaluator import makespan_ns
from megatrain.simulator.exposed import exposed_ns, slowed_ns
from megatrain.simulator.families import WRITTEN_OUT
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.margins import Margin, one_more_gib
from megatrain.simulator.metrics import mfu, tflops_6n, tokens_per_second
from megatrain.simulator.plan import Plan
from megatrain.simulator.planner import candidates
from megatrain.simulator.several import Several, estimate
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.units import format_bytes
from megatrain.simulator.workload import Workload


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to train on so many tokens, without start, evaluation and saving."""

    tokens: int
    days: float
    """tokens / tokens_per_second / 86400; of all GPUs, where several are asked for"""
    energy_kwh: float | None
    """GPUs' board power x hours / 1000, of the whole package for a unified machine; None where the power is not stated"""
    watts: float | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Does it fit, how fast, what binds, what would help. Sizes in bytes, times in seconds. The fields are the keys of `--json`."""

    model: str
    parameters: int
    active_parameters: int
    hardware: str
    unified: bool
    """one memory for CPU and GPU: the device's bytes are all there are, nothing is copied"""
    workload: Workload
    policy: str
    knobs: dict[str, object]
    """of the plan; empty for another system's"""
    prediction_only: bool
    feasible: bool
    binding: str
    """the lane with the most work, or the largest pool of the place that is too small"""
    step_seconds: float
    step_seconds_low: float | None
    """None where nothing says, as the next: a calibration without spreads, a plan that does not fit"""
    step_seconds_high: float | None
    tokens_per_second: float
    tflops_6n: float
    """6 x all parameters x tokens / s; of a mixture of experts no rate of the chip, see the next"""
    tflops_6n_active: float
    """6 x the parameters that a token uses x tokens / s"""
    mfu: float | None
    lower_bound_seconds: float
    lower_bound_lane: str
    exposed_seconds: dict[str, float] = {}
    """lane -> time in which it ran and compute did not, shared among lanes that ran together; `waiting`: none ran; see exposed.py"""
    slowed_seconds: float = 0.0
    """that compute's ops take longer because of what other lanes do at the same time"""
    streams: bool = True
    """something is copied from or to the host; else the model and all of its state stay on the device"""
    lane_seconds: dict[str, float]
    """lane -> sum of its ops"""
    device_peak_bytes: int
    device_limit_bytes: int
    host_peak_bytes: int
    host_limit_bytes: int
    pools: dict[str, int]
    classes: dict[str, dict[str, int]]
    """place -> class of data -> bytes"""
    calibrated: str
    """date of the measurement; empty where costs come from a datasheet's rates"""
    uncertainty: float | None
    extrapolated: dict[str, int]
    """kind -> ops whose cost lies outside of what was measured; 0 where they were not counted"""
    longest_context: int | None = None
    """tokens of one sequence that fit, one sequence a micro-batch; None where it was not asked for, as the next"""
    largest_batch: int | None = None
    """sequences of a micro-batch that fit at the workload's sequence length"""
    documents: str = ""
    """what it costs that attention stays inside documents; empty where it costs nothing, or rows are one text"""
    reason: str = ""
    """why it does not fit, in one line"""
    runner_up: RunnerUp | None = None
    """what would have been chosen otherwise; None where nothing else fits"""
    one_more_gib: tuple[Margin, ...] = ()
    """what more memory would buy, by place; empty where it was not asked for"""
    advice: tuple[Suggestion, ...] = ()
    training: Training | None = None
    several: Several | None = None


def _knobs(plan: Plan) -> dict[str, object]:
    """The knobs that the plan's policy reads, in the order of `Knobs`."""
    policy = policy_library.find(plan.policy)
    read = {*policy.knobs, *(["placement"] if policy.placements else [])}
    return {field: getattr(plan.knobs, field) for field in plan.knobs.__struct_fields__ if field in read}


def brief(choice: Choice, hardware: HardwareSpec, *, tokens: int | None = None) -> Verdict:
    """What a choice says of itself. `tokens`: to train on."""
    plan, account, limits = choice.plan, choice.account, choice.bounds
    work, seconds = plan.workload, choice.step_seconds
    peer = policy_library.is_prediction_only(plan.policy)
    peak = hardware.peak_tflops.get(work.dtype)
    low, high = _range(choice, hardware)
    verdict = Verdict(
        model=plan.model.name, parameters=plan.model.parameters, active_parameters=plan.model.active_parameters,
        hardware=hardware.name, unified=hardware.unified, workload=work, policy=plan.policy,
        knobs={} if peer else _knobs(plan), prediction_only=peer,
        feasible=choice.feasible, binding=limits.binding if choice.feasible else account.binding, step_seconds=seconds,
        step_seconds_low=low, step_seconds_high=high,
        tokens_per_second=tokens_per_second(work, seconds), tflops_6n=tflops_6n(plan.model, work, seconds),
        tflops_6n_active=tflops_6n(plan.model, work, seconds) * plan.model.active_parameters / plan.model.parameters,
        mfu=mfu(plan.model, work, seconds, peak) if peak else None, lower_bound_seconds=limits.lower_bound_ns / 1e9, lower_bound_lane=limits.latest,
        streams=not {"h2d", "d2h"}.isdisjoint(limits.lanes_ns),
        lane_seconds={lane: time / 1e9 for lane, time in limits.lanes_ns.items()},
        device_peak_bytes=account.device_peak_bytes, device_limit_bytes=account.device_limit_bytes,
        host_peak_bytes=account.host_peak_bytes, host_limit_bytes=account.host_limit_bytes, pools=dict(account.pools),
        classes=account.classes,
        calibrated=hardware.costs.date if hardware.costs else "", uncertainty=None if hardware.costs else hardware.uncertainty, extrapolated=dict.fromkeys(choice.extrapolated, 0),
        documents=_documents(plan.model, work), reason="" if choice.feasible else account.advice, runner_up=choice.runner_up,
    )  # fmt: skip
    return verdict if tokens is None else msgspec.structs.replace(verdict, training=train_for(verdict, hardware, tokens))


def _range(choice: Choice, hardware: HardwareSpec) -> tuple[float | None, float | None]:
    """Seconds that the step may take, at least and at most."""
    seconds, table, plan = choice.step_seconds, hardware.costs, choice.plan
    if table is None:
        return seconds * (1 - hardware.uncertainty), seconds * (1 + hardware.uncertainty)
    few = varied(plan, accumulation=2)  # of more than two micro-batches, the ratio of two is taken as that of all
    costs = cost_model(hardware, few.model, few.workload)
    if not (isinstance(costs, Calibrated) and table.spread and choice.feasible):
        return None, None
    schedule = policy_library.lower(few)
    usual = makespan_ns(schedule, costs)
    least, most = (makespan_ns(schedule, WithinSpread(costs, hardware.uncertainty, longer=longer)) for longer in (False, True))
    return seconds * least / usual, seconds * most / usual


def _documents(model: ModelSpec, work: Workload) -> str:
    if not work.documents or model.documents_by(work.dtype) != "mask" or model.family in WRITTEN_OUT:
        return ""
    return f"in {work.dtype} a mask keeps them apart, and attention computes the pairs that it hides, half of them in vain"


def _lacking(verdict: Verdict) -> str:
    """What the nearest plan has too little of."""
    excess = {"device": verdict.device_peak_bytes - verdict.device_limit_bytes, "host": verdict.host_peak_bytes - verdict.host_limit_bytes}
    return "the nearest plan lacks " + " and ".join(f"{format_bytes(size)} of {place} memory" for place, size in excess.items() if size > 0)


def train_for(verdict: Verdict, hardware: HardwareSpec, tokens: int) -> Training | None:
    """Days and energy of training on so many tokens; None where it does not fit."""
    if not (verdict.feasible and (verdict.several is None or verdict.several.feasible)):
        return None
    speed, gpus = (verdict.several.tokens_per_second, verdict.several.gpus) if verdict.several else (verdict.tokens_per_second, 1)
    hours = tokens / speed / 3600
    return Training(tokens=tokens, days=hours / 24, energy_kwh=None if hardware.watts is None else gpus * hardware.watts * hours / 1000, watts=hardware.watts)


def in_full(
    choice: Choice, hardware: HardwareSpec, names: list[str] | None = None, *, gpus: int = 1, tokens: int | None = None, advise: bool = True
) -> Verdict:
    """`brief` and all that has to be played or tried. `names`: the policies that may be chosen. Without `advise` nothing is searched for again, which takes
    most of the time. Raises UserError for `gpus` that a host has not.
    """
    plan, verdict = choice.plan, brief(choice, hardware)
    costs = cost_model(hardware, plan.model, plan.workload)
    schedule = policy_library.lower(plan)
    sizes = costs.sizes(schedule)
    counts = Counter(sizes.which)
    flagged: dict[str, int] = defaultdict(int)
    for index, op in enumerate(sizes.ops):
        if costs.extrapolated(op):
            flagged[op.kind] += counts[index]
    timeline = simulate(schedule, costs)
    exposed = exposed_ns(timeline)
    names = policy_library.contenders() if names is None else names
    footprints = usable(plan, hardware, costs, names)
    if choice.feasible and footprints:  # where memory is short, its placement may take less than the least of a policy: what stays needs no slots
        footprints.append(Footprint(plan, costs))

    alike = [plan.policy] if policy_library.places(plan.policy) else names  # the others took longer, or did not fit

    def again(work: Workload, device_limit: int, host_limit: int) -> Choice:
        return candidates(plan.model, hardware, work, device_limit=device_limit, host_limit=host_limit, policies=alike)[0]

    margins = one_more_gib(choice, hardware, costs)  # before the advice: the choice's schedule is still known
    advice = Adviser(choice, hardware, costs, names, again).suggestions() if footprints and advise else ()
    verdict = msgspec.structs.replace(
        verdict, slowed_seconds=slowed_ns(timeline, schedule, costs) / 1e9, exposed_seconds={lane: time / 1e9 for lane, time in exposed.items()}, extrapolated=dict(flagged), advice=advice,
        one_more_gib=margins,
        reason="" if choice.feasible else _lacking(verdict), longest_context=longest_context(footprints, plan.workload) if footprints else None,
        largest_batch=largest_batch(footprints, plan.workload) if footprints else None,
        several=estimate(plan, schedule, choice.account, hardware, costs, choice.step_seconds, gpus) if gpus != 1 else None,
    )  # fmt: skip
    return verdict if tokens is None else msgspec.structs.replace(verdict, training=train_for(verdict, hardware, tokens))


def judge(
    model: ModelSpec, hardware: HardwareSpec, workload: Workload, *, device_limit: int | None = None, host_limit: int | None = None,
    policies: list[str] | None = None, gpus: int = 1, tokens: int | None = None, advise: bool = True,
) -> Verdict:  # fmt: skip
    """The verdict on training `model` so on `hardware`. Limits in bytes, by default the machine's; `policies` by default those that the runtime
    executes; `gpus` of one host, more than one as a first estimate; `tokens` to train on; without `advise` what would help is not looked for, which
    takes most of the time. Raises UserError like `search`.
    """
    found = candidates(model, hardware, workload, device_limit=device_limit, host_limit=host_limit, policies=policies)
    return in_full(found[0], hardware, policies, gpus=gpus, tokens=tokens, advise=advise)
