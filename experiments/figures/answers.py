"""Answers: what the paper's schedule, and our own best plan, would do with a published row's model, machine and tokens per step.

Both train as many tokens a step as the row. The paper's schedule checkpoints every 4 layers, every 2 or every layer, the first that fits: all
activations of a block are held at once, K A_max in the paper's own bound. A micro-batch that does not fit so is split into 2, 4, 8 or 16;
where sums of gradients for these do not fit, the step has fewer tokens.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.assessment import Choice, assess, plan_account
from megatrain.simulator.capacity import frugal
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.planner import candidates
from megatrain.simulator.policies import contenders, outline
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.verdict import brief
from megatrain.simulator.workload import Workload

GIB = 2**30
PAPER = "double_buffer"
PAPER_KNOBS = Knobs(weight_slots=2, gradient_slots=2, gradient_slabs=12, checkpoint_interval=4, chunk_bytes=2**28)
"""As the paper tells them: two weight buffers, 12 gradient slabs, K = 4. Copies of 256 MiB: a layer is one or two."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One plan's step."""

    policy: str
    regime: str
    """of `overlapped`: how much of the state streams, or how many layers the host's cores update; else empty"""
    fits: bool
    batch: int
    """sequences a micro-batch"""
    accumulation: int
    sequence: int
    interval: int
    step_s: float
    tokens_per_s: float
    tflops: float
    """6 x all parameters x tokens / s, as `simulator/metrics.py` has it"""
    device_gib: float
    host_gib: float


def workloads(batch: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation): about as many sequences, coarsest first; then fewer of them.

    >>> workloads(6)
    [(6, 1), (3, 2), (2, 3), (1, 6), (3, 1), (2, 1), (1, 1)]
    """
    sizes = list(dict.fromkeys(-(-batch // parts) for parts in (1, 2, 4, 8, 16)))
    return [*((size, -(-batch // size)) for size in sizes), *((size, 1) for size in sizes[1:])]


def paper_schedule(
    model: ModelSpec, hardware: HardwareSpec, batch: int, sequence: int, *, policy: str = PAPER, knobs: Knobs = PAPER_KNOBS, intervals: tuple[int, ...] = (4, 2, 1)
) -> Answer:  # fmt: skip
    """The first that fits; where none does, the least demanding, with `fits` false. Another policy, knobs or intervals: an ablation of it."""
    for size, accumulation in workloads(batch):
        work = Workload(batch=size, accumulation=accumulation, sequence=sequence)
        costs = cost_model(hardware, model, work)
        for interval in intervals:
            plan = msgspec.structs.replace(_plan(policy, model, hardware, work), knobs=msgspec.structs.replace(knobs, checkpoint_interval=interval))
            if plan_account(plan, outline(plan), costs).fits:
                return answer(assess(plan, costs), hardware)
    return answer(assess(plan, costs), hardware)


def _plan(policy: str, model: ModelSpec, hardware: HardwareSpec, work: Workload) -> Plan:
    return Plan(
        policy=policy, hardware=hardware.name, source=model.name, model=model, workload=work, device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=hardware.host_bytes,
    )  # fmt: skip


def ours(model: ModelSpec, hardware: HardwareSpec, work: Workload, policies: list[str] | None = None) -> Answer:
    """The planner's best for the first workload that fits, or for the next finer one of as many tokens where that is faster; where none fits, the plan of
    one small micro-batch that lacks least.
    """
    names, found = policies or (["resident"] if hardware.unified else contenders()), list[Answer]()
    for size, accumulation in workloads(work.batch * work.accumulation):
        if found and found[0].batch * found[0].accumulation > size * accumulation:
            break
        split = msgspec.structs.replace(work, batch=size, accumulation=accumulation)
        least = frugal(_plan(names[0], model, hardware, split), cost_model(hardware, model, split), names)
        if any(footprint.account().fits for footprint in least):
            found.append(answer(candidates(model, hardware, split, policies=policies)[0], hardware))
        if len(found) == 2:
            break
    if found:
        return max(found, key=lambda each: (each.fits, each.tokens_per_s))
    nearest = min(least, key=lambda footprint: footprint.account().excess_bytes)
    return answer(assess(nearest.plan, cost_model(hardware, model, split)), hardware)


def answer(choice: Choice, hardware: HardwareSpec) -> Answer:
    verdict, plan = brief(choice, hardware), choice.plan
    work = plan.workload
    return Answer(
        policy=plan.policy, regime=_regime(plan), fits=choice.feasible, batch=work.batch, accumulation=work.accumulation, sequence=work.sequence,
        interval=plan.knobs.checkpoint_interval, step_s=choice.step_seconds, tokens_per_s=tokens_per_second(work, choice.step_seconds),
        tflops=tflops_6n(plan.model, work, choice.step_seconds), device_gib=verdict.device_peak_bytes / GIB, host_gib=verdict.host_peak_bytes / GIB,
    )  # fmt: skip


def _regime(plan: Plan) -> str:
    if plan.policy != "overlapped":
        return ""
    layers, updated = len(plan.model.stack), len(plan.placed("host_updated"))
    if updated:
        return "host updates most" if 2 * updated > layers else "host updates some"
    kept = [len(plan.placed(name)) for name in ("weights", "low", "moments", "gradients")]
    return "nothing streams" if min(kept) == layers else "all streams" if max(kept) <= 2 else "part streams"
