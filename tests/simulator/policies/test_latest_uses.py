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


def test_stages_wait_for_parts_and_slots_and_are_waited_for() -> None:
    uses = LatestUses()
    assert uses.append_chunks(COMPUTE, [], ["a"], ["a"], 3) == [(), (), ()]
    stages = [(UP, ["a"], ["s"]), (COMPUTE, ["s", "b"], ["s", "c"]), (DOWN, ["s"], ["a"])]
    found = uses.append_stages(stages, ["a"], {"s": ["s0", "s1"]}, 3)
    assert found is not None
    assert [set(after) for after in found[:3]] == [{0}, {3}, {0, 4}]
    assert found[3:6] == [(1,), (6,), (7,)]
    assert set(found[6]) == {2, 4, 5}  # a part, and the slot of two rounds before
    assert found[7:] == [(9,), (10,)]
    assert uses.append_chunks(UP, ["a"], ["w"], ["a"], 3) == [(), (8,), (11,)]
    assert uses.append(DOWN, [], ["b"]) == ()  # has waited for the last round
    assert uses.append(UP, [], ["c"]) == (10,)


def test_buffers_whose_parts_are_touched_one_by_one_pass_no_stages() -> None:
    uses = LatestUses()
    uses.append(UP, ["a#0"], [])
    stages = [(UP, ["a"], ["s"]), (DOWN, ["s"], ["a"])]
    assert uses.append_stages(stages, ["a"], {"s": ["s0"]}, 2) is None
    assert len(uses.lanes) == 1


PARTS = 3
names = st.lists(st.sampled_from("abcd"), max_size=2, unique=True)
steps = st.tuples(
    st.sampled_from([COMPUTE, UP, DOWN]),
    names,
    names,
    st.sampled_from(["whole", "part", "run", "stages"]),
)


@given(
    program=st.lists(steps, min_size=1, max_size=12),
    cut=st.sets(st.sampled_from("abc")),
    durations=st.lists(st.integers(1, 9), min_size=36 * PARTS, max_size=36 * PARTS),
)
def test_a_run_over_parts_takes_as_long_as_its_ops(
    program: list[tuple[int, list[str], list[str], str]], cut: set[str], durations: list[int]
) -> None:
    """A run is an op for each part of the buffers `cut`. The buffers that it does not cut are
    touched as a whole. In stages, each part is read into one of two slots, changed there by an op
    that touches whole buffers, too, and written.
    """

    def ends(*, together: bool) -> list[int]:
        uses, found, lanes, lane_of = LatestUses(), list[int](), list[int](), list[int]()
        for lane, reads, writes, how in program:
            parted = cut & {*reads, *writes}

            def part(names: list[str], number: int, parted: set[str] = parted) -> list[str]:
                return [f"{name}#{number}" if name in parted else name for name in names]

            stages = [
                (UP, [*parted], ["slot"]),
                (COMPUTE, ["slot", *({*reads} - cut)], ["slot", *({*writes} - {*reads} - cut)]),
                (DOWN, ["slot"], [*parted]),
            ]
            if how == "whole":
                after = [uses.append(lane, reads, writes)]
            elif how == "part":
                after = [uses.append(lane, part(reads, 1), part(writes, 1))]
            elif how == "stages":
                every = None
                if together:
                    every = uses.append_stages(stages, parted, {"slot": ["s0", "s1"]}, PARTS)
                after = every or [
                    uses.append(
                        each,
                        *(
                            [f"s{number % 2}" if name == "slot" else name for name in names]
                            for names in (part(read, number), part(written, number))
                        ),
                    )
                    for number in range(PARTS)
                    for each, read, written in stages
                ]
                lane_of = [each for each, _, _ in stages] * PARTS
            elif together:
                after = uses.append_chunks(lane, reads, writes, parted, PARTS)
            else:
                after = [
                    uses.append(lane, part(reads, number), part(writes, number))
                    for number in range(PARTS)
                ]
            lane_of = lane_of if how == "stages" else [lane] * len(after)
            for lane, awaited in zip(lane_of, after, strict=True):
                own = [end for end, other in zip(found, lanes, strict=True) if other == lane]
                start = max([0, *own, *(found[other] for other in awaited)])
                found.append(start + durations[len(found)])
                lanes.append(lane)
        return found

    assert ends(together=True) == ends(together=False)
