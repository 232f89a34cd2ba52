"""Tests of the stored runs of Table 3 with 0.5 B parameters: means, ranges and the page."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatrain.paper_figures import table3
from megatrain.paper_figures.common.fine_tuning import BF16, EXACT, FOLDER, fine_tuning
from megatrain.paper_figures.common.results import EXPERIMENTS, Results
from megatrain.paper_figures.gallery import draw
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

STORED = EXPERIMENTS / "results" / FOLDER
SEEDS = [json.loads((STORED / f"seed-{seed}.json").read_text()) for seed in range(3)]
WAYS = [(rate, way) for rate in (1e-5, 1e-6) for way in (EXACT, BF16)]


def values(rate: float, way: str) -> list[dict[str, Any]]:
    """Returns the run of each seed."""
    return [
        next(run for run in seed["runs"] if (run["rate"], run["way"]) == (rate, way))
        for seed in SEEDS
    ]


def copied(tmp_path: Path) -> Path:
    """Returns a folder of results that has a copy of the stored seeds."""
    shutil.copytree(STORED, tmp_path / FOLDER)
    return tmp_path / FOLDER


@pytest.mark.parametrize(("rate", "way"), WAYS)
def test_means_and_ranges_are_those_of_the_seeds(rate: float, way: str) -> None:
    found = fine_tuning(Results())
    runs = values(rate, way)
    assert found.steps == [0, 40, 80, 120, 160]
    for at, loss in enumerate(found.held_out(way, rate)):
        each = [run["evaluations"][at][1] for run in runs]
        assert loss == pytest.approx((fmean(each), min(each), max(each)))
    falls = [run["evaluations"][0][1] - run["evaluations"][-1][1] for run in runs]
    assert found.spread(way, rate, lambda run: run.fall).mean == pytest.approx(fmean(falls))


def test_ways_are_compared_seed_by_seed() -> None:
    found = fine_tuning(Results())
    for rate in found.rates:
        shares = [
            rounded["moved"] / exact["moved"]
            for rounded, exact in zip(values(rate, BF16), values(rate, EXACT), strict=True)
        ]
        spread = found.relative(rate, lambda run: run.moved)
        assert spread == pytest.approx((fmean(shares), min(shares), max(shares)))
    assert found.exact_is_always_lower()


def test_one_higher_evaluation_is_noticed(tmp_path: Path) -> None:
    path = copied(tmp_path) / "seed-1.json"
    seed = json.loads(path.read_text())
    seed["runs"][0]["evaluations"][2][1] = 9.0
    path.write_text(json.dumps(seed))
    assert not fine_tuning(Results(tmp_path)).exact_is_always_lower()


def test_the_seeds_ran_with_the_stored_plan() -> None:
    plan = Plan.load(STORED / "table3.plan.toml")
    for number, seed in enumerate(SEEDS):
        assert seed["seed"] == number
        assert (seed["model"], seed["parameters"]) == (plan.model.name, plan.model.parameters)
        assert (seed["batch"], seed["sequence"]) == (plan.workload.batch, plan.workload.sequence)
        assert not [word for word in json.dumps(seed).split('"') if word.startswith("/")]


def test_the_numbers_of_the_page_are_those_of_the_files() -> None:
    page = (STORED / "README.md").read_text()
    rows = re.findall(r"^\| (1e-\d) \| (exact|bf16 weights alone) \| (.*) \|$", page, re.MULTILINE)
    assert [(float(rate), way) for rate, way, _ in rows] == WAYS
    found = fine_tuning(Results())
    for rate, way, cells in rows:
        first, last = (found.held_out(way, float(rate))[at] for at in (0, -1))
        fall, right, moved, changed = (
            found.spread(way, float(rate), value)
            for value in (
                lambda run: run.fall,
                lambda run: 100 * run.evaluations[-1][2],
                lambda run: 100 * run.moved,
                lambda run: 100 * run.changed,
            )
        )
        places = 3 if fall.mean > 0.1 else 4
        spread = "{0:.{3}f} ({1:.{3}f} to {2:.{3}f})"
        before = spread.format(*first, 3) if (float(rate), way) == WAYS[0] else "the same"
        assert cells.split(" | ") == [
            before,
            spread.format(*last, 3),
            spread.format(*fall, places),
            f"{right.mean:.1f} %",
            f"{moved.mean:.3g} %",
            f"{changed.mean:.1f} %",
        ]
    shares = re.findall(r"^\| (1e-\d) \| ([\d.]+ %.*\)) \| ([\d.]+ %.*\)) \|$", page, re.MULTILINE)
    assert len(shares) == 2
    for rate, *cells in shares:
        for cell, value in zip(cells, (lambda run: run.fall, lambda run: run.moved), strict=True):
            share = [100 * part for part in found.relative(float(rate), value)]
            assert cell == "{:.1f} % ({:.1f} to {:.1f} %)".format(*share)


def test_the_table_of_the_picture_has_the_means() -> None:
    path = Path(table3.__file__).parent / "pictures" / "table3.csv"
    rows = {
        (row["item"], row["quantity"]): row
        for row in csv.DictReader(path.read_text().splitlines())
        if "step 160" in row["note"]
    }
    for rate, way in WAYS:
        row = rows[f"qwen2.5-0.5b, rate {rate:.0e}, {way}".replace("e-0", "e-"), "held_out_loss"]
        each = [run["evaluations"][-1][1] for run in values(rate, way)]
        assert float(row["measured"]) == pytest.approx(fmean(each), rel=1e-5)
        assert f"{min(each):.6g} to {max(each):.6g}" in row["note"]


def test_the_figure_has_the_means_and_the_finding_links_the_runs() -> None:
    drawn = draw("table3", Results())
    curves = drawn.figure.axes[3:5]
    assert [axes.get_title("left") for axes in curves] == [
        "0.5 B, rate 1e-5: held-out loss",
        "0.5 B, rate 1e-6: held-out loss",
    ]
    for axes, rate in zip(curves, (1e-5, 1e-6), strict=True):
        for line, way in zip(axes.containers, (EXACT, BF16), strict=True):
            means = [spread.mean for spread in fine_tuning(Results()).held_out(way, rate)]
            assert list(line[0].get_ydata()) == pytest.approx(means)
    assert f"({table3.PAGE})" in drawn.finding
    assert (Path(table3.__file__).parent / table3.PAGE).is_file()


def test_seeds_that_are_missing_malformed_incomplete_or_of_another_job_are_named(
    tmp_path: Path,
) -> None:
    folder = copied(tmp_path)
    path = folder / "seed-2.json"
    seed = json.loads(path.read_text())
    for text, found in (
        (json.dumps(seed | {"sequence": 256}), "seeds of 2 jobs"),
        (json.dumps(seed | {"runs": seed["runs"][:3]}), "seed 2 without a run"),
        ('{"seed": 2}', "seed-2.json"),
        ("{ cut", "seed-2.json"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=found) as caught:
            fine_tuning(Results(tmp_path))
        assert "README.md" in str(caught.value)
        assert "\n" not in str(caught.value)
    for each in folder.glob("seed-*.json"):
        each.unlink()
    with pytest.raises(UserError, match=r"no seed-\*\.json"):
        fine_tuning(Results(tmp_path))
