"""Tests of the figures: every figure is drawn from the committed results.

Tables have the paper's numbers, nothing is clipped or empty, and errors name missing results.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import shutil
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from megatrain.paper_figures import figure1, figure3, gallery, table4
from megatrain.paper_figures.beyond_the_paper import predicted_measured, ratio, robustness
from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import EXPERIMENTS, Results
from megatrain.paper_figures.common.table import Drawn, TableRow, as_csv
from megatrain.paper_figures.gallery import FIGURES, draw, known, page
from megatrain.simulator.base.errors import UserError

HERE = Path(gallery.__file__).parent
SOURCES = {
    "figure1": ("paper Figure 1",),
    "figure4": ("paper Figure 4",),
    "figure5": ("paper Figure 5",),
    "figure6": ("paper Figure 6",),
    "figure7": ("paper Figure 7",),
    "table4": ("paper Table 4",),
    "table7": ("paper Table 7",),
    "tables8_9": ("paper Table 8", "paper Table 9"),
}
"""figure -> sources of its published rows"""
SIMULATED = sorted(path.stem for path in (EXPERIMENTS / "results" / "figures").glob("*.json"))


@functools.cache
def drawn(name: str) -> Drawn:
    return draw(name, Results())


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_built_from_the_committed_results(name: str) -> None:
    found = drawn(name)
    assert found.rows
    assert found.claim.endswith(".")
    assert found.finding.endswith(".")
    assert "2026-" in found.caption, "the machine and the date are stated"
    sentences = re.split(r"(?<=[.]) (?=[A-Z0-9`])", found.finding)
    assert len(sentences) <= 8
    assert max(len(sentence.split()) for sentence in sentences) < 40, "one finding a sentence"
    assert "{" not in found.finding + found.claim


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("figure1", "table4") else [pytest.mark.nightly])
        for name in FIGURES
    ],
)
def test_a_figure_is_saved_as_an_image_and_as_a_page(name: str, tmp_path: Path) -> None:
    written = style.save(drawn(name).figure, tmp_path, name)
    assert [path.read_bytes()[:4] for path in written] == [b"\x89PNG", b"%PDF"]


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_clipped_and_no_panel_is_empty(name: str) -> None:
    figure = drawn(name).figure
    figure.dpi = 72  # as on the page, whether or not the figure has been saved before
    with matplotlib.rc_context(style.RC):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        width, height = canvas.get_width_height()
        assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
        for axes in figure.axes:
            assert axes.lines or axes.patches or axes.collections or axes.tables, (
                "no panel is empty"
            )
            if axes.axison:
                assert axes.get_ylabel() or axes.get_title("left"), "every axis has a name"
        texts = [
            text
            for text in figure.findobj(matplotlib.text.Text)
            if text.get_visible() and text.get_text().strip()
        ]
        assert min(text.get_fontsize() for text in texts) >= 7
        ticks = {
            label
            for axes in figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            for label in axis.get_ticklabels(which="both")
        }
        for text in set(texts) - ticks:  # ticks beyond the limits have labels that are not drawn
            box = text.get_window_extent(renderer)
            assert box.x0 >= -2, text.get_text()
            assert box.x1 <= width + 2, text.get_text()
            assert box.y0 >= -2, text.get_text()
            assert box.y1 <= height + 2, text.get_text()


@pytest.mark.parametrize("name", SOURCES)
def test_the_paper_s_column_is_that_of_the_stored_rows(name: str) -> None:
    with (EXPERIMENTS / "published" / "paper.csv").open(newline="") as file:
        reported = [row for row in csv.DictReader(file) if row["source"] in SOURCES[name]]
    assert reported
    rows = list(csv.DictReader(as_csv(drawn(name).rows).splitlines()))
    for fact in reported:
        item = (
            f"{fact['item'].removeprefix('host minimum ')}: state"
            if name == "figure4"
            else fact["item"]
        )
        mine = [
            row
            for row in rows
            if (row["item"], row["quantity"]) == (item, fact["quantity"])
            and (row["paper"], row["sure"]) != ("", "")
        ]
        values = [(row["paper"], row["sure"]) for row in mine]
        assert (f"{float(fact['value']):g}" if fact["value"] else "", fact["sure"]) in values, item


@pytest.mark.parametrize(
    ("name", "section"),
    [("table1", "bandwidth_gb_per_s"), ("table1", "capacity_gb"), ("table3", "percent")],
)
def test_rows_that_no_policy_predicts_are_those_of_the_stored_rows(name: str, section: str) -> None:
    reported = Results().facts()[name][section]
    rows = {(row.item, row.quantity): row.paper for row in drawn(name).rows}
    quantity = {
        "bandwidth_gb_per_s": "bandwidth",
        "capacity_gb": "capacity",
        "percent": "exact_match",
    }[section]
    assert {item: rows[item, quantity] for item in reported} == reported


def test_marked_rows_of_the_paper_are_marked_in_every_table() -> None:
    with (EXPERIMENTS / "published" / "paper.csv").open(newline="") as file:
        reported = list(csv.DictReader(file))
    for name, sources in SOURCES.items():
        marks = {(row.item, row.quantity): row.mark for row in drawn(name).rows if row.paper}
        for fact in reported:
            found = marks.get((fact["item"], fact["quantity"]))
            if fact["source"] in sources and found is not None:
                assert found.startswith("input") == (fact["used"] == "yes"), fact["item"]
                assert found.startswith("lower") == bool(fact["bound"]), fact["item"]


def test_every_row_of_a_system_names_its_workload() -> None:
    for name in ("figure1", "ratio", "figure5", "figure6", "figure7", "table7", "tables8_9"):
        for row in drawn(name).rows:
            if row.quantity == "tflops" and row.published_code is not None:
                assert re.search(r"\d+ x \d+", row.workload), (name, row.item)


def test_the_ratio_compares_equal_batches() -> None:
    rows = {(row.item, row.quantity): row for row in drawn("ratio").rows}
    speeds = {
        system: rows[f"{system}, qwen2.5-14b, gh200-96, 96 sequences", "tflops"].published_code
        for system in ("megatrain_code", "zero3_offload")
    }
    equal = rows["megatrain_code, qwen2.5-14b, gh200-96, 96 sequences", "ratio"].published_code
    assert speeds["megatrain_code"]
    assert speeds["zero3_offload"]
    assert equal == pytest.approx(speeds["megatrain_code"] / speeds["zero3_offload"])
    claimed = rows["MegaTrain 14b with 96 sequences / ZeRO-3 with 4, GH200", "ratio"]
    assert claimed.paper == 1.84
    assert {row.item for row in drawn("ratio").rows if row.measured} == {
        f"{system}, qwen2.5-7b, on our H200, 32 sequences"
        for system in ("ours", "fsdp2_offload", "megatrain_code")
    } | {
        f"{system}, qwen2.5-7b, on our H100, {batch} sequences"
        for system in ("ours", "fsdp2_offload")
        for batch in (4, 8)
    } | {
        f"{system}, on our H200, {batch} sequences"
        for model in ("qwen2.5-7b", "qwen2.5-14b")
        for system in (f"ours, {model}", f"fsdp2_offload, {model}")
        for batch in (1, 16)
    }


def test_every_benchmark_with_zero3_is_a_star_of_the_ratio(tmp_path: Path) -> None:
    folder = link_all(tmp_path)
    path = f"{ratio.PEERS}/{ratio.BENCHMARKS[0]}"
    found = json.loads((EXPERIMENTS / "results" / path).read_text())
    found["plan"]["workload"].update(batch=8, accumulation=2)
    for system, seconds in (("ours", 2.0), ("zero3", 7.0)):
        (record,) = [record for record in found["systems"] if record["system"] == system]
        record.update(step_seconds_median=seconds)
    (folder / "h200-another").mkdir()
    (folder / "h200-another" / "benchmark.json").write_text(json.dumps(found))
    stars = ratio.measured(Results(folder))
    (star,) = [star for star in stars if star.where == "h200-another/benchmark.json"]
    assert star[:4] == ("ours", "qwen2.5-7b", 16, 3.5)
    assert len(stars) == len(ratio.measured(Results())) + 1


def test_a_conclusion_is_robust_if_nothing_breaks_it() -> None:
    data = robustness.Robustness(
        conclusions=[robustness.StoredConclusion(name=name, unit="x") for name in ("a", "b")],
        perturbations=[
            robustness.Tried(name="as predicted", values=[1.0, 2.0], holds=[True, True]),
            robustness.Tried(name="slower", values=[1.1, 3.0], holds=[True, False]),
            robustness.Tried(name="faster", values=[None, 2.5], holds=[None, True]),
        ],
    )
    first, second = robustness.judged(data)
    assert (first.verdict, first.tried, first.least, first.most) == ("robust", 1, "1.00", "1.10")
    assert (second.verdict, second.tried, second.broken_by) == ("fragile", 2, ["slower"])


def test_deviations_are_signed_and_relative_to_the_papers_value() -> None:
    row = TableRow(
        item="x", quantity="tflops", unit="TFLOPS", paper=200.0, ours=150.0, measured=220.0
    )
    assert row.deviation("ours") == pytest.approx(-0.25)
    (line,) = csv.DictReader(as_csv([row]).splitlines())
    assert (
        line["deviation_ours"],
        line["deviation_measured"],
        line["deviation_published_code"],
    ) == ("-0.2500", "+0.1000", "")
    assert (
        TableRow(item="x", quantity="runs", unit="", paper=1.0, ours=0.0).deviation("ours") is None
    )


# ---- results that are missing or malformed


def link_all(tmp_path: Path) -> Path:
    """Makes a results folder with links to the committed results, and a copy of `figures`."""
    folder = tmp_path / "results"
    folder.mkdir()
    for path in (EXPERIMENTS / "results").iterdir():
        if path.name == "figures":
            shutil.copytree(path, folder / path.name)
        else:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("name", SIMULATED)
def test_a_missing_or_malformed_result_names_the_file_and_the_command(
    tmp_path: Path, name: str
) -> None:
    folder = link_all(tmp_path)
    path = folder / "figures" / f"{name}.json"
    stored = json.loads(path.read_text())
    for content in (
        "{ cut",
        "{}",
        json.dumps(stored | {"data": {"x": 1}}),
        json.dumps(stored | {"data": [{"x": 1}]}),
        None,
    ):
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(UserError) as caught:
            draw(name, Results(folder))
        assert str(path) in str(caught.value)
        assert f"megatrain figures {name} --rerun" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "file",
    [
        "plan.toml",
        "environment.json",
        "predicted.json",
        "measured.json",
        "comparison.json",
        "memory.json",
    ],
)
def test_a_missing_or_malformed_run_is_named(tmp_path: Path, file: str) -> None:
    folder = link_all(tmp_path)
    (folder / figure3.PAPERS).unlink()
    shutil.copytree(EXPERIMENTS / "results" / figure3.PAPERS, folder / figure3.PAPERS)
    path = folder / figure3.PAPERS / file
    for content in ("{ cut", None):
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(UserError, match=file) as caught:
            predicted_measured.draw(Results(folder))
        assert "run.sh" in str(caught.value)


@pytest.mark.parametrize("name", ["figure1", "predicted_measured"])
def test_a_malformed_benchmark_is_named_and_other_files_are_left_alone(
    tmp_path: Path, name: str
) -> None:
    folder = link_all(tmp_path)
    path = folder / "h200-another" / "benchmark.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert draw(name, Results(folder)).rows == drawn(name).rows
    for content in ("{ cut", '{"systems": []}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"h200-another.*README"):
            draw(name, Results(folder))


# ---- measured results


def measured(folder: Path, case: str, *, seconds: float, failure: str = "", **work: object) -> None:
    """Writes a benchmark of the case, which is a changed copy of a stored benchmark."""
    found = json.loads((EXPERIMENTS / "results" / table4.FULL).read_text())
    found["plan"]["workload"].update(work)
    found["tokens_per_step"] = (
        found["plan"]["workload"]["batch"] * found["plan"]["workload"]["sequence"]
    )
    (record,) = [record for record in found["systems"] if record["system"] == "ours"]
    record.update(
        step_seconds_median=seconds,
        tflops_6n=record["tflops_6n"] * record["step_seconds_median"] / seconds,
        failure=failure,
    )
    (folder / "figures" / "measured").mkdir(exist_ok=True)
    (folder / "figures" / "measured" / f"{case}.json").write_text(
        json.dumps(found | {"systems": [record]})
    )


def test_every_stored_run_and_benchmark_is_in_the_scatter_and_in_figure_1(tmp_path: Path) -> None:
    every = (EXPERIMENTS / "results").glob("h200-*")
    folders = {
        path.name
        for path in every
        if any(
            file.name == "measured.json" or '"systems"' in file.read_text()
            for file in path.glob("*.json")
        )
    }
    assert len(folders) >= 6
    assert {
        case.item.partition(":")[0].partition("/")[0]
        for case in predicted_measured.cases(Results())
    } >= folders
    # the paper has none of these
    others = {"h200-qwen2.5-7b-fp8", "h200-qwen2.5-7b-muon", "h200-gpt-oss-20b", "h200-x2-depth"}
    others.add("h200-embedding-kernels")
    long = {  # Table 7 has them
        "h200-long-context",
        "h200-qwen2.5-7b-49152",
        "h200-x2-qwen2.5-7b-524288",
    }
    drawn = {star.where.partition("/")[0] for star in figure1.stars(Results())}
    large = {"h100-x4-large-models"}  # the only models of 72B and more
    assert drawn == (folders - others - long) | large
    folder = link_all(tmp_path)
    measured(folder, "table4-no-residency", seconds=4.0)
    items = {case.item: case for case in predicted_measured.cases(Results(folder))}
    assert items["figures/measured/table4-no-residency.json: step"].measured == 4.0
    assert len(figure1.stars(Results(folder))) == len(figure1.stars(Results())), (
        "a plan of an ablation has no star"
    )


def test_a_measured_ablation_is_drawn_and_a_failed_one_is_not(tmp_path: Path) -> None:
    folder = link_all(tmp_path)
    measured(folder, "table4-no-residency", seconds=5.0)
    measured(folder, "table4-no-compile", seconds=5.0, failure="out of memory")
    found = draw("table4", Results(folder))
    rows = {row.item: row for row in found.rows if row.quantity == "tflops"}
    tokens = 32 * 1024
    assert rows["ours, 7B, H200: no residency"].measured == pytest.approx(
        6 * 7615616512 * tokens / 5 / 1e12
    )
    assert rows["ours, 7B, H200: no compile"].measured is None
    assert rows["ours, 7B, H200: full"].measured == pytest.approx(536.5, abs=0.1)
    assert "no residency" in found.caption
    assert "no compile" not in found.caption


def test_every_ablation_of_ours_is_measured() -> None:
    found = drawn("table4")
    steps = {row.item: row for row in found.rows if row.quantity == "step_s"}
    assert set(steps) == {f"ours, 7B, H200: {name}" for name in table4.OURS}
    for name in table4.OURS[1:]:
        file = Results().measured(f"table4-{name.replace(' ', '-')}")
        assert file is not None
        assert (
            steps[f"ours, 7B, H200: {name}"].measured == file["systems"][0]["step_seconds_median"]
        )
        assert name in found.caption
    assert "not measured" not in found.finding


def test_a_measured_context_is_scaled_to_the_reported_tokens() -> None:
    found = draw("table7", Results())
    rows = {row.item: row for row in found.rows if row.quantity == "step_s"}
    assert rows["ours, 7b, 1K, on an H200"].measured == pytest.approx(2.7906 * 158 / 32, rel=1e-4)
    assert rows["ours, 7b, 32K, on an H200"].measured == pytest.approx(3.8033 * 6, rel=1e-4)
    contexts = {row.partition("7b, ")[2].partition(",")[0] for row in rows if "on an H200" in row}
    assert contexts == {"1K", "8K", "32K", "128K", "256K", "512K"}
    assert "accumulation 1" in found.caption
    assert "5 x 8,192" in found.caption


def test_nothing_is_written_for_a_figure_that_fails(tmp_path: Path) -> None:
    folder = link_all(tmp_path)
    (folder / "figures" / "figure7.json").unlink()
    with pytest.raises(UserError):
        gallery.build(["fig7"], Results(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- names and the page


def test_figures_can_be_named_by_short_names() -> None:
    assert known(["table8", "fig5", "table9", "figure5"]) == ["figure5", "tables8_9"]
    assert known([]) == list(FIGURES)
    with pytest.raises(UserError, match="did you mean figure5"):
        known(["figur5"])


def test_the_committed_page_and_tables_are_todays() -> None:
    """The committed page and tables are up to date.

    `megatrain figures --out paper_figures` makes them again.
    """
    made = {name: drawn(name) for name in FIGURES}
    assert (HERE / "README.md").read_text() == page(made, Results())
    for name in FIGURES:
        assert (HERE / "pictures" / f"{name}.png").exists()
        assert (HERE / "pictures" / f"{name}.csv").read_text() == as_csv(drawn(name).rows)


def test_a_held_out_plan_that_was_measured_several_times_counts_once() -> None:
    for folder, rows in Results().heldout_rows().items():
        names = [row["name"] for row in rows]
        assert len(set(names)) == len(names), folder
    rows = Results().heldout_rows()["h200-16-cores-choices"]
    assert len(rows) == 13
    assert next(row for row in rows if row["name"].endswith("/best"))["step_seconds"] == (
        pytest.approx(0.35502, abs=1e-4)
    )


@pytest.mark.parametrize("figure", ["regimes", "pareto"])
def test_missing_measured_plans_are_named(figure: str, tmp_path: Path) -> None:
    folder = link_all(tmp_path)
    (folder / "h200-regimes").unlink()  # a link
    with pytest.raises(UserError, match=r"h200-regimes: found no measured plan; .*--suite figures"):
        draw(figure, Results(folder))
