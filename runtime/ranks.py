"""Ranks: the processes that train together on several GPUs of one host, one for each GPU.

`torchrun` starts them. They talk through `torch.distributed`: with gloo on the CPU, with NCCL
between GPUs.

The ops of a step wait for other ranks at most `TIMEOUT_S` seconds. Between steps, rank 0 leads: it
alone reads and writes the run's files, and the others wait for what it says, for as long as its
process runs. Each of these waits ends as soon as a rank has ended or has said why it stops.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatrain.runtime.host import launched
from megatrain.runtime.rank_board import Board
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.schedule.plan import Plan

T = TypeVar("T")
TIMEOUT_S = 50.0
"""Seconds after which a collective that not all ranks have reached fails."""
_ENDED = "has ended"
_LOOKING_S = 3.0
"""Seconds in which a rank whose connection has closed must turn out to have ended."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks at the processes of the other ranks, while this one waits."""
_LONGEST_PAUSE_S = 0.005
_ALWAYS = timedelta(days=30)
"""How long a collective between steps may take: rank 0 may be writing a large model meanwhile."""
_START = "torchrun --standalone --nproc-per-node {count} -m megatrain train PLAN --out RUN ..."


_all_gather: Callable[[torch.Tensor, torch.Tensor], object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the second is its name before PyTorch 2.13


class RankLost(RunError):
    """Another rank has ended or does not answer. The text names the rank, the op and the lane."""


class Ranks:
    """This process among the ranks of a plan."""

    def __init__(
        self,
        rank: int,
        count: int,
        processes: list[int],
        boards: list[Board] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Use `joined` instead.

        Args:
            rank: the number of this rank, from 0.
            count: the number of ranks.
            processes: the process id of each rank.
            boards: what each rank shows the others. None if they show nothing.
            timeout_s: seconds after which a rank that is stopped counts as lost.
        """
        self.rank, self.count, self._processes = rank, count, processes
        self._boards = boards or [Board() for _ in range(count)]
        self._timeout_s = timeout_s
        self._between: Any = None
        """The group of the collectives between steps; None for the default group."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which leads the run and has its folder."""
        return self.rank == 0

    @property
    def board(self) -> Board:
        """What this rank shows the others."""
        return self._boards[self.rank]

    # ---- in a step ----

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

    # ---- between steps ----

    def values(self, value: object) -> list[Any]:
        """Returns `value` of all ranks, as plain values. Every rank must call this at the same
        point. Raises RankLost if a rank is gone.
        """
        text = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.count, 1, dtype=torch.int64)
        self._finish(
            dist.all_gather(
                list(sizes), torch.tensor([len(text)]), group=self._between, async_op=True
            )
        )
        room = torch.zeros(self.count, int(sizes.max()), dtype=torch.uint8)
        own = torch.zeros_like(room[0])
        own[: len(text)] = text
        self._finish(dist.all_gather(list(room), own, group=self._between, async_op=True))
        return [
            msgspec.json.decode(bytes(row[:size].numpy()))
            for row, size in zip(room, sizes.view(-1).tolist(), strict=True)
        ]

    def meet(self) -> None:
        """Waits until all ranks have come to this point. Raises RankLost if a rank is gone."""
        self.values(None)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Rank 0 goes through the block alone, and then all others do. So one rank fills a cache
        or tidies a folder that the others then find.
        """
        if not self.leads:
            self.meet()
        yield
        if self.leads:
            self.meet()

    def total(self, number: int) -> int:
        """Returns the sum of `number` over all ranks."""
        own = torch.tensor([number])
        found = [torch.zeros_like(own) for _ in range(self.count)]
        self._finish(dist.all_gather(found, own, group=self._between, async_op=True))
        return int(torch.cat(found).sum())

    def send(self, value: object) -> None:
        """Sends `value` of rank 0 to the others, which must call `receive`."""
        self._broadcast(bytearray(msgspec.json.encode(value)))

    def receive(self) -> Any:
        """Returns the value that rank 0 sends, as plain values."""
        return msgspec.json.decode(self._broadcast(None))

    def _broadcast(self, text: bytearray | None) -> bytes:
        size = torch.tensor([len(text or ())])
        self._finish(dist.broadcast(size, 0, group=self._between, async_op=True))
        room = (
            torch.zeros(int(size), dtype=torch.uint8)
            if text is None
            else torch.frombuffer(text, dtype=torch.uint8)
        )
        self._finish(dist.broadcast(room, 0, group=self._between, async_op=True))
        return bytes(room.numpy())

    def gathered(self, own: torch.Tensor) -> torch.Tensor | None:
        """Returns `own` [n], in host memory, of all ranks on rank 0, [count, n], and None on the
        others. Every rank must call this at the same point.
        """
        whole = own.new_empty(self.count, *own.shape) if self.leads else None
        rows = None if whole is None else [_bytes(row) for row in whole]
        self._finish(
            dist.gather(_bytes(own.contiguous()), rows, 0, group=self._between, async_op=True)
        )
        return whole

    def agree(self, what: str, value: str) -> None:
        """Raises UserError, on every rank, unless `value` is the same on all ranks. `what` says
        what it is.
        """
        values = self.values(value)
        other = next((rank for rank, each in enumerate(values) if each != values[0]), None)
        if other is not None:
            raise UserError(
                f"ranks: {what}",
                found=f"{values[other]} on rank {other}",
                allowed=f"{values[0]}, as on rank 0",
                fix="start all ranks with the same plan, settings and version",
            )

    def signalled(self) -> bool:
        """Returns whether a signal has asked any rank to stop (`Board.signalled`)."""
        return any(board.signalled for board in self._boards)

    def _finish(self, work: Any) -> None:
        """Waits for a collective between steps. Raises RankLost if a rank is gone."""
        try:
            self._wait(work)
        except BaseException:
            if not work.is_completed():
                _keep(self._between)
            raise
        try:
            work.wait()
        except RuntimeError as error:
            raise (
                self._lost(f"rank {self.rank}, between steps")
                or RankLost(f"rank {self.rank}, between steps: {str(error).splitlines()[0]}")
            ) from None

    def _wait(self, work: Any) -> None:
        """Returns when `work` has ended or failed. Raises RankLost as soon as a rank is gone."""
        pause, looked, stopped_since = 0.0001, time.monotonic(), 0.0
        while not work.is_completed():
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked < _LOOK_EVERY_S:
                continue
            looked = now
            if error := self._told():
                raise error
            gone = self._gone()
            stopped_since = (stopped_since or now) if gone else 0.0
            ended = any(_ENDED in text for text in gone)
            if gone and (ended or now - stopped_since > self._timeout_s):
                raise RankLost(f"rank {self.rank}, between steps: {' and '.join(gone)}")

    # ---- when something is wrong ----

    @contextlib.contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Ends the collectives of the block when another rank is gone, and then raises RankLost.

        Collectives of NCCL wait for a rank forever, even if its process has ended. So a thread
        looks at the other processes, and aborts the collectives. Those of gloo fail by themselves,
        and the block is not watched. A rank that is only stopped is left to the time limit of
        NCCL, since an abort waits for such a rank.
        """
        if device.type != "cuda":
            yield
            return
        over, found = threading.Event(), list[RankLost]()
        watch = threading.Thread(target=self._watch, args=(over, found), daemon=True)
        watch.start()
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:  # torchrun also sends SIGTERM when a rank ends
            error = failure
        finally:
            over.set()
            watch.join()
        if error is None and not found:
            return
        lost = found[0] if found else self._ended()
        if lost is not None:
            raise lost from None  # what the block raised follows from it
        assert error is not None
        raise error

    def _ended(self) -> RankLost | None:
        """Returns the error to report if a rank has ended or has said why it stops."""
        gone = [text for text in self._gone() if _ENDED in text]
        where = f"rank {self.rank}, {self.board.activity}"
        return self._told() or (RankLost(f"{where}: {' and '.join(gone)}") if gone else None)

    def _watch(self, over: threading.Event, found: list[RankLost]) -> None:
        while not over.wait(_LOOK_EVERY_S):
            error = self._ended()
            if error is not None:
                found.append(error)
                assert dist.group.WORLD is not None
                dist.group.WORLD.abort()
                return

    def stopping(self, error: BaseException) -> None:
        """Tells the others why this rank stops."""
        if isinstance(error, KeyboardInterrupt):
            self.board.error = "interrupted"
        elif isinstance(error, UserError | RunError):
            self.board.error = str(error)
        else:
            self.board.error = f"{type(error).__name__}: {error}"

    def lost(self, op: str) -> RankLost | None:
        """Returns the error to report if the collective `op` failed because another rank is gone,
        is stopped or has not reached it. None if the ranks are all there.
        """
        return self._lost(f"{op} on lane exchange of rank {self.rank}", behind=True)

    def _lost(self, where: str, *, behind: bool = False) -> RankLost | None:
        """A connection closes shortly before its process ends, so this looks for a few seconds."""
        end = time.monotonic() + _LOOKING_S
        while True:
            if error := self._told():
                return error
            if gone := self._gone():
                return RankLost(f"{where}: {' and '.join(gone)}")
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        late = [
            f"{self._name(rank)} has not reached it, {board.activity}"
            for rank, board in enumerate(self._boards)
            if behind and board.collectives < self.board.collectives
        ]
        return RankLost(f"{where}: {' and '.join(late)}") if late else None

    def _told(self) -> RankLost | None:
        """Returns the error of a rank that has said why it stops."""
        for rank, board in enumerate(self._boards):
            if rank != self.rank and (reason := board.error):
                return RankLost(f"{self._name(rank)} has stopped: {reason}")
        return None

    def _gone(self) -> list[str]:
        """Returns a phrase for each other rank that has ended or is stopped."""
        return [
            f"{self._name(rank)} {state}, {self._boards[rank].activity}"
            for rank, process in enumerate(self._processes)
            if rank != self.rank and (state := _state(process))
        ]

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes[rank]})"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a vector. Collectives only move them."""
    return tensor.reshape(-1).view(torch.uint8)


def _keep(group: object) -> None:
    """Never releases `group`. The end of a group of gloo waits for its collectives, and one that
    waits for a stopped rank would keep this process from ending.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _state(process: int) -> str:
    """Returns what is wrong with a process, in words, or nothing."""
    try:
        # the state follows the name, which is in parentheses
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return _ENDED
    return {"Z": _ENDED, "X": _ENDED, "T": "is stopped", "t": "is stopped"}.get(letter, "")


def started_ranks() -> int:
    """Returns the number of ranks that have been started, from the variable `WORLD_SIZE`, which
    torchrun sets. 1 without it. Raises UserError if it is not a number of ranks.
    """
    return launched("WORLD_SIZE", default=1, least=1)


def identity(plan: Plan, *more: object) -> str:
    """Returns a digest of all of `plan` that decides what a step does, and of `more`."""
    blank = msgspec.structs.replace(plan, hardware="", source="", prediction=None)
    text = msgspec.json.encode([blank, str(torch.__version__), *map(repr, more)])
    return hashlib.sha256(text).hexdigest()[:16]


@contextlib.contextmanager
def joined(
    plan: Plan, device: torch.device, *more: object, timeout_s: float | None = None
) -> Iterator[Ranks | None]:
    """Joins the ranks of `plan` and leaves them at the end. None if the plan is for one GPU.

    Args:
        plan: the plan, which must be the same on all ranks.
        device: where collectives find their tensors. A GPU should be this rank's.
        *more: what else must be the same on all ranks, such as settings and seed.
        timeout_s: seconds that a rank waits for the others, at the start and in a collective of a
            step; None for `TIMEOUT_S`.

    If the block raises an error, the other ranks learn of it, and their next collective fails.

    Raises:
        UserError: the ranks are not as many as the plan has GPUs, do not come together, or differ.
    """
    started = started_ranks()
    if started != plan.gpus:
        raise UserError(
            "ranks",
            found=f"{started} (WORLD_SIZE)" if "WORLD_SIZE" in os.environ else started,
            allowed=f"{plan.gpus}, the GPUs of the plan",
            fix=f"start it with `{_START.format(count=plan.gpus)}`"
            if plan.gpus > 1
            else "start it without torchrun, and unset WORLD_SIZE",
        )
    if plan.gpus == 1:
        yield None
        return
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _shared_file() as file:
        own = Board.make(file)
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            there: list[Any] = [None] * plan.gpus
            dist.all_gather_object(there, (os.getpid(), str(file)))
            boards = [
                own if rank == dist.get_rank() else Board.open(Path(path))
                for rank, (_, path) in enumerate(there)
            ]
            between = dist.new_group(backend="gloo", timeout=_ALWAYS)
        except (RuntimeError, ValueError, OSError) as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise UserError(
                "ranks",
                found=f"not all of {plan.gpus} ranks of this host came together"
                f" ({str(error).splitlines()[0]})",
                allowed=f"all within {timeout_s:g} s",
                fix=f"start all with `{_START.format(count=plan.gpus)}`",
            ) from error
        ranks = Ranks(dist.get_rank(), plan.gpus, [pid for pid, _ in there], boards, timeout_s)
        ranks._between = between
        try:
            ranks.meet()
            file.unlink()  # every rank has opened it, and a rank that is killed leaves nothing
            ranks.agree("plan", identity(plan, *more))
            yield ranks
        except BaseException as error:
            ranks.stopping(error)
            raise
        finally:
            dist.destroy_process_group()


@contextlib.contextmanager
def _shared_file() -> Iterator[Path]:
    """Returns a new file, in memory if the host has such a file system. Removes it at the end."""
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
    """Raises UserError if a plan for several GPUs would be executed by one process."""
    if plan.gpus != (1 if ranks is None else ranks.count):
        raise UserError(
            "plan: gpus",
            found=plan.gpus,
            allowed="1 in a single process",
            fix=f"start the ranks with `{_START.format(count=plan.gpus)}`, or plan for one GPU",
        )
