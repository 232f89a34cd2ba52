"""Order: happens-before among ops on FIFO lanes, by vector clocks: per op, how far each lane must have come before it starts.

`host.moments:12#3` is part 3 of a buffer: two parts never overlap, the whole overlaps each.
Policies derive their dependencies from it and `Schedule.check` proves them with it, each from scratch.
"""

from __future__ import annotations

from collections.abc import Iterable


class Order:
    """The ops so far. Lanes are what `add` is told; an op is named by its id.

    A clock is a list of counts, one per lane in the order in which lanes appeared: so many of the lane's ops have ended. That of a lane
    only ever grows, so adding an op costs one comparison a dependency where the lane already waited for that much.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, int] = {}
        self._next: list[list[int]] = []  # lane -> clock of the op that will be added to it next
        self._clock: dict[str, tuple[int, ...]] = {}
        self._place: dict[str, tuple[int, int]] = {}  # op -> (lane, how many ops of it have ended once this one has)
        self._last_write: dict[str, str] = {}
        self._parts: dict[str, dict[str, None]] = {}  # whole -> parts of it that were touched, in order
        self._reads_since: dict[str, dict[int, str]] = {}  # buffer -> lane -> its last reader: the lane's earlier ones end before that

    def _lane(self, lane: str) -> int:
        index = self._lanes.get(lane)
        if index is None:
            index = self._lanes[lane] = len(self._lanes)
            for clock in self._next:
                clock.append(0)
            self._next.append([0] * (index + 1))
        return index

    def add(self, op: str, lane: str, after: Iterable[str]) -> None:
        """Puts `op` at the end of `lane`, behind the ops `after`."""
        index = self._lane(lane)
        clock = self._next[index]
        for other in after:
            other_lane, ended = self._place[other]
            if clock[other_lane] < ended:  # else an op behind `other` is waited for already, and with it all that `other` waited for
                for key, count in enumerate(self._clock[other]):
                    if clock[key] < count:
                        clock[key] = count
                clock[other_lane] = ended
        self._clock[op] = tuple(clock)
        clock[index] += 1
        self._place[op] = (index, clock[index])

    def precedes(self, first: str, second: str) -> bool:
        """`first` has ended whenever `second` starts."""
        lane, ended = self._place[first]
        clock = self._clock[second]
        return lane < len(clock) and clock[lane] >= ended

    def not_awaited(self, lane: str, ops: Iterable[str]) -> list[str]:
        """Of `ops`, those that may still run when the op starts that will be added to `lane` next, unless that waits for them."""
        clock, place = self._next[self._lane(lane)], self._place
        return [op for op in ops if clock[place[op][0]] < place[op][1]]

    def conflicts(self, reads: Iterable[str], writes: Iterable[str]) -> list[tuple[str, str]]:
        """Earlier ops, each with the buffer, that an op with these accesses must wait for: write-read, read-write, write-write.

        Of the readers of a lane, only the last.
        """
        last_write, reads_since = self._last_write, self._reads_since
        if self._parts:
            reads, writes = self._overlapping(reads), self._overlapping(writes)
        found = [(last_write[buffer], buffer) for buffer in reads if buffer in last_write]
        for buffer in writes:
            if buffer in reads_since:
                found += [(reader, buffer) for reader in reads_since[buffer].values()]
            if buffer in last_write:
                found.append((last_write[buffer], buffer))
        return found

    def _overlapping(self, buffers: Iterable[str]) -> list[str]:
        """Names under which earlier ops may have touched the same memory: a part's own and its whole's, a whole's own and its parts'."""
        names = []
        for buffer in buffers:
            names.append(buffer)
            if buffer in self._parts:
                names += self._parts[buffer]
            elif "#" in buffer:
                names.append(buffer.partition("#")[0])
        return names

    def touch(self, op: str, reads: Iterable[str], writes: Iterable[str]) -> None:
        """Records the accesses of `op`."""
        lane, _ = self._place[op]
        for buffer in (*reads, *writes):
            if "#" in buffer:
                self._parts.setdefault(buffer.partition("#")[0], {})[buffer] = None
        for buffer in reads:
            readers = self._reads_since.get(buffer)
            if readers is None:
                self._reads_since[buffer] = {lane: op}
            else:
                readers[lane] = op
        for buffer in writes:
            self._last_write[buffer] = op
            self._reads_since.pop(buffer, None)
