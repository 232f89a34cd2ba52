"""Attention with a chosen kernel, and attention whose output is saved for recompute.

The forward pass can save the attention output and the log-sum-exp of a layer. A recompute with
these saved results runs everything except the attention kernel, and the backward pass runs the
backward kernel on them. The kernels and their inputs are the same as without saving, so results
have the same bits.

If no kernel is chosen and nothing is saved, `attend` calls transformers' `sdpa_attention_forward`.
Otherwise, the attention is causal and has no dropout, and the layer must pass its keyword arguments
on to `attend`. Only the CPU kernel accepts a mask. If packed documents are separated by their
lengths, `attend` receives `LengthBounds` (`lengths.py`) instead of a mask, and the layer need not
pass keyword arguments on.

| kernel | device | aten op | requirements |
|---|---|---|---|
| cpu | CPU | `_scaled_dot_product_flash_attention_for_cpu` | bf16 or fp32 |
| flash | CUDA | `_scaled_dot_product_flash_attention` | bf16, head size a multiple of 8 |
| cudnn | CUDA | `_scaled_dot_product_cudnn_attention` | bf16, head size a multiple of 8 |
| flash4 | CUDA | none (`flash4.py`) | the same, Hopper or later, an optional package |

All of them allow fewer key and value heads than query heads. `FunctionalLayers` passes `kernel`,
`kept`, `results` and `groups` to the layer, and the layer passes them to `attend`.

With several groups of heads (`Workload.head_groups`), the kernels run for one group after another,
forward and backward. Queries, keys, values and the output of all heads exist, so projections are
computed once. What a kernel allocates for itself exists for one group at a time.

Attention with sinks (`sinks.py`) uses the same kernels. On a GPU it uses the kernels of
`lengths.py`, because these support windows, also for rows of one document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch.backends import cuda as sdp
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from megatrain.runtime.layers import flash4
from megatrain.runtime.layers.lengths import (
    LengthBounds,
    attend_within,
    backward_in_groups,
    takes_lengths,
)
from megatrain.runtime.layers.sinks import add_sinks, sink_gradient
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.attention_kernel import (
    choosable,
    computes_heads,
    obstacle,
    without_lengths,
)
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan

Kernel = Literal["cpu", "flash", "cudnn", "flash4"]
NAME = "megatrain"
"""Name under which `attend` is registered in transformers."""
_BACKENDS: dict[int, Kernel] = {
    int(SDPBackend.FLASH_ATTENTION.value): "flash",
    int(SDPBackend.CUDNN_ATTENTION.value): "cudnn",
}
# Sequence length of the tensors for asking PyTorch which kernel it would choose. The choice is the
# same for every length.
_SEQUENCE = 128


class Attention(NamedTuple):
    """The results of an attention kernel that its backward pass needs."""

    output: torch.Tensor
    """Attention output, [batch, sequence, heads, value size], in the compute dtype, contiguous."""
    log_sum_exp: torch.Tensor
    """Log-sum-exp of the scores, [batch, heads, sequence], fp32, contiguous."""


def kernel_of(model: ModelSpec, workload: Workload, device: torch.device) -> Kernel:
    """Returns the attention kernel of the workload on `device`. If the workload names no kernel,
    returns the kernel that `scaled_dot_product_attention` would choose.

    Raises UserError if `device` cannot run this kernel for this model.
    """
    if workload.attention == "flash4" and (why := flash4.missing(device)):
        raise UserError(
            "workload: attention",
            found=why,
            allowed=f"a GPU of the generation {' or '.join(flash4.GENERATIONS.values())}, with the"
            f" package {flash4.PACKAGE}",
            fix=flash4.fix(device),
        )
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[workload.dtype]
    heads, pairs, size = model.heads
    query, key = (
        torch.empty(1, _SEQUENCE, count, size, dtype=dtype, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, pairs)
    )
    grouped = heads != pairs
    if workload.attention is None:
        backend = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=grouped)
        kernel = _BACKENDS.get(backend)
        usable = device.type == "cpu" or computes_heads(workload.dtype, size)
        found = (
            f"PyTorch chooses {SDPBackend(backend).name.lower()} for {workload.dtype} heads of"
            f" {size} on {device.type}, whose output cannot be saved"
        )
    elif device.type != "cuda":
        kernel, usable = workload.attention, workload.attention == "flash"
        found = f"{kernel} on {device.type}"
    else:
        kernel, parameters = (
            workload.attention,
            sdp.SDPAParams(query, key, key, None, 0.0, True, grouped),
        )
        has_kernel: dict[Kernel, Callable[[sdp.SDPAParams], bool]] = {
            "flash": sdp.can_use_flash_attention,
            "cudnn": sdp.can_use_cudnn_attention,
            "flash4": lambda _: True,  # see `flash4.missing` above
        }
        usable = computes_heads(workload.dtype, size) and has_kernel[kernel](parameters)
        mode = ", deterministic mode" if torch.are_deterministic_algorithms_enabled() else ""
        found = (
            f"{kernel} for {workload.dtype} heads of {size} on"
            f" {torch.cuda.get_device_name(device)}{mode}"
        )
    if kernel is None or not usable:
        raise UserError(
            "workload: attention",
            found=found,
            allowed="a kernel that this machine has for this model",
            fix=(
                "make the plan with --attention flash"
                if workload.attention in ("cudnn", "flash4")
                else "leave `attention` out of the workload"
                if workload.attention
                else "leave `attention` out of the plan's placement"
            ),
        )
    return kernel if device.type == "cuda" else "cpu"


def refuse_attention(
    plan: Plan, device: torch.device | None, *, deterministic: bool = False
) -> None:
    """Raises UserError if `device` cannot execute the plan's attention. Allocates nothing.

    Args:
        plan: the plan.
        device: the device. None means that only plans that no device can execute are refused.
        deterministic: check for PyTorch's deterministic mode, even if this process has not enabled
            it.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    model, work = plan.model, plan.workload
    if work.attention and (
        found := obstacle(model, work, work.attention, deterministic=deterministic)
    ):
        raise found.error()
    special = work.attention or plan.placed("saved_attention")
    if (
        special
        and work.documents
        and not model.fuses_scores(work)  # `kernel_of` asks the device for the same kernel
        and device
        and device.type == "cuda"
        and not takes_lengths(model, work, device)
    ):
        kept = f"knobs.placement.saved_attention = {plan.knobs.placement.saved_attention!r}"
        named = f"attention = {work.attention!r}" if work.attention else kept
        raise without_lengths(named).error()
    if special and device:
        kernel_of(model, work, device)


def with_kernel_for_sinks(
    workload: Workload, models: Sequence[ModelSpec], device: torch.device
) -> Workload:
    """Returns the workload to measure: with the flash kernel if it names none, if all `models` have
    sinks, and if `device` is a GPU that has this kernel. So the planner can choose it.
    """
    named = msgspec.structs.replace(workload, attention="flash")
    if device.type != "cuda" or workload.attention is not None:
        return workload
    if not all(model.has_sinks and choosable(model, workload) for model in models):
        return workload
    try:
        for model in models:
            kernel_of(model, named, device)
    except UserError:
        return workload
    return named


def install(config: PretrainedConfig) -> None:
    """Makes `attend` the attention function of the layers that refer to `config`. Their masks stay
    the masks of PyTorch's attention.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | LengthBounds | None,
    *,
    scaling: float | None = None,
    kernel: Kernel | None = None,
    kept: Attention | None = None,
    results: list[torch.Tensor] | None = None,
    groups: int = 1,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention. This is an attention function for transformers.

    Args:
        module: the attention module of the layer.
        query: queries, [batch, heads, sequence, size].
        key: keys, [batch, key heads, sequence, size].
        value: values, [batch, key heads, sequence, value size].
        attention_mask: a mask, None, or `LengthBounds`. With `LengthBounds`, the kernels of
            `lengths.py` are used: `flash4` if `kernel` names it, and otherwise `flash`.
        scaling: factor on the scores. None means 1 / sqrt(size).
        kernel: the kernel. None means that PyTorch chooses it, and no results can be saved.
        kept: results of an earlier forward pass, which are used instead of running the kernel.
        results: a list, to which the output and the log-sum-exp are appended, to be saved.
        groups: number of groups of heads. More than one requires a `kernel` or `LengthBounds`.
        s_aux: sinks, [heads], which require a `kernel` or `LengthBounds`. This is transformers'
            name for them.

    Returns:
        The output, [batch, sequence, heads, value size], contiguous; and None instead of attention
        weights.
    """
    if isinstance(attention_mask, LengthBounds):
        assert not others.get("dropout"), "kernels are called without dropout"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return (
            attend_within(
                attention_mask,
                query,
                key,
                value,
                scale,
                kept=kept,
                results=results,
                groups=groups,
                sinks=s_aux,
                kernel="flash4" if kernel == "flash4" else "flash",
            ),
            None,
        )
    if kernel is None:
        assert groups == 1, "groups of heads call a kernel by its name"
        assert s_aux is None, "sinks call a kernel by its name"
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output, None
    assert attention_mask is None or kernel == "cpu", "CUDA kernels are called without a mask"
    assert not others.get("dropout"), "kernels are called without dropout"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # `scaled_dot_product_attention` also does this before it calls the kernel.
    if attention_mask is not None:
        shared = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, shared), repeat_kv(value, shared)
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, -torch.inf
        )
    if kept is None and (groups > 1 or s_aux is not None):
        kept = _computed(kernel, scale, attention_mask, groups, s_aux, query, key, value)
    if kept is not None:
        output = _SavedAttention.apply(
            kernel,
            scale,
            groups,
            attention_mask,
            query,
            key,
            value,
            kept.output.transpose(1, 2),
            log_sum_exp := kept.log_sum_exp,
            s_aux,
        )
    else:
        output, log_sum_exp = _forward(kernel, scale, attention_mask, query, key, value)
    contiguous = output.transpose(1, 2).contiguous()
    if results is not None:
        results += [contiguous, log_sum_exp.reshape(log_sum_exp.shape[:3]).contiguous()]
    return contiguous, None


@torch.no_grad()
def _computed(
    kernel: Kernel,
    scale: float,
    mask: torch.Tensor | None,
    groups: int,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Attention:
    """Runs the forward kernel for one group of heads after another, and adds the sinks. Returns the
    results of all heads. Autograd records nothing.
    """
    if groups == 1:
        made, found = _forward(kernel, scale, mask, query, key, value)
        whole = Attention(made.transpose(1, 2), found.reshape(found.shape[:3]))
    else:
        batch, heads, sequence, _ = query.shape
        whole = Attention(
            query.new_empty(batch, sequence, heads, value.shape[-1]),
            query.new_empty(batch, heads, sequence, dtype=torch.float32),
        )
        parts = (
            tensor.chunk(groups, 1) for tensor in (whole.output.transpose(1, 2), whole.log_sum_exp)
        )
        inputs = (tensor.chunk(groups, 1) for tensor in (query, key, value))
        for out, sums, *group in zip(*parts, *inputs, strict=True):
            made, found = _forward(kernel, scale, mask, *group)
            out.copy_(made)
            sums.copy_(found.reshape(sums.shape))
    if sinks is None:
        return whole
    return Attention(*add_sinks(*whole, sinks))


def _forward(
    kernel: Kernel,
    scale: float,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the forward kernel. Autograd records its backward pass.

    Returns the output, [batch, heads, sequence, size], and the log-sum-exp, [batch, heads,
    sequence] fp32, which has a fourth dimension of size 1 with cudnn.
    """
    aten = torch.ops.aten
    if kernel == "cpu":
        outputs = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
        )
    elif kernel == "flash":
        outputs = aten._scaled_dot_product_flash_attention.default(
            query, key, value, 0.0, True, False, scale=scale
        )
    elif kernel == "flash4":
        rows = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, log_sum_exp = flash4.forward(*rows, None, 0, -1, scale)
        return output.transpose(1, 2), log_sum_exp
    else:
        outputs = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, None, True, 0.0, True, False, scale=scale
        )
    return outputs[0], outputs[1]


class _SavedAttention(torch.autograd.Function):
    """An autograd function that returns a saved attention output. Its backward runs the backward
    kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        scale: float,
        groups: int,
        mask: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(mask, sinks, query, key, value, output, log_sum_exp)
        ctx.kernel, ctx.scale, ctx.groups = kernel, scale, groups
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mask, sinks, *saved = ctx.saved_tensors
        of_sinks = None
        if sinks is not None:
            output, log_sum_exp = saved[-2:]
            by_row = (gradient.transpose(1, 2), output.transpose(1, 2))
            of_sinks = sink_gradient(*by_row, log_sum_exp, sinks, ctx.groups)
        kernel = functools.partial(_backward, ctx.kernel, ctx.scale, mask)
        gradients = backward_in_groups(kernel, ctx.groups, gradient, *saved, dim=1)
        return None, None, None, None, *gradients, None, None, of_sinks


def _backward(
    kernel: Kernel,
    scale: float,
    mask: torch.Tensor | None,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value. The kernels require random states as
    arguments, but do not read them without dropout.
    """
    aten, lengths = torch.ops.aten, (query.shape[2], key.shape[2])
    if kernel == "cpu":
        outputs = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient,
            query,
            key,
            value,
            output,
            log_sum_exp,
            0.0,
            mask is None,
            attn_mask=mask,
            scale=scale,
        )
    elif kernel == "flash":
        seed, offset = (
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            torch.zeros((), dtype=torch.uint64, device=query.device),
        )
        outputs = aten._scaled_dot_product_flash_attention_backward.default(
            gradient,
            query,
            key,
            value,
            output,
            log_sum_exp,
            None,
            None,
            *lengths,
            0.0,
            True,
            seed,
            offset,
            scale=scale,
        )
    elif kernel == "flash4":
        rows = (tensor.transpose(1, 2) for tensor in (gradient, query, key, value, output))
        of_query, of_key, of_value = flash4.backward(*rows, log_sum_exp, None, 0, -1, scale)
        return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)
    else:
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
        outputs = aten._scaled_dot_product_cudnn_attention_backward.default(
            gradient,
            query,
            key,
            value,
            output,
            log_sum_exp[..., None],
            seed,
            offset,
            None,
            None,
            None,
            *lengths,
            0.0,
            True,
            scale=scale,
        )
    return outputs[0], outputs[1], outputs[2]
