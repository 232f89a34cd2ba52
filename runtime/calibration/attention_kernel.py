"""Times the attention kernel of a model alone, over sequence lengths.

The FLOPs of attention grow with the square of the sequence length, and run at another rate than the
matrix products of a layer. So the duration of a layer at a length that was not measured is
predicted from the two separately (`simulator/costs/datasheet.py`).
"""

from __future__ import annotations

import contextlib

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatrain.runtime.calibration.timing import rounded, time_repeatedly
from megatrain.runtime.layers import flash4, lengths
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.simulator.hardware.machine import MOST_HALF_TOKENS, AttentionRate
from megatrain.simulator.model.attention_kernel import KERNELS, computes_heads, obstacle
from megatrain.simulator.model.families import UNFUSED_ATTENTION
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Kernel, Workload

_SHORTEST, _LONGEST, _FACTOR = 512, 2**17, 4
"""The shortest and the longest row in tokens, and the factor from one length to the next."""
_MOST_SECONDS = {"cuda": 2.0, "cpu": 0.05}
"""Type of device -> the longest expected time of a row that is measured, in seconds."""
_TOKENS = {"cuda": 2**15, "cpu": 1}
"""Type of device -> the least number of tokens in a call. A single short row does not fill a GPU,
and a step has many rows: on an H200, a row of 1,024 tokens took four times as long alone as in a
batch of 32."""
_REPEATS = 3
"""Number of calls that are timed."""
_BACKENDS: dict[Kernel | None, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Kernel of PyTorch -> its name there."""


def attention_curve(
    model: ModelSpec, workload: Workload, device: torch.device
) -> tuple[tuple[int, int, int], ...]:
    """Returns points (S, forward_ns, backward_ns) of the model's attention kernel on one causal row
    of S tokens. Each is the median of three calls, divided by the number of rows in a call.

    With documents, each row has one. If the device has a kernel that receives lengths, it is that
    kernel, which has other times for the same rows: FlashAttention-2 takes 6 to 20 % longer in the
    forward pass (H200, rows of 8,192 tokens).

    For a model without a fused kernel, which writes out the attention scores, there are no points.
    Sinks are left out, because they take little time. There are fewer than two if memory or time is
    too short.
    """
    unfused = model.writes_scores or model.family in UNFUSED_ATTENTION
    if unfused and not model.fuses_scores(workload):
        return ()
    kernel = workload.kernel if device.type == "cuda" else None
    if kernel == "flash4" and (
        flash4.missing(device)
        or not computes_heads(workload.dtype, model.heads.size)
        or obstacle(model, workload, kernel)
    ):
        return ()
    backend = sdpa_kernel(_BACKENDS[kernel]) if kernel in _BACKENDS else contextlib.nullcontext()
    points: list[tuple[int, int, int]] = []
    length = _SHORTEST
    with backend:
        while length <= _LONGEST:
            try:
                forward, backward = _row(model, workload, device, length)
            except (RuntimeError, MemoryError):  # no memory, or no such kernel for this model
                break
            except Exception:
                if kernel != "flash4":
                    raise
                break  # an optional package may fail in any way
            points.append((length, max(round(forward * 1e9), 1), max(round(backward * 1e9), 1)))
            if _FACTOR**2 * (forward + backward) > _MOST_SECONDS[device.type] and len(points) > 1:
                break
            length *= _FACTOR
    return tuple(points)


def attention_curves(
    model: ModelSpec, workload: Workload, device: torch.device
) -> dict[Kernel | None, tuple[tuple[int, int, int], ...]]:
    """Returns the curves of the attention kernels that rows of one text may use, by kernel. None is
    PyTorch's choice. A kernel that the device does not have for this model has no points.
    """
    kernels: tuple[Kernel | None, ...] = (None, *KERNELS) if device.type == "cuda" else (None,)
    return {
        kernel: attention_curve(
            model, msgspec.structs.replace(workload, attention=kernel, documents=False), device
        )
        for kernel in kernels
    }


def _row(
    model: ModelSpec, workload: Workload, device: torch.device, length: int
) -> tuple[float, float]:
    """Returns the seconds of one forward and of one backward on a row of `length` tokens.

    The caller selects among the kernels of PyTorch.

    Raises RuntimeError or MemoryError if memory runs out, or if there is no kernel for the model.
    """
    heads, pairs, size = model.heads
    rows = max(_TOKENS[device.type] // length, 1)
    dtype = TORCH_DTYPE[workload.dtype]

    def drawn(count: int) -> torch.Tensor:
        shape = (rows, length, count, size)
        return torch.randn(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_()

    query, key, value = drawn(heads), drawn(pairs), drawn(pairs)
    receives = workload.documents and lengths.takes_lengths(model, workload, device)
    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    one_a_row = lengths.LengthBounds(starts, torch.empty(length, 0, device=device), 0)

    def attend() -> torch.Tensor:
        if receives:
            kernel: lengths.Kernel = "flash4" if workload.kernel == "flash4" else "flash"
            return lengths.attend_within(one_a_row, query, key, value, size**-0.5, kernel=kernel)
        if workload.kernel == "flash4":
            by_token = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return flash4.forward(*by_token, None, 0, -1, size**-0.5)[0]
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=heads != pairs
        )

    output = attend()
    gradient = torch.randn_like(output)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return (
        time_repeatedly(attend, device, repeats=_REPEATS).value / rows,
        time_repeatedly(backward, device, repeats=_REPEATS).value / rows,
    )


def attention_rate(
    model: ModelSpec, points: tuple[tuple[int, int, int], ...], flops_per_s: float
) -> AttentionRate | None:
    """Returns the rate of an attention kernel.

    With it, the two longest rows of `points` take the measured times. The forward and the
    backward of a row of S tokens take a time proportional to S (S + half_tokens). Together they
    count as 3.5 forwards. `flops_per_s` is the rate of a large matrix product. Returns None if
    there are fewer than two points, or if the time per token does not grow with the length, or so
    little that `attention_half_tokens` is above the allowed range.
    """
    if len(points) < 2:
        return None
    (short, *before), (long, *after) = points[-2:]
    per_token = [sum(before) / short, sum(after) / long]
    slope = (per_token[1] - per_token[0]) / (long - short)
    if slope <= 0:
        return None
    half = max(per_token[1] / slope - long, 0.0)
    if half > MOST_HALF_TOKENS:
        return None
    heads, _, size = model.heads
    # A forward has 2 H D S^2 FLOPs, because half of the pairs are masked.
    flops = 3.5 * 2 * heads * size * long * (long + half)
    reached = min(flops / (sum(after) / 1e9) / flops_per_s, 1.0)
    return AttentionRate(efficiency=rounded(reached), half_tokens=round(half))
