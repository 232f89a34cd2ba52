"""Tests of the discrete-event simulator: rates of busy lanes, deadlocks, and two anomalies.

Because of these anomalies, the planner enumerates candidates instead of bisecting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from megatrain.simulator import policies
from megatrain.simulator.costs import Replayed
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.engine import discrete_event
from megatrain.simulator.engine.discrete_event import DeadlockError, makespan_ns, play, simulate
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Span, Timeline


def costs(
    durations: Mapping[str, int],
    contention: Mapping[str, Mapping[str, float]] | None = None,
    dispatch_ns: Mapping[str, int] | None = None,
) -> Replayed:
    spans = tuple(
        Span(op=op, lane="compute", start_ns=0, end_ns=duration)
        for op, duration in durations.items()
    )
    model = Replayed(Timeline(name="measured", digest="", spans=spans))
    model.sharing, model.dispatch_ns = ContentionModel(contention or {}), dispatch_ns or {}
    return model


def program(*ops: tuple[str, str, Sequence[str]]) -> Schedule:
    return Schedule(
        policy="test",
        buffers=(),
        ops=tuple(Op(id=name, lane=lane, after=tuple(after)) for name, lane, after in ops),
    )


def times(timeline: Timeline) -> dict[str, tuple[int, int]]:
    return {span.op: (span.start_ns, span.end_ns) for span in timeline.spans}


LINK = {"h2d": {"d2h": 0.5}, "d2h": {"h2d": 0.5}}


def test_two_copies_at_half_rate_share_until_the_shorter_ends() -> None:
    played = simulate(
        program(("W0", "h2d", ()), ("G0", "d2h", ())), costs({"W0": 30, "G0": 10}, LINK)
    )
    assert times(played) == {"W0": (0, 40), "G0": (0, 20)}


def test_rates_need_not_be_the_same_both_ways() -> None:
    played = simulate(
        program(("W0", "h2d", ()), ("U0", "cpu", ())),
        costs({"W0": 30, "U0": 10}, {"h2d": {"cpu": 0.25}}),
    )
    assert times(played) == {
        "W0": (0, 38),
        "U0": (0, 10),
    }  # 10 ns at a quarter leave 27.5 ns of work; ends are rounded up


def test_rates_of_several_busy_lanes_multiply() -> None:
    contention = {"h2d": {"cpu": 0.5, "d2h": 0.4}}
    played = simulate(
        program(("W0", "h2d", ()), ("U0", "cpu", ()), ("G0", "d2h", ())),
        costs({"W0": 100, "U0": 500, "G0": 500}, contention),
    )
    assert times(played)["W0"] == (0, 500)


def test_a_rate_that_changes_often_loses_no_nanosecond() -> None:
    schedule = program(("W0", "h2d", ()), *((f"G{index}", "d2h", ()) for index in range(1000)))
    durations = {"W0": 3000, **{f"G{index}": 1 for index in range(1000)}}
    contention = {"h2d": {"d2h": 0.333}}
    assert times(simulate(schedule, costs(durations, contention)))["W0"] == (0, 1000 + 3000 - 333)


def test_a_lane_that_waits_or_dispatches_slows_no_other_lane() -> None:
    schedule = program(("F0", "compute", ()), ("W0", "h2d", ()), ("G0", "d2h", ("F0",)))
    played = simulate(schedule, costs({"F0": 10, "W0": 20, "G0": 5}, LINK, {"d2h": 10}))
    assert times(played) == {"F0": (0, 10), "W0": (0, 20), "G0": (20, 25)}


def test_dispatch_latency_is_paid_by_every_op() -> None:
    played = simulate(
        program(("F0", "compute", ()), ("F1", "compute", ())),
        costs({"F0": 10, "F1": 10}, {}, {"compute": 3}),
    )
    assert times(played) == {"F0": (3, 13), "F1": (16, 26)}


def test_lanes_that_wait_for_each_other_are_named() -> None:
    schedule = program(("G0", "d2h", ()), ("F0", "compute", ("G0", "W0")), ("W0", "h2d", ("F0",)))
    with pytest.raises(DeadlockError) as error:
        simulate(schedule, costs({"G0": 1, "F0": 1, "W0": 1}))
    assert (
        str(error.value)
        == "compute is blocked at F0, which waits for W0; h2d is blocked at W0, which waits for F0"
    )


def test_lanes_that_wait_for_the_first_op_are_named() -> None:
    schedule = program(("F0", "compute", ("W0",)), ("W0", "h2d", ("F0",)), ("G0", "d2h", ("F0",)))
    with pytest.raises(DeadlockError) as error:
        simulate(schedule, costs({"F0": 1, "W0": 1, "G0": 1}))
    waiting = (
        "compute is blocked at F0, which waits for W0",
        "h2d is blocked at W0, which waits for F0",
        "d2h is blocked at G0, which waits for F0",
    )
    assert str(error.value) == "; ".join(waiting)


def test_an_op_that_waits_for_nothing_that_runs_is_named() -> None:
    with pytest.raises(DeadlockError) as error:
        simulate(program(("F0", "compute", ("W7",)), ("G0", "d2h", ())), costs({"F0": 1, "G0": 1}))
    assert str(error.value) == "compute is blocked at F0, which waits for W7 (which no lane runs)"


@pytest.mark.parametrize("played", [play, makespan_ns])
def test_blocked_lanes_are_an_error_although_simulate_finds_none(
    monkeypatch: pytest.MonkeyPatch, played: Callable[..., object]
) -> None:
    """The two implementations of the engine then disagree. No end of an op may be returned."""
    schedule = program(("F0", "compute", ("W0",)), ("W0", "h2d", ("F0",)))
    monkeypatch.setattr(discrete_event, "simulate", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"^`play` ended with .*, and `simulate` played the"):
        played(schedule, costs({"F0": 1, "W0": 1}))


def test_a_replayed_timeline_without_gaps_plays_as_measured(make_plan: Callable[..., Plan]) -> None:
    schedule = policies.lower(make_plan("double_buffer"))
    first = simulate(
        schedule, costs({op.id: 5 + index % 11 for index, op in enumerate(schedule.ops)})
    )
    assert simulate(schedule, Replayed(first)) == first
    assert makespan_ns(schedule, Replayed(first)) == first.makespan_ns


def test_nothing_to_do_takes_no_time() -> None:
    assert simulate(program(), costs({})).makespan_ns == 0
    assert makespan_ns(program(), costs({})) == 0


def shorter(first: int) -> int:
    """Returns the makespan of four ops in ns: the first takes `first`, the others 1200."""
    schedule = program(
        ("F0", "compute", ()), ("G0", "d2h", ()), ("W0", "h2d", ("F0",)), ("F1", "compute", ("G0",))
    )
    contention = {"h2d": {"d2h": 0.75}, "d2h": {"h2d": 0.75}}
    return simulate(
        schedule, costs({"F0": first, "G0": 1200, "W0": 1200, "F1": 1200}, contention)
    ).makespan_ns


def deeper(depth: int) -> int:
    """Returns the makespan of four streamed layers with `depth` slots for weights and gradients.

    The unit is 1000 ns.
    """
    ops = []
    for layer in range(4):
        ago = layer - depth
        ops.append((f"W{layer}", "h2d", [f"F{ago}"] if ago >= 0 else []))
        ops.append((f"F{layer}", "compute", [f"W{layer}"] + ([f"G{ago}"] if ago >= 0 else [])))
        ops.append((f"G{layer}", "d2h", [f"F{layer}"]))
    loads, computes, saves = (0, 0, 0, 2), (0, 0, 1, 1), (1, 0, 1, 0)
    durations = {
        f"{code}{layer}": 1000 * taken[layer]
        for code, taken in (("W", loads), ("F", computes), ("G", saves))
        for layer in range(4)
    }
    return simulate(program(*ops), costs(durations, LINK)).makespan_ns // 1000


def test_the_anomalies_have_not_changed() -> None:
    """A shorter op and a deeper buffer can each make a step longer if lanes slow each other."""
    assert (shorter(1200), shorter(0)) == (2400, 2800)
    assert (deeper(2), deeper(3)) == (4, 5)


@pytest.mark.xfail(
    strict=True,
    reason=(
        "an anomaly of lanes that slow each other: the op that ends earlier lets two copies overlap"
    ),
)
def test_a_shorter_op_never_makes_a_step_longer() -> None:
    assert shorter(0) <= shorter(1200)


@pytest.mark.xfail(
    strict=True,
    reason="an anomaly of lanes that slow each other: the deeper buffer lets two copies overlap",
)
def test_a_deeper_buffer_never_makes_a_step_longer() -> None:
    assert deeper(3) <= deeper(2)
