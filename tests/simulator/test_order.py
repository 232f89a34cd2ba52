"""Order against the plain definition: what has ended when an op starts is what its lane and its dependencies wait for, and what those did."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.simulator.order import Order

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
    order, ended = Order(), ended_before(program)
    names = [str(index) for index in range(len(program))]
    for index, (lane, after, _, _) in enumerate(program):
        awaited_by_lane = set().union(*({other, *ended[other]} for other in range(index) if program[other][0] == lane))
        assert order.not_awaited(lane, names[:index]) == [names[other] for other in range(index) if other not in awaited_by_lane]
        order.add(names[index], lane, [names[other] for other in after])
    for second in range(len(program)):
        for first in range(len(program)):
            assert order.precedes(names[first], names[second]) == (first in ended[second])


@given(programs())
def test_waiting_for_the_named_conflicts_is_waiting_for_all(program: Program) -> None:
    """Of a lane's readers only the last is named; behind it, all of them have ended."""
    order = Order()
    for index, (lane, _, reads, writes) in enumerate(program):
        named = {other for other, _ in order.conflicts(reads, writes)}
        order.add(str(index), lane, sorted(named))
        for other, (_, _, other_reads, other_writes) in enumerate(program[:index]):
            if writes & (other_reads | other_writes) or reads & other_writes:
                assert order.precedes(str(other), str(index))
        order.touch(str(index), reads, writes)
