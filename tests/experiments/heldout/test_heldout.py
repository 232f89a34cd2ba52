"""Tests of the held-out validation: its cases, its interrupted runs and the summary of its rows.

No case may be a point of the calibration's grid. An interrupted validation continues where it
stopped.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest
from heldout_regression import moved, replay_error

from megatrain.experiments.cli.program import run_program
from megatrain.experiments.files.row_file import append_row
from megatrain.experiments.heldout import __main__ as heldout
from megatrain.experiments.heldout import rows as records
from megatrain.experiments.heldout.compared import predict_and_compare
from megatrain.experiments.heldout.measure import plan_case
from megatrain.experiments.heldout.rows import HeldoutRow, by_case, read_rows
from megatrain.experiments.heldout.suites import BEST, HeldoutCase, Suite, refuse_grid, suite
from megatrain.experiments.heldout.summary import kendall_tau, summarize_errors
from megatrain.experiments.heldout.table import markdown
from megatrain.experiments.heldout.timelines import StoredTimeline, read_timelines
from megatrain.experiments.paper_data import pareto, regimes
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.filling import CLASSES
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.arithmetic import cost_keys
from megatrain.simulator.schedule.plan import Plan, Prediction


def test_the_suite_has_the_stated_breadth() -> None:
    chosen = suite("h200")
    cases = chosen.cases
    refuse_grid(chosen, cases)
    assert len({case.name for case in cases}) == len(cases) >= 24
    assert len(chosen.models) >= 3
    heads = {
        (model.config["num_attention_heads"], model.config["num_key_value_heads"])
        for model in chosen.models.values()
    }
    assert len(heads) == 3
    tokens = {case.accumulation * case.batch * case.sequence for case in cases}
    assert (min(tokens), max(tokens)) == (4096, 131072)
    assert len(tokens) >= 3
    assert len({case.sequence for case in cases}) >= 2
    assert {case.device_cap for case in cases} >= {None, 16 * 2**30}
    assert {case.accumulation for case in cases} >= {1, 4}
    assert len({case.policy for case in cases} - {BEST}) >= 4


def test_every_case_lies_inside_the_grid() -> None:
    """Token counts and sequence lengths of all cases lie within the range of the grid.

    Outside of the grid, a prediction would be an extrapolation.
    """
    chosen = suite("h200")
    points = [chosen.base, *chosen.points()]
    for case in chosen.cases:
        work = chosen.workload(case)
        assert (
            min(point.tokens for point in points)
            <= work.tokens
            <= max(point.tokens for point in points)
        )
        assert (
            min(point.sequence for point in points)
            <= work.sequence
            <= max(point.sequence for point in points)
        )


def test_nothing_that_computes_lies_beyond_the_grid() -> None:
    """A cost table of only the grid's points covers all compute ops of the cases.

    Kept attention has only points of 4,096 tokens, between the sequence lengths where it is
    measured.
    """
    chosen, hardware = suite("h200"), HardwareSpec.load("h200")
    ids = {
        "embed": "E.m0",
        "forward": "F0.m0",
        "recompute": "R0.m0",
        "backward": "B0.m0",
        "head": "H.m0",
        "embed_backward": "EB.m0",
        "loss": "HL.m0",
    }

    def op(model: str, work: Workload, kind: str, *, kept: bool = False) -> Op:
        plan = Plan(
            policy="resident",
            hardware="",
            source="",
            device_limit_bytes=1,
            host_limit_bytes=1,
            model=chosen.models[model],
            workload=work,
        )
        return Op(
            id=ids[kind],
            lane="compute",
            **cost_keys(
                plan, kind, "0" if kind in ("forward", "recompute", "backward") else "", kept=kept
            ),
        )

    compute: dict[str, dict[str, tuple[int, int]]] = {kind: {} for kind in ids}
    for model in chosen.models:
        for point in (chosen.base, *chosen.points()):
            ops = [op(model, point, kind) for kind in ids]
            ops += (
                [op(model, point, "recompute", kept=True)]
                if point == chosen.base or point.sequence > chosen.base.sequence
                else []
            )
            for each in ops:
                compute[each.kind][each.shape] = (each.amount, each.amount)
    table = CostTable(measured_on="", date="", curves={"norm": ((1, 1),)}, compute=compute)
    machine = msgspec.structs.replace(hardware, costs=table)
    for case in chosen.cases:
        work = chosen.workload(case)
        costs = cost_model(machine, chosen.models[case.model], work)
        asked = [op(case.model, work, kind) for kind in ids] + (
            [op(case.model, work, "recompute", kept=True)] if work.sequence == 4096 else []
        )
        assert not [(case.name, each.id) for each in asked if costs.extrapolated(each)]


def test_at_least_twelve_plans_of_a_model_can_be_compared() -> None:
    chosen, hardware = suite("h200"), HardwareSpec.load("h200")
    group = [
        case
        for case in chosen.cases
        if case.name.startswith("llama-3.2-3b-8/1x16x1024/16GiB/") and case.policy != BEST
    ]
    plans = [choice.plan for case in group if (choice := plan_case(chosen, case, hardware, "h200"))]
    assert len({plan.digest for plan in plans}) >= 12
    assert all(plan.prediction is not None for plan in plans)


def test_the_cases_of_figures_have_the_loss_chunk_of_the_planner() -> None:
    """Every case is a place of a figure's map, and one of them is planned."""
    chosen, hardware = suite("figures"), HardwareSpec.load("h200")
    places = {(batch * 1024, gib) for batch in regimes.BATCHES for gib in regimes.DEVICE_GIB}
    limits = {(case.batch * case.sequence, case.device_cap // 2**30) for case in chosen.cases}
    front = {(32768, gib) for gib in pareto.DEVICE_GIB}
    assert sum(case in front for case in limits) >= 6
    assert len(limits - front) >= 8
    assert limits - front <= places
    assert len(limits) == len(chosen.cases)
    assert chosen.host_bytes == 116 * 2**30
    case = next(case for case in chosen.cases if case.batch == 4)
    planned = plan_case(chosen, case, hardware, "h200")
    assert planned
    assert planned.plan.workload.loss_chunk == 4096
    fixed = plan_case(chosen._replace(chooses_loss_chunk=False), case, hardware, "h200")
    assert fixed
    assert fixed.plan.workload.loss_chunk == chosen.base.loss_chunk == 1024


def test_the_choice_is_compared_with_twelve_plans_most_of_which_are_nearly_as_fast() -> None:
    chosen, hardware = suite("choices"), HardwareSpec.load("h200")
    assert list(chosen.measured()) == ["qwen2.5-3b-10"]
    choices = {case.name: plan_case(chosen, case, hardware, "h200") for case in chosen.cases}
    plans = {choice.plan.digest: choice for choice in choices.values() if choice}
    assert len(plans) >= 13
    best = choices["qwen2.5-3b-10/1x16x1024/16GiB/best"]
    assert best
    ratios = [choice.step_seconds / best.step_seconds for choice in plans.values()]
    assert min(ratios) > 1 / 1.01
    assert sum(ratio < 1.05 for ratio in ratios) > len(plans) / 2


def test_a_layer_less_on_the_device_is_updated_by_the_host_if_others_are() -> None:
    chosen, hardware = suite("choices"), HardwareSpec.load("h200")
    best, less, none = (
        plan_case(chosen, case, hardware, "h200")
        for case in chosen.cases
        if case.variant in ("", "one layer less", "one layer less, no host updates")
        and case.policy != "k_buffer"
    )
    assert best
    assert less
    assert none
    before, after = best.plan, less.plan
    (layer,) = before.placed("weights") - after.placed("weights")
    assert {before.placed(name) - after.placed(name) for name in CLASSES} == {frozenset({layer})}
    assert after.placed("host_updated") - before.placed("host_updated") == {layer}
    assert not none.plan.placed("host_updated")
    assert none.plan.placed("weights") == after.placed("weights")


def test_a_case_on_the_grid_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = suite("tiny")
    on_grid = chosen._replace(
        cases=(*chosen.cases, HeldoutCase("tiny", 8, 16, "k_buffer", accumulation=4))
    )
    with pytest.raises(UserError, match="a point of the calibration's grid"):
        refuse_grid(on_grid, on_grid.cases)
    monkeypatch.setattr(heldout, "suite", lambda _: on_grid)
    assert heldout.main(["--suite", "tiny", "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert "tiny/4x8x16/whole/k_buffer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # A case that is a point of an existing calibration is refused too.
    work = chosen.workload(chosen.cases[0])
    table = CostTable(
        measured_on="",
        date="",
        curves={},
        compute={"forward": {f"{chosen.models['tiny'].shape}/{work.shape}": (1, 1)}},
    )
    with pytest.raises(UserError, match="a point of the calibration's grid"):
        refuse_grid(chosen, chosen.cases, table)


def test_an_interrupted_validation_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation calibrates once. After an interruption it does only what is missing.

    The interruption cuts the last line of both files in the middle.
    """
    monkeypatch.setattr("megatrain.experiments.heldout.measure.SECONDS", 0.0)
    cases = (
        HeldoutCase("tiny", 4, 16, BEST),
        HeldoutCase("tiny", 4, 16, "overlapped"),
        HeldoutCase("tiny", 3, 16, "k_buffer", accumulation=2),
    )
    small, calibrated = suite("tiny")._replace(cases=cases), list[Any]()

    def calibrate(*model: Any, grid: list[Workload], others: list[Any], **_: Any) -> HardwareSpec:
        calibrated.append((model[2], *grid, *others))
        return HardwareSpec.load("h200")

    monkeypatch.setattr(heldout, "suite", lambda _: small)
    monkeypatch.setattr(heldout, "calibrate", calibrate)
    folder = tmp_path / "out"
    words = ["--suite", "tiny", "--device", "cpu", "--repetitions", "1", "--out", str(folder)]
    assert heldout.main([*words, "--seconds", "0.001"]) == 0
    assert "left for the next run" in capsys.readouterr().out
    assert not (folder / "rows.jsonl").exists()
    assert heldout.main(words) == 0
    printed = capsys.readouterr().out
    assert len(calibrated) == 1
    assert [point.sequence for point in calibrated[0][:3]] == [16, 16, 32]
    assert "3 cases, 2 plans executed, 0 failed" in printed, "best and overlapped are the same plan"
    rows = read_rows(folder / "rows.jsonl")
    assert [row.name for row in rows] == [case.name for case in small.cases]
    assert rows[1].same_as == rows[0].name
    for row in rows:
        assert row.plan.prediction is not None
        assert row.step_seconds
        assert len(row.steps) >= 3
        assert row.replay_error is not None
        assert row.kinds["backward"][1] > 0
    stored = read_timelines(folder / "timelines.jsonl")
    assert list(stored) == [rows[0].name, rows[2].name], "each plan has one timeline"
    for row in (rows[0], rows[2]):
        schedule = lower(row.plan)
        measured = stored[row.name].timeline(schedule)
        assert {kind: seconds for kind, (_, seconds) in row.kinds.items()} == {
            kind: sum(span.duration_ns for span in measured.spans if span.kind == kind) / 1e9
            for kind in row.kinds
        }
        costs = cost_model(HardwareSpec.load("h200"), row.plan.model, row.plan.workload)
        assert replay_error(schedule, measured, costs) == row.replay_error
    # An interruption cuts the last line of both files.
    path = folder / "rows.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    timelines = folder / "timelines.jsonl"
    timelines.write_bytes(timelines.read_bytes()[:-40])
    assert list(read_timelines(timelines)) == [rows[0].name]
    assert heldout.main(words) == 0
    assert list(read_timelines(timelines)) == [rows[0].name, rows[2].name]
    again = read_rows(path)
    assert [row.name for row in again] == [row.name for row in rows]
    assert path.read_bytes().startswith(b"\n".join(whole.split(b"\n")[:2])), (
        "complete lines stay as they are"
    )
    # The first command adds a repetition of each case. The second command has nothing to do.
    for _ in range(2):
        assert heldout.main([*words, "--repetitions", "2"]) == 0
        assert "2 of the plans were executed again minutes later." in capsys.readouterr().out
    visited = read_rows(path)
    assert [len(row.repetitions) for row in visited] == [2, 2, 2]
    assert [row.repetitions[0] for row in visited] == [row.step_seconds for row in again]
    assert visited[1] == msgspec.structs.replace(
        visited[0], name=visited[1].name, policy="overlapped", same_as=visited[0].name
    )
    assert list(read_timelines(timelines)) == [rows[0].name, rows[2].name]
    assert (len(path.read_bytes().splitlines()), len(timelines.read_bytes().splitlines())) == (
        5,
        4,
    ), "one line per repetition, and none for a case with another case's plan"


def row(case: str, predicted: float, measured: float, **changes: Any) -> HeldoutRow:
    """Returns a row whose plan differs from the plans of other rows only in its digest."""
    chosen: Suite = suite("tiny")
    plan = Plan(
        policy="k_buffer",
        digest=case,
        hardware="",
        source="",
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
        model=chosen.models["tiny"],
        workload=chosen.base,
        prediction=Prediction(
            step_seconds=predicted,
            lower_bound_seconds=0,
            device_peak_bytes=990,
            host_peak_bytes=2**31,
            binding="",
        ),
    )
    made = HeldoutRow(
        name=case,
        model="tiny",
        policy="k_buffer",
        plan=plan,
        steps=(measured,),
        step_seconds=measured,
        device_peak_bytes=1000,
        host_bytes=2**31,
        host_pool_bytes=2**31,
        replay_error=-0.002,
    )
    return msgspec.structs.replace(made, **changes)


def test_errors_are_signed_and_missed_targets_are_named() -> None:
    rows = [
        row("a", 1.0, 1.0),
        row("b", 2.2, 2.0),
        row("c", 2.85, 3.0),
        row("d", 9.0, 4.0, same_as="a"),
        row("e", 5.0, 1.0, failure="no room"),
    ]
    summary = summarize_errors(rows)
    assert (summary.cases, summary.executed, summary.failed) == (5, 3, 1)
    assert summary.step_mape == pytest.approx((0 + 0.1 + 0.05) / 3)
    assert summary.step_worst == pytest.approx(0.1)
    assert summary.device_smallest == pytest.approx(-0.01)
    met = {what: ok for what, _, _, ok in summary.targets()}
    assert not met["step time, worst"]
    assert not met["device peak, most too small"]
    assert met["device peak, worst"]
    assert met["host memory, worst"]
    assert met["replay, worst"]
    assert "MISSED" in markdown(rows)
    assert not any(ok for *_, ok in summarize_errors([]).targets()), (
        "a target without a measurement is not met"
    )


def test_several_repetitions_count_as_one_step() -> None:
    first = row("a", 1.0, 1.0)
    (both,) = by_case([first, row("a", 1.0, 1.2, steps=(1.1, 1.2, 1.3))])
    assert (both.repetitions, both.steps) == ((1.0, 1.2), (1.1, 1.2, 1.3))
    assert both.step_seconds == pytest.approx(1.1), (
        "repetitions weigh the same, whatever their numbers of steps"
    )
    assert summarize_errors([first]).spread_between_repetitions is None
    summary = summarize_errors(
        by_case(
            [
                first,
                row("b", 1.0, 2.0),
                row("c", 1.0, 1.0),
                row("d", 1.0, 1.0),
                row("a", 1.0, 1.2),
                row("b", 1.0, 1.0),
                row("c", 1.0, 1.0),
            ]
        )
    )
    assert (summary.cases, summary.visited_again) == (4, 3)
    assert (summary.spread_between_repetitions, summary.spread_between_repetitions_worst) == (
        pytest.approx(0.2),
        pytest.approx(1.0),
    )


def test_regret_compares_the_planner_s_choice_with_twelve_plans() -> None:
    rows = [row(f"p{index}", 1 + index, 2.0 + index) for index in range(11)]
    assert summarize_errors(rows).regret == {}
    rows.append(row("best", 1, 2.1, policy=BEST))
    assert list(summarize_errors(rows).regret.values()) == [pytest.approx(0.05)]
    assert next(iter(summarize_errors(rows).tau.values())) == 1.0


def test_kendalls_tau_with_ties_and_reversals() -> None:
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall_tau([(1, 1), (1, 2), (3, 3), (4, 4)]) == pytest.approx(5 / 30**0.5)
    assert kendall_tau([(1, 1), (1, 2)]) == 0


def test_a_broken_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    append_row(path, row("a", 1, 1))
    with path.open("a") as file:
        file.write("{nonsense\n")
    append_row(path, row("b", 1, 1))
    with pytest.raises(UserError, match=r"line 2: found no row: JSON is malformed"):
        records.read_rows(path)


def stored(case: HeldoutCase, chosen: Suite, hardware: HardwareSpec, measured: float) -> HeldoutRow:
    """Returns a row of today's plan whose step took `measured` times the predicted time."""
    choice = plan_case(chosen, case, hardware, "h200")
    assert choice is not None
    made = row(case.name, 1, measured * choice.step_seconds, plan=choice.plan)
    return msgspec.structs.replace(
        made, device_peak_bytes=round(0.99 * choice.account.device_peak_bytes)
    )


def test_a_stored_row_that_is_predicted_worse_today_is_named() -> None:
    chosen, hardware = suite("tiny"), HardwareSpec.load("h200")
    rows = [
        stored(chosen.cases[0], chosen, hardware, 1.02),
        stored(chosen.cases[2], chosen, hardware, 1.02),
    ]
    assert moved(rows, hardware, {}) == []
    slower = msgspec.structs.replace(
        hardware, h2d_curve=tuple((size, rate / 20) for size, rate in hardware.h2d_curve)
    )
    messages = moved(rows, slower, {})
    assert len(messages) == 1
    assert messages[0].startswith("tiny/1x4x16/whole/k_buffer: step +")
    other = msgspec.structs.replace(
        rows[1], plan=msgspec.structs.replace(rows[1].plan, digest="0" * 16)
    )
    assert "ran as 0000000000000000" in moved([other], hardware, {})[0]
    small = msgspec.structs.replace(
        rows[1], device_peak_bytes=rows[1].plan.prediction.device_peak_bytes * 2
    )  # type: ignore[union-attr]
    assert moved([small], hardware, {}) == [], "a row with the same error as before is not named"
    assert moved([msgspec.structs.replace(rows[1], failure="no room")], slower, {}) == []


def test_a_stored_step_that_is_replayed_worse_today_is_named() -> None:
    """A row whose timeline no longer matches its schedule is named too."""
    chosen, hardware = suite("tiny"), HardwareSpec.load("h200")
    one = stored(chosen.cases[2], chosen, hardware, 1.02)
    schedule, costs = lower(one.plan), cost_model(hardware, one.plan.model, one.plan.workload)
    timeline = StoredTimeline.of(one.name, simulate(schedule, costs), schedule)
    exact = msgspec.structs.replace(
        one, replay_error=replay_error(schedule, timeline.timeline(schedule), costs)
    )
    assert moved([exact], hardware, {one.name: timeline}) == []
    late = msgspec.structs.replace(
        timeline, starts_ns=tuple(start + 10_000_000 for start in timeline.starts_ns)
    )
    messages = moved([exact], hardware, {one.name: late})
    assert len(messages) == 1
    assert messages[0].startswith(f"{one.name}: replay -")
    (text,) = moved(
        [exact], hardware, {one.name: msgspec.structs.replace(timeline, digest="0" * 16)}
    )
    assert "ops of schedule 0000000000000000" in text


def test_a_step_that_went_as_predicted_is_replayed_exactly() -> None:
    """A measured step that equals the prediction is replayed without an error.

    The replay adds the machine's dispatch time, which every prediction contains and no duration of
    an op does.
    """
    folder = Path(__file__).parents[3] / "experiments" / "results" / "h200-qwen2.5-3b"
    plan, hardware = (
        Plan.load(folder / "plan.toml"),
        HardwareSpec.load(str(folder / "hardware.toml")),
    )
    schedule, costs = lower(plan), cost_model(hardware, plan.model, plan.workload)
    assert costs.dispatch_ns["cpu"] > 0
    predicted = simulate(schedule, costs)
    assert replay_error(schedule, predicted, costs) == 0
    assert predict_and_compare(schedule, predicted, costs).errors.engine_error == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x"),
            "heldout: /proc/x: found no such file or directory; ",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "heldout: output: found no space left on device; ",
        ),
    ],
)
def test_an_unexpected_error_of_a_path_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], error: OSError, expected: str
) -> None:
    def fail() -> int:
        raise error

    assert run_program("heldout", fail) == 2
    said = capsys.readouterr().err
    assert said.startswith(expected)
    assert said.count("\n") == 1


def test_an_error_without_a_path_is_raised() -> None:
    def fail() -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        run_program("heldout", fail)
