"""Tests of op ids, of the text form of a schedule, and of `Schedule.check` on broken schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import from_text

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule import (
    CODES,
    LANES,
    Buffer,
    Op,
    OpId,
    Schedule,
    ScheduleError,
    parse_id,
)
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.vector_clocks import VectorClocks

ids = st.builds(
    OpId,
    kind=st.sampled_from(sorted(CODES.values())),
    layer=st.one_of(st.sampled_from(["", "e", "h"]), st.integers(0, 10_000).map(str)),
    phase=st.sampled_from(["", "f", "r", "b", "h"]),
    micro=st.none() | st.integers(0, 10_000),
    chunk=st.none() | st.integers(0, 10_000),
)


@given(ids)
def test_an_op_id_reads_back_from_its_text(op: OpId) -> None:
    if op.layer == "" and op.phase == "h":
        return  # This text would read as layer `h`. Every op with a phase has a layer.
    assert parse_id(str(op)) == op


@given(
    st.text(max_size=12)
    | st.from_regex(r"[A-Z]{1,2}[0-9eh]*[frbh]?(\.m[0-9]*)?(\.c[0-9]*)?", fullmatch=True)
)
def test_other_texts_are_no_op_ids(text: str) -> None:
    try:
        op = parse_id(text)
    except ScheduleError:
        return
    assert parse_id(str(op)) == op


def test_every_id_of_a_real_schedule_reads_back(make_plan: Callable[..., Plan]) -> None:
    schedule = policies.lower(make_plan("k_buffer", tied=True, accumulation=3))
    assert all(str(parse_id(op.id)) == op.id for op in schedule.ops)
    assert {op.kind for op in schedule.ops} <= set(CODES.values())


# ---- text form and digest

words = st.text(
    st.characters(codec="ascii", exclude_characters=" ,=", categories=["L", "N", "P"]),
    min_size=1,
    max_size=8,
)
lists = st.lists(words, max_size=3).map(tuple)
sizes = st.integers(0, 2**50)
buffers = st.builds(Buffer, id=words, bytes=sizes, persistent=st.booleans(), dynamic=st.booleans())
ops = st.builds(
    Op,
    id=ids.map(str),
    lane=st.sampled_from(LANES),
    after=lists,
    reads=lists,
    writes=lists,
    acquires=lists,
    releases=lists,
    offset=sizes,
    bytes=sizes,
    parameters=sizes,
    flops=sizes,
    shape=st.just("") | words,
    high_priority=st.booleans(),
)


@given(
    st.builds(
        Schedule,
        policy=words,
        buffers=st.lists(buffers, max_size=4).map(tuple),
        ops=st.lists(ops, max_size=4).map(tuple),
    )
)
def test_any_schedule_reads_back_from_its_text(schedule: Schedule) -> None:
    again = from_text(schedule.to_text())
    assert again == schedule
    assert again.digest == schedule.digest


@pytest.mark.parametrize("policy", policies.names())
def test_a_lowered_schedule_reads_back_from_its_text(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    schedule = policies.lower(make_plan(policy, accumulation=2))
    assert from_text(schedule.to_text()) == schedule


def test_any_change_changes_the_digest(make_plan: Callable[..., Plan]) -> None:
    schedule = policies.lower(make_plan())
    digests = {schedule.digest}
    for index, op in enumerate(schedule.ops):
        for changes in (
            {"bytes": op.bytes + 1},
            {"flops": op.flops + 1},
            {"shape": "other"},
            {"reads": (*op.reads, "x")},
            {"lane": "other"},
            {"high_priority": not op.high_priority},
        ):
            digests.add(replace(schedule, index, **changes).digest)
    assert len(digests) == 1 + 6 * len(schedule.ops)


# ---- what check() finds


def replace(schedule: Schedule, index: int, **changes: Any) -> Schedule:
    op = msgspec.structs.replace(schedule.ops[index], **changes)
    return msgspec.structs.replace(
        schedule, ops=(*schedule.ops[:index], op, *schedule.ops[index + 1 :])
    )


def each_dependency_removed(schedule: Schedule) -> Iterator[tuple[str, str, Schedule]]:
    for index, op in enumerate(schedule.ops):
        for gone in op.after:
            yield (
                op.id,
                gone,
                replace(schedule, index, after=tuple(other for other in op.after if other != gone)),
            )


VARIATIONS: list[dict[str, Any]] = [
    {},
    {"tied": True, "accumulation": 2, "checkpoint_interval": 2},
    {"accumulation": 3, "checkpoint_interval": 3, "gradient_slots": 1, "gradient_staging": 1},
    {"clipping": "none", "gradient_staging": 0},
    {"clipping": "none", "tied": True, "layers": 1},
    {"clipping": "update", "weights_ahead": 1, "accumulation": 2},
    {"clipping": "layer", "weights_ahead": 1, "tied": True},
    {"clipping": "update", "placement": Placement(host_updated="e,1-2")},
    {"placement": Placement(host_updated="0,2,h")},
    {"accumulation": 2, "micro_batch_group": 2, "placement": Placement(offloaded_inputs="0,1")},
]


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        pytest.param(policy, changes, marks=[pytest.mark.nightly] if nightly else [])
        for policy in policies.names()
        if policy != "sequential"
        for index, changes in enumerate(VARIATIONS)
        # The normal tests have every second variation of the policies with fewer kinds of ops.
        for nightly in (policy != "overlapped" and index % 2 == 1,)
    ],
    ids=str,
)
def test_removing_any_one_dependency_is_a_race(
    make_plan: Callable[..., Plan], policy: str, changes: dict[str, Any]
) -> None:
    schedule = policies.lower(make_plan(policy, **changes))
    schedule.check()
    tried = 0
    for op, gone, broken in each_dependency_removed(schedule):
        with pytest.raises(ScheduleError) as caught:
            broken.check()
        assert (
            op in str(caught.value) or gone in str(caught.value) or "race on" in str(caught.value)
        )
        tried += 1
    assert tried > 0


@pytest.mark.parametrize("changes", VARIATIONS, ids=str)
def test_sequential_needs_every_dependency(
    make_plan: Callable[..., Plan], changes: dict[str, Any]
) -> None:
    """Without any one dependency, two neighboring ops of `sequential` could overlap.

    Some of its dependencies do not prevent a race.
    """
    schedule = policies.lower(make_plan("sequential", **changes))
    place = {op.id: index for index, op in enumerate(schedule.ops)}
    for op, gone, broken in each_dependency_removed(schedule):
        order = VectorClocks()
        for other in broken.ops:
            order.add(other.lane, [place[name] for name in other.after])
        assert not order.precedes(place[gone], place[op])


BUFFERS = (
    Buffer(id="host.weights:0", bytes=64, data="weights", dtype="bf16", persistent=True),
    Buffer(id="device.weights:0", bytes=64, data="weights", dtype="bf16"),
    Buffer(id="device.hidden:0", bytes=64, data="hidden", dtype="bf16"),
    Buffer(id="device.input:0", bytes=64, data="hidden", dtype="bf16", persistent=True),
)
LOAD = Op(
    id="W0.c0",
    lane="h2d",
    reads=("host.weights:0",),
    writes=("device.weights:0",),
    acquires=("device.weights:0",),
    bytes=64,
)
USE = Op(
    id="F0.m0",
    lane="compute",
    after=("W0.c0",),
    reads=("device.weights:0", "device.input:0"),
    writes=("device.hidden:0",),
    acquires=("device.hidden:0",),
    releases=("device.weights:0", "device.hidden:0"),
)
AGAIN = Op(
    id="W1.c0",
    lane="h2d",
    after=("F0.m0",),
    reads=("host.weights:0",),
    writes=("device.weights:0",),
    acquires=("device.weights:0",),
    releases=("device.weights:0",),
    bytes=64,
)


def schedule_of(*ops: Op, buffers: tuple[Buffer, ...] = BUFFERS) -> Schedule:
    return Schedule(policy="test", buffers=buffers, ops=ops)


def but(op: Op, **changes: Any) -> Op:
    return msgspec.structs.replace(op, **changes)


def test_the_schedule_that_the_broken_ones_are_made_from_is_valid() -> None:
    schedule_of(LOAD, USE, AGAIN).check()


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (schedule_of(LOAD, USE, but(AGAIN, id="W0.c0")), "W0.c0: two ops have this id"),
        (
            schedule_of(LOAD, USE, AGAIN, buffers=(*BUFFERS, BUFFERS[1])),
            "device.weights:0: two buffers",
        ),
        (schedule_of(but(LOAD, id="X0"), USE, AGAIN), "op id 'X0'"),
        (
            schedule_of(but(LOAD, id="W0.c00"), but(USE, after=("W0.c00",)), AGAIN),
            "W0.c00: not in its canonical form",
        ),
        (schedule_of(but(LOAD, lane="disk"), USE, AGAIN), "on no lane: 'disk'"),
        (
            schedule_of(LOAD, but(USE, high_priority=True), AGAIN),
            "F0.m0: a high priority on compute",
        ),
        (
            schedule_of(LOAD, but(USE, reads=("device.weights:7",)), AGAIN),
            "F0.m0: unknown buffer device.weights:7",
        ),
        (
            schedule_of(but(LOAD, reads=("host.moments:0",)), USE, AGAIN),
            "W0.c0: unknown buffer host.moments:0",
        ),
        (
            schedule_of(LOAD, but(USE, acquires=("device.hidden:0", "device.hidden:9"))),
            "F0.m0: acquires device.hidden:9, which is not written by it",
        ),
        (
            schedule_of(LOAD, but(USE, releases=("device.hidden:0",)), AGAIN),
            "W1.c0: acquires device.weights:0, which is held",
        ),
        (
            schedule_of(LOAD, but(USE, acquires=("device.hidden:0", "device.hidden:0"))),
            "F0.m0: acquires device.hidden:0, which is held",
        ),
        (
            schedule_of(LOAD, but(USE, releases=("device.weights:0",)), AGAIN),
            "never released: device.hidden:0",
        ),
        (
            schedule_of(but(LOAD, acquires=()), USE, AGAIN),
            "W0.c0: touches device.weights:0, which is not acquired",
        ),
        (
            schedule_of(LOAD, USE, but(AGAIN, acquires=())),
            "W1.c0: touches device.weights:0, which is not acquired",
        ),
        (
            schedule_of(
                LOAD, but(USE, releases=("device.weights:0", "device.hidden:0", "device.weights:0"))
            ),
            "releases device.weights:0, which is not acquired",
        ),
        (
            schedule_of(
                LOAD, but(USE, releases=("device.hidden:0",)), but(AGAIN, acquires=(), after=())
            ),
            "race on device.weights:0: nothing orders F0.m0 before W1.c0",
        ),
        (
            schedule_of(LOAD, but(USE, after=()), AGAIN),
            "race on device.weights:0: nothing orders W0.c0 before F0.m0",
        ),
        (
            schedule_of(LOAD, USE, but(AGAIN, after=())),
            "race on device.weights:0: nothing orders F0.m0 before W1.c0",
        ),
        (
            schedule_of(but(LOAD, after=("F0.m0",)), USE, AGAIN),
            "W0.c0: depends on F0.m0, which is not before it",
        ),
        (
            schedule_of(but(LOAD, after=("W0.c0",)), USE, AGAIN),
            "W0.c0: depends on W0.c0, which is not before it",
        ),
        (
            schedule_of(but(LOAD, after=("F9.m9",)), USE, AGAIN),
            "W0.c0: depends on F9.m9, which is not before it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_schedule_is_found(broken: Schedule, complaint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        broken.check()
    assert complaint in str(caught.value)


@pytest.mark.parametrize("obtain", [policies.verified, policies.executable])
def test_a_policy_with_a_race_is_neither_simulated_nor_executed(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    obtain: Callable[[Plan], Schedule],
) -> None:
    """A schedule with a race is refused, even if the plan has its digest."""
    plan = make_plan("double_buffer")
    _, _, broken = next(each_dependency_removed(policies.lower(plan)))
    monkeypatch.setattr(policies, "lower", lambda _: broken)
    with pytest.raises(UserError, match="policy double_buffer: found race on"):
        obtain(msgspec.structs.replace(plan, digest=broken.digest))


def test_a_slot_taken_while_another_lane_still_reads_it() -> None:
    """An op that acquires a slot must wait for the op that releases it and for every reader.

    Here the op that releases the slot does not wait for the reader.
    """
    reader = but(USE, releases=("device.hidden:0",))
    other = Op(
        id="S0.c0",
        lane="d2h",
        after=("W0.c0",),
        reads=("device.weights:0",),
        writes=("host.copies:1",),
        releases=("device.weights:0",),
    )
    again = Op(
        id="W1.c0",
        lane="h2d",
        after=("S0.c0",),
        reads=("host.weights:0",),
        writes=("device.weights:0",),
        acquires=("device.weights:0",),
    )
    end = Op(
        id="S1.c0",
        lane="d2h",
        after=("W1.c0",),
        reads=("device.weights:0",),
        writes=("host.copies:1",),
        releases=("device.weights:0",),
    )
    buffers = (
        *BUFFERS,
        Buffer(id="host.copies:1", bytes=64, data="weights", dtype="bf16", persistent=True),
    )
    with pytest.raises(
        ScheduleError, match=r"race on device\.weights:0: nothing orders F0\.m0 before W1\.c0"
    ):
        schedule_of(LOAD, reader, other, again, end, buffers=buffers).check()
    schedule_of(
        LOAD, reader, other, but(again, after=("S0.c0", "F0.m0")), end, buffers=buffers
    ).check()


@settings(max_examples=40)
@given(st.data())
def test_a_real_schedule_with_two_ops_exchanged_is_found_or_still_sound(
    make_plan: Callable[..., Plan], data: st.DataObject
) -> None:
    """If an op is moved before an op that it waits for, `check` finds it."""
    schedule = policies.lower(make_plan("double_buffer", accumulation=2))
    waiting = [(index, other) for index, op in enumerate(schedule.ops) for other in op.after]
    index, other = data.draw(st.sampled_from(waiting))
    earlier = next(place for place, op in enumerate(schedule.ops) if op.id == other)
    ops = list(schedule.ops)
    ops[index], ops[earlier] = ops[earlier], ops[index]
    with pytest.raises(ScheduleError):
        msgspec.structs.replace(schedule, ops=tuple(ops)).check()
