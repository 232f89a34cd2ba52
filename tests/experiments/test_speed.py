"""Tests of `make speed`: it compares ratios to a reference with stored ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.experiments.benchmarks import speed


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replaces the cases by two with given processor seconds, and the reference by 0.5 s.

    Returns the seconds by case, which a test may change.
    """
    seconds = {"first": 1.0, "second": 3.0}
    monkeypatch.setattr(speed, "reference", lambda: 0.5)
    monkeypatch.setattr(speed, "CASES", {name: lambda name=name: seconds[name] for name in seconds})
    return seconds


def test_a_slower_case_is_named_and_ends_with_status_1(
    fixed: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "results" / "speed.json"
    assert speed.run(["--stored", str(stored), "--write", str(stored)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["first", "1.000", "2.00", "-", "-"]
    fixed["second"] = 3.6
    assert speed.run(["--stored", str(stored)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == [
        "second",
        "3.600",
        "7.20",
        "6.00",
        "+20%",
    ]
    fixed["second"] = 3.9
    assert speed.run(["--stored", str(stored)]) == 1
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "slower than 1.25 times the stored ratio: second"
    )
    assert speed.run(["--stored", str(stored), "--tolerance", "1.5"]) == 0
    assert speed.run(["--stored", str(stored), "first"]) == 0


@pytest.mark.usefixtures("fixed")
def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        speed.run(["third"])
    assert ended.value.code == 2
    assert "found case 'third'; allowed: first, second" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_real_cases_run_and_have_a_stored_ratio() -> None:
    assert set(
        speed.msgspec.convert(speed.read_json(speed.STORED), speed.SpeedResult).ratios
    ) == set(speed.CASES)
    assert speed.run(["megatrain --help", "sweep 24 plans of 14B", "--tolerance", "100"]) == 0
