"""Chooses the attention kernel if the user names none.

The candidates are the kernels that the runtime can use (`choosable`), and with which the model's
layers were measured. If its layers were not measured at all, they are the kernels for which the
machine has rates of their own (`HardwareSpec.attention`). They are compared by the time of
the forward, recompute and backward of all decoder layers. The fastest is chosen if it is faster
than PyTorch's choice by 2 % or more. Otherwise the workload names no kernel. Plans are searched
only after this choice, so the search takes no longer.

The times are those of a micro-batch of about 32,768 tokens, whatever the batch is, because one
short row does not fill a GPU. So the choice depends on the model, the machine and the sequence, but
not on the batch, the loss chunk or the token piece, and all commands choose the same kernel.

A calibration mostly has the times of one kernel. No kernel is chosen then, because a measured time
cannot be compared with one that follows from rates.

Attention with sinks is the exception (`ModelSpec.has_sinks`). Without a kernel, its scores are
written out. So the flash kernel is chosen wherever the machine has costs for it, by a rate of its
own or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.cost_table import LAYER_KINDS
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.attention_kernel import KERNELS, choosable
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Kernel, Workload
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.schedule.plan import Plan

LEAST_GAIN = 0.02
"""A kernel is chosen if the layers compute faster by this fraction."""
_TOKENS = 2**15
"""The least tokens of the micro-batch with which kernels are compared, if rows are short."""


def with_attention_kernel(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    policies: Sequence[str] | None = None,
    deterministic: bool = False,
) -> Workload:
    """Returns `workload` with the attention kernel that the planner chooses.

    The workload is not changed if it names a kernel, if all policies are only for prediction, or if
    the machine's costs of the kernels cannot be compared.

    Args:
        model: the model.
        hardware: the machine.
        workload: the workload.
        policies: names of the policies that may be used. None means all that the runtime executes.
        deterministic: whether only deterministic kernels may run.

    Raises UserError for an unknown policy.
    """
    executed = policies is None or not all(
        policy_library.find(name).prediction_only for name in policies
    )
    if workload.attention is not None or not executed:
        return workload
    times = {
        kernel: _layers_ns(model, hardware, workload, kernel)
        for kernel in choosable(model, workload, deterministic=deterministic)
        if model.has_sinks or _comparable(model, hardware, workload, kernel)
    }
    if not times:
        return workload
    fastest = min(times, key=lambda kernel: times[kernel])
    if model.has_sinks and times[fastest] < math.inf:
        return msgspec.structs.replace(workload, attention=fastest)
    if _gain(_layers_ns(model, hardware, workload, None), times[fastest]) < LEAST_GAIN:
        return workload
    return msgspec.structs.replace(workload, attention=fastest)


def _comparable(
    model: ModelSpec, hardware: HardwareSpec, workload: Workload, kernel: Kernel
) -> bool:
    """Returns whether the costs of a kernel and of PyTorch's choice have the same source: layers
    that were measured with both, or rates.
    """
    layer, (_, *how) = model.decoders[0].signature, _plain(workload)
    measured = set[Kernel | None]()
    for work in hardware.costs.workloads_of(layer) if hardware.costs else ():
        _, *parts = work.split("-")
        used = next((known for known in KERNELS if known in parts), None)
        if [part for part in parts if part != used] == how:
            measured.add(used)
    return {None, kernel} <= measured if measured else kernel in hardware.attention


def _plain(workload: Workload) -> list[str]:
    """Returns the parts of the workload's shape if it names no kernel."""
    return msgspec.structs.replace(workload, attention=None).shape.split("-")


def kernel_gain(model: ModelSpec, hardware: HardwareSpec, workload: Workload) -> float:
    """Returns how much faster the layers compute with the kernel of `workload` than with PyTorch's
    choice: 0.1 is 10 % faster. 0 on a calibrated machine if only one of both was measured.
    """
    kernel = workload.attention
    if kernel and hardware.costs and not _comparable(model, hardware, workload, kernel):
        return 0.0
    usual, named = (_layers_ns(model, hardware, workload, each) for each in (None, kernel))
    return _gain(usual, named)


def _gain(usual: float, other: float) -> float:
    """Returns the gain of a kernel from two times in ns. It is 0 if one of them is not known."""
    return usual / other - 1 if usual < math.inf and other < math.inf else 0.0


def _layers_ns(
    model: ModelSpec, hardware: HardwareSpec, workload: Workload, kernel: Kernel | None
) -> float:
    """Returns the time in ns of forward, recompute and backward of all decoder layers with an
    attention kernel. Returns infinity if the machine has neither measurements of the layers and the
    head nor a peak rate for the workload's dtype.
    """
    work = msgspec.structs.replace(
        workload,
        attention=kernel,
        batch=-(-_TOKENS // workload.sequence),
        accumulation=1,
        sum_group=1,
        token_piece=None,
    )
    plan = Plan(
        policy="overlapped",
        hardware=hardware.name,
        source=model.name,
        model=model,
        workload=work,
        device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=hardware.host_bytes,
    )
    try:
        bounds = LowerBound(plan, cost_model(hardware, model, work))
        bounds.duration_ns("head", "")
        return sum(
            bounds.duration_ns(kind, layer.name) for layer in model.decoders for kind in LAYER_KINDS
        )
    except UserError:
        return math.inf
