"""Order: happens-before among ops on FIFO lanes, by vector clocks: per op, how far each lane must have come before it starts.

`host.moments:12#3` is part 3 of a buffer: two parts never overlap, the whole overlaps each.
Policies derive their dependencies from it and `Schedule.check` proves them with it, each from scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class _Use:
    """Who touched a buffer last. Of a lane's readers only the last counts: its earlier ones end before that."""

    __slots__ = ("count", "lane", "latest", "readers", "writer")

    def __init__(self) -> None:
        self.writer = self.latest = -1  # the op that wrote last, the op that touched it last
        self.lane = self.count = 0  # the writer's lane, and how many ops of that have ended once it has
        self.readers: dict[int, int] | None = None  # lane -> op, since the last write; None where there is none


class Order:
    """The ops so far, by their place in program order. Lanes are what `add` is told.

    A clock is a list of counts, one per lane in the order in which lanes appeared: so many of the lane's ops have ended. That of a lane
    only ever grows, so adding an op costs one comparison a dependency where the lane already waited for that much.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, int] = {}
        self._next: list[list[int]] = []  # lane -> clock of the op that will be added to it next
        self._clocks: list[tuple[int, ...]] = []  # op -> its clock
        self._lane_of: list[int] = []
        self._ended: list[int] = []  # op -> how many ops of its lane have ended once this one has
        self._uses: dict[str, list[_Use]] = {}  # buffer -> its use, then those of the parts or of the whole that overlap it

    def _lane(self, lane: str) -> int:
        index = self._lanes.get(lane)
        if index is None:
            index = self._lanes[lane] = len(self._lanes)
            for clock in self._next:
                clock.append(0)
            self._next.append([0] * (index + 1))
        return index

    def add(self, lane: str, after: Sequence[int]) -> list[int]:
        """Puts an op at the end of `lane`, behind the ops `after`. Returns those of them that are not implied by the lane or by another of them, in order."""
        index = self._lane(lane)
        clock, kept = self._next[index], list[int]()
        for other in sorted(set(after), reverse=True) if len(after) > 1 else after:  # latest first, so none is kept in vain
            other_lane, ended = self._lane_of[other], self._ended[other]
            if clock[other_lane] < ended:  # else an op behind `other` is waited for already, and with it all that `other` waited for
                kept.append(other)
                for key, count in enumerate(self._clocks[other]):
                    if clock[key] < count:
                        clock[key] = count
                clock[other_lane] = ended
        self._clocks.append(tuple(clock))
        clock[index] += 1
        self._lane_of.append(index)
        self._ended.append(clock[index])
        kept.reverse()
        return kept

    def precedes(self, first: int, second: int) -> bool:
        """`first` has ended whenever `second` starts."""
        lane, clock = self._lane_of[first], self._clocks[second]
        return lane < len(clock) and clock[lane] >= self._ended[first]

    def touch(self, lane: str, reads: Iterable[str], writes: Iterable[str]) -> list[int]:
        """Records what the op accesses that will be added next, to `lane`. Returns the earlier ops that must have ended before it starts (write-read,
        read-write, write-write), without those that its lane has waited for already; one may stand there twice.
        """
        uses, ended, index, op, found = self._uses, self._ended, self._lane(lane), len(self._clocks), list[int]()
        clock = self._next[index]
        for buffer in reads:
            overlapping = uses.get(buffer) or self._first_use(buffer)
            for use in overlapping:
                if clock[use.lane] < use.count:
                    found.append(use.writer)
            own = overlapping[0]
            own.latest = op
            if own.readers is None:
                own.readers = {index: op}
            else:
                own.readers[index] = op
        for buffer in writes:
            overlapping = uses.get(buffer) or self._first_use(buffer)
            for use in overlapping:
                if clock[use.lane] < use.count and use.writer != op:
                    found.append(use.writer)
                if use.readers:
                    for reader_lane, reader in use.readers.items():
                        if reader != op and clock[reader_lane] < ended[reader]:
                            found.append(reader)
            own = overlapping[0]
            own.writer = own.latest = op
            own.lane, own.count, own.readers = index, clock[index] + 1, None
        return found

    def last(self, buffer: str) -> int:
        """The last op that touched `buffer`. Raises KeyError where none did."""
        return self._uses[buffer][0].latest

    def _first_use(self, buffer: str) -> list[_Use]:
        own = _Use()
        found = self._uses[buffer] = [own]
        whole, mark, _ = buffer.partition("#")
        if mark:
            overlapping = self._uses.get(whole) or self._first_use(whole)
            found.append(overlapping[0])
            overlapping.append(own)
        return found
