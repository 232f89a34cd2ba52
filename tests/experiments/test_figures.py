"""Tests of the simulations for the figures and of the command that runs and draws them.

All systems of a figure have the same workload, and every result says how it was made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatrain.experiments import benchmark
from megatrain.experiments.paper_data import (
    ablations,
    answers,
    figure6,
    measure,
    ratio,
    rerun,
    robustness,
    stored,
    table4,
)
from megatrain.experiments.paper_data.answers import ours, paper_schedule, workloads
from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours
from megatrain.experiments.validate_published import load_settings, predict
from megatrain.experiments.validation.rows import PublishedRow
from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.gallery import FIGURES, build
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

Command = Callable[..., tuple[int, str, str]]


def test_an_installed_package_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Without a repository, `--rerun` stores its results in a copy of the package's results."""
    package = tmp_path / "site-packages" / "megatrain"
    results = package / "experiments" / "results"
    shutil.copytree(stored.RESULTS / "figures", results / "figures")
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    monkeypatch.setattr(stored, "ROOT", package)
    monkeypatch.setattr(stored, "RESULTS", results)
    monkeypatch.setitem(rerun.SIMULATIONS, "figure7", lambda: json.loads(old)["data"])
    old = (results / "figures" / "figure7.json").read_text()
    command("figures", "fig7", "--rerun", "--out", tmp_path / "drawn")
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before
    copied = tmp_path / "drawn" / "results" / "figures" / "figure7.json"
    assert json.loads(copied.read_text())["data"] == json.loads(old)["data"]
    assert copied.read_text() != old, "the result must have today's date and inputs"


def test_machines_in_the_user_s_folder_change_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has a file that would be refused if it were read."""
    (tmp_path / "theirs.toml").write_text("spoilt")
    monkeypatch.setenv("MEGATRAIN_MACHINES", str(tmp_path))
    with pytest.raises(UserError, match="theirs"):
        HardwareSpec.load("h200")
    monkeypatch.setitem(rerun.SIMULATIONS, "figure7", lambda: HardwareSpec.load("h200").name)
    rerun.rerun(["figure7"], tmp_path, lambda _: None)
    assert json.loads((tmp_path / "figures" / "figure7.json").read_text())["data"] == "h200"
    monkeypatch.setattr(style, "save", lambda *_: [])
    assert build(["table1"], Results(), tmp_path)
    assert os.environ["MEGATRAIN_MACHINES"] == str(tmp_path)


def test_a_workload_is_split_before_it_is_cut() -> None:
    assert workloads(6) == [(6, 1), (3, 2), (2, 3), (1, 6), (3, 1), (2, 1), (1, 1)]
    assert workloads(1) == [(1, 1)]
    for batch in (7, 96, 158, 203):
        whole = [
            size * accumulation
            for size, accumulation in workloads(batch)
            if accumulation > 1 or size == batch
        ]
        assert all(batch <= sequences < batch + 16 for sequences in whole)


def test_the_papers_schedule_takes_the_largest_interval_that_fits() -> None:
    model, roomy = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    wide = paper_schedule(model, roomy, 8, 1024)
    assert (wide.fits, wide.policy, wide.interval, wide.batch, wide.accumulation) == (
        True,
        "double_buffer",
        4,
        8,
        1,
    )
    tight = paper_schedule(
        model,
        msgspec.structs.replace(roomy, device_bytes=int(0.8 * wide.device_gib * 2**30)),
        8,
        1024,
    )
    assert tight.fits
    assert (tight.interval, tight.accumulation) != (4, 1)
    assert tight.device_gib <= 0.8 * wide.device_gib
    none = paper_schedule(model, msgspec.structs.replace(roomy, host_bytes=2**30), 8, 1024)
    assert not none.fits


def test_ours_fits_or_reports_that_it_does_not() -> None:
    model, roomy = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    found = ours(model, roomy, Workload(batch=8, sequence=1024))
    assert found.fits
    assert found.tokens_per_s >= paper_schedule(model, roomy, 8, 1024).tokens_per_s
    assert not ours(
        model,
        msgspec.structs.replace(roomy, host_bytes=2**30, device_bytes=2**30),
        Workload(batch=2, sequence=1024),
    ).fits


def test_a_published_row_is_predicted_by_the_validation_and_by_nothing_else() -> None:
    row: PublishedRow = published("paper Table 8")[0]
    (record,) = published_vs_ours([row])
    assert record["paper_stated"]["host_gib"] < record["paper_schedule"]["host_gib"]
    found = predict(row, load_settings()[row.setting])
    assert found is not None
    assert record["code"] == {
        "value": found.value,
        "fits": found.fits,
        "batch": found.batch,
        "sequence": found.sequence,
    }
    assert (record["paper"], record["sure"]) == (row.value, row.sure)
    assert record["ours"]["batch"] * record["ours"]["accumulation"] == pytest.approx(
        found.batch, abs=16
    )


def test_the_paper_s_state_format_is_temporary_and_has_no_low_half() -> None:
    model, machine = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    exact = paper_schedule(model, machine, 4, 1024)
    with answers.stated_format() as state:
        stated = paper_schedule(model, machine, 4, 1024, state=state)
    low_halves = (exact.host_gib - stated.host_gib) * 2**30 / model.parameters
    assert low_halves == pytest.approx(2, rel=0.05)
    assert answers.STATED.name not in FORMATS


def test_all_systems_of_the_ratio_train_as_many_sequences() -> None:
    model, machine = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("rtx3090")
    for system in ratio.SYSTEMS:
        found = ratio.other_system(system, model, machine, 32)
        assert found["fits"]
        assert found["batch"] * found["accumulation"] >= 32
        assert found["device_gib"] * 2**30 <= machine.device_bytes


def test_a_perturbation_changes_one_input() -> None:
    changes = {perturbation.name: perturbation for perturbation in robustness.PERTURBATIONS}
    known = load_settings()
    for name, field, factor in (
        ("link x 0.8", "h2d_gb_per_s", 0.8),
        ("CPU Adam x 2", "cpu_adam_per_s", 2),
    ):
        world = robustness.World(changes[name])
        for key, setting in known.items():
            before, after = setting.machine(), world.settings[key].machine()
            assert getattr(after, field) == pytest.approx(factor * getattr(before, field))
            assert after.device_bytes == before.device_bytes
    world = robustness.World(changes["H200 host 1,500 GB"])
    assert world.settings["h200-paper"].machine().host_bytes == 1_500_000_000_000
    assert {key for key in known if world.settings[key] != known[key]} == {"h200-paper"}
    assert robustness.World(changes["as predicted"]).settings == known


def test_every_conclusion_holds_as_predicted() -> None:
    """The stored conclusions are those of the code, and hold with unchanged inputs."""
    stored_one = json.loads((stored.RESULTS / "figures" / "robustness.json").read_text())["data"]
    names = [conclusion.name for conclusion in robustness.CONCLUSIONS]
    assert [found["name"] for found in stored_one["conclusions"]] == names
    first = stored_one["perturbations"][0]
    assert first["name"] == "as predicted"
    assert all(first["holds"])


def test_widths_keep_the_models_proportions() -> None:
    assert figure6.shape(3584, 1.0) == {
        "hidden_size": "3584",
        "intermediate_size": "18944",
        "num_attention_heads": "28",
        "num_key_value_heads": "4",
    }
    assert all(
        int(figure6.shape(base, 3.5)["num_attention_heads"])
        % int(figure6.shape(base, 3.5)["num_key_value_heads"])
        == 0
        for base in figure6.BASES
    )


def test_every_stored_result_has_a_figure_and_says_how_it_was_made() -> None:
    names = {path.stem for path in (stored.RESULTS / "figures").glob("*.json")}
    assert names == set(rerun.SIMULATIONS) <= set(FIGURES)
    for name in names:
        found = json.loads((stored.RESULTS / "figures" / f"{name}.json").read_text())
        assert found["command"] == f"megatrain figures {name} --rerun"
        assert found["date"] >= "2026-11-21"
        assert len(found["inputs"]) == 16


def test_every_measured_case_is_a_known_case_without_paths_of_its_machine() -> None:
    paths = sorted((stored.RESULTS / "figures" / "measured").glob("*.json"))
    assert {path.stem for path in paths} == set(measure.CASES)
    for path in paths:
        found = json.loads(path.read_text())
        words = {key: found["arguments"][key] for key in ("plan", "out")}
        assert words == {"plan": f"{path.stem}.plan.toml", "out": path.name}
        assert not [word for word in path.read_text().split('"') if word.startswith("/")]


def test_a_regime_states_what_the_host_updates() -> None:
    model = ModelSpec.load("qwen2.5-7b")
    plan = Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=model,
        workload=Workload(batch=1, sequence=64),
        device_limit_bytes=1,
        host_limit_bytes=1,
    )
    assert len(model.stack) == 30
    regimes = {
        "nothing streams": Placement(
            weights="all", master_low="all", moments="all", gradients="all"
        ),
        "all streams": Placement(),
        "part streams": Placement(moments="0-9"),
        "host updates some": Placement(weights="e,0-13", host_updated="14-27,h"),
        "host updates most": Placement(host_updated="13-27,h"),
    }
    for regime, placement in regimes.items():
        placed = msgspec.structs.replace(plan, knobs=Knobs(placement=placement))
        assert answers._regime(placed) == regime
        streams = msgspec.structs.replace(
            placement, weights="", master_low="", moments="", gradients=""
        )
        assert ablations.streamed(placed).knobs.placement == streams


def test_a_folder_with_something_else_is_refused_before_the_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(rerun, "rerun", lambda *_: pytest.fail("it simulated"))
    status, _, error = command("figures", "fig5", "--rerun", "--results", tmp_path / "results")
    assert status == 2
    assert "results: found no folder figures in it; allowed: a copy of" in error


def test_an_earlier_copy_of_the_results_gets_those_that_it_lacks(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (results / "figures").mkdir(parents=True)
    (results / "figures" / "figure5.json").write_text("{}")
    assert stored.writable_results(tmp_path, results) == results
    assert {path.name for path in stored.RESULTS.iterdir()} == {
        path.name for path in results.iterdir()
    }
    assert (results / "figures" / "figure5.json").read_text() == "{}"


def test_the_command_simulates_stores_and_draws(tmp_path: Path, command: Command) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    before = {path: path.read_bytes() for path in (stored.RESULTS / "figures").glob("*.json")}
    status, text, _ = command("figures", "fig4", "--rerun", "--results", results, "--out", out)
    assert status == 0
    assert before == {path: path.read_bytes() for path in before}
    assert (results / "h200-x2-depth" / "d28.json").is_file(), "a new folder becomes a copy"
    assert "figure4: simulated in" in text
    assert sorted(path.name for path in (out / "pictures").iterdir()) == [
        "figure4.csv",
        "figure4.pdf",
        "figure4.png",
    ]
    assert not (out / "README.md").exists(), "the page is written only with all figures"
    committed = json.loads((stored.RESULTS / "figures" / "figure4.json").read_text())
    assert (
        json.loads((results / "figures" / "figure4.json").read_text())["data"] == committed["data"]
    )
    path = results / "figures" / "figure4.json"
    path.write_text(path.read_text().replace(stored.digest("figure4"), "0" * 16))
    assert (
        "megatrain figures figure4 --rerun"
        in command("figures", "fig4", "--results", results, "--out", out)[1]
    )


def test_a_mistake_gives_a_one_line_error(tmp_path: Path, command: Command) -> None:
    for words, found in (
        (("fig99",), "fig99"),
        (("fig5", "--results", tmp_path / "none"), "figure5.json"),
    ):
        status, _, err = command("figures", *words, "--out", tmp_path / "out")
        assert status == 2
        assert found in err
        assert "\n" not in err.strip()


@pytest.mark.parametrize("case", measure.CASES)
def test_every_case_to_be_measured_can_be_planned(case: str, tmp_path: Path) -> None:
    """Every case fits the calibrated H200 with 118 GiB of host memory.

    Cases whose workload was not calibrated as a whole leave some device memory free.
    """
    args = benchmark.parser().parse_args(measure.arguments(case, tmp_path, 5))
    plan, _ = benchmark.make_plan(args)
    assert plan.prediction is not None
    assert plan.prediction.device_peak_bytes <= plan.device_limit_bytes
    assert plan.prediction.host_peak_bytes <= 118 * 2**30
    assert plan.workload.accumulation == 1
    assert plan.workload.compiled == (case != "table4-no-compile")
    exact = case in ("table4-no-overlapped-update", "table4-no-residency")
    assert exact or plan.device_limit_bytes <= 134 * 2**30
    assert (plan.policy == "k_buffer") == (case == "table4-no-overlapped-update")
    if case == "table4-no-residency":
        assert not any(
            plan.placed(name) for name in ("weights", "master_low", "moments", "gradients")
        )
        assert plan.placed("saved_activations")
    if case == "table4-no-chunked-loss":
        assert plan.workload.loss_chunk == plan.workload.tokens


def test_eager_layers_cost_what_was_measured_alone() -> None:
    """Eager layers take the durations in `experiments/published/h200.csv`.

    Forward takes 28.04 ms, and forward and backward together take 85.17 ms.
    """
    model = ModelSpec.load(ablations.MODEL)
    costs = ablations.machine("no compile", model).costs
    assert costs is not None
    shape = f"{model.shape}/32x1024-bf16"
    assert [costs.compute[kind][shape][1] for kind in ("forward", "recompute", "backward")] == [
        28_040_000,
        28_040_000,
        57_130_000,
    ]
    assert 0.8 < table4.compiled_share() < 0.9


def test_every_ablation_of_ours_is_slower() -> None:
    found = {case: ablations.ablated(case) for case in ablations.CASES}
    assert all(choice.feasible for choice in found.values())
    assert min(found, key=lambda case: found[case].step_seconds) == "full"
    stored_one = json.loads(
        (stored.RESULTS / "h200-qwen2.5-7b-batches" / "32x1024.json").read_text()
    )["plan"]["workload"]
    assert msgspec.convert(stored_one, Workload) == ablations.WORK, (
        "the full plan was measured with this workload"
    )


def test_measuring_can_show_its_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["measure", "table4-no-residency", "--only-plan", "--out", str(tmp_path)]
    )
    assert measure.main() == 0
    assert "table4-no-residency.plan.toml: step 3." in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["measure", "table4", "--out", str(tmp_path)])
    assert measure.main() == 2
    assert "table4-no-residency" in capsys.readouterr().err
