"""LatestUses: the ops that an op has to wait for, for a schedule that is only timed.

It finds the same order as `VectorClocks` in less time. Some of the ops that it names follow from
others, which changes no time.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.simulator.schedule import LANES

_LANES = {lane: index for index, lane in enumerate(LANES)}


class _Use:
    """The ops that touched one buffer, or one part of a buffer, last."""

    __slots__ = ("latest", "overlapping", "readers", "writer")

    def __init__(self) -> None:
        self.writer = self.latest = -1
        self.readers: list[int] = []
        """The ops that have read it since it was written."""
        self.overlapping = [self]
        """Its own use, then those of the parts, or of the whole, that overlap it."""


class LatestUses:
    """The last ops that touched each buffer. An op is its index in program order."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}
        self._lane_of: list[int] = []
        self._waited = [[-1] * len(LANES) for _ in LANES]
        """Lane -> for each lane the last of its ops that it has waited for."""

    def append(
        self, lane: str, reads: Iterable[str], writes: Iterable[str], also: int | None = None
    ) -> list[int]:
        """Adds an op at the end of `lane`. Returns earlier ops that must end before it starts.

        These are the writers of what it reads, the readers and writers of what it writes, and
        `also`. Ops for which the lane has waited already are left out.
        """
        uses, lanes, own = self._uses, self._lane_of, _LANES[lane]
        waited, op, after = self._waited[own], len(lanes), list[int]()
        found = [] if also is None else [also]
        for buffer in reads:
            use = uses.get(buffer) or self._first_use(buffer)
            for each in use.overlapping:
                if each.writer >= 0:
                    found.append(each.writer)
            use.readers.append(op)
            use.latest = op
        for buffer in writes:
            use = uses.get(buffer) or self._first_use(buffer)
            for each in use.overlapping:
                if each.readers:
                    found += each.readers
                if each.writer >= 0:
                    found.append(each.writer)
            use.readers = []
            use.writer = use.latest = op
        for other in found:
            if other != op and waited[lanes[other]] < other:
                waited[lanes[other]] = other
                after.append(other)
        waited[own] = op
        lanes.append(own)
        return after

    def last(self, buffer: str) -> int:
        """Returns the last op that touched `buffer`. Raises KeyError if none did."""
        return self._uses[buffer].latest

    def _first_use(self, buffer: str) -> _Use:
        """Adds a buffer, or a part of one."""
        own = self._uses[buffer] = _Use()
        whole, mark, _ = buffer.partition("#")
        if mark:
            overlapping = self._uses.get(whole) or self._first_use(whole)
            own.overlapping.append(overlapping)
            overlapping.overlapping.append(own)
        return own
