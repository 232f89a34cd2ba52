"""FlashAttention-4, from the package `flash-attn-4`, as PyTorch operators.

These kernels for Hopper and Blackwell GPUs of data centers are not part of PyTorch. The package is
optional, and only plans whose workload names the kernel `flash4` use it.

The package's autograd functions cannot run the backward pass of a saved output. So its forward and
backward functions are called directly. They are the two functions that PyTorch calls if its
FlashAttention-4 implementation is activated. As operators of PyTorch, they can be compiled, and
autograd records the backward pass.

The kernels are compiled when they are called first, which takes seconds. `verify` calls them before
a run and compares them with plain attention, because versions of the package exist whose gradients
are wrong for some head sizes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import torch

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.attention_kernel import package
from megatrain.simulator.model.specs import ModelSpec

PACKAGE = package("flash4")
"""The name of the package for pip."""
GENERATIONS = {9: "Hopper (H100, H200, GH200)", 10: "Blackwell (B200, GB200)"}
"""Major compute capability of a GPU that has the kernels -> its generation, with examples."""
_MODULE = "flash_attn.cute.interface"
_OTHER_VERSION = f"install another version of {PACKAGE}, or plan with --attention flash"
_LONGEST_TEXT = 200
_TOKENS, _DOCUMENT, _WINDOW = 256, 100, 30
"""Tokens with which kernels are verified, the length of the first of two documents, and the window
of a layer that has one."""
_MOST_ERROR = 0.05
"""The largest error of a verified tensor, relative to its norm. On an H200, kernels that are right
had 0.003, and wrong gradients 0.13 or more."""


def missing(device: torch.device) -> str | None:
    """Returns why `device` cannot run the kernels, in words, or None if it can."""
    if device.type != "cuda":
        return f"flash4 on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in GENERATIONS:
        name = torch.cuda.get_device_name(device)
        return f"flash4 on {name}, which has compute capability {major}.{minor}"
    if not _installed():
        return f"flash4 without the package {PACKAGE}"
    return None


def fix(device: torch.device) -> str:
    """Returns how to train on `device` if `missing` returned a reason."""
    usable = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in GENERATIONS
    if not usable:
        return "make the plan with --attention flash"
    cuda = "[cu13]" if (torch.version.cuda or "").startswith("13") else ""
    return f'pip install --pre "{PACKAGE}{cuda}", or make the plan with --attention flash'


@functools.cache
def _installed() -> bool:
    """Returns whether the package is installed. It is imported only as far as its folders."""
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except Exception:  # such as an older flash_attn that was built for another PyTorch
        return False


@functools.cache
def _package() -> Any:
    """Returns the module of the package that has the kernels."""
    # Its compiler warns about an argument that it handles correctly, at each compilation.
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    return importlib.import_module(_MODULE)


def _bounds(starts: torch.Tensor | None, longest: int) -> dict[str, Any]:
    """Returns the keyword arguments of the kernels for the bounds of documents."""
    if starts is None:
        return {}
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def window_of(left: int) -> dict[str, int]:
    """Returns the keyword arguments of a kernel for the earlier tokens that a token attends to. -1
    stands for all of them.
    """
    return {} if left < 0 else {"window_size_left": left, "window_size_right": 0}


@torch.library.custom_op("megatrain::flash4", mutates_args=())
def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    longest: int,
    left: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the forward kernel of causal attention. Autograd records its backward pass.

    Args:
        query: queries in bf16, [batch, sequence, heads, size], or [tokens, heads, size] with
            `starts`.
        key: keys, with the same dimensions and the number of key heads.
        value: values, with the same dimensions as the keys.
        starts: bounds of documents, [documents + 1] int32. None means that each row is one text.
        longest: upper bound of the number of tokens in a document. Not read without `starts`.
        left: number of earlier tokens that a token attends to; -1 for all.
        scale: factor on the scores.

    Returns the output, with the dimensions of the queries, and the log-sum-exp of the scores in
    fp32, [batch, heads, sequence], or [heads, tokens] with `starts`.
    """
    output, log_sum_exp, *_ = _package()._flash_attn_fwd(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
        **_bounds(starts, longest),
        **window_of(left),
    )
    return output, log_sum_exp.contiguous()


@forward.register_fake
def _(
    query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, tokens, heads, _size = query.shape
    return (
        query.new_empty(*rows, tokens, heads, value.shape[-1]),
        query.new_empty(*rows, heads, tokens, dtype=torch.float32),
    )


@torch.library.custom_op("megatrain::flash4_backward", mutates_args=())
def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    starts: torch.Tensor | None,
    longest: int,
    left: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value.

    The arguments have the same dimensions as in `forward`, and `gradient` is the gradient of the
    output. In PyTorch's deterministic mode, sums are computed in a fixed order.
    """
    query_gradient, key_gradient, value_gradient, *_ = _package()._flash_attn_bwd(
        query,
        key,
        value,
        output,
        gradient.contiguous(),
        log_sum_exp.contiguous(),
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_bounds(starts, longest),
        **window_of(left),
    )
    return query_gradient, key_gradient, value_gradient


@backward.register_fake
def _(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, starts, ctx.longest, ctx.left, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _differentiate(
    ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *saved, starts = ctx.saved_tensors
    found = backward(gradient, *saved, starts, ctx.longest, ctx.left, ctx.scale)
    return *found, None, None, None, None


forward.register_autograd(_differentiate, setup_context=_save)


def verify(model: ModelSpec, device: torch.device, *, lengths: bool) -> None:
    """Compares the kernels with attention in fp32: output and gradients of a few tokens, with the
    heads of `model`. Results are cached.

    Args:
        model: the model.
        device: the GPU.
        lengths: whether the kernels may receive the lengths of documents. Rows without documents
            are compared in any case, and windows only with lengths.

    Raises UserError if a tensor differs by more than `_MOST_ERROR` of its norm, or if the kernels
    cannot be compiled or run.
    """
    heads, pairs, size = model.heads
    fixed_order = torch.are_deterministic_algorithms_enabled()  # compiles other kernels
    kinds: set[tuple[int, bool]] = set() if model.has_sinks else {(0, False)}
    if lengths:
        kinds |= {(int(model.window(layer.name) > 0), True) for layer in model.decoders}
    for windowed, documents in sorted(kinds):
        try:
            errors = _errors(heads, pairs, size, windowed * _WINDOW, documents, device, fixed_order)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise UserError(
                "workload: attention",
                found=f"flash4 that ends with {type(error).__name__}: {lines[0][:_LONGEST_TEXT]}",
                allowed=f"a version of {PACKAGE} that runs with this GPU, PyTorch and CUDA",
                fix=_OTHER_VERSION,
            ) from error
        for name, error_of_norm in errors.items():
            if not error_of_norm < _MOST_ERROR:  # also if it is not a number
                raise UserError(
                    "workload: attention",
                    found=f"flash4 whose {name} is off by {error_of_norm:.0%} of its norm for heads"
                    f" of {size}",
                    allowed=f"a version of {PACKAGE} that computes these heads correctly",
                    fix=_OTHER_VERSION,
                )


@functools.cache
def _errors(
    heads: int,
    pairs: int,
    size: int,
    window: int,
    documents: bool,
    device: torch.device,
    _fixed_order: bool,
) -> dict[str, float]:
    """Returns the errors of the output and of the gradients, relative to their norms."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn(_TOKENS, count, size, generator=generator, device=device).bfloat16()
        for count in (heads, pairs, pairs, heads)
    ]
    index = torch.arange(_TOKENS, device=device)
    behind = index[:, None] - index
    seen = (behind >= 0) & (behind < (window or _TOKENS))
    starts = None
    if documents:
        starts = torch.tensor([0, _DOCUMENT, _TOKENS], dtype=torch.int32, device=device)
        seen &= (index[:, None] < _DOCUMENT) == (index < _DOCUMENT)
    call = (starts, _TOKENS, window - 1, size**-0.5)
    *inputs, gradient = [tensor if documents else tensor[None] for tensor in tensors]
    output, log_sum_exp = forward(*inputs, *call)
    found = output, *backward(gradient, *inputs, output, log_sum_exp, *call)
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return {
        name: float((ours.view_as(exact).float() - exact).norm() / exact.norm())
        for name, ours, exact in zip(names, found, _exact(tensors, seen), strict=True)
    }


def _exact(tensors: list[torch.Tensor], seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns output and gradients of attention in fp32, [tokens, heads, size].

    Args:
        tensors: queries, keys and values, and the gradient of the output.
        seen: which keys a query attends to, [tokens, tokens].
    """
    *inputs, gradient = (tensor.float() for tensor in tensors)
    with torch.enable_grad():
        query, key, value = (tensor.requires_grad_() for tensor in inputs)
        shared = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(shared, 1))
        shares = (scores * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        output = torch.einsum("hqk,khd->qhd", shares, value.repeat_interleave(shared, 1))
        return output.detach(), *torch.autograd.grad(output, inputs, gradient)
