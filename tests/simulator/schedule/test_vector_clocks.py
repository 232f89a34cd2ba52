"""Tests of vector clocks against the definition of the order of ops.

When an op starts, the earlier ops of its lane and its dependencies have ended, and so have all ops
that those waited for.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.simulator.schedule.vector_clocks import VectorClocks

BUFFERS = ("a", "b", "c")
Program = list[tuple[str, list[int], set[str], set[str]]]
"""For each op: its lane, the indices of the ops that it waits for, what it reads and writes."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    made: Program = []
    for index in range(draw(st.integers(1, 14))):
        after = draw(st.lists(st.integers(0, index - 1), unique=True, max_size=3)) if index else []
        reads, writes = (draw(st.sets(st.sampled_from(BUFFERS), max_size=2)) for _ in range(2))
        made.append((draw(st.sampled_from(["compute", "h2d", "d2h", "cpu"])), after, reads, writes))
    return made


def ended_before(program: Program) -> list[set[int]]:
    """Returns for every op the ops that have ended when it starts."""
    ended: list[set[int]] = []
    for index, (lane, after, _, _) in enumerate(program):
        direct = [other for other in range(index) if program[other][0] == lane] + after
        ended.append(set(direct).union(*(ended[other] for other in direct)))
    return ended


@given(programs())
def test_clocks_are_reachability(program: Program) -> None:
    """An op precedes another if it has ended when the other starts."""
    order, ended = VectorClocks(), ended_before(program)
    for lane, after, _, _ in program:
        order.add(lane, after)
    for second in range(len(program)):
        for first in range(len(program)):
            assert order.precedes(first, second) == (first in ended[second])


def conflicts(program: Program, index: int) -> set[int]:
    """Returns the earlier ops that write a buffer of this op, or access a buffer that it writes."""
    _, _, reads, writes = program[index]
    return {
        other
        for other in range(index)
        if writes & (program[other][2] | program[other][3]) or reads & program[other][3]
    }


@given(programs())
def test_waiting_for_the_returned_conflicts_is_waiting_for_all(program: Program) -> None:
    """Waiting for the conflicts that `touch` returns is waiting for all conflicts.

    It returns only the last reader of a lane, and earlier readers of that lane have ended too.
    """
    order = VectorClocks()
    for index, (lane, _, reads, writes) in enumerate(program):
        order.add(lane, order.touch(lane, reads, writes))
        assert all(order.precedes(other, index) for other in conflicts(program, index))


@given(programs())
def test_conflicts_that_the_lane_already_waits_for_are_left_out(program: Program) -> None:
    order, last = VectorClocks(), dict[str, int]()
    for index, (lane, _, reads, writes) in enumerate(program):
        found = order.touch(lane, reads, writes)
        if lane in last:
            before = last[lane]
            assert not [op for op in found if op == before or order.precedes(op, before)]
        order.add(lane, found)
        last[lane] = index


@given(programs())
def test_a_race_is_a_conflict_that_is_not_waited_for(program: Program) -> None:
    """A conflict that an op does not wait for is found as a race.

    The comparison ends at the first race, because later results are undefined.
    """
    order, ended = VectorClocks(), ended_before(program)
    for index, (lane, after, reads, writes) in enumerate(program):
        earlier = order.touch(lane, reads, writes)
        order.add(lane, after)
        found = {other for other in earlier if not order.precedes(other, index)}
        races = conflicts(program, index) - ended[index]
        assert found <= races
        assert bool(found) == bool(races)
        if races:
            break


@settings(max_examples=30)
@given(programs())
def test_the_last_op_on_a_buffer(program: Program) -> None:
    order = VectorClocks()
    for index, (lane, _, reads, writes) in enumerate(program):
        order.add(lane, order.touch(lane, reads, writes))
        for buffer in reads | writes:
            assert order.last(buffer) == index


def test_parts_and_wholes_overlap() -> None:
    """An access to a part of a buffer conflicts with an access to the whole buffer."""
    order = VectorClocks()
    for index, (lane, buffer) in enumerate(
        [("h2d", "a#0"), ("compute", "a#1"), ("cpu", "a"), ("d2h", "a#0")]
    ):
        found = order.touch(lane, [], [buffer])
        assert sorted(found) == [[], [], [0, 1], [0, 2]][index]
        order.add(lane, found)
