"""Tests of the display of a held-out validation: its tables, its picture and a single case.

The tables and the picture need only the rows. A single case is compared op by op with its stored
timeline.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from megatrain.experiments.files.row_file import append_row
from megatrain.experiments.heldout import show
from megatrain.experiments.heldout.measure import plan_case
from megatrain.experiments.heldout.picture import draw
from megatrain.experiments.heldout.rows import HeldoutRow, read_rows
from megatrain.experiments.heldout.suites import BEST, suite
from megatrain.experiments.heldout.table import markdown
from megatrain.experiments.heldout.timelines import StoredTimeline
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.policies import lower

HARDWARE = HardwareSpec.load("h200")
STORED = Path(__file__).parents[3] / "experiments" / "results" / "h200-heldout"


@pytest.fixture(scope="module")
def rows() -> list[HeldoutRow]:
    """Returns a row for every case of the suite `tiny`, with steps 5 % longer than predicted.

    The last case but one has failed.
    """
    chosen, found = suite("tiny"), list[HeldoutRow]()
    for case in chosen.cases:
        if choice := plan_case(chosen, case, HARDWARE, "h200"):
            peak = choice.account.device_peak_bytes
            made = HeldoutRow(
                name=case.name,
                model=case.model,
                policy=case.policy,
                variant=case.variant,
                plan=choice.plan,
                steps=(1.05 * choice.step_seconds,),
                step_seconds=1.05 * choice.step_seconds,
                device_peak_bytes=peak,
                host_bytes=2**31,
                host_pool_bytes=2**29,
                replay_error=-0.02,
                kinds={"forward": (1.0, 1.25), "embed": (0.1, 0.0)},
                machine="a machine",
                date="2026-11-22",
            )
            twin = next((row for row in found if row.plan == made.plan), None)
            found.append(msgspec.structs.replace(made, same_as=twin.name) if twin else made)
    found[-2] = msgspec.structs.replace(found[-2], failure="no | room", step_seconds=None)
    return found


@pytest.fixture(scope="module")
def folder(rows: list[HeldoutRow], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a finished validation, with a timeline for the case of k_buffer.

    Tests must not change it.
    """
    folder = tmp_path_factory.mktemp("proof")
    for row in rows:
        append_row(folder / "rows.jsonl", row)
    write_toml(folder / "hardware.toml", HARDWARE, "")
    row = next(row for row in rows if row.policy == "k_buffer")
    schedule, costs = lower(row.plan), cost_model(HARDWARE, row.plan.model, row.plan.workload)
    timeline = StoredTimeline.of(row.name, simulate(schedule, costs), schedule)
    longer = msgspec.structs.replace(
        timeline,
        starts_ns=tuple(2 * time for time in timeline.starts_ns),
        durations_ns=tuple(2 * time for time in timeline.durations_ns),
    )
    append_row(folder / "timelines.jsonl", longer)
    return folder


def height(path: Path) -> int:
    """Returns the height of a PNG."""
    return int.from_bytes(path.read_bytes()[20:24])


def test_every_case_and_every_target_is_in_the_table(rows: list[HeldoutRow]) -> None:
    lines = markdown(rows).splitlines()
    assert lines[0].startswith(f"a machine, 2026-11-22: {len(rows)} cases, ")
    cases = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert cases.keys() >= {row.name for row in rows}
    assert "| -4.8 % | +0.0 % | - | -2.0 % | is overlapped |" in cases[rows[0].name]
    assert cases[rows[1].name].endswith("| the plan of best |")
    assert cases[rows[-2].name].endswith("| failed: no / room |")
    assert "| step time, worst | -4.8 % | <= 8 % | met |" in lines
    assert "| replay, worst | -2.0 % | <= 1 % | **MISSED** |" in lines
    assert "| regret, worst | - | <= 2 % | not measured |" in lines
    ran = [row for row in rows if not row.failure and not row.same_as]
    assert [
        line.split(" | ")[1] for line in lines if line.startswith(("| tiny |", "| tiny-heads |"))
    ] == [str(sum(row.model == model for row in ran)) for model in ("tiny", "tiny-heads")]
    kinds = [line for line in lines if line.startswith(("| forward", "| embed"))]
    assert [" | ".join(line.split(" | ")[4:6]) for line in kinds] == [
        "-20.0 % | -20.0 %",
        "- | -",
    ], "embed has no measurement"


def test_the_table_names_plans_that_were_executed_again(rows: list[HeldoutRow]) -> None:
    assert "executed again" not in markdown(rows)
    again = [
        (
            msgspec.structs.replace(row, repetitions=(1.0, 1.05), failures=("no | room",))
            if row is rows[0]
            else row
        )
        for row in rows
    ]
    table = markdown(again)
    assert (
        "1 of the plans were executed again minutes later. The step times of a plan\ndiffer by"
        " +5.0 % in the median, and by +5.0 % at most." in table
    )
    assert "| is overlapped; another repetition failed: no / room |" in table


def test_the_stored_table_is_that_of_the_stored_rows() -> None:
    assert (STORED / "table.md").read_text() == markdown(read_rows(STORED / "rows.jsonl"))


@pytest.mark.usefixtures("with_pictures")
def test_tables_and_picture_need_the_rows_alone(
    rows: list[HeldoutRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in (
        msgspec.structs.replace(rows[0], failure="no room", step_seconds=None),
        *rows,
    ):  # the first case failed at first and ran later
        append_row(tmp_path / "rows.jsonl", row)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"name": "cut o')
    assert show.main([str(tmp_path)]) == 0
    assert f"wrote table.md, summary.json and errors.png into {tmp_path}" in capsys.readouterr().out
    text = (tmp_path / "table.md").read_text()
    assert text.count("; another repetition failed: no room |") == 2, (
        "the first case and the case with the same plan"
    )
    assert text.replace("; another repetition failed: no room |", " |") == markdown(rows)
    picture = (tmp_path / "errors.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")
    assert show.main([str(tmp_path)]) == 0
    assert (tmp_path / "errors.png").read_bytes() == picture, "the same rows give the same bytes"


@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize(
    ("more", "taller"),
    [({"same_as": "another"}, False), ({"failure": "no room"}, False), ({"same_as": ""}, True)],
)
def test_the_picture_has_a_row_for_each_plan_that_ran(
    more: dict[str, str], taller: bool, rows: list[HeldoutRow], tmp_path: Path
) -> None:
    few, many = rows[:2], [*rows[:2], msgspec.structs.replace(rows[1], name="one more", **more)]
    for name, drawn in (("few.png", few), ("many.png", many)):
        draw(drawn, tmp_path / name)
    assert (height(tmp_path / "many.png") > height(tmp_path / "few.png")) == taller


def test_a_case_is_compared_op_by_op(
    rows: list[HeldoutRow], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in rows if row.policy == "k_buffer")
    assert show.main([str(folder), "--case", row.name, "--out", str(tmp_path / "one")]) == 0
    printed = capsys.readouterr().out
    assert "end to end" in printed
    assert "-50.00 %" in printed, "the measured step took twice the predicted time"
    assert "first divergence" in printed
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "comparison.json",
        "errors.png",
        "timeline.png",
        "trace.json",
    ]
    comparison = json.loads((tmp_path / "one" / "comparison.json").read_text())
    assert comparison["error"] == pytest.approx(-0.5)
    assert abs(comparison["engine_error"]) < 0.05
    assert [peak["what"] for peak in comparison["memory"]] == ["whole device peak", "host memory"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--case", "tiny"], "cases with 'tiny' in their name"),
        (["--case", BEST], "cases with 'best' in their name"),
        (["--case", "sequential"], "no stored timeline"),
    ],
)
def test_showing_an_unknown_case_or_folder_gives_a_one_line_error(
    folder: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show.main([str(folder), *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_folder_without_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show.main([str(tmp_path)]) == 2
    assert "found no rows" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
