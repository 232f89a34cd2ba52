"""Every figure builds from the committed results, its table says what the paper says, nothing is clipped or empty, and what is missing is named."""

from __future__ import annotations

import csv
import functools
import json
import shutil
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from megatrain.paper_figures import figure3, gallery, predicted_measured, style
from megatrain.paper_figures.gallery import FIGURES, draw, known, page
from megatrain.paper_figures.results import EXPERIMENTS, Results
from megatrain.paper_figures.table import Drawn, Row, as_csv
from megatrain.simulator.errors import UserError

HERE = Path(gallery.__file__).parent
SOURCES = {
    "figure1": ("paper Figure 1",), "figure4": ("paper Figure 4",), "figure5": ("paper Figure 5",), "figure6": ("paper Figure 6",), "figure7": ("paper Figure 7",),
    "table4": ("paper Table 4",), "table7": ("paper Table 7",), "tables8_9": ("paper Table 8", "paper Table 9"),
}  # fmt: skip
"""figure -> the sources of its published rows"""
SIMULATED = sorted(path.stem for path in (EXPERIMENTS / "results" / "figures").glob("*.json"))


@functools.cache
def drawn(name: str) -> Drawn:
    return draw(name, Results())


@pytest.mark.parametrize("name", FIGURES)
def test_it_builds_from_the_committed_results(name: str, tmp_path: Path) -> None:
    found = drawn(name)
    written = style.save(found.figure, tmp_path, name)
    assert [path.read_bytes()[:4] for path in written] == [b"\x89PNG", b"%PDF"]
    assert found.rows
    assert found.claim.endswith(".")
    assert found.finding.endswith(".")
    assert "2026-" in found.made, "machine and date"


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_clipped_and_no_panel_is_empty(name: str) -> None:
    figure = drawn(name).figure
    with matplotlib.rc_context(style.RC):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        width, height = canvas.get_width_height()
        assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
        for axes in figure.axes:
            assert axes.lines or axes.patches or axes.collections or axes.tables, "an empty panel"
            if axes.axison:
                assert axes.get_ylabel() or axes.get_title("left"), "an axis without a name"
        texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
        assert min(text.get_fontsize() for text in texts) >= 7
        ticks = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels(which="both")}
        for text in set(texts) - ticks:  # ticks beyond the limits have labels that are not drawn
            box = text.get_window_extent(renderer)
            assert box.x0 >= -2, text.get_text()
            assert box.x1 <= width + 2, text.get_text()
            assert box.y0 >= -2, text.get_text()
            assert box.y1 <= height + 2, text.get_text()


@pytest.mark.parametrize("name", SOURCES)
def test_the_papers_column_is_what_is_stored(name: str) -> None:
    with (EXPERIMENTS / "published" / "paper.csv").open(newline="") as file:
        told = [row for row in csv.DictReader(file) if row["source"] in SOURCES[name]]
    assert told
    rows = list(csv.DictReader(as_csv(drawn(name).rows).splitlines()))
    for fact in told:
        item = f"{fact['item'].removeprefix('host minimum ')}: state" if name == "figure4" else fact["item"]
        mine = [row for row in rows if (row["item"], row["quantity"]) == (item, fact["quantity"]) and (row["paper"], row["sure"]) != ("", "")]
        values = [(row["paper"], row["sure"]) for row in mine]
        assert (f"{float(fact['value']):g}" if fact["value"] else "", fact["sure"]) in values, item


@pytest.mark.parametrize(("name", "section"), [("table1", "bandwidth_gb_per_s"), ("table1", "capacity_gb"), ("table3", "percent")])
def test_what_no_policy_predicts_is_what_is_stored_too(name: str, section: str) -> None:
    told = Results().facts()[name][section]
    rows = {(row.item, row.quantity): row.paper for row in drawn(name).rows}
    quantity = {"bandwidth_gb_per_s": "bandwidth", "capacity_gb": "capacity", "percent": "exact_match"}[section]
    assert {item: rows[item, quantity] for item in told} == told


def test_deviations_are_signed_and_relative_to_the_papers_value() -> None:
    row = Row(item="x", quantity="tflops", unit="TFLOPS", paper=200.0, ours=150.0, measured=220.0)
    assert row.deviation("ours") == pytest.approx(-0.25)
    (line,) = csv.DictReader(as_csv([row]).splitlines())
    assert (line["deviation_ours"], line["deviation_measured"], line["deviation_published_code"]) == ("-0.2500", "+0.1000", "")
    assert Row(item="x", quantity="runs", unit="", paper=1.0, ours=0.0).deviation("ours") is None


# ---- results that are missing or malformed


def link_all(tmp_path: Path) -> Path:
    """A results folder of links to the committed one, `figures` copied."""
    folder = tmp_path / "results"
    folder.mkdir()
    for path in (EXPERIMENTS / "results").iterdir():
        if path.name == "figures":
            shutil.copytree(path, folder / path.name)
        else:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("name", SIMULATED)
def test_a_missing_or_malformed_result_names_the_file_and_the_command(tmp_path: Path, name: str) -> None:
    folder = link_all(tmp_path)
    path = folder / "figures" / f"{name}.json"
    stored = json.loads(path.read_text())
    for content in ("{ cut", "{}", json.dumps(stored | {"data": {"x": 1}}), json.dumps(stored | {"data": [{"x": 1}]}), None):
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(UserError) as caught:
            draw(name, Results(folder))
        assert str(path) in str(caught.value)
        assert f"megatrain figures {name} --rerun" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["plan.toml", "environment.json", "predicted.json", "measured.json", "comparison.json", "memory.json"])
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


def test_nothing_is_written_for_a_figure_that_fails(tmp_path: Path) -> None:
    folder = link_all(tmp_path)
    (folder / "figures" / "figure7.json").unlink()
    with pytest.raises(UserError):
        gallery.build(["fig7"], Results(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- names and the page


def test_short_names_stand_for_figures() -> None:
    assert known(["table8", "fig5", "table9", "figure5"]) == ["figure5", "tables8_9"]
    assert known([]) == list(FIGURES)
    with pytest.raises(UserError, match="did you mean figure5"):
        known(["figur5"])


def test_the_committed_page_and_tables_are_todays() -> None:
    """To make them again: `megatrain figures --out paper_figures`."""
    assert (HERE / "README.md").read_text() == page({name: drawn(name) for name in FIGURES})
    for name in FIGURES:
        assert (HERE / "pictures" / f"{name}.png").exists()
        assert (HERE / "pictures" / f"{name}.csv").read_text() == as_csv(drawn(name).rows)
