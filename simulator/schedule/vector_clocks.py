"""VectorClocks: the happens-before relation among ops on FIFO lanes.

The vector clock of an op says how many ops of each lane have ended before the op starts. Policies
derive their dependencies from these clocks. `Schedule.check` builds its own clocks to prove the
dependencies correct.

`host.moments:12#3` is part 3 of a buffer. Two parts never overlap, and the whole buffer overlaps
each of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class _ClockedUse:
    """The last ops that touched one buffer, or one part of a buffer. For each lane it keeps only
    the last reader, because earlier readers on the same lane end before that one.
    """

    __slots__ = ("count", "lane", "latest", "readers", "writer")

    def __init__(self) -> None:
        self.writer = self.latest = -1  # the op that wrote last, the op that touched it last
        # the writer's lane, and how many ops of that lane have ended when the writer has
        self.lane = self.count = 0
        # lane -> its last reader since the last write; None if there is none
        self.readers: dict[int, int] | None = None


class VectorClocks:
    """The vector clocks of the ops added so far.

    An op is its index in program order. Lanes are numbered in the order in which they first appear.
    A clock is a list with one count per lane: how many of the lane's ops have ended. The clock of a
    lane only grows. A dependency that the lane has already waited for costs one comparison.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, int] = {}  # name -> number
        self._next: list[list[int]] = []  # lane -> clock of the op that will be added to it next
        self._clocks: list[tuple[int, ...]] = []  # op -> its clock
        self._lane_of: list[int] = []  # op -> lane
        self._ended: list[int] = []  # op -> how many ops of its lane have ended when it has
        # buffer -> its own use, then the uses of the parts, or of the whole, that overlap it
        self._uses: dict[str, list[_ClockedUse]] = {}

    def _lane(self, lane: str) -> int:
        """Returns the number of `lane`. A new lane is added to every clock."""
        index = self._lanes.get(lane)
        if index is None:
            index = self._lanes[lane] = len(self._lanes)
            for clock in self._next:
                clock.append(0)
            self._next.append([0] * (index + 1))
        return index

    def add(self, lane: str, after: Sequence[int]) -> list[int]:
        """Adds an op at the end of `lane` that depends on the ops `after`.

        Returns the necessary dependencies in program order: those of `after` that follow neither
        from the lane's order nor from another dependency.
        """
        return self._add(self._lane(lane), after)

    def append(
        self, lane: str, reads: Sequence[str], writes: Sequence[str], also: int | None = None
    ) -> list[int]:
        """Adds an op at the end of `lane` that waits for the ops that `touch` returns, and for the
        op `also`.

        Returns the necessary dependencies, as `add` does.
        """
        index = self._lane(lane)
        after = self._touch(index, reads, writes)
        if also is not None:
            after.append(also)
        return self._add(index, after)

    def _add(self, index: int, after: Sequence[int]) -> list[int]:
        """Does what `add` does, for the lane with this number."""
        clock, kept = self._next[index], list[int]()
        # The latest op comes first, because it may imply earlier ones.
        for other in sorted(set(after), reverse=True) if len(after) > 1 else after:
            other_lane, ended = self._lane_of[other], self._ended[other]
            # Otherwise the lane already waits for `other`, and for all that `other` waited for.
            if clock[other_lane] < ended:
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
        """Checks whether `first` always ends before `second` starts."""
        lane, clock = self._lane_of[first], self._clocks[second]
        return lane < len(clock) and clock[lane] >= self._ended[first]

    def touch(self, lane: str, reads: Iterable[str], writes: Iterable[str]) -> list[int]:
        """Records the buffers that the next op reads and writes. `add` must then add this op to the
        same lane.

        Returns the earlier ops that must end before it starts: the writers of buffers that it
        reads, and the readers and writers of buffers that it writes. Ops that the lane already
        waits for are left out. An op may occur twice.
        """
        return self._touch(self._lane(lane), reads, writes)

    def _touch(self, index: int, reads: Iterable[str], writes: Iterable[str]) -> list[int]:
        """Does what `touch` does, for the lane with this number."""
        uses, ended, clock = self._uses, self._ended, self._next[index]
        op, found = len(self._clocks), list[int]()
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
        """Returns the last op that touched `buffer`. Raises KeyError if none did."""
        return self._uses[buffer][0].latest

    def touched(self, buffer: str) -> bool:
        """Returns whether an op touched `buffer`."""
        return buffer in self._uses

    def _first_use(self, buffer: str) -> list[_ClockedUse]:
        """Adds a buffer, or a part of one, and returns its entry in `_uses`."""
        own = _ClockedUse()
        found = self._uses[buffer] = [own]
        whole, mark, _ = buffer.partition("#")
        if mark:
            overlapping = self._uses.get(whole) or self._first_use(whole)
            found.append(overlapping[0])
            overlapping.append(own)
        return found
