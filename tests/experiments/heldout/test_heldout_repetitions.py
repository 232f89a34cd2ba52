"""Tests of repeated cases in the held-out validation: what runs again, and how rows are merged.

Some repetitions fail, would end too late, or were made with another plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.experiments.heldout import __main__ as heldout
from megatrain.experiments.heldout.rows import HeldoutRow, by_case, read_rows
from megatrain.experiments.heldout.suites import BEST, HeldoutCase, suite
from megatrain.experiments.heldout.summary import summarize_errors
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.assessment import Choice


class Machine:
    """A machine that executes nothing and makes up its measurements.

    A step takes one second in the first repetition of a case, two seconds in the second, and so on.
    The executions whose numbers are in `fails` fail.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, cases: tuple[HeldoutCase, ...]
    ) -> None:
        self.folder, self.ran, self.fails = folder, list[str](), set[int]()
        write_toml(folder / "hardware.toml", HardwareSpec.load("h200"), "")
        monkeypatch.setattr(heldout, "suite", lambda _: suite("tiny")._replace(cases=cases))
        monkeypatch.setattr(heldout, "load_libraries", lambda *_: None)
        monkeypatch.setattr(heldout, "executed", self.executed)

    def executed(self, case: HeldoutCase, choice: Choice, *_: Any) -> tuple[HeldoutRow, None]:
        self.ran.append(case.name)
        seconds, failure = (
            1.0 + (self.ran.count(case.name) - 1),
            "no room" if len(self.ran) in self.fails else "",
        )
        steps = (
            {}
            if failure
            else {
                "steps": (seconds,),
                "step_seconds": seconds,
                "device_peak_bytes": int(seconds),
                "host_bytes": 9 - int(seconds),
                "host_pool_bytes": 1,
            }
        )
        return (
            HeldoutRow(
                name=case.name,
                model=case.model,
                policy=case.policy,
                plan=choice.plan,
                machine="a machine",
                failure=failure,
                **steps,
            ),
            None,
        )

    def heldout(self, *words: str) -> list[HeldoutRow]:
        assert heldout.main(["--device", "cpu", "--out", str(self.folder), *words]) == 0
        return read_rows(self.folder / "rows.jsonl")


TWINS = (
    HeldoutCase("tiny", 4, 16, BEST),
    HeldoutCase("tiny", 4, 16, "overlapped"),
    HeldoutCase("tiny", 3, 16, "k_buffer", accumulation=2),
)


def test_a_repetition_that_fails_does_not_hide_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, TWINS)
    best, twin, other = (case.name for case in TWINS)
    machine.fails = {3}  # the first case's second repetition
    rows = machine.heldout()
    assert machine.ran == [best, other, best, other]
    assert [(row.name, row.repetitions, row.failures, row.failure) for row in rows] == [
        (best, (1.0,), ("no room",), ""),
        (twin, (1.0,), ("no room",), ""),
        (other, (1.0, 2.0), (), ""),
    ]
    assert rows[1].same_as == best
    assert summarize_errors(rows).executed == 2
    rows = machine.heldout()
    assert machine.ran[4:] == [best], "the next command runs only the failed repetition again"
    assert [row.repetitions for row in rows] == [(1.0, 3.0), (1.0, 3.0), (1.0, 2.0)]
    assert [row.step_seconds for row in rows] == [2.0, 2.0, 1.5]
    assert (rows[1].device_peak_bytes, rows[1].host_bytes) == (3, 8), (
        "the highest value of each repetition counts"
    )
    machine.heldout()
    assert len(machine.ran) == 5


def test_a_case_that_fails_at_once_waits_for_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, TWINS)
    machine.fails = {1, 2}  # the best plan, and the next case, which has the same plan
    rows = machine.heldout()
    assert machine.ran == [TWINS[0].name, TWINS[1].name, TWINS[2].name, TWINS[2].name]
    assert [row.failure for row in rows] == ["no room", "no room", ""]
    assert [row.repetitions for row in machine.heldout()] == [(2.0, 3.0), (2.0, 3.0), (1.0, 2.0)]


def test_some_cases_can_run_first_and_the_others_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, TWINS)
    machine.heldout("--cases", "best", "--repetitions", "1")
    machine.heldout("--cases", "overlapped")
    assert machine.ran == [TWINS[0].name], "its plan was executed for another case already"
    machine.heldout("--cases", "overlapped")
    assert [row.repetitions for row in machine.heldout()] == [(1.0, 2.0)] * 3


def test_repetitions_of_another_plan_or_machine_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, TWINS[2:])
    machine.heldout()
    path = tmp_path / "rows.jsonl"
    first, second = (
        msgspec.json.decode(line, type=HeldoutRow) for line in path.read_bytes().splitlines()
    )
    for change in (
        {"machine": "another"},
        {"plan": msgspec.structs.replace(first.plan, source="another")},
    ):
        other = msgspec.structs.replace(first, **change)
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in (other, second)))
        assert [row.repetitions for row in read_rows(path)] == [(2.0,)]
    path.write_bytes(msgspec.json.encode(other) + b"\n")
    assert [row.repetitions for row in machine.heldout()] == [(3.0, 4.0)], (
        "the stored repetition had another plan"
    )


def test_a_case_that_no_longer_shares_a_plan_has_results_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch, TWINS)
    best, twin, other = machine.heldout()
    moved_on = msgspec.structs.replace(
        best, plan=other.plan, repetitions=(), failures=(), step_seconds=5.0
    )
    rows = by_case(
        [
            msgspec.structs.replace(best, repetitions=(), failures=()),
            msgspec.structs.replace(twin, repetitions=(), failures=()),
            moved_on,
        ]
    )
    assert [(row.same_as, row.step_seconds) for row in rows] == [("", 5.0), ("", 1.5)]


def test_a_case_that_would_end_too_late_is_left_for_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path, monkeypatch, TWINS)
    monkeypatch.setattr(heldout, "case_seconds", lambda _: 1e9 if len(machine.ran) >= 3 else 0.0)
    machine.heldout("--seconds", "60")
    assert machine.ran == [TWINS[0].name, TWINS[2].name, TWINS[0].name]
    assert capsys.readouterr().out.count("left for the next run") == 1
    machine.heldout("--seconds", "60")
    assert capsys.readouterr().out.count("left for the next run") == 1
    monkeypatch.setattr(heldout, "case_seconds", lambda _: 7.0)
    machine.heldout()
    assert machine.ran[3:] == [TWINS[2].name]
    printed = capsys.readouterr().out
    assert printed.count("done") == 2, "the first case and the case with the same plan"
    assert "7 s in total" in printed
