"""Ranks: what the ranks of a plan exchange, in a step and between steps, and how they notice that
one is lost.

A rank sees the processes of its own host. It knows the ranks of other hosts by the copies of their
boards (`board_mirror.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatrain.runtime.ranks.board_mirror import BoardMirror
from megatrain.runtime.ranks.rank_board import Board
from megatrain.simulator.base.errors import RunError, UserError

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


_all_gather: Callable[..., object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # the second name is from before PyTorch 2.13


class RankLost(RunError):
    """Another rank has ended or does not answer. The text names the rank, the op and the lane."""


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
        *,
        within: Any = None,
        between: Any = None,
        mirror: BoardMirror | None = None,
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
            within: The group of the collectives in steps, or None for the default
                group.
            between: The group of the collectives between steps, or None for the
                default group.
            mirror: The copies of the boards of other hosts. None with one host.
        """
        self.rank, self.count, self._processes = rank, count, processes
        self._boards = boards or [Board() for _ in range(count)]
        self._timeout_s = timeout_s
        self._nodes = nodes or [platform.node()]
        self.hosts = len(self._nodes)
        self._per_host = count // self.hosts
        self._within, self._between, self._mirror = within, between, mirror

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
