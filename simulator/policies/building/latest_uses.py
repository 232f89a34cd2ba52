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

    __slots__ = ("others", "readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []
        """The ops that have read it since it was written."""
        self.others: list[_Use] = []
        """The uses of its parts, or of the whole, which overlap it."""


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
        op, waited, after = len(lanes), self._waited[own], list[int]()
        lanes.append(own)
        waited[own] = op
        if also is not None and waited[lanes[also]] < also:
            waited[lanes[also]] = also
            after.append(also)
        for buffer in reads:
            use = uses.get(buffer) or self._first_use(buffer)
            for each in (use, *use.others) if use.others else (use,):
                other = each.writer
                if waited[lanes[other]] < other:
                    waited[lanes[other]] = other
                    after.append(other)
            use.readers.append(op)
        for buffer in writes:
            use = uses.get(buffer) or self._first_use(buffer)
            for each in (use, *use.others) if use.others else (use,):
                for other in (*each.readers, each.writer):
                    if waited[lanes[other]] < other:
                        waited[lanes[other]] = other
                        after.append(other)
            use.writer, use.readers = op, []
        return after

    def _first_use(self, buffer: str) -> _Use:
        """Adds a buffer, or a part of one."""
        own = self._uses[buffer] = _Use()
        whole, mark, _ = buffer.partition("#")
        if mark:
            overlapping = self._uses.get(whole) or self._first_use(whole)
            own.others.append(overlapping)
            overlapping.others.append(own)
        return own
