"""Executes a plan of a sweep on this machine and returns its row."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from megatrain.experiments import benchmark
from megatrain.experiments.sweep.store import SweepRow
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator import policies
from megatrain.simulator.costs import CostModel
from megatrain.simulator.model.metrics import tokens_per_second
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.schedule.plan import Plan


def executed(
    predicted: SweepRow, plan: Plan, costs: CostModel, path: Path, steps: int, device: str
) -> SweepRow:
    """Returns `predicted` with the time and memory of `steps` executed steps. The first steps are
    warm-up and are not counted. The plan is written to `path`.

    The row is `refused` with the reason, and has what was predicted, if the run fails, if this
    machine has less memory than the plan needs, or if the policy can only be predicted.
    """
    if policies.find(plan.policy).prediction_only:
        return msgspec.structs.replace(
            predicted,
            decided_by="refused",
            reason="a policy of another system, which can only be predicted",
            step_seconds=None,
            tokens_per_second=None,
            predicted_seconds=predicted.step_seconds,
        )
    # With its prediction, which the run compares with the memory of this machine.
    assess(plan, costs, predicted.step_seconds).plan.save(path)
    found = benchmark.time_system("ours", path, steps, device)
    row = msgspec.structs.replace(
        predicted,
        predicted_seconds=predicted.step_seconds,
        step_seconds=None,
        tokens_per_second=None,
    )
    seconds = [step["seconds"] for step in found["steps"][WARM_UP_STEPS:]]
    if found["failure"] or not seconds:
        return msgspec.structs.replace(
            row, decided_by="refused", reason=found["failure"] or "no steps"
        )
    median = statistics.median(seconds)
    return msgspec.structs.replace(
        row,
        decided_by="execution",
        step_seconds=median,
        tokens_per_second=tokens_per_second(plan.workload, median),
        measured_device_peak_bytes=found["device_peak_bytes"],
        measured_host_peak_bytes=found["host_peak_bytes"],
    )
