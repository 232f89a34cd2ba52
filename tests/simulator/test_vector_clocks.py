"""Order against the plain definition: what has ended when an op starts is what its lane and its
dependencies wait for, and what those did.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.simulator.schedule.vector_clocks import VectorClocks

BUFFERS = ("a", "b", "c")
Program = list[tuple[str, list[int], set[str], set[str]]]
"""(lane, places of the ops it waits for, reads, writes)"""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    made: Program = []
    for index in range(draw(st.integers(1, 14))):
        after = draw(st.lists(st.integers(0, index - 1), unique=True, max_size=3)) if index else []
        reads, writes = (draw(st.sets(st.sampled_from(BUFFERS), max_size=2)) for _ in range(2))
        made.append((draw(st.sampled_from(["compute", "h2d", "d2h", "cpu"])), after, reads, writes))
    return made


def ended_before(program: Program) -> list[set[int]]:
    """For every op, all that have ended when it starts."""
    ended: list[set[int]] = []
    for index, (lane, after, _, _) in enumerate(program):
        direct = [other for other in range(index) if program[other][0] == lane] + after
        ended.append(set(direct).union(*(ended[other] for other in direct)))
    return ended


@given(programs())
def test_clocks_are_reachability(program: Program) -> None:
    order, ended = VectorClocks(), ended_before(program)
    for lane, after, _, _ in program:
        order.add(lane, after)
    for second in range(len(program)):
        for first in range(len(program)):
            assert order.precedes(first, second) == (first in ended[second])


def conflicts(program: Program, index: int) -> set[int]:
    """Earlier ops that touch what this one does, one of the two writing."""
    _, _, reads, writes = program[index]
    return {
        other
        for other in range(index)
        if writes & (program[other][2] | program[other][3]) or reads & program[other][3]
    }


@given(programs())
def test_waiting_for_the_named_conflicts_is_waiting_for_all(program: Program) -> None:
    """Of a lane's readers only the last is named; behind it, all of them have ended."""
    order = VectorClocks()
    for index, (lane, _, reads, writes) in enumerate(program):
        order.add(lane, order.touch(lane, reads, writes))
        assert all(order.precedes(other, index) for other in conflicts(program, index))


@given(programs())
def test_a_race_is_a_conflict_that_is_not_waited_for(program: Program) -> None:
    """As `Schedule.check` asks; up to the first one, behind which nothing is promised."""
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


@given(programs())
def test_the_last_op_on_a_buffer(program: Program) -> None:
    order = VectorClocks()
    for index, (lane, _, reads, writes) in enumerate(program):
        order.add(lane, order.touch(lane, reads, writes))
        for buffer in reads | writes:
            assert order.last(buffer) == index


def test_parts_and_wholes_overlap() -> None:
    order = VectorClocks()
    for index, (lane, buffer) in enumerate(
        [("h2d", "a#0"), ("compute", "a#1"), ("cpu", "a"), ("d2h", "a#0")]
    ):
        found = order.touch(lane, [], [buffer])
        assert sorted(found) == [[], [], [0, 1], [0, 2]][index]
        order.add(lane, found)
