"""Joins the ranks of a plan, which `torchrun` starts, and compares what must be the same on all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from megatrain.runtime.host import torchrun_variable
from megatrain.runtime.ranks.board_mirror import BoardMirror
from megatrain.runtime.ranks.rank_board import Board
from megatrain.runtime.ranks.ranks import TIMEOUT_S, Ranks
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

_BETWEEN_TIMEOUT = timedelta(days=30)
"""Time limit of a collective between steps. Rank 0 may be writing a large model meanwhile."""
_NCCL_TIMEOUT = timedelta(hours=2)
"""Time limit of NCCL for a collective of a step. NCCL counts from the time when the collective is
enqueued, which can be a whole step before it runs.
"""
_TRAIN = "-m megatrain train ..."
_CALIBRATE = "-m megatrain calibrate --several HARDWARE --out NEW"
_LONGEST = 300
"""The most characters of a setting in an error message."""


class WithoutPlan(NamedTuple):
    """The ranks of one host that do not execute a plan, such as those that measure the GPUs."""

    gpus: int
    """Number of ranks, one for each GPU."""

    @property
    def hosts(self) -> int:
        """The number of hosts, which is 1."""
        return 1

    @property
    def gpus_per_host(self) -> int:
        """The number of ranks of the host."""
        return self.gpus


def started_ranks() -> int:
    """Returns the number of ranks that torchrun started, from the environment variable
    `WORLD_SIZE`, or 1 if it is not set. Raises UserError if it is not a positive number.
    """
    return torchrun_variable("WORLD_SIZE", default=1, least=1)


def _start(plan: Plan | WithoutPlan) -> str:
    """Returns the command that starts the ranks of `plan`. With several hosts, it is the command
    for each of them.
    """
    return f"{launcher(plan)} {_TRAIN if isinstance(plan, Plan) else _CALIBRATE}"


def launcher(plan: Plan | WithoutPlan) -> str:
    """Returns the command with `torchrun` that starts a program for each rank of `plan` on a host,
    without the program.
    """
    if plan.hosts == 1:
        return f"torchrun --standalone --nproc-per-node {plan.gpus}"
    return (
        f"torchrun --nnodes {plan.hosts} --nproc-per-node {plan.gpus_per_host} --rdzv-backend c10d"
        " --rdzv-endpoint HOST:PORT"
    )


def check_started(plan: Plan | WithoutPlan) -> None:
    """Raises UserError if the number of ranks that torchrun started is not the number of GPUs of
    `plan`, in all or on this host.
    """
    started = started_ranks()
    if started != plan.gpus:
        raise UserError(
            "ranks",
            found=f"{started} (WORLD_SIZE)" if "WORLD_SIZE" in os.environ else started,
            allowed=f"{plan.gpus}, the GPUs of the plan",
            fix=f"start the command with `{_start(plan)}`"
            if plan.gpus > 1
            else "start the command without torchrun, and unset WORLD_SIZE",
        )
    here = torchrun_variable("LOCAL_WORLD_SIZE", default=plan.gpus_per_host, least=1)
    if here != plan.gpus_per_host:
        what, more = "--several measures the GPUs of", ""
        if isinstance(plan, Plan):
            what = "the plan is for"
            more = " on each host" if plan.hosts > 1 else ", or set hosts in the plan"
        raise UserError(
            "ranks of this host",
            found=f"{here} (LOCAL_WORLD_SIZE)",
            allowed=f"{plan.gpus_per_host}, the GPUs of the plan divided by its {plan.hosts} hosts"
            if plan.hosts > 1
            else f"{plan.gpus}, because {what} one host",
            fix=f"start the command with `{_start(plan)}`{more}",
        )


def identity(plan: Plan | WithoutPlan, *more: object) -> dict[str, str]:
    """Returns what must be the same on all ranks, as text by name: a digest of the fields of `plan`
    that decide what a step computes, the version of PyTorch, and `more`.

    The entries of a mapping in `more`, and the fields of a struct and of its structs, have names of
    their own. A digest stands for a text of more than `_LONGEST` characters.
    """
    blank = (
        msgspec.structs.replace(plan, hardware="", source="", prediction=None)
        if isinstance(plan, Plan)
        else plan
    )
    named = {
        "plan": _digest(msgspec.json.encode(blank)),
        "version of PyTorch": str(torch.__version__),
    }
    for place, value in enumerate(more, 1):
        if isinstance(value, msgspec.Struct):
            named |= _fields(value)
        elif isinstance(value, Mapping):
            named |= {str(name): repr(entry) for name, entry in value.items()}
        else:
            named[f"setting {place}"] = repr(value)
    return {
        name: text if len(text) <= _LONGEST else _digest(text.encode())
        for name, text in named.items()
    }


def _digest(text: bytes) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of `text`."""
    return hashlib.sha256(text).hexdigest()[:16]


def _fields(value: msgspec.Struct, prefix: str = "") -> dict[str, str]:
    """Returns the fields of a struct, and of the structs in it, as text by their dotted names."""
    named = dict[str, str]()
    for name in value.__struct_fields__:
        field = getattr(value, name)
        if isinstance(field, msgspec.Struct):
            named |= _fields(field, f"{prefix}{name}.")
        else:
            named[f"{prefix}{name}"] = repr(field)
    return named


@contextlib.contextmanager
def joined(
    plan: Plan | WithoutPlan, device: torch.device, *more: object, timeout_s: float | None = None
) -> Iterator[Ranks | None]:
    """Joins the ranks of `plan` for the duration of the block. Yields None if the plan is for one
    GPU.

    If the block raises an error, the other ranks are notified, and their next collective fails.

    Args:
        plan: The plan, which must be the same on all ranks, or the number of ranks.
        device: The device with the tensors of collectives: the CPU or this rank's GPU.
        *more: Other values that must be the same on all ranks, such as settings and seed.
        timeout_s: Seconds that a rank waits for the others at the start and in a collective of a
            step. None means `TIMEOUT_S`.

    Raises:
        UserError: The number of ranks is not the plan's number of GPUs, the ranks do not connect
            within `timeout_s`, or `plan` or `more` differs between ranks.
    """
    check_started(plan)
    if plan.gpus == 1:
        yield None
        return
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    with _shared_file() as file:
        own = Board.make(file)
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
            peers: list[Any] = [None] * plan.gpus
            dist.all_gather_object(peers, (os.getpid(), str(file), platform.node()))
            processes, files, nodes = map(list, zip(*peers, strict=True))
            boards = _opened(plan, own, files)
            mirror = _mirror(plan, boards, files[0], timeout_s)
            between = dist.new_group(backend="gloo", timeout=_BETWEEN_TIMEOUT)
            within = (
                dist.new_group(backend="nccl", timeout=_NCCL_TIMEOUT)
                if device.type == "cuda"
                else None
            )
        except (RuntimeError, ValueError, OSError) as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise UserError(
                "ranks",
                found=f"fewer than {plan.gpus} connected ranks"
                f"{' on this host' if plan.hosts == 1 else ''} ({str(error).splitlines()[0]})",
                allowed=f"{plan.gpus}, connected within {timeout_s:g} s",
                fix=f"start all ranks with `{_start(plan)}`",
            ) from error
        ranks = Ranks(
            dist.get_rank(),
            plan.gpus,
            processes,
            boards,
            timeout_s,
            nodes[:: plan.gpus_per_host],
            within=within,
            between=between,
            mirror=mirror,
        )
        try:
            ranks.meet()
            # every rank has opened it, and now a rank that is killed leaves no file
            file.unlink()
            if mirror is not None:
                mirror.start()
            ranks.agree(identity(plan, *more))
            yield ranks
        except BaseException as error:
            ranks.stopping(error)
            raise
        finally:
            if mirror is not None:
                mirror.stop()
            dist.destroy_process_group()


def _mirror(
    plan: Plan | WithoutPlan, boards: list[Board], name: str, timeout_s: float
) -> BoardMirror | None:
    """Returns the copies of the boards of other hosts, or None with one host.

    They are under `name` in the store that torchrun or rank 0 serves. Raises RuntimeError if the
    store cannot be reached.
    """
    if plan.hosts == 1:
        return None
    # a connection of its own, because a thread that waits for the store blocks a connection
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    this = dist.get_rank()
    here = this // plan.gpus_per_host
    others = {
        rank: board for rank, board in enumerate(boards) if rank // plan.gpus_per_host != here
    }
    return BoardMirror(dist.PrefixStore(name, store), this, boards[this], others)


def _opened(plan: Plan | WithoutPlan, own: Board, files: list[str]) -> list[Board]:
    """Returns the board of each rank: of this rank, of the ranks of this host, which are in the
    `files`, and empty boards for the ranks of other hosts. Raises OSError if a rank of this host is
    on another one.
    """
    this = dist.get_rank()
    first = this - this % plan.gpus_per_host
    here = range(first, first + plan.gpus_per_host)
    return [
        own if rank == this else Board.open(Path(file)) if rank in here else Board()
        for rank, file in enumerate(files)
    ]


@contextlib.contextmanager
def _shared_file() -> Iterator[Path]:
    """Yields a new file, in memory if the host has /dev/shm. Removes it at the end."""
    handle, name = tempfile.mkstemp(
        prefix="megatrain-rank-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def refuse_without_ranks(plan: Plan, ranks: Ranks | None) -> None:
    """Raises UserError if the number of `ranks` is not the plan's number of GPUs."""
    if plan.gpus != (1 if ranks is None else ranks.count):
        raise UserError(
            "plan: gpus",
            found=plan.gpus,
            allowed="1 in a single process",
            fix=f"start the ranks with `{_start(plan)}`, or plan for one GPU; from Python, pass"
            " `ranks`, which `joined` of megatrain.runtime.ranks yields",
        )
