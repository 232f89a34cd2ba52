"""Tests of the evaluator and the bounds, on schedules small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megatrain.simulator.costs import Replayed
from megatrain.simulator.engine.evaluator import bounds, evaluate
from megatrain.simulator.schedule import Op, Schedule, ScheduleError
from megatrain.simulator.schedule.timeline import Span, Timeline


def costs(durations: Mapping[str, int], dispatch_ns: Mapping[str, int] | None = None) -> Replayed:
    model = Replayed(
        Timeline(
            name="measured",
            digest="",
            spans=tuple(
                Span(op=op, lane="cpu", start_ns=0, end_ns=time) for op, time in durations.items()
            ),
        )
    )
    model.dispatch_ns = dispatch_ns or {}
    return model


PIPELINE = Schedule(
    policy="test",
    buffers=(),
    ops=(
        Op(id="W0", lane="h2d"),
        Op(id="F0", lane="compute", after=("W0",)),
        Op(id="W1", lane="h2d"),
        Op(id="F1", lane="compute", after=("W1",)),
        Op(id="W2", lane="h2d", after=("F0",)),
        Op(id="F2", lane="compute", after=("W2",)),
    ),
)
DURATIONS = {"W0": 4, "W1": 4, "W2": 4, "F0": 10, "F1": 3, "F2": 1}


def test_a_pipeline_of_two_slots() -> None:
    spans = {
        span.op: (span.start_ns, span.end_ns) for span in evaluate(PIPELINE, costs(DURATIONS)).spans
    }
    assert spans == {
        "W0": (0, 4),
        "F0": (4, 14),
        "W1": (4, 8),
        "F1": (14, 17),
        "W2": (14, 18),
        "F2": (18, 19),
    }


def test_dispatch_comes_before_every_op() -> None:
    spans = {
        span.op: (span.start_ns, span.end_ns)
        for span in evaluate(PIPELINE, costs(DURATIONS, {"h2d": 1})).spans
    }
    assert spans == {
        "W0": (1, 5),
        "F0": (5, 15),
        "W1": (6, 10),
        "F1": (15, 18),
        "W2": (16, 20),
        "F2": (20, 21),
    }


def test_the_timeline_carries_the_digest_and_the_program_order() -> None:
    timeline = evaluate(PIPELINE, costs(DURATIONS))
    assert (timeline.name, timeline.digest) == ("predicted", PIPELINE.digest)
    assert [span.op for span in timeline.spans] == [op.id for op in PIPELINE.ops]


def test_bounds_of_the_pipeline() -> None:
    limits = bounds(PIPELINE, costs(DURATIONS))
    assert limits.lanes_ns == {"h2d": 12, "compute": 14}
    assert limits.critical_path_ns == 4 + 10 + 4 + 1
    assert limits.sum_ns == 26
    assert (limits.binding, limits.lower_bound_ns) == ("compute", 19)


def test_the_lower_bound_counts_when_a_lane_can_begin() -> None:
    """The lower bound includes the time before a lane can start.

    Here three updates wait for one op: their lane has 30 ns of work and cannot start before 5 ns.
    """
    ops = (
        Op(id="C", lane="compute"),
        *(Op(id=f"UC{layer}", lane="cpu", after=("C",)) for layer in range(3)),
    )
    limits = bounds(
        Schedule(policy="test", buffers=(), ops=ops),
        costs({"C": 5, "UC0": 10, "UC1": 10, "UC2": 10}),
    )
    assert (limits.critical_path_ns, limits.lower_bound_ns, limits.binding) == (15, 35, "cpu")


def test_the_critical_path_counts_reads_on_the_same_lane() -> None:
    """The critical path joins two ops of a lane if the second reads what the first writes."""
    ops = (
        Op(id="F0", lane="compute", writes=("device.hidden:0",)),
        Op(id="F1", lane="compute", reads=("device.hidden:0",)),
        Op(id="F2", lane="compute"),
    )
    limits = bounds(
        Schedule(policy="test", buffers=(), ops=ops), costs({"F0": 5, "F1": 10, "F2": 1})
    )
    assert (limits.critical_path_ns, limits.lower_bound_ns) == (15, 16)


@pytest.mark.parametrize("play", [evaluate, bounds])
def test_a_dependency_on_a_later_op_is_named(play: object) -> None:
    schedule = Schedule(
        policy="test",
        buffers=(),
        ops=(Op(id="F0", lane="compute", after=("W0",)), Op(id="W0", lane="h2d")),
    )
    with pytest.raises(ScheduleError, match="F0: depends on W0, which is not before it"):
        play(schedule, costs({"F0": 1, "W0": 1}))  # type: ignore[operator]
