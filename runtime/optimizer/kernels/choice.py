"""Chooses the optimizer's kernels: C on a CPU, Triton on a CUDA GPU. With
`MEGATRAIN_KERNELS=eager` there are none, and PyTorch does the work.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from megatrain.runtime.optimizer.kernels.host import host_kernels


class Kernels(Protocol):
    """Functions of `adamw.py` and `blockwise.py` as kernels, each in one pass over memory.

    Results have the same bits. A NaN is a NaN in both, but may have other bits.
    """

    def adamw(
        self,
        weights: torch.Tensor,
        low: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        gradient: torch.Tensor,
        clip: torch.Tensor | None,
        scale: torch.Tensor | None,
        copy_to: torch.Tensor | None,
        scalars: Sequence[float],
    ) -> None:
        """Does the work of `adamw.update`. Tensors are contiguous, [n], except `clip` and `scale`,
        which have one element.
        """

    def blockwise_adamw(
        self,
        weights: torch.Tensor,
        low: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        gradient: torch.Tensor,
        clip: torch.Tensor | None,
        scale: torch.Tensor | None,
        copy_to: torch.Tensor | None,
        scalars: Sequence[float],
        states: tuple[int, int],
    ) -> None:
        """Does the work of `blockwise.update`. `states` are those of the generators of random bits
        before the first parameter, for weights and second moments, as signed 64-bit integers.
        """

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        """Writes to `sums` [rows] fp32 the sum of each 4096 elements of `gradient` [n] bf16 or
        fp32, or of their squares if `square`, by halving.
        """

    def ratio_sums(
        self,
        gradient: torch.Tensor,
        second: torch.Tensor,
        sums: torch.Tensor,
        scalars: Sequence[float],
    ) -> None:
        """Does the work of `ratio_sums`, which writes the first n / 64 elements of `sums`.
        `gradient` and `second` are contiguous. `second` is [n] fp32 or uint8 records; n is a
        multiple of 64.
        """

    def fold(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `sums` [2^k] fp32 by halving, as a 0-dimensional tensor. Overwrites
        `sums`.
        """

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        """Copies `gradient` [n] bf16 or fp32 to `total` [n] fp32 if `first`, and adds it
        otherwise.
        """


def kernels(device: torch.device) -> Kernels | None:
    """Returns the kernels for tensors on `device`, or None if there are none."""
    if os.environ.get("MEGATRAIN_KERNELS") == "eager":
        return None
    if device.type == "cpu":
        return host_kernels()
    return _device_kernels() if device.type == "cuda" else None


@functools.cache
def _device_kernels() -> Kernels | None:
    if importlib.util.find_spec("triton") is None:  # it comes with CUDA builds of torch
        return None
    from megatrain.runtime.optimizer.kernels.device import DeviceKernels

    return DeviceKernels()
