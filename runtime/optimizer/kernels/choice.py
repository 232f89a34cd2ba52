"""Chooses the optimizer's kernels: C for a CPU, Triton for a CUDA GPU. With the environment
variable `MEGATRAIN_KERNELS=eager`, no kernels are used, and PyTorch does the work.
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

    Results have the same bits as in PyTorch, except that the bits of a NaN may differ. All tensors
    must be contiguous. `scalars` are in the order of `adamw.Scalars`, and each is rounded to fp32.
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
        """Does the work of `adamw.update`. `clip` and `scale` have one element."""

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
        """Does the work of `blockwise.update`. `states` are the states of the random generators of
        weights and of second moments before the first parameter, as signed 64-bit integers.
        """

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        """Writes the sum of each row of 4096 elements of `gradient` [n] bf16 or fp32, or with
        `square` the sum of their squares, to `sums` [rows] fp32. Rows are summed by halving. The
        last row may be shorter.
        """

    def ratio_sums(
        self,
        gradient: torch.Tensor,
        second: torch.Tensor,
        sums: torch.Tensor,
        scalars: Sequence[float],
    ) -> None:
        """Does the work of `adamw.ratio_sums` if `second` is [n] fp32, and of
        `blockwise.ratio_sums` if it is uint8 records. n must be a multiple of 64.
        """

    def fold(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `sums` [2^k] fp32 by halving, as a 0-dimensional tensor. Overwrites
        `sums`.
        """

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        """Copies `gradient` [n] bf16 or fp32 to `total` [n] fp32 if `first`, otherwise adds it."""

    def sum_parts(self, total: torch.Tensor, parts: torch.Tensor, *, first: bool) -> None:
        """Does the work of `adamw.sum_parts` if `total` is fp32 and each row of `parts` is
        contiguous. `parts` as a whole need not be.
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
    if importlib.util.find_spec("triton") is None:  # CUDA builds of PyTorch include it
        return None
    from megatrain.runtime.optimizer.kernels.device import DeviceKernels

    return DeviceKernels()
