"""Why: what speaks for a plan, from its memory, its bounds and its timeline, and what the planner finds beside it."""

from __future__ import annotations

import msgspec

from megatrain.experiments import report
from megatrain.experiments.compared_run import ComparedRun
from megatrain.simulator.assessment import assess
from megatrain.simulator.errors import UserError
from megatrain.simulator.evaluator import bounds
from megatrain.simulator.margins import one_more_gib
from megatrain.simulator.memory import class_of
from megatrain.simulator.planner import candidates, plan_account
from megatrain.simulator.units import format_bytes, format_seconds
from megatrain.simulator.verdict import brief


def reasons(run: ComparedRun) -> list[str]:
    """Sentences, the most important first."""
    plan, account = run.plan, plan_account(run.plan, run.schedule, run.costs)
    limits, parts = bounds(run.schedule, run.costs), {part.name: part for part in run.errors.parts}
    state = sum(buffer.allocated for buffer in run.schedule.buffers if buffer.persistent and class_of(buffer) in ("weights", "gradients", "moments"))
    device = plan.device_limit_bytes
    sides = "so part of it streams from host memory" if account.host_peak_bytes else "and all of it stays there"
    found = [
        f"Weights, gradients and optimizer state take {format_bytes(state)}; the device may hold {format_bytes(device)}, activations included, {sides}.",
        f"{limits.binding} binds: the lane has the most work, {format_seconds(limits.lanes_ns[limits.binding] / 1e9)}. No order of these ops and no more "
        f"overlap beats {format_seconds(limits.lower_bound_ns / 1e9)}; the step was predicted to take {format_seconds(run.errors.predicted_seconds)}.",
    ]
    step = run.errors.predicted_seconds
    waits = sorted(
        ((part.predicted_seconds, name) for name, part in parts.items() if name != "compute" and part.predicted_seconds >= step / 1000), reverse=True
    )
    if waits:
        shares = ", ".join(f"{'nobody' if name == 'waiting' else name} {format_seconds(seconds)}" for seconds, name in waits)
        total = sum(part.predicted_seconds for name, part in parts.items() if name != "compute")
        measured = sum(part.measured_seconds for name, part in parts.items() if name != "compute")
        found.append(f"Compute was to stand still for {format_seconds(total)}, waiting for {shares}; measured {format_seconds(measured)}.")
    else:
        found.append("Nothing is exposed: compute was predicted to run all the time.")
    place = max(("device", "host"), key=lambda name: getattr(account, f"{name}_peak_bytes") / max(getattr(plan, f"{name}_limit_bytes"), 1))
    peak, limit = getattr(account, f"{place}_peak_bytes"), getattr(plan, f"{place}_limit_bytes")
    found.append(f"{place.capitalize()} memory is the tighter one: {format_bytes(peak)} of {format_bytes(limit)}, {peak / limit:.0%}.")
    return found + _margins(run)


def _margins(run: ComparedRun) -> list[str]:
    """What one more GiB of either memory would buy, as `megatrain plan` says it, by this run's machine."""
    try:
        choice = assess(run.plan, run.costs)
        bought = one_more_gib(choice, run.hardware, run.costs)
    except UserError:  # costs of ops that this machine was not measured for
        return []
    return [f"{line}." for line in report.margins(msgspec.structs.replace(brief(choice, run.hardware), one_more_gib=bought))]


def rivals(run: ComparedRun) -> list[list[str]]:
    """The best plan of each policy on the same machine and limits, as today's planner finds it: step, against this plan, memory; or what it lacks."""
    plan, step = run.plan, run.errors.predicted_seconds + run.costs.step_overhead_ns / 1e9
    try:
        found = candidates(
            plan.model, run.hardware, plan.workload, source=plan.source, hardware_name=plan.hardware,
            device_limit=plan.device_limit_bytes, host_limit=plan.host_limit_bytes,
        )  # fmt: skip
    except UserError:  # costs of another policy's ops that this machine was not measured for
        found = []
    rows = []
    for choice in found:
        account = choice.account
        sizes = [format_bytes(account.device_peak_bytes), format_bytes(account.host_peak_bytes)]
        speed = [format_seconds(choice.step_seconds), f"{100 * (choice.step_seconds / step - 1):+.1f} %"] if choice.feasible else ["does not fit", ""]
        rows.append([choice.plan.policy, *speed, *sizes])
    return rows
