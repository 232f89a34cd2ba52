"""Tests of what an op waits for in a schedule that is only timed."""

from __future__ import annotations

from megatrain.simulator.policies.building.latest_uses import LatestUses
from megatrain.simulator.schedule import LANES

COMPUTE, UP, DOWN = (LANES.index(lane) for lane in ("compute", "h2d", "d2h"))


def test_a_reader_waits_for_the_writer_and_a_writer_for_all_readers() -> None:
    uses = LatestUses()
    assert uses.append(UP, [], ["a"]) == ()
    assert uses.append(COMPUTE, ["a"], []) == (0,)
    assert uses.append(DOWN, ["a"], []) == (0,)
    assert set(uses.append(UP, [], ["a"])) == {1, 2}
    assert uses.append(COMPUTE, ["a"], ["b"]) == (3,)
    assert uses.append(UP, [], ["b"]) == (4,)


def test_of_two_readers_on_a_lane_the_later_is_waited_for() -> None:
    uses = LatestUses()
    uses.append(UP, [], ["a"])
    for _ in range(2):
        uses.append(COMPUTE, ["a"], [])
    assert set(uses.append(DOWN, [], ["a"])) == {0, 2}


def test_what_a_lane_has_waited_for_is_not_waited_for_again() -> None:
    uses = LatestUses()
    uses.append(UP, [], ["a", "b"])
    assert uses.append(COMPUTE, ["a"], []) == (0,)
    assert uses.append(COMPUTE, ["b"], []) == ()


def test_a_part_and_its_whole_wait_for_each_other_and_two_parts_do_not() -> None:
    uses = LatestUses()
    uses.append(UP, [], ["a"])
    assert uses.append(DOWN, ["a#0"], []) == (0,)
    assert uses.append(COMPUTE, [], ["a#1"]) == (0,)
    assert set(uses.append(UP, [], ["a"])) == {1, 2}


def test_another_op_may_be_waited_for_too() -> None:
    uses = LatestUses()
    uses.append(UP, [], ["a"])
    assert uses.append(COMPUTE, [], ["b"], also=0) == (0,)
