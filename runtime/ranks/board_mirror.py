"""BoardMirror: copies the boards of ranks between hosts.

Ranks of one host read each other's boards in shared memory (`rank_board.py`). For the ranks of
other hosts, each rank writes a copy of its board to the store of `torch.distributed` every second,
and reads theirs. A rank whose copies no longer change has ended, is stopped, or is cut off.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping

import torch.distributed as dist

from megatrain.runtime.ranks.rank_board import Board

_EVERY_S = 1.0
"""Seconds between two copies."""
_FLUSH_S = 2.0
"""The longest time that `flush` waits, because the host of the store may be gone."""


class BoardMirror:
    """Keeps local copies of the boards of ranks of other hosts up to date, in a thread."""

    def __init__(
        self, store: dist.Store, rank: int, own: Board, others: Mapping[int, Board]
    ) -> None:
        """Writes the first copy of the rank's own board.

        Args:
            store: The store, in which the keys are the numbers of ranks.
            rank: The number of this rank.
            own: Its board.
            others: Rank -> the board to fill, for each rank of another host.
        """
        self._store, self._rank, self._own, self._others = store, rank, own, others
        self._count = 0
        self._shown: dict[int, bytes] = {}
        self._heard = dict.fromkeys(others, time.monotonic())
        self._over, self._wake, self._written = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._copy_boards, daemon=True)
        self._write()

    def start(self) -> None:
        """Begins to copy. All ranks must have made their mirrors."""
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._thread.start()

    def stop(self) -> None:
        """Ends the copies. A copy that does not end is left alone."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_FLUSH_S)

    def flush(self) -> None:
        """Writes the rank's own board now, and returns when it is written or after 2 seconds."""
        self._written.clear()
        self._wake.set()
        self._written.wait(_FLUSH_S)

    def silence_s(self, rank: int) -> float:
        """Returns the seconds since a new copy of the board of `rank` was read."""
        return time.monotonic() - self._heard[rank]

    def _copy_boards(self) -> None:
        keys = [str(rank) for rank in self._others]
        while not self._over.is_set():
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            # the process that serves the store may have ended, and then all ranks are silent
            with contextlib.suppress(RuntimeError):
                self._write()
                self._written.set()
                for rank, copy in zip(self._others, self._store.multi_get(keys), strict=True):
                    if self._shown.get(rank) != copy:
                        self._shown[rank], self._heard[rank] = copy, time.monotonic()
                        self._others[rank].fill(copy[8:])
        # `flush` may have returned for a copy that was made before the rank's last words
        with contextlib.suppress(RuntimeError):
            self._write()

    def _write(self) -> None:
        self._count += 1  # so that a board that does not change is heard, too
        copy = self._count.to_bytes(8, "little") + self._own.content()
        self._store.set(str(self._rank), copy)  # type: ignore[arg-type]  # the stub has no bytes
