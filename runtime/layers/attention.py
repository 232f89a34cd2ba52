"""Attention by a chosen kernel, and attention that is kept: what its forward leaves is handed out, and taken again where the layer is recomputed.

A recompute that is given a layer's attention output and log-sum-exp runs everything but the attention kernel, and its backward runs that kernel's
backward on them: the same kernel on the same inputs as without keeping, so the same bits. Where neither a kernel is chosen nor anything kept, this is
transformers' `sdpa_attention_forward`, unchanged. Causal attention without dropout, for layers that pass their keyword arguments on to it; without
mask but for the CPU's. Documents that are kept apart by their lengths (`lengths.py`) come as `Bounds` instead of a mask, and need no such layers.

| kernel | where | aten op, and what it wants |
|---|---|---|
| cpu | CPU | `_scaled_dot_product_flash_attention_for_cpu`: bf16, fp32 |
| flash | CUDA | `_scaled_dot_product_flash_attention`: bf16, heads of a multiple of 8 |
| cudnn | CUDA | `_scaled_dot_product_cudnn_attention`: bf16, heads of a multiple of 8 |

All three take fewer key and value heads than query heads. `Templates` hands `kernel`, `kept` and `taken` to its layer, which passes them to `attend`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.backends import cuda as sdp
from torch.nn.attention import SDPBackend
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from megatrain.runtime.layers.lengths import Bounds, attend_within, takes_lengths
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

Kernel = Literal["cpu", "flash", "cudnn"]
NAME = "megatrain"
"""in transformers' table of attention functions"""
_BACKENDS: dict[int, Kernel] = {int(SDPBackend.FLASH_ATTENTION.value): "flash", int(SDPBackend.CUDNN_ATTENTION.value): "cudnn"}
_SEQUENCE = 128  # of the tensors on which PyTorch is asked which kernel it would take: that does not hang on the length


class Attention(NamedTuple):
    """What an attention kernel leaves for its backward."""

    output: torch.Tensor
    """[batch, sequence, heads, value size] in the compute dtype, contiguous"""
    log_sum_exp: torch.Tensor
    """[batch, heads, sequence] fp32, contiguous"""


def kernel_of(model: ModelSpec, workload: Workload, device: torch.device) -> Kernel:
    """The workload's kernel on `device`; where it names none, the one that `scaled_dot_product_attention` would take.

    Raises UserError where the machine, or this model on it, has no such kernel.
    """
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[workload.dtype]
    heads, pairs, size = model.heads
    query, key = (torch.empty(1, _SEQUENCE, count, size, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for count in (heads, pairs))
    grouped = heads != pairs
    if workload.attention is None:
        choice = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=grouped)
        kernel = _BACKENDS.get(choice)
        able = kernel is not None and (device.type == "cpu" or size % 8 == 0)
        found = f"PyTorch takes {SDPBackend(choice).name.lower()} for {workload.dtype} heads of {size} on {device.type}, which leaves nothing to keep"
    elif device.type != "cuda":
        kernel, able = workload.attention, workload.attention == "flash"
        found = f"{kernel} on {device.type}"
    else:
        kernel, asked = workload.attention, sdp.SDPAParams(query, key, key, None, 0.0, True, grouped)
        able = size % 8 == 0 and (sdp.can_use_flash_attention(asked) if kernel == "flash" else sdp.can_use_cudnn_attention(asked))
        mode = ", deterministic mode" if torch.are_deterministic_algorithms_enabled() else ""
        found = f"{kernel} for {workload.dtype} heads of {size} on {torch.cuda.get_device_name(device)}{mode}"
    if kernel is None or not able:
        raise UserError(
            "workload: attention", found=found, allowed="a kernel that this machine has for this model",
            fix="leave `attention` out of the workload" if workload.attention else "leave `attention` out of the plan's placement",
        )  # fmt: skip
    return kernel if device.type == "cuda" else "cpu"


def refuse_attention(plan: Plan, device: torch.device) -> None:
    """Raises UserError, before anything is loaded, where `device` cannot do what the plan says of attention."""
    if plan.workload.attention and not all(plan.model.keeps_attention(layer.name) for layer in plan.model.decoders):
        raise UserError(
            "workload: attention", found=f"{plan.workload.attention} for a {plan.model.family} model",
            allowed="full causal attention in every layer, as in Llama",
            fix="leave `attention` out of the workload",
        )  # fmt: skip
    special = plan.workload.attention or plan.placed("attention")
    if (
        special
        and plan.workload.documents
        and (plan.workload.attention == "cudnn" or (device.type == "cuda" and not takes_lengths(plan.model, plan.workload, device)))
    ):
        kept = f"knobs.placement.attention = {plan.knobs.placement.attention!r}"
        raise UserError(
            "workload: documents", found=f"true, beside {f'attention = {plan.workload.attention!r}' if plan.workload.attention else kept}",
            allowed="flash, or attention that is kept, where flash attention takes documents' lengths: bf16 on an Ampere GPU or later",
            fix="make the plan with --plain-packing, or without these",
        )  # fmt: skip
    if plan.workload.attention == "cudnn" and torch.are_deterministic_algorithms_enabled():
        raise UserError(
            "workload: attention", found="cudnn in deterministic mode, whose backward sums in any order", allowed="flash, or no kernel of choice",
            fix="leave `attention` out of the workload, or train without deterministic mode",
        )  # fmt: skip
    if special:
        kernel_of(plan.model, plan.workload, device)


def take_over(config: PretrainedConfig) -> None:
    """Has layers that are built from `config` attend by `attend`, with the masks that they have with PyTorch's attention."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | Bounds | None, *,
    scaling: float | None = None, kernel: Kernel | None = None, kept: Attention | None = None, taken: list[torch.Tensor] | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Query [batch, heads, sequence, size], key and value likewise with their own heads -> [batch, sequence, heads, size], contiguous.

    `kernel`: None leaves it to PyTorch, and then nothing can be kept. `kept`: not computed but this. `taken`: gets the output and the log-sum-exp.
    With `Bounds` the kernel is `lengths.py`'s, whatever is named; a layer's `sliding_window` is what transformers hands to flash attention.
    """
    if isinstance(attention_mask, Bounds):
        assert not others.get("dropout"), "kernels are called without dropout"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_within(attention_mask, query, key, value, scale, others.get("sliding_window") or 0, kept=kept, taken=taken), None
    if kernel is None:
        made, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return made, None
    assert attention_mask is None or kernel == "cpu", "kernels are called for causal attention alone"
    assert not others.get("dropout"), "kernels are called without dropout"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None:  # what `scaled_dot_product_attention` makes of heads and mask before this kernel
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
    if kept is not None:
        output = _Kept.apply(kernel, scale, attention_mask, query, key, value, kept.output.transpose(1, 2), kept.log_sum_exp)
    else:
        output, log_sum_exp = _forward(kernel, scale, attention_mask, query, key, value)
    made = output.transpose(1, 2).contiguous()
    if taken is not None:
        taken += [made, log_sum_exp.reshape(log_sum_exp.shape[:3]).contiguous()]
    return made, None


def _forward(
    kernel: Kernel, scale: float, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [batch, heads, sequence, size] and log-sum-exp [batch, heads, sequence(, 1)], with autograd's own backward."""
    aten = torch.ops.aten
    if kernel == "cpu":
        made = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
    elif kernel == "flash":
        made = aten._scaled_dot_product_flash_attention.default(query, key, value, 0.0, True, False, scale=scale)
    else:
        made = aten._scaled_dot_product_cudnn_attention.default(query, key, value, None, True, 0.0, True, False, scale=scale)
    return made[0], made[1]


class _Kept(torch.autograd.Function):
    """Attention whose output is there already; backward is the kernel's."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, scale: float, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
        log_sum_exp: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(mask, query, key, value, output, log_sum_exp)
        ctx.kernel, ctx.scale = kernel, scale
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mask, query, key, value, output, log_sum_exp = ctx.saved_tensors
        return (None, None, None, *_backward(ctx.kernel, ctx.scale, mask, gradient, query, key, value, output, log_sum_exp), None, None)


def _backward(
    kernel: Kernel, scale: float, mask: torch.Tensor | None, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    output: torch.Tensor, log_sum_exp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value. Random states are passed for form: without dropout nothing reads them. None stands for an undefined tensor."""
    aten, lengths = torch.ops.aten, (query.shape[2], key.shape[2])
    if kernel == "cpu":
        made = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient, query, key, value, output, log_sum_exp, 0.0, mask is None, attn_mask=mask, scale=scale
        )  # fmt: skip
    elif kernel == "flash":
        seed, offset = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.zeros((), dtype=torch.uint64, device=query.device)
        made = aten._scaled_dot_product_flash_attention_backward.default(
            gradient, query, key, value, output, log_sum_exp, None, None, *lengths, 0.0, True, seed, offset, scale=scale
        )  # fmt: skip
    else:
        seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
        made = aten._scaled_dot_product_cudnn_attention_backward.default(
            gradient, query, key, value, output, log_sum_exp[..., None], seed, offset, None, None, None, *lengths, 0.0, True, scale=scale
        )  # fmt: skip
    return made[0], made[1], made[2]
