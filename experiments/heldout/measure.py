"""Plans a case from the calibration alone, and executes its plan."""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from megatrain.experiments.heldout.compared import predict_and_compare
from megatrain.experiments.heldout.rows import HeldoutRow
from megatrain.experiments.heldout.suites import BEST, HeldoutCase, Suite
from megatrain.experiments.heldout.timelines import StoredTimeline
from megatrain.experiments.heldout.variants import VARIANTS
from megatrain.runtime import machine
from megatrain.runtime.calibration.profile_steps import profile_steps
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.memory.process_memory import growth
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess
from megatrain.simulator.planner.loss_chunk import with_loss_chunk
from megatrain.simulator.planner.search import search
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

STEPS, SECONDS = 3, 1.2
"""The least number of steady steps of a case, and their least total time in seconds."""
_START_SECONDS = 1.5
"""Time to build an executor."""
_BYTES_PER_S = 4e9
"""Rate at which an executor's memory is filled with weights."""


def plan_case(
    suite: Suite, case: HeldoutCase, hardware: HardwareSpec, hardware_name: str
) -> Choice | None:
    """Returns the case's plan and its prediction for a machine. Returns None if no plan fits, or if
    the case's variant changes nothing or is not supported by the policy.
    """
    names = policies.names() if case.policy == BEST else [case.policy]
    limits = {
        "device_limit": case.device_cap or hardware.device_bytes,
        "host_limit": min(hardware.host_bytes, suite.host_bytes or hardware.host_bytes),
    }
    model, workload = suite.models[case.model], suite.workload(case)
    if suite.chooses_loss_chunk:
        workload = with_loss_chunk(model, hardware, workload, policies=names, **limits)
    choice = search(
        model,
        hardware,
        workload,
        policies=names,
        source=case.model,
        hardware_name=hardware_name,
        **limits,
    )[0]
    if case.variant:
        plan = VARIANTS[case.variant](choice.plan)
        if plan.knobs == choice.plan.knobs:
            return None
        try:
            choice = assess(plan, cost_model(hardware, model, workload))
        except UserError:  # the policy does not support this knob
            return None
    return choice if choice.feasible else None


def case_seconds(choice: Choice) -> float:
    """Returns the predicted seconds to execute a case, including start, loading and warm-up."""
    seconds = choice.step_seconds
    weights = 16 * choice.plan.model.parameters
    return (
        _START_SECONDS
        + weights / _BYTES_PER_S
        + seconds * WARM_UP_STEPS
        + max(STEPS * seconds, SECONDS + seconds)
    )


def executed(
    case: HeldoutCase,
    choice: Choice,
    hardware: HardwareSpec,
    device: torch.device,
    memory: ReusablePinnedPool,
) -> tuple[HeldoutRow, StoredTimeline | None]:
    """Executes the plan and returns its row and the timeline of its middle step, the step with the
    median time. If the plan fails, the row has the reason and the timeline is None.
    """
    plan = choice.plan
    row = HeldoutRow(
        name=case.name,
        model=case.model,
        policy=case.policy,
        variant=case.variant,
        plan=plan,
        extrapolated=choice.extrapolated,
        machine=str(machine.describe(device)["device"]),
        date=time.strftime("%Y-%m-%d"),
    )
    try:
        with growth() as grown:
            trial = profile_steps(
                plan,
                config_of(plan.model),
                device,
                steps=STEPS,
                seconds=SECONDS,
                schedule=policies.executable(plan),
                host_memory=memory,
                watches=False,
            )
    except Exception as error:  # the row keeps the reason, and the other cases still run
        return (
            msgspec.structs.replace(
                row, failure=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            ),
            None,
        )
    middle = sorted(range(len(trial.seconds)), key=trial.seconds.__getitem__)[
        len(trial.seconds) // 2
    ]
    costs = cost_model(hardware, plan.model, plan.workload)
    measured = trial.timelines[middle]
    report = predict_and_compare(trial.schedule, measured, costs).errors
    row = msgspec.structs.replace(
        row,
        steps=tuple(round(seconds, 6) for seconds in trial.seconds),
        step_seconds=statistics.median(trial.seconds),
        device_peak_bytes=trial.device_peak_bytes,
        host_bytes=trial.host_bytes + (grown[0] if grown else 0),
        host_pool_bytes=trial.host_bytes,
        replay_error=report.engine_error,
        kinds={kind.kind: (kind.predicted_seconds, kind.measured_seconds) for kind in report.kinds},
    )
    return row, StoredTimeline.of(case.name, measured, trial.schedule)


def load_libraries(model: ModelSpec, device: torch.device) -> None:
    """Runs one step of a small model. The first step of a process loads libraries (0.7 GiB of host
    memory on an H200 machine), which should not count as the memory of a case.
    """
    plan = Plan(
        policy="overlapped",
        hardware="",
        source="",
        device_limit_bytes=2**34,
        host_limit_bytes=2**34,
        model=model,
        workload=Workload(batch=2, sequence=128),
        knobs=Knobs(placement=Placement(host_updated="all")),
    )
    profile_steps(plan, config_of(model), device, steps=1, seconds=0.0)
