"""What each attention kernel can do: the rules of `Workload.attention`.

The runtime refuses a plan by these rules, and the planner chooses a kernel by the same rules. So a
kernel that the planner chose is not refused. The runtime also asks the device, because an older GPU
or PyTorch may lack a kernel.

| kernel | documents of a row | deterministic |
|---|---|---|
| `flash` | separated, if the kernel receives their lengths | yes |
| `cudnn` | not separated | no |
| `flash4` | separated, the kernel receives their lengths | yes |

All need full causal attention in every layer (`CAN_SAVE_ATTENTION`). On a GPU, they compute in
bf16, with heads whose size is a multiple of 8.

`flash` and `flash4` also compute attention with sinks (`ModelSpec.has_sinks`), with or without a
window, and then always receive the lengths of documents. A workload that names no kernel has
transformers' own attention for these models, which writes out the scores.

`flash4` is FlashAttention-4, for Hopper and Blackwell GPUs of data centers. It needs a package that
PyTorch does not contain, so the planner does not choose it. Advice names it where it is faster. Its
backward pass is wrong for some head sizes, so it is used with sizes that were tried.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import ONE_KERNEL
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Dtype, Kernel, Workload

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
"""The kernels that a workload may name."""
_PACKAGES: dict[Kernel, str] = {"flash4": "flash-attn-4"}
"""Kernel that PyTorch does not contain -> the package that does."""
_FLASH4_HEADS = (32, 64, 96, 128)
"""Head sizes of `flash4`. On an H200, its gradients were right for these sizes and 24, and wrong
for 16 and 80 (docs/lab_notes.md, "FlashAttention-4")."""
_WITH_SINKS = ("flash", "flash4")
"""Kernels that compute attention with sinks."""
_WITHOUT_DOCUMENTS = ("cudnn",)
"""Kernels that cannot keep the documents of a row apart."""
_NOT_DETERMINISTIC = ("cudnn",)
"""Kernels whose backward pass is not deterministic."""
_HEAD_MULTIPLE = 8
_LARGEST_HEAD = 128
"""The largest head for which the planner chooses a kernel. The kernels' rates were measured with
it, and larger heads are not supported on every GPU."""


class Obstacle(NamedTuple):
    """The reason why a kernel cannot be used, as the parts of a UserError."""

    field: str
    """The field of the workload."""
    found: str
    """What was found."""
    allowed: str
    """What is allowed instead."""
    fix: str
    """How to change the plan."""

    def error(self) -> UserError:
        """Returns the error for a plan that names the kernel."""
        return UserError(
            f"workload: {self.field}", found=self.found, allowed=self.allowed, fix=self.fix
        )


def separates_documents(kernel: Kernel | None) -> bool:
    """Returns whether `kernel` can keep the documents of a row apart. None is PyTorch's choice."""
    return kernel not in _WITHOUT_DOCUMENTS


def is_deterministic(kernel: Kernel | None) -> bool:
    """Returns whether the backward pass of `kernel` is deterministic. None is PyTorch's choice in
    deterministic mode.
    """
    return kernel not in _NOT_DETERMINISTIC


def package(kernel: Kernel | None) -> str | None:
    """Returns the package that has `kernel`, or None if PyTorch has it."""
    return _PACKAGES.get(kernel) if kernel else None


def is_optional(kernel: Kernel | None) -> bool:
    """Returns whether `kernel` needs a package of its own. A machine has it only if it has a rate
    for it.
    """
    return package(kernel) is not None


def computes_heads(dtype: Dtype, size: int) -> bool:
    """Returns whether the kernels compute heads of `size` elements in `dtype` on a GPU."""
    return dtype == "bf16" and size % _HEAD_MULTIPLE == 0


def obstacle(
    model: ModelSpec, workload: Workload, kernel: Kernel, *, deterministic: bool = False
) -> Obstacle | None:
    """Returns why no device can use `kernel` for this model and workload, or None if some can.

    Args:
        model: the model.
        workload: the workload. Its own `attention` is not read.
        kernel: the kernel.
        deterministic: whether only deterministic kernels may run.
    """
    fused = model.has_sinks and kernel in _WITH_SINKS
    if not all(model.can_save_attention(layer.name, fused=fused) for layer in model.decoders):
        return Obstacle(
            "attention",
            f"{kernel} for a {model.family} model",
            f"{' or '.join(_WITH_SINKS)}, the kernels for attention with sinks"
            if model.has_sinks
            else ONE_KERNEL,
            "leave `attention` out of the workload",
        )
    if kernel == "flash4" and model.heads.size not in _FLASH4_HEADS:
        return Obstacle(
            "attention",
            f"flash4 for heads of {model.heads.size}",
            f"heads of {', '.join(map(str, _FLASH4_HEADS))}, for which its gradients were checked",
            "leave `attention` out of the workload",
        )
    if workload.documents and not separates_documents(kernel):
        return without_lengths(f"attention = {kernel!r}")
    if deterministic and not is_deterministic(kernel):
        return Obstacle(
            "attention",
            f"{kernel} in deterministic mode, although its backward is not deterministic",
            "flash",
            "make the plan with --attention flash, or train without deterministic mode",
        )
    return None


def without_lengths(setting: str) -> Obstacle:
    """Returns the obstacle for rows with documents if `setting`, text from a plan, needs a kernel
    that receives the lengths of documents and there is none.
    """
    return Obstacle(
        "documents",
        f"true, together with {setting}",
        "flash, or saved attention, only if flash attention can separate documents by their"
        " lengths: bf16 on an Ampere GPU or later",
        "make the plan with --plain-packing, or without these settings",
    )


def choosable(
    model: ModelSpec, workload: Workload, *, deterministic: bool = False
) -> tuple[Kernel, ...]:
    """Returns the kernels that the planner may choose for the workload.

    These are kernels of PyTorch. There are none for rows with documents, because its flash
    attention, which receives their lengths, is used without being named. It is named if the model
    has sinks, because transformers writes out their scores otherwise.

    Args:
        model: the model.
        workload: the workload. Its own `attention` is not read.
        deterministic: whether only deterministic kernels may run.
    """
    if workload.documents and not model.has_sinks:
        return ()
    return tuple(
        kernel
        for kernel in _usable(model, workload, deterministic=deterministic)
        if not is_optional(kernel)
    )


def optional(model: ModelSpec, workload: Workload) -> tuple[Kernel, ...]:
    """Returns the kernels of optional packages that can compute the workload. Its own `attention`
    is not read.
    """
    return tuple(kernel for kernel in _usable(model, workload) if is_optional(kernel))


def _usable(
    model: ModelSpec, workload: Workload, *, deterministic: bool = False
) -> tuple[Kernel, ...]:
    """Returns the kernels that can compute the workload, with heads for which rates are known."""
    size = model.heads.size
    if size > _LARGEST_HEAD or not computes_heads(workload.dtype, size):
        return ()
    return tuple(
        kernel
        for kernel in KERNELS
        if obstacle(model, workload, kernel, deterministic=deterministic) is None
    )
