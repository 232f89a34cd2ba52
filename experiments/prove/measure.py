"""Measure: a case's plan, made and predicted from the calibration alone; and the plan executed."""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from megatrain.experiments.prove.compared import compared
from megatrain.experiments.prove.rows import Row
from megatrain.experiments.prove.suites import BEST, Case, Suite
from megatrain.experiments.prove.timelines import StoredTimeline
from megatrain.experiments.prove.variants import VARIANTS
from megatrain.runtime import machine
from megatrain.runtime.layers.templates import config_of
from megatrain.runtime.memory.kept_memory import KeptMemory
from megatrain.runtime.memory.process_memory import growth
from megatrain.runtime.trial import run_trial
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator import policies
from megatrain.simulator.assessment import Choice, assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.planner import search
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

STEPS, SECONDS = 3, 1.2
"""steady steps of a case, at least, and for so long at least"""
_START_SECONDS, _BYTES_PER_S = 1.5, 4e9  # to build an executor; to fill its memory with weights


def planned(suite: Suite, case: Case, hardware: HardwareSpec, hardware_name: str) -> Choice | None:
    """The case's plan and what is expected of it; None where it does not fit, or is another case's plan."""
    names = policies.names() if case.policy == BEST else [case.policy]
    limits = {"device_limit": case.device_cap or hardware.device_bytes, "host_limit": hardware.host_bytes}
    model, workload = suite.models[case.model], suite.workload(case)
    choice = search(model, hardware, workload, policies=names, source=case.model, hardware_name=hardware_name, **limits)[0]
    if case.variant:
        plan = VARIANTS[case.variant](choice.plan)
        if plan.knobs == choice.plan.knobs:
            return None
        try:
            choice = assess(plan, cost_model(hardware, model, workload))
        except UserError:  # a policy that does not take this knob
            return None
    return choice if choice.feasible else None


def case_seconds(choice: Choice) -> float:
    """What it will take to execute it, memory and warm-up included."""
    seconds = choice.step_seconds
    weights = 16 * choice.plan.model.parameters
    return _START_SECONDS + weights / _BYTES_PER_S + seconds * WARM_UP_STEPS + max(STEPS * seconds, SECONDS + seconds)


def executed(case: Case, choice: Choice, hardware: HardwareSpec, device: torch.device, memory: KeptMemory) -> tuple[Row, StoredTimeline | None]:
    """Its steps, and the middle one op by op; where it fails, why, and None."""
    plan = choice.plan
    row = Row(
        name=case.name, model=case.model, policy=case.policy, variant=case.variant, plan=plan, extrapolated=choice.extrapolated,
        machine=str(machine.describe(device)["device"]), date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip
    try:
        with growth() as grown:
            trial = run_trial(
                plan, config_of(plan.model, plan.workload), device, steps=STEPS, seconds=SECONDS, schedule=policies.executable(plan), host_memory=memory, watches=False
            )  # fmt: skip
    except Exception as error:  # whatever one case dies of, the others are still worth measuring; the row says it
        return msgspec.structs.replace(row, failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"), None
    middle = sorted(range(len(trial.seconds)), key=trial.seconds.__getitem__)[len(trial.seconds) // 2]
    costs = cost_model(hardware, plan.model, plan.workload)
    measured = trial.timelines[middle]
    report = compared(trial.schedule, measured, costs).errors
    row = msgspec.structs.replace(
        row, steps=tuple(round(seconds, 6) for seconds in trial.seconds), step_seconds=statistics.median(trial.seconds),
        device_peak_bytes=trial.device_peak_bytes, host_bytes=trial.host_bytes + (grown[0] if grown else 0), host_pool_bytes=trial.host_bytes,
        replay_error=report.engine_error, kinds={kind.kind: (kind.predicted_seconds, kind.measured_seconds) for kind in report.kinds},
    )  # fmt: skip
    return row, StoredTimeline.of(case.name, measured, trial.schedule)


def load_libraries(model: ModelSpec, device: torch.device) -> None:
    """A step of `model`, a small one: what a process' first step loads, 0.7 GiB on an H200's host, is no case's."""
    plan = Plan(
        policy="overlapped", hardware="", source="", device_limit_bytes=2**34, host_limit_bytes=2**34, model=model,
        workload=Workload(batch=2, sequence=128), knobs=Knobs(placement=Placement(host_updated="all")),
    )  # fmt: skip
    run_trial(plan, config_of(model), device, steps=1, seconds=0.0)
