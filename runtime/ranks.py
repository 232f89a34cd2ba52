"""Ranks: the processes that train together on several GPUs, one for each GPU.

`torchrun` starts them, on one host or on several. They communicate through `torch.distributed`:
with gloo on the CPU and with NCCL between GPUs.

In a step, an op waits at most `TIMEOUT_S` seconds for other ranks, and on GPUs up to
`NEW_TIMEOUT_S` seconds in the first steps. Between steps, only rank 0 reads
and writes the run's files. The other ranks wait for its messages as long as its process runs. Every
wait ends early when a rank has ended or has reported why it stops.

A rank sees the processes of its own host. It knows the ranks of other hosts by the copies of their
boards (`board_mirror.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from megatrain.runtime.board_mirror import BoardMirror
from megatrain.runtime.host import torchrun_variable
from megatrain.runtime.rank_board import Board
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.schedule.plan import Plan

T = TypeVar("T")
TIMEOUT_S = 50.0
"""Seconds after which a collective fails if not all ranks have reached it."""
NEW_TIMEOUT_S = 600.0
"""Seconds without a new op after which a rank hangs while ops run for the first times, and layers
are compiled. Without a compile cache, an op may take minutes then."""
_ENDED = "has ended"
_SILENT = "does not answer"
_LOOKING_S = 3.0
"""Seconds to wait for the process of a rank to end after its connection has closed."""
_SILENT_S = 4.0
"""Seconds without a new copy of its board after which a rank of another host does not answer."""
_LOOK_EVERY_S = 0.5
"""Seconds between two checks of the other ranks' processes while this rank waits."""
_LONGEST_PAUSE_S = 0.005
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


_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the second name is from before PyTorch 2.13


class RankLost(RunError):
    """Another rank has ended or does not answer. The text names the rank, the op and the lane."""


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


class Ranks:
    """The ranks of a plan, as seen by one of them: the rank of this process."""

    def __init__(
        self,
        rank: int,
        count: int,
        processes: list[int],
        boards: list[Board] | None = None,
        timeout_s: float = TIMEOUT_S,
        nodes: list[str] | None = None,
    ) -> None:
        """Use `joined` instead.

        Args:
            rank: The number of this rank, from 0.
            count: The number of ranks.
            processes: The process id of each rank.
            boards: The board of each rank. None means boards that only this
                process can read.
            timeout_s: Seconds after which a stopped process counts as lost.
            nodes: The name of each host. Each has the same number of ranks. None
                means one host.
        """
        self.rank, self.count, self._processes = rank, count, processes
        self._boards = boards or [Board() for _ in range(count)]
        self._timeout_s = timeout_s
        self._nodes = nodes or [platform.node()]
        self.hosts = len(self._nodes)
        self._per_host = count // self.hosts
        self._mirror: BoardMirror | None = None
        """The copies of the boards of other hosts. None with one host."""
        self._within: Any = None
        """The group of the collectives in steps, or None for the default group."""
        self._between: Any = None
        """The group of the collectives between steps, or None for the default group."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone reads and writes the run folder."""
        return self.rank == 0

    @property
    def board(self) -> Board:
        """The board of this rank."""
        return self._boards[self.rank]

    def host_of(self, rank: int) -> int:
        """Returns the number of the host of `rank`."""
        return rank // self._per_host

    # ---- in a step ----

    def exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Sends row q of `sent` [count, part] to rank q, and writes the row from rank q to row q of
        `received` [count, part] (all-to-all).
        """
        dist.all_to_all_single(_bytes(received), _bytes(sent), group=self._within)

    def gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        """Writes `own` [n] of each rank q to row q of `received` [count, n] (all-gather). `own` may
        be the row of this rank.
        """
        _all_gather(_bytes(received), _bytes(own), group=self._within)

    # ---- between steps ----

    def values(self, value: object) -> list[Any]:
        """Returns `value` of every rank, in the order of the ranks, decoded from JSON. Every rank
        must call this at the same point. Raises RankLost if a rank is gone.
        """
        text = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.count, 1, dtype=torch.int64)
        self._finish(
            dist.all_gather(
                list(sizes), torch.tensor([len(text)]), group=self._between, async_op=True
            )
        )
        received = torch.zeros(self.count, int(sizes.max()), dtype=torch.uint8)
        own = torch.zeros_like(received[0])
        own[: len(text)] = text
        self._finish(dist.all_gather(list(received), own, group=self._between, async_op=True))
        return [
            msgspec.json.decode(bytes(row[:size].numpy()))
            for row, size in zip(received, sizes.view(-1).tolist(), strict=True)
        ]

    def meet(self) -> None:
        """Waits until all ranks have called this (barrier). Raises RankLost if a rank is gone."""
        self.values(None)

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Runs the block on rank 0 first, and then on all other ranks at the same time. Use it for
        a block that fills a cache or cleans a folder, so the other ranks find the result.

        With several hosts, the first rank of each other host follows rank 0, because a cache may be
        on a disk of the host. The other ranks are last.
        """
        last = min(self.hosts, 2)
        first_of_host = self.rank % self._per_host == 0
        turn = 0 if self.leads else 1 if first_of_host else last
        for _ in range(turn):
            self.meet()
        yield
        for _ in range(last - turn):
            self.meet()

    def total(self, number: int) -> int:
        """Returns the sum of `number` over all ranks."""
        own = torch.tensor([number])
        numbers = [torch.zeros_like(own) for _ in range(self.count)]
        self._finish(dist.all_gather(numbers, own, group=self._between, async_op=True))
        return int(torch.cat(numbers).sum())

    def send(self, value: object) -> None:
        """Sends `value` from rank 0 to the other ranks, which must call `receive`."""
        self._broadcast(bytearray(msgspec.json.encode(value)))

    def receive(self) -> Any:
        """Returns the value that rank 0 sends, decoded from JSON."""
        return msgspec.json.decode(self._broadcast(None))

    def _broadcast(self, text: bytearray | None) -> bytes:
        size = torch.tensor([len(text or ())])
        self._finish(dist.broadcast(size, 0, group=self._between, async_op=True))
        received = (
            torch.zeros(int(size), dtype=torch.uint8)
            if text is None
            else torch.frombuffer(text, dtype=torch.uint8)
        )
        self._finish(dist.broadcast(received, 0, group=self._between, async_op=True))
        return bytes(received.numpy())

    def gathered(self, own: torch.Tensor) -> torch.Tensor | None:
        """Returns `own` [n] of all ranks as one tensor [count, n] on rank 0, and None on the other
        ranks (gather). `own` may be on any device. The result is in host memory. Every rank must
        call this at the same point.
        """
        own = own.cpu()
        whole = own.new_empty(self.count, *own.shape) if self.leads else None
        rows = None if whole is None else [_bytes(row) for row in whole]
        self._finish(
            dist.gather(_bytes(own.contiguous()), rows, 0, group=self._between, async_op=True)
        )
        return whole

    def agree(
        self,
        named: Mapping[str, str],
        fix: str = "start all ranks with the same plan, settings and version",
    ) -> None:
        """Raises UserError on every rank unless `named` is the same on all ranks.

        Args:
            named: Name of a value -> the value. The error names the first that differs.
            fix: What the user can do, for the error.
        """
        values: list[dict[str, str]] = self.values(named)
        for rank, other in enumerate(values):
            for name in {**values[0], **other}:
                if other.get(name) != values[0].get(name):
                    raise UserError(
                        f"ranks: {name}",
                        found=f"{other.get(name, 'none')} on rank {rank}",
                        allowed=f"{values[0].get(name, 'none')}, as on rank 0",
                        fix=fix,
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
                _never_release(self._between)
            raise
        try:
            work.wait()
        except RuntimeError as error:
            raise (
                self._rank_lost(f"rank {self.rank}, between steps")
                or RankLost(f"rank {self.rank}, between steps: {str(error).splitlines()[0]}")
            ) from None

    def _wait(self, work: Any) -> None:
        """Waits until `work` has ended or failed. Raises RankLost as soon as a rank is gone."""
        pause, looked, stopped_since = 0.0001, time.monotonic(), 0.0
        while not work.is_completed():
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked < _LOOK_EVERY_S:
                continue
            looked = now
            if error := self._reported():
                raise error
            gone = self._lost_ranks()
            stopped_since = (stopped_since or now) if gone else 0.0
            ended = any(_ENDED in text for text in gone)
            if gone and (ended or now - stopped_since > self._timeout_s):
                raise RankLost(f"rank {self.rank}, between steps: {' and '.join(gone)}")

    # ---- when something is wrong ----

    @contextlib.contextmanager
    def watched(self, device: torch.device, *, new: bool = False) -> Iterator[None]:
        """Aborts the collectives of the block when another rank has ended, and then raises
        RankLost. If a rank is stopped or hangs, prints the error and ends this process.

        A collective of NCCL waits for a rank forever, even if the process of the rank has ended. So
        a thread checks the other ranks. It aborts the collectives if a process has ended. An abort
        would wait for a rank that is stopped or hangs, and so would the end of the block. So the
        thread ends this process in that case. The run folder is usable after any such end.

        A collective of gloo fails by itself, so without CUDA there is no such thread.

        Args:
            device: The device of this rank.
            new: Whether the block is one of the first with its ops. A rank may then be late for
                `NEW_TIMEOUT_S`.
        """
        if device.type != "cuda":
            yield
            return
        over, errors = threading.Event(), list[RankLost]()
        late_s = max(self._timeout_s, NEW_TIMEOUT_S if new else 0.0)
        watch = threading.Thread(target=self._watch, args=(over, errors, late_s), daemon=True)
        watch.start()
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:  # includes an interruption: torchrun sends SIGTERM
            error = failure
        finally:
            over.set()
            watch.join()
        if error is None and not errors:
            return
        lost = errors[0] if errors else self._ended_or_reported()
        if lost is not None:
            raise lost from None  # it caused the error of the block
        assert error is not None
        raise error

    def _ended_or_reported(self) -> RankLost | None:
        """Returns the error to report if a rank has ended or has reported why it stops."""
        gone = [text for text in self._lost_ranks() if _ENDED in text]
        where = f"rank {self.rank}, {self.board.activity}"
        return self._reported() or (RankLost(f"{where}: {' and '.join(gone)}") if gone else None)

    def _watch(self, over: threading.Event, errors: list[RankLost], late_s: float) -> None:
        """Aborts the collectives when a rank has ended, and appends the error to `errors`. Ends
        this process when a rank has been stopped for the time limit, or late for `late_s`.
        """
        silent: dict[int, tuple[object, float]] = {}  # what a rank showed, and since when
        while not over.wait(_LOOK_EVERY_S):
            error = self._ended_or_reported()
            if error is not None:
                errors.append(error)
                self._within.abort()
                return
            now = time.monotonic()
            for rank, board in enumerate(self._boards):
                shown = (board.collectives, board.activity, state := self._state_of(rank))
                waits = state or board.collectives < self.board.collectives
                if rank == self.rank or not waits or silent.get(rank, ("", 0.0))[0] != shown:
                    silent[rank] = (shown, now)
                elif now - silent[rank][1] > (self._timeout_s if state else late_s):
                    where = f"rank {self.rank}, {self.board.activity}"
                    state = state or "hangs"
                    _end_process(RankLost(f"{where}: {self.name(rank)} {state}, {board.activity}"))
                    return

    def stopping(self, error: BaseException) -> None:
        """Shows the other ranks that this rank stops because of `error`."""
        if isinstance(error, KeyboardInterrupt):
            self.board.error = "interrupted"
        elif isinstance(error, UserError | RunError):
            self.board.error = str(error)
        else:
            self.board.error = f"{type(error).__name__}: {error}"
        if self._mirror is not None:
            self._mirror.flush()

    def lost(self, op: str) -> RankLost | None:
        """Returns the error to report if the collective `op` failed because another rank has ended,
        is stopped or has not reached `op`. Returns None if all ranks have reached it.
        """
        return self._rank_lost(f"{op} on lane exchange of rank {self.rank}", behind=True)

    def _rank_lost(self, where: str, *, behind: bool = False) -> RankLost | None:
        """Returns the error to report after a failure at `where`, or None if no rank is lost. With
        `behind`, a rank that has begun fewer collectives than this rank counts as lost.

        A connection closes shortly before its process ends, so this checks for a few seconds. A
        rank of another host is lost when its board was silent for some seconds.
        """
        end = time.monotonic() + _LOOKING_S + (_SILENT_S if self.hosts > 1 else 0)
        while True:
            if error := self._reported():
                return error
            if gone := self._lost_ranks():
                return RankLost(f"{where}: {' and '.join(gone)}")
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        late = [
            f"{self.name(rank)} has not reached it, {board.activity}"
            for rank, board in enumerate(self._boards)
            if behind and board.collectives < self.board.collectives
        ]
        return RankLost(f"{where}: {' and '.join(late)}") if late else None

    def _reported(self) -> RankLost | None:
        """Returns the error to report if a rank has reported why it stops, and otherwise None."""
        for rank, board in enumerate(self._boards):
            if rank != self.rank and (reason := board.error):
                return RankLost(f"{self.name(rank)} has stopped: {reason}")
        return None

    def _lost_ranks(self) -> list[str]:
        """Returns a description of each other rank that has ended or is stopped."""
        return [
            f"{self.name(rank)} {state}, {self._boards[rank].activity}"
            for rank in range(self.count)
            if rank != self.rank and (state := self._state_of(rank))
        ]

    def _state_of(self, rank: int) -> str:
        """Returns the state of a rank as `_state` does. A rank of another host `does not answer` if
        no new copy of its board arrives.
        """
        if self.host_of(rank) == self.host_of(self.rank):
            return _state(self._processes[rank])
        silent = self._mirror is not None and self._mirror.silence_s(rank) > _SILENT_S
        return _SILENT if silent else ""

    def name(self, rank: int) -> str:
        """Returns, for messages, a rank with its process and, if there are several, its host."""
        host = self.host_of(rank)
        where = f" on host {host}, {self._nodes[host]}" if self.hosts > 1 else ""
        return f"rank {rank} (process {self._processes[rank]}{where})"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor as a vector, since collectives only move bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _end_process(error: RunError) -> None:
    """Prints `error` as every program of this package does, and ends this process at once."""
    with contextlib.suppress(OSError):  # the terminal may have been closed
        sys.stderr.write(f"megatrain: {error}\n")
        sys.stderr.flush()
    os._exit(error.status)


def _never_release(group: object) -> None:
    """Keeps `group` alive until the process ends. The destructor of a gloo group waits for its
    collectives, so a collective that waits for a stopped rank would keep this process from ending.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _state(process: int) -> str:
    """Returns `has ended` or `is stopped`, or an empty string for a process that runs."""
    try:
        # the state follows the name, which is in parentheses
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return _ENDED
    return {"Z": _ENDED, "X": _ENDED, "T": "is stopped", "t": "is stopped"}.get(letter, "")


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
            ranks = Ranks(
                dist.get_rank(),
                plan.gpus,
                processes,
                _opened(plan, own, files),
                timeout_s,
                nodes[:: plan.gpus_per_host],
            )
            ranks._mirror = _mirror(ranks, files[0], timeout_s)
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
        ranks._within, ranks._between = within, between
        try:
            ranks.meet()
            # every rank has opened it, and now a rank that is killed leaves no file
            file.unlink()
            if ranks._mirror is not None:
                ranks._mirror.start()
            ranks.agree(identity(plan, *more))
            yield ranks
        except BaseException as error:
            ranks.stopping(error)
            raise
        finally:
            if ranks._mirror is not None:
                ranks._mirror.stop()
            dist.destroy_process_group()


def _mirror(ranks: Ranks, name: str, timeout_s: float) -> BoardMirror | None:
    """Returns the copies of the boards of other hosts, or None with one host.

    They are under `name` in the store that torchrun or rank 0 serves. Raises RuntimeError if the
    store cannot be reached.
    """
    if ranks.hosts == 1:
        return None
    # a connection of its own, because a thread that waits for the store blocks a connection
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    own = ranks.host_of(ranks.rank)
    others = {rank: board for rank, board in enumerate(ranks._boards) if ranks.host_of(rank) != own}
    return BoardMirror(dist.PrefixStore(name, store), ranks.rank, ranks.board, others)


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
