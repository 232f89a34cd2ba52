"""Tests of `megatrain compare` with several runs: its table, its JSON and its picture."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.figure import Figure

from megatrain.experiments.run_report.several_runs import format_runs, read_runs
from megatrain.runtime.data.summary import DataSummary, data_labels
from megatrain.simulator.base.files import write_json
from megatrain.simulator.plots import canvas
from megatrain.simulator.schedule.plan import Placement, Plan

STORED = Path(__file__).parents[3] / "experiments" / "results" / "h200-qwen2.5-3b"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the runs `a/run`, `b/run` and `short`.

    Run b is faster and learns more, and `short` was stopped in its second step.
    """
    place = tmp_path_factory.mktemp("runs")
    row = json.loads((STORED / "metrics.jsonl").read_text().splitlines()[0])
    for name, count, final, seconds in (("a/run", 50, 2.0, 0.5), ("b/run", 100, 1.0, 0.4)):
        folder = place / name
        folder.mkdir(parents=True)
        for file in ("plan.toml", "environment.json", "memory.json"):
            shutil.copy(STORED / file, folder)
        rows = [
            {
                **row,
                "step": step,
                "loss": final + 2 / step,
                "rate": 1e-4 * final,
                "seconds": 9.0 if step <= 2 else seconds,
                "tokens_per_second": 1.0 if step <= 2 else 32 / seconds,
            }
            for step in range(1, count + 1)
        ]
        seen = {"step": count, "evaluation_loss": final / 2, "perplexity": 3.0}
        rows.insert(20, {**seen, "step": 20, "tokens": 9, "seconds": 0.1})
        rows.append({**seen, "evaluation_loss": final, "tokens": 9, "seconds": 0.1})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        config = f"[training]\nsteps = 100\n[optimizer]\nweight_decay = {final}\n"
        (folder / "config.toml").write_text(config + f'[data]\ndata = "{name}.txt"\n')
    shutil.copytree(place / "a" / "run", place / "short")
    lines = (place / "short" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "short" / "metrics.jsonl").write_text("".join(lines[:2]))
    (place / "short" / "memory.json").unlink()
    return place


def cells(text: str, name: str) -> list[str]:
    """Returns the cells of the row that begins with `name`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}  ")]
    return re.split(r"\s\s+", line.removeprefix(name).strip())


def summary(**changes: Any) -> DataSummary:
    """Returns the summary of two documents."""
    numbers = {"documents": 2, "left_out": 0, "cut": 0, "cut_tokens": 0, "tokens": 24}
    rows = {"targets": 24, "sequence": 16, "packed_rows": 2, "padding": 0.0}
    return DataSummary(**{**numbers, **rows, **changes})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list to which every drawn figure is added. Files are written too."""
    figures: list[Figure] = []
    save = canvas.save

    def both(figure: Figure, path: Path) -> None:
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(canvas, "save", both)
    return figures


def test_the_speed_without_padding_is_a_row_of_its_own(runs: Path, tmp_path: Path) -> None:
    """Only the rows of run b have padding."""
    folders = [tmp_path / name for name in "ab"]
    for folder, padding in zip(folders, (0.0, 0.25), strict=True):
        shutil.copytree(runs / folder.name / "run", folder)
        write_json(folder / "data.json", {"training": summary(padding=padding)})
    text = format_runs(read_runs(folders)[0], ["a", "b"])
    assert cells(text, "tokens/s") == ["64.0", "80.0", "+25.0 %"]
    assert cells(text, "tokens/s without padding") == ["64.0", "60.0", "-6.2 %"]
    for others in ([folders[0]] * 2, [runs / "a" / "run", runs / "b" / "run"]):
        assert "padding" not in format_runs(read_runs(others)[0], ["a", "b"])


def test_the_placements_of_the_runs_are_compared(runs: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, changes in zip(folders, ({"weights": "all"}, {"moments": "0-1"}), strict=True):
        shutil.copytree(runs / "a" / "run", folder)
        plan = Plan.load(folder / "plan.toml")
        knobs = msgspec.structs.replace(plan.knobs, placement=Placement(**changes))
        msgspec.structs.replace(plan, knobs=knobs).save(folder / "plan.toml")
    assert read_runs(folders)[0].settings == {
        "knobs.placement.weights": ["all", "-"],
        "knobs.placement.moments": ["-", "0-1"],
    }


@pytest.mark.parametrize(
    ("names", "digests", "documents", "shown"),
    [
        ("ab", "xy", (2, 2), ["a", "b"]),
        ("aa", "xy", (2, 2), ["a (x, 2 documents, 24 tokens)", "a (y, 2 documents, 24 tokens)"]),
        ("aa", "xx", (2, 3), ["a (x, 2 documents, 24 tokens)", "a (x, 3 documents, 24 tokens)"]),
        ("ab", "xx", (2, 2), None),  # the same data in another place
        ("ab", ("", ""), (2, 2), ["a", "b"]),  # older runs
        ("aa", ("", ""), (2, 2), None),
    ],
)
def test_the_data_of_the_runs_is_compared(
    runs: Path,
    tmp_path: Path,
    names: str,
    digests: Sequence[str],
    documents: tuple[int, int],
    shown: list[str] | None,
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, name, digest, count in zip(folders, names, digests, documents, strict=True):
        shutil.copytree(runs / "a" / "run", folder)
        data = summary(digest=digest, documents=count)
        write_json(folder / "data.json", {"training": data, "evaluation": data})
        (folder / "config.toml").write_text(f'[data]\ndata = "{name}"\nevaluation_data = ""\n')
    compared, _ = read_runs(folders)
    text = format_runs(compared, ["one", "two"])
    line = "\nEvaluation losses on different evaluation data are not comparable."
    assert text.endswith(line) == (shown is not None)
    assert len(cells(text, "evaluation loss, last")) == (3 if shown is None else 2)
    for key in ("data.data", "data.evaluation_data"):
        assert compared.settings.get(key) == shown


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        # Documents that are left out were cut at the sequence, which is 16 and 24 tokens here.
        (
            {"documents": 5, "tokens": 100},
            {"documents": 3, "left_out": 2, "tokens": 48, "cut_tokens": 4, "sequence": 24},
            True,
        ),
        ({"tokens": 619}, {"tokens": 1857}, False),  # two parts of one text
        ({"chosen": "one"}, {"chosen": "one", "documents": 1, "left_out": 1, "tokens": 8}, True),
        ({"chosen": "one"}, {"chosen": "two"}, False),
        ({"chosen": "one"}, {}, True),  # the second run is older than this digest
    ],
)
def test_other_documents_of_the_same_data_are_other_data(
    first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    labels = data_labels([summary(digest="x", **first), summary(digest="x", **second)])
    assert (len(set(labels)) == 1) == same


def held_out_runs(runs: Path, place: Path, held_out: dict[str, DataSummary | None]) -> list[Path]:
    """Returns runs with the names and the evaluation data of `held_out`. Those without evaluation
    data have no evaluation loss.
    """
    folders = []
    for name, data in held_out.items():
        folder = place / name
        shutil.copytree(runs / "a" / "run", folder)
        (folder / "config.toml").write_text('[data]\ndata = "corpus"\n')
        summaries = {"training": summary(digest="z", chosen="z")}
        if data:
            summaries["evaluation"] = data
        else:
            metrics = folder / "metrics.jsonl"
            lines = metrics.read_text().splitlines(keepends=True)
            metrics.write_text("".join(line for line in lines if "evaluation" not in line))
        write_json(folder / "data.json", summaries)
        folders.append(folder)
    return folders


def test_only_runs_with_an_evaluation_loss_have_evaluation_data(runs: Path, tmp_path: Path) -> None:
    same, other = (summary(digest="x", chosen=chosen) for chosen in ("one", "two"))
    said = "Evaluation losses on different evaluation data are not comparable."
    h1, h2, h3, n = held_out_runs(runs, tmp_path, {"h1": same, "h2": same, "h3": other, "n": None})
    assert said not in format_runs(read_runs([h1, h2, n])[0], ["h1", "h2", "n"])
    assert said not in format_runs(read_runs([h1, n])[0], ["h1", "n"])
    compared, _ = read_runs([h1, h3, n])
    assert said in format_runs(compared, ["h1", "h3", "n"])
    assert compared.settings["data.evaluation_data"] == [
        "corpus (one, 2 documents, 24 tokens)",
        "corpus (two, 2 documents, 24 tokens)",
        "-",
    ]


def test_evaluation_data_of_its_own_is_named(runs: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, digest in zip(folders, "xy", strict=True):
        shutil.copytree(runs / "a" / "run", folder)
        held_out = summary(digest=digest)
        write_json(folder / "data.json", {"training": summary(digest="z"), "evaluation": held_out})
        (folder / "config.toml").write_text(
            f'[data]\ndata = "corpus"\nevaluation_data = "held-{digest}"\n'
        )
    assert read_runs(folders)[0].settings == {"data.evaluation_data": ["held-x", "held-y"]}


def test_two_runs_are_compared_in_one_table_and_one_picture(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Any],
    drawn: list[Figure],
) -> None:
    monkeypatch.chdir(tmp_path)
    found = command("compare", runs / "a" / "run", runs / "b" / "run")
    assert (found.status, found.err) == (0, "")
    assert found.out.startswith("the same in all: model ")
    assert all(len(line) <= 80 for line in found.out.splitlines())
    assert re.search(r"\n +a/run +b/run +change\n", found.out)
    assert cells(found.out, "steps") == ["50", "100"]
    assert cells(found.out, "highest learning rate") == ["2e-4", "1e-4"]
    assert cells(found.out, "loss, last 2 steps") == ["2.0404", "1.0201", "-50.0 %"]
    assert cells(found.out, "loss up to step 50") == ["2.0404", "1.0404", "-49.0 %"]
    assert cells(found.out, "evaluation loss, last") == ["2.0000", "1.0000", "-50.0 %"]
    assert cells(found.out, "evaluation loss, best") == ["1.0000", "0.5000", "-50.0 %"]
    assert cells(found.out, "tokens/s") == ["64.0", "80.0", "+25.0 %"], "without warm-up"
    assert cells(found.out, "step") == ["500.000 ms", "400.000 ms", "-20.0 %"]
    assert cells(found.out, "device memory")[2] == "+0.0 %"
    assert cells(found.out, "optimizer.weight_decay") == ["2.0", "1.0"]
    assert "training.steps" not in found.out, "both configs have the same value"
    assert cells(found.out, "data.data") == ["a/run.txt", "b/run.txt"]
    assert found.out.endswith("wrote comparison.png\n")
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.png"]
    upper, middle, *memory = drawn[0].axes
    assert [text.get_text() for text in upper.get_legend().get_texts()] == ["a/run", "b/run"]
    assert [list(line.get_ydata())[-1] for line in middle.lines] == [64.0, 80.0]
    assert len(memory[0].patches) == len(memory[1].patches) == 2


def test_a_change_from_what_is_shown_as_zero_is_left_out(runs: Path) -> None:
    compared, _ = read_runs([runs / "a/run", runs / "b/run"])
    first, second = compared.runs
    learned = msgspec.structs.replace(first, loss=4e-7, common_loss=1e-3)
    text = format_runs(msgspec.structs.replace(compared, runs=[learned, second]), ["a", "b"])
    assert cells(text, "loss, last 2 steps")[0] == "0.0000"
    assert len(cells(text, "loss, last 2 steps")) == 2
    assert cells(text, "loss up to step 50")[2].startswith("+")


def test_a_run_that_was_stopped_early_is_compared_too(
    runs: Path, tmp_path: Path, command: Callable[..., Any], drawn: list[Figure]
) -> None:
    picture = tmp_path / "three.png"
    names = [runs / "a" / "run", runs / "b" / "run", runs / "short"]
    found = command("compare", *names, "--out", picture)
    assert (found.status, found.err) == (0, "")
    assert "change" not in found.out
    assert cells(found.out, "loss, last step")[2] == f"{2 + 2 / 2:.4f}"
    assert cells(found.out, "device memory")[2] == "-"
    assert picture.is_file()
    texts = [text.get_text() for text in drawn[0].axes[2].texts]
    assert "not measured" in texts
    found = json.loads(command("compare", *names, "--out", picture, "--json").out)
    assert [run["steps"] for run in found["runs"]] == [50, 100, 2]
    assert [run["loss"] for run in found["runs"]] == [2 + 2 / 50, 1 + 2 / 100, 3.0]
    assert found["runs"][2]["device_bytes"] is None
    assert (found["last_steps"], found["common_step"]) == (1, 2)
    assert found["settings"]["optimizer.weight_decay"] == ["2.0", "1.0", "2.0"]


def test_the_speed_of_a_run_that_switched_plans_is_that_of_the_last_one(
    runs: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    shutil.copytree(runs / "a" / "run", tmp_path / "switched")
    metrics = tmp_path / "switched" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        if row["step"] <= 40:
            row |= {"schedule": "former", "seconds": 5.0, "tokens_per_second": 6.4}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = tmp_path / "two.png"
    outcome = command(
        "compare", runs / "a" / "run", tmp_path / "switched", "--json", "--out", picture
    )
    whole, switched = json.loads(outcome.out)["runs"]
    for key in ("step_seconds", "tokens_per_second"):
        assert switched[key] == whole[key]


@pytest.mark.parametrize("bad", ["nothing", "."])
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Any],
    bad: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = command("compare", runs / "short", bad)
    assert found.status == 2
    assert found.err.startswith(f"megatrain: {bad}: found no ")
    assert found.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_picture_of_one_run_has_its_folder(runs: Path, command: Callable[..., Any]) -> None:
    found = command("compare", runs / "short", "--out", "x.png")
    assert found.status == 2
    assert "allowed: several RUNs, which have one picture" in found.err
