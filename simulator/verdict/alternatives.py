"""Finds another machine or a smaller model of the library if a model does not fit a machine.

A GPU's memory cannot be enlarged, so these are the remaining choices. The machine is the one with
the least GPU memory that the model fits. The model is the largest one that fits the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec, library
from megatrain.simulator.model.metrics import tokens_per_second
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.specs import library as model_library
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Estimate
from megatrain.simulator.planner.attention_kernel import with_attention_kernel
from megatrain.simulator.planner.capacity import fitting
from megatrain.simulator.planner.search import best_estimate
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.suggestion import Suggestion


def alternatives(
    plan: Plan, hardware: HardwareSpec, *, machines: bool, choose_kernel: bool = False
) -> list[Suggestion]:
    """Returns at most one machine that the model of `plan` fits, and at most one smaller model that
    fits `hardware`.

    Both are tried with the workload of `plan` and the memory limits that the user gave. With
    `machines` False, no machine is returned. With `choose_kernel`, the planner chooses the
    attention kernel for them again.
    """
    other_machines = _another_machine(plan, hardware, choose_kernel) if machines else ()
    return [*other_machines, *_smaller_model(plan, hardware, choose_kernel)]


def fits(plan: Plan, hardware: HardwareSpec, names: list[str]) -> bool:
    """Returns whether a plan of any policy of `names` fits, with the model, the workload and the
    limits of `plan`.

    Raises UserError if `hardware` was measured and has no costs for the model and the workload.
    """
    device, host = hardware.memory_limits(plan.device_limit_bytes, plan.host_limit_bytes)
    plan = msgspec.structs.replace(plan, device_limit_bytes=device, host_limit_bytes=host)
    costs = cost_model(hardware, plan.model, plan.workload)
    return fitting(plan, hardware, costs, names) is not None


def library_models() -> list[ModelSpec]:
    """Returns the models of the library, the one with the most parameters first."""
    models = (ModelSpec.load(name) for name in model_library())
    return sorted(models, key=lambda model: -model.parameters)


def _another_machine(
    plan: Plan, hardware: HardwareSpec, choose_kernel: bool = False
) -> Iterator[Suggestion]:
    """Yields the machine with the least GPU memory that the plan's model fits, among those that
    have more than `hardware`. Yields nothing if there is none.

    `choose_kernel` is the argument of `alternatives`.
    """
    machines = [HardwareSpec.load(name) for name in library()]
    larger = [
        machine
        for machine in machines
        if machine.gpu_names and machine.device_bytes > hardware.device_bytes
    ]
    for machine in sorted(larger, key=lambda machine: (machine.device_bytes, machine.host_bytes)):
        device, host = _limits_on(machine, plan, hardware)
        other = msgspec.structs.replace(
            plan, hardware=machine.name, device_limit_bytes=device, host_limit_bytes=host
        )
        if not _fits(other, machine):
            continue
        best = best_estimate(
            plan.model,
            machine,
            _workload(other, machine, choose_kernel),
            device_limit=device,
            host_limit=host,
            policies=usual_policies(machine),
        )
        if best is None:
            continue
        yield _suggestion(
            best,
            f"--hardware {machine.name}",
            {"hardware": machine.name},
            f"{machine.title}, with {host / 2**30:.0f} GiB of RAM for plans",
        )
        return


def _limits_on(machine: HardwareSpec, plan: Plan, hardware: HardwareSpec) -> tuple[int, int]:
    """Returns the limits of device and host memory, in bytes, if `plan` is made for `machine`
    instead of `hardware`.

    A limit of `plan` that is not the memory of `hardware` was given by the user, who gives it for
    the other machine as well. Otherwise the limit is the memory of `machine`.
    """
    device, host = (
        None if limit == memory else limit
        for limit, memory in zip(
            (plan.device_limit_bytes, plan.host_limit_bytes), hardware.memory_limits(), strict=True
        )
    )
    if device is not None:
        device = min(device, machine.device_bytes)
    return machine.memory_limits(device, host)


def _smaller_model(
    plan: Plan, hardware: HardwareSpec, choose_kernel: bool = False
) -> Iterator[Suggestion]:
    """Yields the largest model that fits among the smaller models of the library. Models of the
    same series are preferred.

    Yields nothing if none fits, or if the machine was calibrated, because it then has no costs for
    other models. `choose_kernel` is the argument of `alternatives`.
    """
    if hardware.costs is not None:
        return
    series = plan.model.name.partition("-")[0]
    models = [model for model in library_models() if model.parameters < plan.model.parameters]
    for model in sorted(models, key=lambda model: not model.name.startswith(series)):
        other = msgspec.structs.replace(plan, model=model, source=model.name)
        if not _fits(other, hardware):
            continue
        best = best_estimate(
            model,
            hardware,
            _workload(other, hardware, choose_kernel),
            device_limit=plan.device_limit_bytes,
            host_limit=plan.host_limit_bytes,
            policies=usual_policies(hardware),
        )
        if best is None:
            continue
        yield msgspec.structs.replace(
            _suggestion(best, model.name, {}, "a smaller model"), model=model.name
        )
        return


def usual_policies(hardware: HardwareSpec) -> list[str]:
    """Returns the policy to search where many plans are searched, as a list.

    It is nearly always the fastest of all that the runtime executes, and searching it alone takes
    half of the time.
    """
    return ["resident"] if hardware.unified else ["overlapped"]


def _workload(plan: Plan, machine: HardwareSpec, choose_kernel: bool) -> Workload:
    """Returns the workload of `plan`, with `choose_kernel` with the attention kernel that the
    planner chooses for `machine`.
    """
    if not choose_kernel:
        return plan.workload
    unnamed = msgspec.structs.replace(plan.workload, attention=None)
    return with_attention_kernel(plan.model, machine, unnamed)


def _fits(plan: Plan, hardware: HardwareSpec) -> bool:
    """Returns `fits` with the usual policies, or False if there are no costs for the workload."""
    try:
        return fits(plan, hardware, usual_policies(hardware))
    except UserError:
        return False


def _suggestion(choice: Estimate, change: str, options: dict[str, str], note: str) -> Suggestion:
    return Suggestion(
        change=change,
        options=options,
        fits=choice.feasible,
        tokens_per_second=tokens_per_second(choice.plan.workload, choice.step_seconds),
        note=note,
    )
