"""Board: a block of shared memory in which a rank shows the other ranks of its host what it does.

The rank writes which op each of its lanes is running. The other ranks can read this even if the
rank is stopped or has been killed.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Self

# the layout, in bytes: a counter, a flag, the error, and one line for each lane
_COUNT = slice(0, 8)
_SIGNALLED = 8
_ERROR = slice(16, 1040)
_LANES = 1040
_LANE_BYTES = 128
_MOST_LANES = 12
_BYTES = _LANES + _MOST_LANES * _LANE_BYTES
_WAITING = "exchange"
"""The lane that waits for other ranks. `activity` leaves it out while another lane is busy."""


class Board:
    """The board of one rank. Any thread may write to it."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """Use `make` or `open` instead. Without `memory`, only this process can read the board."""
        self._memory = memory or mmap.mmap(-1, _BYTES)
        self._places: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def make(cls, path: Path) -> Self:
        """Returns an empty board in the file `path`."""
        os.truncate(path, _BYTES)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Returns the board of another rank. Raises OSError if it is on another host."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _BYTES))

    def content(self) -> bytes:
        """Returns a copy of the whole board."""
        return self._memory[:]

    def fill(self, content: bytes) -> None:
        """Replaces the whole board with the `content` of another one."""
        self._memory[:] = content

    @property
    def collectives(self) -> int:
        """Number of collectives that the rank has begun in steps."""
        return int.from_bytes(self._memory[_COUNT], "little")

    @property
    def signalled(self) -> bool:
        """Whether a signal has asked the rank to stop after its step."""
        return bool(self._memory[_SIGNALLED])

    @signalled.setter
    def signalled(self, value: bool) -> None:
        self._memory[_SIGNALLED] = value

    @property
    def error(self) -> str:
        """The reason why the rank stops, as one line; empty while the rank runs."""
        return _text(self._memory[_ERROR])

    @error.setter
    def error(self, text: str) -> None:
        self._memory[_ERROR] = _padded(" ".join(text.split()), _ERROR.stop - _ERROR.start)

    def begin(self, lane: str, op: str) -> None:
        """Shows that `lane` begins `op`."""
        self._memory[self._place(lane)] = _padded(f"{op} on lane {lane}", _LANE_BYTES)
        if lane == _WAITING:
            self._memory[_COUNT] = (self.collectives + 1).to_bytes(8, "little")

    def end(self, lane: str) -> None:
        """Shows that `lane` does nothing."""
        self._memory[self._place(lane)] = bytes(_LANE_BYTES)

    @property
    def activity(self) -> str:
        """What the rank is doing, as a phrase: `in OP on lane LANE and ...`, or `between ops`."""
        starts = range(_LANES, _BYTES, _LANE_BYTES)
        shown = [_text(self._memory[start : start + _LANE_BYTES]) for start in starts]
        ops = [text for text in shown if text]
        computing = [text for text in ops if not text.endswith(f" {_WAITING}")]
        return f"in {' and '.join(computing or ops)}" if ops else "between ops"

    def _place(self, lane: str) -> slice:
        with self._lock:
            number = self._places.setdefault(lane, len(self._places) % _MOST_LANES)
        start = _LANES + number * _LANE_BYTES
        return slice(start, start + _LANE_BYTES)


def _padded(text: str, size: int) -> bytes:
    """Returns `text` in UTF-8, cut or filled with zeros to `size` bytes."""
    return text.encode(errors="replace")[:size].ljust(size, b"\0")


def _text(stored: bytes) -> str:
    return stored.rstrip(b"\0").decode(errors="ignore")
