"""notes: what a verdict says in words about a plan and its workload."""

from __future__ import annotations

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.several_gpus import has_own_memory
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.attention_masks import (
    document_attention,
    document_tokens,
    writes_scores,
)
from megatrain.simulator.model.families import UNFUSED_ATTENTION
from megatrain.simulator.model.layer import EAGER_MIXERS
from megatrain.simulator.model.op_work import fp8_share
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import FP8_MULTIPLE, Workload
from megatrain.simulator.planner.assessment import Choice

_NAMED = 4
"""The most tensors whose names a note lists."""


def unknown_memory(choice: Choice, hardware: HardwareSpec) -> str:
    """Returns the name of the tensors in compiled layers whose memory is not known, or "".

    The memory of compiled layers with fused attention kernels is known from measurements. If a
    layer computes attention scores in PyTorch, torch.compile generates other kernels, whose memory
    is known only if the machine was calibrated with this model. Returns "" if it was, or if the
    plan does not fit or cannot be executed.
    """
    plan = choice.plan
    model, work = plan.model, plan.workload
    if not (work.compiled and choice.feasible and writes_scores(model, work)):
        return ""
    if policy_library.find(plan.policy).prediction_only:
        return ""
    known = cost_model(hardware, model, work).workspace(model, work)
    return "" if known else "written-out attention scores"


def documents(model: ModelSpec, work: Workload) -> str:
    """Returns the text of `Verdict.documents`."""
    if length := document_tokens(model, work):
        return f"attention is predicted for documents of {length:,} tokens"
    fused = model.fuses_scores(work)
    if (
        not work.documents
        or document_attention(model, work) != "mask"
        or (model.family in UNFUSED_ATTENTION and not fused)
    ):
        return ""
    return (
        f"in {work.dtype} a mask keeps them apart, and attention also computes the pairs that the"
        " mask hides"
    )


def eager(model: ModelSpec, work: Workload) -> str:
    """Returns the text of `Verdict.eager`."""
    eager = [layer.attention for layer in model.decoders if not layer.compilable]
    if not (eager and work.compiled):
        return ""
    names = " and ".join(EAGER_MIXERS[kind] for kind in dict.fromkeys(eager))
    return (
        f"{len(eager)} of {model.layers} layers are not compiled, since layers with {names} always"
        " run eagerly"
    )


def fp8(model: ModelSpec, work: Workload) -> str:
    """Returns the text of `Verdict.fp8`."""
    if not work.fp8:
        return ""
    if work.tokens % FP8_MULTIPLE:
        return (
            f"none of the matrix products is in fp8, because the {work.tokens:,} tokens of a"
            f" micro-batch are not a multiple of {FP8_MULTIPLE}"
        )
    not_fp8 = dict.fromkeys(
        tensor.name
        for layer in {layer.signature: layer for layer in model.decoders}.values()
        for tensor in layer.tensors
        if len(tensor.shape) > 1 and tensor.name not in model.fp8_products(layer.name, work)
    )
    share = f"{100 * fp8_share(model, work):.3g}"
    names = ", ".join(list(not_fp8)[:_NAMED]) + (" and others" if len(not_fp8) > _NAMED else "")
    return f"{share} % of the layers' matrix products, by FLOPs, are in fp8 ({work.fp8})" + (
        f"; these stay in {work.dtype}: {names}" if not_fp8 else ""
    )


def change_needed(choice: Choice, hardware: HardwareSpec) -> str:
    """Returns `Account.advice`. With several GPUs, the memory that it names is that of each GPU,
    but most GPUs share the host memory that a user states.
    """
    plan, account = choice.plan, choice.account
    if plan.gpus == 1 or not account.advice:
        return account.advice
    shared = account.host_peak_bytes > account.host_limit_bytes and not has_own_memory(hardware)
    sharing = "which" if plan.hosts == 1 else f"of which {plan.gpus_per_host} a host"
    which = f", {sharing} share --host-memory" if shared else ""
    return f"{account.advice} for each of {plan.gpus} GPUs{which}"


def lacking(account: Account) -> str:
    """Returns, in words, how much memory is missing for the plan that comes nearest to fitting."""
    excess = {
        "device": account.device_peak_bytes - account.device_limit_bytes,
        "host": account.host_peak_bytes - account.host_limit_bytes,
    }
    return "the nearest plan lacks " + " and ".join(
        f"{format_bytes(size)} of {place} memory" for place, size in excess.items() if size > 0
    )
