"""The reasons for a plan (its memory, its bounds and its timeline), and the plans of other
policies.
"""

from __future__ import annotations

import msgspec

from megatrain.experiments.cli.verdict import reasons as verdict_reasons
from megatrain.experiments.run_report.compared_run import ComparedRun
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.engine.evaluator import bounds
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import class_of
from megatrain.simulator.planner.assessment import Choice, assess
from megatrain.simulator.planner.search import candidates, plan_account
from megatrain.simulator.planner.shared_step import alone, shared_step
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.marginal_memory import one_more_gib
from megatrain.simulator.verdict.verdict import summarize


def reasons(run: ComparedRun) -> list[str]:
    """Returns the reasons as sentences, with the most important first."""
    plan, account = run.plan, plan_account(run.plan, run.schedule, run.costs)
    limits, parts = bounds(run.schedule, run.costs), {part.name: part for part in run.errors.parts}
    state = sum(
        buffer.allocated
        for buffer in run.schedule.buffers
        if buffer.persistent and class_of(buffer) in ("weights", "gradients", "moments")
    )
    device = plan.device_limit_bytes
    if not account.host_peak_bytes:
        sides = "and all of it stays there"
    elif account.device_peak_bytes + account.host_peak_bytes > device:
        sides = "so part of it streams from host memory"
    else:
        sides = f"so it would all fit there, but the policy {plan.policy} streams a part of it"
    found = [
        (
            f"Weights, gradients and optimizer state take {format_bytes(state)}. The device may"
            f" hold {format_bytes(device)}, with activations, {sides}."
        ),
        (
            f"The lane {limits.binding} has the most work,"
            f" {format_seconds(limits.lanes_ns[limits.binding] / 1e9)}. No order of these ops and"
            f" no more overlap beats {format_seconds(limits.lower_bound_ns / 1e9)}. The predicted"
            f" step takes {format_seconds(run.errors.predicted_seconds)}."
        ),
    ]
    step = run.errors.predicted_seconds
    waits = sorted(
        (
            (part.predicted_seconds, name)
            for name, part in parts.items()
            if name != "compute" and part.predicted_seconds >= step / 1000
        ),
        reverse=True,
    )
    if waits:
        shares = ", ".join(
            f"{'no lane' if name == 'waiting' else name} {format_seconds(seconds)}"
            for seconds, name in waits
        )
        total = sum(part.predicted_seconds for name, part in parts.items() if name != "compute")
        measured = sum(part.measured_seconds for name, part in parts.items() if name != "compute")
        found.append(
            f"Compute is predicted to be idle for {format_seconds(total)}, waiting for {shares}."
            f" Measured: {format_seconds(measured)}."
        )
    else:
        found.append("Nothing is exposed: compute is predicted to run all the time.")
    place = max(
        ("device", "host"),
        key=lambda name: (
            getattr(account, f"{name}_peak_bytes") / max(getattr(plan, f"{name}_limit_bytes"), 1)
        ),
    )
    peak, limit = getattr(account, f"{place}_peak_bytes"), getattr(plan, f"{place}_limit_bytes")
    found.append(
        f"{place.capitalize()} memory is the tighter one: {format_bytes(peak)} of"
        f" {format_bytes(limit)}, {peak / limit:.0%}."
    )
    return found + _marginal_gains(run)


def _marginal_gains(run: ComparedRun) -> list[str]:
    """Returns the sentences of `megatrain plan` on what one more GiB of each memory would gain on
    this run's machine.
    """
    try:
        choice = assess(run.plan, run.costs)
        bought = one_more_gib(choice, run.hardware, run.costs)
    except UserError:  # this machine has no measured cost for an op of the plan
        return []
    return [
        f"{line}."
        for line in verdict_reasons.marginal_gains(
            msgspec.structs.replace(summarize(choice, run.hardware), one_more_gib=bought)
        )
    ]


def rivals(run: ComparedRun) -> list[list[str]]:
    """Returns one row for each policy, with its best plan by the current planner for the same
    machine and limits: the step time, its difference from this plan's, and the memory. A plan that
    does not fit is marked.
    """
    step = run.errors.predicted_seconds + run.costs.step_overhead_ns / 1e9
    try:
        found = _found(run.plan, run.hardware)
    except UserError:  # this machine has no measured cost for an op of another policy
        found = []
    rows = []
    for choice in found:
        account = choice.account
        sizes = [format_bytes(account.device_peak_bytes), format_bytes(account.host_peak_bytes)]
        speed = (
            [
                format_seconds(choice.step_seconds),
                f"{100 * (choice.step_seconds / step - 1):+.1f} %",
            ]
            if choice.feasible
            else ["does not fit", ""]
        )
        rows.append([choice.plan.policy, *speed, *sizes])
    return rows


def _found(plan: Plan, hardware: HardwareSpec) -> list[Choice]:
    """Returns the best plans for the model, the step, the limits and the number of GPUs of `plan`.
    Raises UserError if an op of a policy has no measured cost.
    """
    if plan.gpus > 1:
        machine = hardware.with_network(plan.network_gb_per_s)
        return [shared_step(alone(plan, hardware), machine, plan.gpus, plan.hosts)]
    return candidates(
        plan.model,
        hardware,
        plan.workload,
        source=plan.source,
        hardware_name=plan.hardware,
        device_limit=plan.device_limit_bytes,
        host_limit=plan.host_limit_bytes,
    )
