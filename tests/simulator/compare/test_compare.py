"""Tests of the error report: every number, on small timelines whose answers are known."""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator.compare import error_table
from megatrain.simulator.compare.compare import compare
from megatrain.simulator.compare.corrections import corrections
from megatrain.simulator.compare.error_report import ErrorReport, peak_error
from megatrain.simulator.compare.error_table import format_report, signed_percent
from megatrain.simulator.costs import Replayed
from megatrain.simulator.engine.evaluator import evaluate
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.schedule.timeline import Span, Timeline, median_timeline

MS = 1_000_000
SCHEDULE = Schedule(
    policy="by hand",
    buffers=(),
    ops=(
        Op(id="W0f", lane="h2d"),
        Op(id="F0.m0", lane="compute", after=("W0f",)),
        Op(id="W1f", lane="h2d"),
        Op(id="F1.m0", lane="compute", after=("W1f",)),
        Op(id="B1.m0", lane="compute"),
    ),
)
LANE = {op.id: op.lane for op in SCHEDULE.ops}
PREDICTED = {
    "W0f": (0, 10),
    "F0.m0": (10, 30),
    "W1f": (10, 20),
    "F1.m0": (30, 50),
    "B1.m0": (50, 90),
}
MEASURED = {"W0f": (0, 8), "F0.m0": (9, 34), "W1f": (8, 20), "F1.m0": (34, 54), "B1.m0": (60, 100)}
REPLAYED = {"W0f": (0, 8), "F0.m0": (8, 33), "W1f": (8, 20), "F1.m0": (33, 53), "B1.m0": (53, 93)}


def timeline(name: str, times_ms: dict[str, tuple[float, float]], digest: str = "") -> Timeline:
    spans = tuple(
        Span(op=op, lane=LANE[op], start_ns=int(start * MS), end_ns=int(end * MS))
        for op, (start, end) in times_ms.items()
    )
    return Timeline(name=name, digest=digest or SCHEDULE.digest, spans=spans)


def report(
    measured: dict[str, tuple[float, float]] | None = None, **options: object
) -> ErrorReport:
    return compare(
        timeline("predicted", PREDICTED),
        timeline("measured", measured or MEASURED),
        SCHEDULE,
        **options,
    )  # type: ignore[arg-type]


def test_end_to_end_and_engine_error() -> None:
    result = report(replayed=timeline("replayed", REPLAYED))
    assert (result.predicted_seconds, result.measured_seconds, result.replayed_seconds) == (
        0.09,
        0.1,
        0.093,
    )
    assert result.error == pytest.approx(-0.1)
    assert result.engine_error == pytest.approx(-0.07)
    assert result.cost_model_error == pytest.approx(-0.03)
    assert report().cost_model_error is None
    assert (result.policy, result.digest, result.ops) == ("by hand", SCHEDULE.digest, 5)


def test_error_of_each_kind() -> None:
    kinds = {kind.kind: kind for kind in report().kinds}
    assert list(kinds) == ["forward", "backward", "load_weights"], "longest measured total first"
    load = kinds["load_weights"]  # 10 for 8, 10 for 12
    assert (load.count, load.predicted_seconds, load.measured_seconds, load.error) == (
        2,
        0.02,
        0.02,
        0.0,
    )
    assert load.median_error == pytest.approx((0.25 - 1 / 6) / 2)
    assert (load.p95_abs_error, load.worst_op, load.worst_error) == (0.25, "W0f", 0.25)
    forward = kinds["forward"]  # two ops: predicted 20, measured 25 and 20
    assert (forward.error, forward.median_error) == (pytest.approx(-5 / 45), pytest.approx(-0.1))
    assert (forward.p95_abs_error, forward.worst_op, forward.worst_error) == (0.2, "F0.m0", -0.2)
    assert (kinds["backward"].error, kinds["backward"].worst_error) == (0.0, 0.0)


def test_the_part_of_a_kind_is_the_change_of_the_step_by_its_measured_durations() -> None:
    """A kind's part of the step's error is how much its measured durations change the step."""
    # The step takes 90 ms as predicted and 100 ms as measured. With measured durations of a single
    # kind, it takes 95 ms (forward) or 90 ms (backward).
    kinds = {kind.kind: kind for kind in report().kinds}
    assert kinds["forward"].of_step == pytest.approx(-0.05)
    assert kinds["backward"].of_step == 0
    assert kinds["load_weights"].of_step == pytest.approx(0.02), (
        "the first load ends 2 ms earlier, and the second one is hidden"
    )


def test_parts_of_a_step_add_up_to_the_step_and_their_errors_to_its_error() -> None:
    result = report()
    assert [part.name for part in result.parts] == ["compute", "h2d", "waiting"]
    compute, h2d, waiting = result.parts
    assert (compute.predicted_seconds, compute.measured_seconds) == (0.08, 0.085)
    assert (h2d.predicted_seconds, h2d.measured_seconds) == (0.01, 0.009), (
        "the first load, and in the measured run the beginning of the second"
    )
    assert (waiting.predicted_seconds, waiting.measured_seconds) == (0.0, 0.006)
    assert sum(part.predicted_seconds for part in result.parts) == pytest.approx(
        result.predicted_seconds
    )
    assert sum(part.measured_seconds for part in result.parts) == pytest.approx(
        result.measured_seconds
    )
    assert sum(part.of_step for part in result.parts) == pytest.approx(result.error)


def test_all_steady_steps_against_the_prediction_with_the_host_s_time_outside() -> None:
    """Measured steps are compared with the prediction plus the host's time between steps."""
    steps = report(
        step_seconds={3: 0.1, 4: 0.125, 5: 0.08}, overhead_ns=10 * MS
    ).steps  # 100 ms predicted
    assert steps is not None
    assert (steps.count, steps.predicted_seconds, steps.median_seconds) == (3, 0.1, 0.1)
    assert (steps.median_error, steps.p95_abs_error) == (0.0, pytest.approx(0.25))
    assert (steps.worst_step, steps.worst_error) == (5, pytest.approx(0.25))
    assert report().steps is None


def test_ops_of_a_lane_and_all_ops_have_a_spread_too() -> None:
    result = report()
    compute, h2d = result.lanes
    assert (compute.count, compute.median_error, compute.worst_op, compute.worst_error) == (
        3,
        0.0,
        "F0.m0",
        -0.2,
    )
    assert (h2d.count, h2d.median_error) == (2, pytest.approx((0.25 - 1 / 6) / 2))
    assert (h2d.p95_abs_error, h2d.worst_op, h2d.worst_error) == (0.25, "W0f", 0.25)
    assert (
        result.median_op_error,
        result.p95_abs_op_error,
        result.worst_op,
        result.worst_op_error,
    ) == (0.0, 0.25, "W0f", 0.25)


def test_p95_is_one_of_the_errors() -> None:
    """The 95th percentile is one of the errors and is not interpolated."""
    ops = tuple(Op(id=f"F{index}.m0", lane="compute") for index in range(20))
    schedule = Schedule(policy="one lane", buffers=(), ops=ops)
    edges = [1000 * index for index in range(21)]

    def played(name: str, durations: list[int]) -> Timeline:
        spans = tuple(
            Span(op=op.id, lane=op.lane, start_ns=edge, end_ns=edge + duration)
            for op, edge, duration in zip(ops, edges, durations, strict=False)
        )
        return Timeline(name=name, digest=schedule.digest, spans=spans)

    result = compare(
        played("predicted", [100 + index for index in range(20)]),
        played("measured", [100] * 20),
        schedule,
    )
    assert result.kinds[0].p95_abs_error == pytest.approx(0.18), "the 19th of 20"
    assert result.kinds[0].worst_error == pytest.approx(0.19)
    assert result.kinds[0].median_error == pytest.approx(0.095)


def test_an_op_that_took_no_time_has_no_relative_error() -> None:
    result = report({**MEASURED, "B1.m0": (60, 60)})
    backward = next(kind for kind in result.kinds if kind.kind == "backward")
    assert (
        backward.error,
        backward.median_error,
        backward.p95_abs_error,
        backward.worst_op,
        backward.worst_error,
    ) == (None, None, None, "", None)
    assert "backward" in format_report(result)


def test_busy_idle_and_stalled_time_of_each_lane() -> None:
    compute, h2d = report().lanes
    assert (compute.lane, compute.predicted_busy_seconds, compute.measured_busy_seconds) == (
        "compute",
        0.08,
        0.085,
    )
    assert compute.busy_error == pytest.approx(-5 / 85)
    assert (compute.predicted_idle_seconds, compute.measured_idle_seconds) == (0.01, 0.015)
    assert compute.measured_stalled_seconds == pytest.approx(0.007), (
        "1 ms from the load of F0 to F0, and 6 ms before B1"
    )
    assert (
        h2d.lane,
        h2d.predicted_idle_seconds,
        h2d.measured_idle_seconds,
        h2d.measured_stalled_seconds,
    ) == ("h2d", 0.07, 0.08, 0.0)


def test_order_violations_are_found_beyond_the_tolerance() -> None:
    assert report().violations == ()
    broken = {**MEASURED, "F0.m0": (7, 32), "B1.m0": (53.99, 100)}
    result = report(
        broken
    )  # F0 starts 1 ms before its load ends; B1 10 us before F1, within the tolerance
    assert [msgspec.structs.astuple(bad) for bad in result.violations] == [
        ("F0.m0", "W0f", "dependency", MS)
    ]
    strict = report(broken, tolerance_ns=0)
    assert [(bad.op, bad.waits_for, bad.rule, bad.early_ns) for bad in strict.violations][1:] == [
        ("B1.m0", "F1.m0", "lane", 10_000)
    ]
    assert report(broken, tolerance_ns=MS).violations == (), "exactly the tolerance is allowed"
    assert "F0.m0 started 1.000 ms before the end of W0f (dependency)" in format_report(result)


def test_first_divergence_is_the_first_start_that_durations_do_not_explain() -> None:
    """The first divergence is the first op that starts later than measured durations explain."""
    replayed = timeline("replayed", REPLAYED)
    late = report(
        replayed=replayed
    ).first_divergence  # F0 and F1 are 1 ms late, which is 1 % of the step; B1 is 7 ms late
    assert late is not None
    assert (late.op, late.measured_start_ns, late.replayed_start_ns, late.late_ns) == (
        "B1.m0",
        60 * MS,
        53 * MS,
        7 * MS,
    )
    assert late.ready_ns == 54 * MS
    sooner = report(replayed=replayed, divergence=0.005).first_divergence
    assert sooner is not None
    assert sooner.op == "F0.m0"
    none = report(replayed=replayed, divergence=0.07)
    assert none.first_divergence is None
    assert none.latest is not None
    assert (none.latest.op, none.latest.late_ns, none.divergence_ns) == ("B1.m0", 7 * MS, 7 * MS)
    assert (
        "first divergence: none; no op started more than 7.000 ms later than the measured durations"
        " explain; B1.m0 did by 7.000 ms" in format_report(none)
    )
    assert (report().first_divergence, report().latest) == (None, None)
    assert evaluate(SCHEDULE, Replayed(timeline("measured", MEASURED))).spans == tuple(
        timeline("", REPLAYED).by_op[op.id] for op in SCHEDULE.ops
    )


def test_timelines_of_other_schedules_or_other_ops_are_refused() -> None:
    predicted, measured = timeline("predicted", PREDICTED), timeline("measured", MEASURED)
    with pytest.raises(ValueError, match="belongs to schedule 0123, not to"):
        compare(predicted, timeline("measured", MEASURED, digest="0123"), SCHEDULE)
    with pytest.raises(ValueError, match="replayed: belongs to schedule 0123"):
        compare(
            predicted, measured, SCHEDULE, replayed=timeline("replayed", REPLAYED, digest="0123")
        )
    with pytest.raises(ValueError, match=r"4 spans for 5 ops; .* B1\.m0"):
        report({op: times for op, times in MEASURED.items() if op != "B1.m0"})
    with pytest.raises(ValueError, match="length 0"):
        report(dict.fromkeys(MEASURED, (0, 0)))


def test_the_median_timeline_is_one_of_the_steps() -> None:
    steps = [timeline("measured", {**MEASURED, "B1.m0": (60, end)}) for end in (104, 98, 101, 99)]
    assert median_timeline(steps) is steps[3], "the lower of two in the middle"
    assert median_timeline(steps[:3]) is steps[2]
    with pytest.raises(ValueError, match="0 timelines"):
        median_timeline([])
    with pytest.raises(ValueError, match="all of one schedule"):
        median_timeline([steps[0], timeline("measured", MEASURED, digest="0123")])


def test_report_is_plain_data() -> None:
    result = report(
        replayed=timeline("replayed", REPLAYED),
        step_seconds={3: 0.1},
        memory=[peak_error("host pools", 101, 100)],
    )
    assert msgspec.json.decode(msgspec.json.encode(result), type=ErrorReport) == result


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_report_says_which_columns_it_leaves_out(width: int) -> None:
    lines = format_report(report(step_seconds={7: 0.1}), width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert f"left out in {width} columns: " in text
    assert "worst, op" in text
    assert "left out" not in format_report(report())


def test_report_as_text_is_aligned_and_signed() -> None:
    memory = [
        peak_error("device pools", 2**30, 2**30),
        peak_error("whole device peak", 2**30 + 2**24, 2**30),
        peak_error("host pools", 1, 0),
    ]
    text = format_report(
        report(replayed=timeline("replayed", REPLAYED), step_seconds={7: 0.1}, memory=memory)
    )
    lines = text.splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[1:4] == [
        "end to end 90.000 ms 100.000 ms -10.00 % the median step's timeline",
        "engine 93.000 ms 100.000 ms -7.00 % measured durations, replayed",
        "cost model 90.000 ms 93.000 ms -3.00 % effect of wrong durations on the step",
    ]
    assert words[4] == "one op's duration: median +0.0 %, P95 |error| 25.0 %, worst +25.0 % (W0f)"
    assert words[5] == "wall time of 1 steady step: predicted 90.000 ms, median 100.000 ms"
    assert (
        words[6] == "a step's wall time: median -10.0 %, P95 |error| 10.0 %, worst -10.0 % (step 7)"
    )
    assert "load_weights 2 20.000 ms 20.000 ms +0.0 % +2.0 % +4.2 % 25.0 % +25.0 % W0f" in words
    assert "compute 3 80.000 ms 85.000 ms -5.9 % 7.000 ms +0.0 % 20.0 % -20.0 % F0.m0" in words
    assert "exposed h2d 10.000 ms 9.000 ms +1.0 %" in words
    assert words[-3:] == [
        "device pools 1.00 GiB 1.00 GiB equal",
        "whole device peak 1.02 GiB 1.00 GiB +1.56 %",
        "host pools 1 B 0 B -",
    ]
    table = lines[lines.index("") + 1 :][:4]
    assert len({line.rindex("%") for line in table[1:]}) == 1, "columns are aligned"
    assert max(map(len, lines)) <= 120
    assert (
        "error: (predicted - measured) / measured; below zero the prediction was too fast or too"
        " small" in lines
    )
    for word in ("of the step", "stalled", "exposed"):
        assert any(
            line.lower().startswith(word) or f". {word}" in line.lower()
            for line in lines
            if ":" in line
        ), "a column has no explanation"
    assert (
        "\nfirst divergence: B1.m0 started at 60.000 ms instead of 53.000 ms, 7.000 ms later than"
        " the measured durations explain,\n" in text
    )
    assert "\n  6.000 ms after all that it waits for had ended\n" in text


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0123, "+1.2 %"), (-0.5, "-50.0 %"), (0.0, "+0.0 %"), (-1e-9, "+0.0 %"), (None, "-")],
)
def test_signs_are_always_shown(error: float | None, text: str) -> None:
    assert signed_percent(error) == text


@pytest.mark.parametrize("width", range(20, 70))
def test_a_number_stays_with_its_unit(width: int) -> None:
    line = "wall time of 10 steady steps: predicted 2.190 s, median 2.611 s; 38.31 MiB, 20.0 us"
    lines = error_table._wrapped([line], width)
    assert max(map(len, lines)) <= width
    for number in ("2.190 s", "2.611 s", "38.31 MiB", "20.0 us"):
        assert any(number in each for each in lines)


def test_one_slow_step_does_not_change_the_corrections() -> None:
    """A program that runs for a moment can make one of three steps ten times as slow."""
    slow = {op: (10 * start, 10 * end) for op, (start, end) in MEASURED.items()}
    steps = [timeline(f"step {number}", each) for number, each in enumerate((MEASURED, slow))]
    three = [steps[0], *steps]
    assert corrections(timeline("predicted", PREDICTED), three, SCHEDULE) == corrections(
        timeline("predicted", PREDICTED), steps[:1], SCHEDULE
    )
