"""Which kernels there are for a device: C on a CPU, Triton on a CUDA GPU; none, and PyTorch does it, with `MEGATRAIN_KERNELS=eager`."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from megatrain.runtime.kernels.host import host_kernels


class Kernels(Protocol):
    """What `runtime/optimizer.py` does, in one pass each, with the same bits; a NaN stays one, which of them is not promised."""

    def adamw(
        self, weights: torch.Tensor, low: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
        clip: torch.Tensor | None, scale: torch.Tensor | None, copy_to: torch.Tensor | None, scalars: Sequence[float],
    ) -> None:  # fmt: skip
        """All [n], contiguous: as in `optimizer.update`."""

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        """`sums` [rows] fp32 of `gradient` [n] bf16 or fp32: each 4096 of them, or of their squares, folded."""

    def ratio_sums(self, gradient: torch.Tensor, second: torch.Tensor, sums: torch.Tensor, scalars: Sequence[float]) -> None:
        """`gradient` and `second` [n], contiguous, n a multiple of 64; the first n / 64 of `sums`: as in `optimizer.ratio_sums`."""

    def fold(self, sums: torch.Tensor) -> torch.Tensor:
        """The sum of `sums` [2^k] fp32 by halving, 0-dimensional; `sums` are lost."""

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        """`total` [n] fp32 = (first) or += `gradient` [n] bf16 or fp32."""


def kernels(device: torch.device) -> Kernels | None:
    """Those for tensors on `device`."""
    if os.environ.get("MEGATRAIN_KERNELS") == "eager":
        return None
    if device.type == "cpu":
        return host_kernels()
    return _device_kernels() if device.type == "cuda" else None


@functools.cache
def _device_kernels() -> Kernels | None:
    if importlib.util.find_spec("triton") is None:  # it comes with CUDA builds of torch
        return None
    from megatrain.runtime.kernels.device import DeviceKernels

    return DeviceKernels()
