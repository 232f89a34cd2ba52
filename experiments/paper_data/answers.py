"""Predicts the paper's schedule and our own best plan for a published row's model, machine and
tokens per step.

The paper's schedule is predicted twice: as stated, with bf16 weights and fp32 moments (12 bytes
per parameter with gradients), and with an exact fp32 master, as our runtime executes it.

All predictions have as many tokens per step as the row. The checkpoint interval of the paper's
schedule is the first of 4, 2 and 1 layers that fits. The schedule holds all activations of a block
at once, which are K A_max in the paper's bound. A micro-batch that does not fit is split into 2, 4,
8 or 16. If the sums of gradients for several micro-batches do not fit, the step has fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import EXACT, FORMATS, StateFormat
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess, plan_account
from megatrain.simulator.planner.capacity import least_memory_plans
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.policies import contenders, outline
from megatrain.simulator.schedule.plan import Knobs, Plan
from megatrain.simulator.verdict.verdict import summarize

GIB = 2**30
PAPER = "double_buffer"
PAPER_KNOBS = Knobs(
    weight_slots=2, gradient_slots=2, gradient_staging=12, checkpoint_interval=4, chunk_bytes=2**28
)
"""Knobs as the paper reports them: two weight buffers, 12 gradient staging buffers, K = 4. A copy
has 256 MiB, so a layer needs one or two copies.
"""


STATED = StateFormat(
    name="paper12",
    low=None,
    moments="fp32",
    what="bf16 weights and fp32 moments, as the paper states: 12 bytes per parameter",
    costs="not exact AdamW: no masters",
)
"""The paper's state. The runtime has no such format, so it exists only within `stated_format`."""


@contextmanager
def stated_format() -> Iterator[str]:
    """Adds the paper's state format to FORMATS within the `with` block, and yields its name."""
    FORMATS[STATED.name] = STATED
    try:
        yield STATED.name
    finally:
        del FORMATS[STATED.name]


class PredictedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one plan's step."""

    policy: str
    """The plan's policy."""
    regime: str
    """For policy `overlapped`, how much of the state streams or how many layers the host updates.
    Otherwise empty.
    """
    fits: bool
    """Whether the plan fits into device and host memory."""
    batch: int
    """Sequences in a micro-batch."""
    accumulation: int
    """Micro-batches in a step."""
    sequence: int
    """Tokens in a sequence."""
    interval: int
    """Decoder layers between two checkpoints."""
    step_s: float
    """Time of a step in seconds."""
    tokens_per_s: float
    """Tokens of a step divided by `step_s`."""
    tflops: float
    """6 x all parameters x tokens / seconds / 10^12, as in `simulator/model/metrics.py`."""
    device_gib: float
    """Peak of device memory in GiB."""
    host_gib: float
    """Peak of host memory in GiB."""


def workloads(batch: int) -> list[tuple[int, int]]:
    """Returns pairs of (micro-batch, accumulation). First come splits of at least `batch`
    sequences, with the largest micro-batch first, and then single smaller micro-batches.

    >>> workloads(6)
    [(6, 1), (3, 2), (2, 3), (1, 6), (3, 1), (2, 1), (1, 1)]
    """
    sizes = list(dict.fromkeys(-(-batch // parts) for parts in (1, 2, 4, 8, 16)))
    return [*((size, -(-batch // size)) for size in sizes), *((size, 1) for size in sizes[1:])]


def paper_schedule(
    model: ModelSpec,
    hardware: HardwareSpec,
    batch: int,
    sequence: int,
    *,
    policy: str = PAPER,
    knobs: Knobs = PAPER_KNOBS,
    intervals: tuple[int, ...] = (4, 2, 1),
    state: str = EXACT,
) -> PredictedStep:
    """Returns the prediction for the first split of `batch` and checkpoint interval that fit, which
    need not be the fastest. If none fits, it is that of the last one, with `fits` false.

    Args:
        model: the model.
        hardware: the machine.
        batch: sequences in a step.
        sequence: tokens in a sequence.
        policy: another policy makes this an ablation of the paper's schedule.
        knobs: the knobs; `checkpoint_interval` is replaced.
        intervals: the checkpoint intervals to try, in their order.
        state: EXACT, or the name that `stated_format` yields.
    """
    for size, accumulation in workloads(batch):
        work = Workload(batch=size, accumulation=accumulation, sequence=sequence, state=state)
        costs = cost_model(hardware, model, work)
        for interval in intervals:
            plan = msgspec.structs.replace(
                _plan(policy, model, hardware, work),
                knobs=msgspec.structs.replace(knobs, checkpoint_interval=interval),
            )
            if plan_account(plan, outline(plan), costs).fits:
                return answer(assess(plan, costs), hardware)
    return answer(assess(plan, costs), hardware)


def _plan(policy: str, model: ModelSpec, hardware: HardwareSpec, work: Workload) -> Plan:
    return Plan(
        policy=policy,
        hardware=hardware.name,
        source=model.name,
        model=model,
        workload=work,
        device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=hardware.host_bytes,
    )


def ours(
    model: ModelSpec, hardware: HardwareSpec, work: Workload, policies: list[str] | None = None
) -> PredictedStep:
    """Returns the prediction for the planner's best plan: for the first split of the workload that
    fits, or for the next one with as many tokens if that is faster. If none fits, the plan is for
    one small micro-batch and exceeds the memory least. `policies` restricts the search.
    """
    names, found = (
        policies or (["resident"] if hardware.unified else contenders()),
        list[PredictedStep](),
    )
    for size, accumulation in workloads(work.batch * work.accumulation):
        if found and found[0].batch * found[0].accumulation > size * accumulation:
            break
        split = msgspec.structs.replace(work, batch=size, accumulation=accumulation)
        plan = _plan(names[0], model, hardware, split)
        least = list(least_memory_plans(plan, cost_model(hardware, model, split), names))
        if any(footprint.account().fits for footprint in least):
            found.append(answer(candidates(model, hardware, split, policies=policies)[0], hardware))
        if len(found) == 2:
            break
    if found:
        return max(found, key=lambda each: (each.fits, each.tokens_per_s))
    nearest = min(least, key=lambda footprint: footprint.account().excess_bytes)
    return answer(assess(nearest.plan, cost_model(hardware, model, split)), hardware)


def answer(choice: Choice, hardware: HardwareSpec) -> PredictedStep:
    """Returns the choice's prediction as a PredictedStep."""
    verdict, plan = summarize(choice, hardware), choice.plan
    work = plan.workload
    return PredictedStep(
        policy=plan.policy,
        regime=_regime(plan),
        fits=choice.feasible,
        batch=work.batch,
        accumulation=work.accumulation,
        sequence=work.sequence,
        interval=plan.knobs.checkpoint_interval,
        step_s=choice.step_seconds,
        tokens_per_s=tokens_per_second(work, choice.step_seconds),
        tflops=tflops_6n(plan.model, work, choice.step_seconds),
        device_gib=verdict.device_peak_bytes / GIB,
        host_gib=verdict.host_peak_bytes / GIB,
    )


def _regime(plan: Plan) -> str:
    """Returns `PredictedStep.regime` of a plan."""
    if plan.policy != "overlapped":
        return ""
    layers, updated = len(plan.model.stack), len(plan.placed("host_updated"))
    if updated:
        return "host updates most" if 2 * updated > layers else "host updates some"
    kept = [len(plan.placed(name)) for name in ("weights", "master_low", "moments", "gradients")]
    return (
        "nothing streams"
        if min(kept) == layers
        else "all streams"
        if max(kept) <= 2
        else "part streams"
    )
