"""Executed: a row of a sweep from a run of its plan on this machine."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from megatrain.experiments import benchmark
from megatrain.experiments.sweep.store import Row
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator import policies
from megatrain.simulator.metrics import tokens_per_second
from megatrain.simulator.plan import Plan


def executed(predicted: Row, plan: Plan, path: Path, steps: int, device: str) -> Row:
    """`predicted`, with what `steps` steps take, the first ones left out. `path`: where the plan may be written. A run that fails says why."""
    if policies.is_prediction_only(plan.policy):
        return msgspec.structs.replace(
            predicted, decided_by="refused", reason="another system's, only for prediction", step_seconds=None, tokens_per_second=None,
            predicted_seconds=predicted.step_seconds,
        )  # fmt: skip
    msgspec.structs.replace(plan, digest=policies.lower(plan).digest).save(path)
    found = benchmark.timed("ours", path, steps, device)
    row = msgspec.structs.replace(predicted, predicted_seconds=predicted.step_seconds, step_seconds=None, tokens_per_second=None)
    seconds = [step["seconds"] for step in found["steps"][WARM_UP_STEPS:]]
    if found["failure"] or not seconds:
        return msgspec.structs.replace(row, decided_by="refused", reason=found["failure"] or "no steps")
    median = statistics.median(seconds)
    return msgspec.structs.replace(
        row, decided_by="execution", step_seconds=median, tokens_per_second=tokens_per_second(plan.workload, median),
        device_peak_bytes=found["device_peak_bytes"] or row.device_peak_bytes, host_peak_bytes=found["host_peak_bytes"] or row.host_peak_bytes,
    )  # fmt: skip
