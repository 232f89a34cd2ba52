"""Tests of what an op waits for in a schedule that is only timed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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


PARTS = 3
names = st.lists(st.sampled_from("abcd"), max_size=2, unique=True)
steps = st.tuples(
    st.sampled_from([COMPUTE, UP, DOWN]), names, names, st.sampled_from(["whole", "part", "run"])
)


@given(
    program=st.lists(steps, min_size=1, max_size=12),
    cut=st.sets(st.sampled_from("abc")),
    durations=st.lists(st.integers(1, 9), min_size=12 * PARTS, max_size=12 * PARTS),
)
def test_a_run_over_parts_takes_as_long_as_its_ops(
    program: list[tuple[int, list[str], list[str], str]], cut: set[str], durations: list[int]
) -> None:
    """A run is an op for each part of the buffers `cut`. The buffers that it does not cut are
    touched as a whole.
    """

    def ends(*, together: bool) -> list[int]:
        uses, found, lanes = LatestUses(), list[int](), list[int]()
        for lane, reads, writes, how in program:
            parted = cut & {*reads, *writes}

            def part(names: list[str], number: int, parted: set[str] = parted) -> list[str]:
                return [f"{name}#{number}" if name in parted else name for name in names]

            if how == "whole":
                after = [uses.append(lane, reads, writes)]
            elif how == "part":
                after = [uses.append(lane, part(reads, 1), part(writes, 1))]
            elif together:
                after = uses.append_chunks(lane, reads, writes, parted, PARTS)
            else:
                after = [
                    uses.append(lane, part(reads, number), part(writes, number))
                    for number in range(PARTS)
                ]
            for awaited in after:
                own = [end for end, other in zip(found, lanes, strict=True) if other == lane]
                start = max([0, *own, *(found[other] for other in awaited)])
                found.append(start + durations[len(found)])
                lanes.append(lane)
        return found

    assert ends(together=True) == ends(together=False)
