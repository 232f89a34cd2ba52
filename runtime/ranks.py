"""Ranks: the processes that train together on several GPUs of one host, one for each GPU.

`torchrun` starts them. They talk through `torch.distributed`: with gloo on the CPU, with NCCL
between GPUs. No GPU has run this yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.schedule.plan import Plan

TIMEOUT_S = 60
"""Seconds after which a collective that not all ranks have reached fails."""
_LOOKING_S = 3.0
"""Seconds in which a rank whose connection has closed must turn out to have ended."""
_START = "torchrun --standalone --nproc-per-node {count} -m megatrain.experiments.ranks PLAN"


_all_gather: Callable[[torch.Tensor, torch.Tensor], object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the second is its name before PyTorch 2.13


class RankLost(RunError):
    """Another rank has ended or does not answer. The text names the rank, the op and the lane."""


class Ranks:
    """This process among the ranks of a plan."""

    def __init__(self, rank: int, count: int, processes: list[int]) -> None:
        """Use `joined` instead. `processes` has the process id of each rank."""
        self.rank, self.count, self._processes = rank, count, processes

    def gather_weights(self, whole: torch.Tensor) -> None:
        """Fills `whole` [count, part], of which row `rank` is this rank's, with the rows of the
        other ranks.
        """
        self.gather(whole, whole[self.rank])

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Sends row q of `sent` [count, part] to rank q. Row q of `received` [count, part] is what
        rank q has sent to this rank.
        """
        dist.all_to_all_single(_bytes(received), _bytes(sent))

    def gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        """Writes `own` [n] of each rank to its row of `received` [count, n]."""
        _all_gather(_bytes(received), _bytes(own))

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Returns `own` [n] of all ranks, [count, n]. Every rank must call this at the same point,
        while no step runs.
        """
        whole = own.new_empty(self.count, *own.shape)
        self.gather(whole, own.contiguous())
        return whole

    def agree(self, what: str, value: str) -> None:
        """Raises UserError, on every rank, unless `value` is the same on all ranks. `what` says
        what it is.
        """
        values: list[str] = [""] * self.count
        dist.all_gather_object(values, value)
        other = next((rank for rank, each in enumerate(values) if each != values[0]), None)
        if other is not None:
            raise UserError(
                f"ranks: {what}",
                found=f"{values[other]} on rank {other}",
                allowed=f"{values[0]}, as on rank 0",
                fix="start all ranks with the same plan, settings and version",
            )

    def lost(self, op: str) -> RankLost | None:
        """Returns the error to report if the collective `op` failed because another rank is gone
        or is stopped. None if the ranks are all there.

        A connection closes shortly before its process ends, so this looks for a few seconds.
        """
        end = time.monotonic() + _LOOKING_S
        while True:
            gone = [
                f"rank {rank} (process {process}) {state}"
                for rank, process in enumerate(self._processes)
                if (state := _state(process)) and rank != self.rank
            ]
            if gone:
                return RankLost(f"{op} on lane exchange of rank {self.rank}: {' and '.join(gone)}")
            if time.monotonic() > end:
                return None
            time.sleep(0.05)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a vector. Collectives only move them."""
    return tensor.reshape(-1).view(torch.uint8)


def _state(process: int) -> str:
    """Returns what is wrong with a process, in words, or nothing."""
    try:
        # the state follows the name, which is in parentheses
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "has ended"
    return {"Z": "has ended", "X": "has ended", "T": "is stopped"}.get(letter, "")


def identity(plan: Plan, *more: object) -> str:
    """Returns a digest of all of `plan` that decides what a step does, and of `more`."""
    blank = msgspec.structs.replace(plan, hardware="", source="", prediction=None)
    text = msgspec.json.encode([blank, str(torch.__version__), *map(repr, more)])
    return hashlib.sha256(text).hexdigest()[:16]


@contextlib.contextmanager
def joined(
    plan: Plan, device: torch.device, *more: object, timeout_s: float = TIMEOUT_S
) -> Iterator[Ranks | None]:
    """Joins the ranks of `plan` and leaves them at the end. None if the plan is for one GPU.

    Args:
        plan: the plan, which must be the same on all ranks.
        device: where collectives find their tensors. A GPU should be this rank's.
        *more: what else must be the same on all ranks, such as settings and seed.
        timeout_s: seconds that a rank waits for the others, at the start and in a collective.

    Raises:
        UserError: the ranks are not as many as the plan has GPUs, do not come together, or differ.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != plan.gpus:
        raise UserError(
            "ranks",
            found=started,
            allowed=f"{plan.gpus}, the GPUs of the plan",
            fix=f"start it with `{_START.format(count=plan.gpus)}`"
            if plan.gpus > 1
            else "start it without torchrun",
        )
    if plan.gpus == 1:
        yield None
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        processes: list[Any] = [None] * plan.gpus
        dist.all_gather_object(processes, os.getpid())
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            "ranks",
            found=f"not all of {plan.gpus} ranks came together ({reason})",
            allowed=f"all within {timeout_s:g} s",
            fix=f"start all with `{_START.format(count=plan.gpus)}`",
        ) from error
    try:
        ranks = Ranks(dist.get_rank(), plan.gpus, processes)
        ranks.agree("plan", identity(plan, *more))
        yield ranks
    finally:
        dist.destroy_process_group()


def refuse_without_ranks(plan: Plan, ranks: Ranks | None) -> None:
    """Raises UserError if a plan for several GPUs would be executed by one process."""
    if plan.gpus != (1 if ranks is None else ranks.count):
        raise UserError(
            "plan: gpus",
            found=plan.gpus,
            allowed="1 in a single process",
            fix=f"start the ranks with `{_START.format(count=plan.gpus)}`, or plan for one GPU",
        )
