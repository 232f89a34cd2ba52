"""Tests of Table 3's job with a model of any size: exact state against bf16 weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.experiments.paper_data.table3 import PLANS, one_thread, plan_with
from megatrain.experiments.paper_data.table3_large import (
    BF16,
    EXACT,
    main,
    rates,
    refuse_other_plans,
)
from megatrain.simulator.base.errors import UserError


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("table3")
    plan_with(*PLANS["overlapped, half resident"]).save(folder / "plan.toml")
    words = ["--device", "cpu", "--before", "10", "--steps", "4", "--every", "4"]
    out = folder / "out.json"
    with one_thread():
        assert main([str(folder / "plan.toml"), *words, "--seed", "1", "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_both_ways_begin_at_the_same_weights(result: dict[str, Any]) -> None:
    runs = result["runs"]
    assert [(run["way"], run["rate"]) for run in runs] == [
        (way, rate) for rate in (1e-5, 1e-6) for way in (EXACT, BF16)
    ]
    assert len({tuple(run["evaluations"][0]) for run in runs}) == 1
    for run in runs:
        assert [step for step, *_ in run["evaluations"]] == [0, 4]
        assert len(run["losses"]) == 4
    assert len({run["losses"][0] for run in runs}) == 1


def test_bf16_weights_alone_lose_most_updates(result: dict[str, Any]) -> None:
    """The smaller the rate, the more updates are lost."""
    shares = {(run["way"], run["rate"]): run["changed"] for run in result["runs"]}
    assert shares[BF16, 1e-6] < shares[BF16, 1e-5] < 0.2
    assert min(shares[EXACT, rate] for rate in (1e-5, 1e-6)) > 0.5
    moved = {(run["way"], run["rate"]): run["moved"] for run in result["runs"]}
    assert moved[EXACT, 1e-5] == pytest.approx(10 * moved[EXACT, 1e-6], rel=0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulation": 2}, "plan: accumulation: found 2; allowed: 1"),
        ({"state": "bf16-sr"}, "plan: state: found bf16-sr; allowed: exact"),
        ({"clipping": "none"}, "plan: clipping: found none; allowed: global"),
        ({"batch": 256}, "plan: batch: found 16,384 tokens in a step; allowed: fewer than 16,384"),
    ],
)
def test_a_plan_that_cannot_be_compared_is_refused(change: dict[str, Any], message: str) -> None:
    plan = plan_with(*PLANS["overlapped, half resident"])
    work = msgspec.structs.replace(plan.workload, **change)
    with pytest.raises(UserError, match=message):
        refuse_other_plans(msgspec.structs.replace(plan, workload=work))
    refuse_other_plans(plan)


def test_rates_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert rates("1e-5,2e-6") == [1e-5, 2e-6]
    assert main(["plan.toml", "--rates", "a,b", "--out", "out.json"]) == 2
    assert "--rates: found 'a,b'" in capsys.readouterr().err


def test_a_missing_plan_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.toml"), "--out", str(tmp_path / "out.json")]) == 2
    assert "none.toml: found no such file" in capsys.readouterr().err
