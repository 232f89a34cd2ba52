"""Tests of the validation against published numbers: its data, its errors and its report.

Every row is predicted or has a reason why not, and no row has its own assumptions.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from megatrain.experiments import validate_published
from megatrain.experiments.validate_published import main, validate
from megatrain.experiments.validation.predict import Implied, Predicted, implied_batch, predict
from megatrain.experiments.validation.report import (
    ALL,
    ALL_SURE,
    ASSUMED,
    DOUBTFUL,
    STATED,
    ValidationResult,
    as_csv,
    as_text,
    mape,
    summary,
    symmetric,
)
from megatrain.experiments.validation.rows import (
    FOLDER,
    GROUPS,
    ORIGINS,
    OTHERS,
    OWN,
    PAPER,
    PublishedRow,
    Setting,
    _row,
    load_rows,
    load_settings,
)
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "published" / "published.csv"


@pytest.fixture(scope="module")
def results() -> list[ValidationResult]:
    return validate()


def cells(**changes: str) -> dict[str, str]:
    """Returns the cells of a line of the data file."""
    line = {
        "item": "x",
        "setting": "gh200",
        "policy": "megatrain_code",
        "model": "qwen2.5-7b",
        "changes": "",
        "batch": "2",
        "sequence": "1024",
        "quantity": "step_s",
        "unit": "s",
        "value": "10",
        "sure": "++",
        "used": "",
        "source": "a table",
        "note": "",
    }
    return {**line, **changes}


def result(predicted: float | None, **changes: str) -> ValidationResult:
    """Returns a result with the row of `cells` and the prediction `predicted`."""
    return ValidationResult(
        row=_row("here", cells(**changes)),
        predicted=None if predicted is None else Predicted(predicted, 2, 1024, True),
    )


# ---- the data


def test_every_row_is_predicted_or_has_a_reason(results: list[ValidationResult]) -> None:
    assert len(results) == len(load_rows())
    for found in results:
        assert (found.predicted is None) == (not found.row.policy)
        if found.predicted is None:
            assert found.row.note
        else:
            assert found.row.policy in (*policies.names(), *policies.peers(), "engine")
            assert found.predicted.value >= 0
            assert found.error is not None or found.row.quantity == "runs"


def test_machines_in_the_user_s_folder_change_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has a file that would be refused if it were read."""
    (tmp_path / "theirs.toml").write_text("spoilt")
    monkeypatch.setenv("MEGATRAIN_MACHINES", str(tmp_path))
    row = load_rows()[0]
    monkeypatch.setattr(validate_published, "load_rows", lambda: [row])
    names: list[str] = []
    monkeypatch.setattr(
        validate_published, "predict", lambda _, setting: names.append(setting.machine().name)
    )
    assert len(validate()) == len(names) == 1
    with pytest.raises(UserError, match="theirs"):
        load_settings()[row.setting].machine()


def test_every_miss_is_named_with_its_reason(results: list[ValidationResult]) -> None:
    text = as_text(results)
    for found in results:
        if found.missed:
            assert found.row.note, (
                f"{found.row.item}: {found.row.quantity} is missed by {found.error}"
            )
            assert found.row.note in text


def test_no_row_has_an_assumption_of_its_own() -> None:
    """All rows of a machine share one table of settings. A row has only facts from its source."""
    settings = load_settings()
    assert {row.setting for row in load_rows()} <= set(settings)
    assert not set(PublishedRow.__struct_fields__) & set(Setting.__struct_fields__) - {
        "batch",
        "sequence",
    }
    stated = {
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "buffers",
        "staging_buffers",
        "interval",
        "lanes",
        "clipping",
    }
    assert all(set(row.changes) <= stated for row in load_rows())
    assert all(setting.assumed for setting in settings.values())
    with (FOLDER / "settings.toml").open("rb") as file:
        allowed = set(Setting.__struct_fields__)
        assert all(
            set(setting) <= allowed for setting in tomllib.load(file).values()
        )  # no efficiency factor, and no rates except that of a link in the source


def test_out_of_memory_is_predicted_or_reported(results: list[ValidationResult]) -> None:
    ooms = [
        found
        for found in results
        if found.row.quantity == "runs" and found.row.value == 0 and found.predicted
    ]
    assert len(ooms) >= 8
    assert all(found.missed == found.predicted.fits for found in ooms if found.predicted)
    assert sum(found.missed for found in ooms) <= 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"value": "fast"}, "fast"),
        ({"quantity": "speed"}, "quantity speed"),
        ({"sure": "maybe"}, "maybe"),
        ({"policy": ""}, "neither"),
        ({"changes": "layers"}, ""),
    ],
)
def test_a_wrong_line_is_refused_by_name(change: dict[str, str], found: str) -> None:
    with pytest.raises(UserError, match="line 7") as caught:
        _row("paper.csv, line 7", cells(**change))
    assert found in str(caught.value)


# ---- the errors of the predictions


def test_our_measurements_are_predicted_within_their_limits(
    results: list[ValidationResult],
) -> None:
    """The first measurements on the H200 are predicted within the error limits of each group.

    Only the time of the norms was fitted to them.
    """
    ours = [found for found in results if found.row.setting in ("h200-a", "h200-b")]
    for group, most in (
        ("speed", 0.05),
        ("a layer", 0.05),
        ("rates", 0.05),
        ("parts of a step", 0.10),
        ("device memory", 0.05),
        ("host memory", 0.05),
    ):
        error = mape(found for found in ours if found.group == group)
        assert error is not None
        assert error <= most, group


@pytest.mark.parametrize(
    ("settings", "most_fsdp2"), [(("h100-x2",), 0.17), (("h200-x2", "h200-x4"), 0.1)]
)
def test_steps_of_the_peers_over_batches_are_predicted_in_the_mean(
    results: list[ValidationResult], settings: tuple[str, ...], most_fsdp2: float
) -> None:
    """Nothing was fitted to them. The largest errors are of FSDP2: its norm varies on the host."""
    ours = [found for found in results if found.row.setting in settings]
    for policy, most in (("zero3_offload", 0.1), ("fsdp2_offload", most_fsdp2)):
        steps = [found for found in ours if found.row.policy == policy and found.group == "speed"]
        error = mape(steps)
        assert len(steps) >= 2
        assert error is not None
        assert error <= most, policy
    host = mape(found for found in ours if found.group == "host memory")
    assert host is not None
    assert host <= 0.02


def test_the_rows_of_our_own_files_count_as_our_measurements(
    results: list[ValidationResult],
) -> None:
    folder = Path(validate_published.__file__).parent / "published"
    for file in ("h200.csv", "h100.csv"):
        with (folder / file).open() as lines:
            names = {(row["item"], row["setting"]) for row in csv.DictReader(lines)}
        origins = {
            found.row.origin for found in results if (found.row.item, found.row.setting) in names
        }
        assert origins == {OWN}, file


def test_the_host_memory_of_the_paper_s_runs_is_predicted_within_2_percent(
    results: list[ValidationResult],
) -> None:
    """The host memory of the paper's runs is predicted within 2 %.

    It is ten bytes per parameter, the staging buffers and two weight buffers. These stay resident
    when gradients are freed. The memory of the process itself is not counted.
    """
    depths = [
        found
        for found in results
        if found.row.quantity == "rss_gib" and found.row.setting in ("gh200", "h100")
    ]
    assert len(depths) == 5
    assert all(-0.02 < (found.error or 0) < 0 for found in depths)


def test_the_committed_result_is_todays(results: list[ValidationResult]) -> None:
    """The committed result is up to date.

    The command that makes it again is in experiments/results/published/README.md.
    """
    stored = {
        (row["item"], row["quantity"], row["source"], row["setting"]): row
        for row in csv.DictReader(RESULT.read_text().splitlines())
    }
    assert len(stored) == len(results)
    for row in csv.DictReader(as_csv(results).splitlines()):
        old = stored[row["item"], row["quantity"], row["source"], row["setting"]]
        assert row["published"] == old["published"]
        if row["predicted"]:
            assert float(row["predicted"]) == pytest.approx(float(old["predicted"]), rel=0.02), row[
                "item"
            ]


# ---- arithmetic


def test_errors_are_signed_and_relative_to_what_was_published() -> None:
    assert result(9.0).error == pytest.approx(-0.1)
    assert result(12.5).error == pytest.approx(0.25)
    assert result(12.5).missed
    assert not result(11.9).missed
    assert result(None, policy="", note="because").error is None


def test_predictions_of_whether_a_run_fits_are_right_or_wrong() -> None:
    wrong = result(1.0, quantity="runs", value="0")
    assert wrong.missed
    assert wrong.error is None
    assert not result(0.0, quantity="runs", value="0").missed
    assert summary([wrong, result(1.0, quantity="runs", value="1")])["runs"] == {
        OTHERS: {"rows": 2, "right": 1}
    }


def test_the_summary_leaves_out_inputs_and_uncertain_rows() -> None:
    rows = [
        result(11.0),
        result(8.0),
        result(13.0, batch=""),
        result(15.0, sure="?"),
        result(99.0, used="yes"),
        result(None, policy="", note="because"),
        result(10.5, quantity="device_gib"),
    ]
    found = summary(rows)
    origins = found["origins"]
    assert isinstance(origins, dict)
    classes = origins[OTHERS]
    assert classes[STATED]["speed"] == {
        "rows": 2,
        "mape": pytest.approx(0.15),
        "median": pytest.approx(0.15),
        "symmetric": pytest.approx((1.1 / 0.8) ** 0.5 - 1),
        "mean_signed": pytest.approx(-0.05),
    }
    assert classes[STATED]["all"]["mape"] == pytest.approx((0.1 + 0.2 + 0.05) / 3)
    assert classes[ALL_SURE]["all"]["mape"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.05) / 4)
    assert classes[ASSUMED]["all"]["rows"] == 1
    assert classes[DOUBTFUL]["all"]["mape"] == pytest.approx(0.5)
    assert (found["rows"], found["not_predicted"], found["used"], found["missed"]) == (7, 1, 1, 3)
    assert mape([]) is None


def test_twice_and_half_of_a_value_have_the_same_symmetric_error() -> None:
    assert symmetric([result(20.0)]) == pytest.approx(1.0)
    assert symmetric([result(5.0)]) == pytest.approx(1.0)
    assert symmetric([]) is None


def test_a_bound_is_one_sided_and_in_no_mean() -> None:
    above, below = result(12.0, bound="least"), result(7.0, bound="least")
    assert above.error == 0
    assert not above.missed
    assert below.error == pytest.approx(-0.3)
    assert below.missed
    assert mape([above, below, result(11.0)]) == pytest.approx(0.1)
    assert summary([above, below])["bounds"] == 2


def test_each_experiment_counts_once() -> None:
    rows = [result(11.0), result(13.0, quantity="tokens_per_s", repeats="x: step_s")]
    assert mape(rows) == pytest.approx(0.1)
    assert summary(rows)["repeats"] == 1


def test_the_papers_rows_and_our_own_are_summed_up_apart() -> None:
    rows = [
        result(11.0, source="paper Table 4"),
        result(12.0, setting="h200-a"),
        result(13.0, source="authors' README"),
    ]
    assert [found.row.origin for found in rows] == [PAPER, OWN, OTHERS]
    origins = summary(rows)["origins"]
    assert isinstance(origins, dict)
    assert {name: round(origins[name][ALL]["all"]["mape"], 3) for name in ORIGINS} == {
        PAPER: 0.1,
        OTHERS: 0.3,
        OWN: 0.2,
    }


def test_every_row_that_repeats_another_names_it() -> None:
    """The named row counts. Rows that were used to choose an assumption do not count."""
    rows = load_rows()
    counted = {f"{row.item}: {row.quantity}" for row in rows if not row.repeats}
    assert {row.repeats for row in rows if row.repeats} <= counted
    chosen = [row for row in rows if row.used]
    assert {
        "MegaTrain gpt-oss-120b on an H200",  # chose 1,536 GiB
        "ZeRO-3 32b on an A100",  # chose 512 GiB
        "MegaTrain 56 layers",  # chose the version of the code
        "host minimum qwen2.5-7b",  # arithmetic
    } <= {row.item for row in chosen}
    assert not any(ValidationResult(row=row, predicted=None).counted for row in chosen)


def test_both_readings_of_one_and_a_half_terabytes_are_predicted(
    results: list[ValidationResult],
) -> None:
    found = {
        result.row.setting: result.predicted.value
        for result in results
        if result.row.quantity == "runs" and result.row.model == "gpt-oss-120b" and result.predicted
    }
    assert found == {"h200-paper": 1, "h200-paper-decimal": 0}


def test_a_baselines_speed_implies_a_batch() -> None:
    """The batch is the one whose speed is nearest. Rows with a stated batch imply none."""
    row = next(row for row in load_rows() if row.item == "ZeRO-3 14b" and row.quantity == "tflops")
    setting = load_settings()["gh200"]
    found = implied_batch(row, setting)
    assert found is not None
    assert found.batch == 4

    def speed(batch: int) -> float:
        predicted = predict(msgspec.structs.replace(row, batch=batch), setting)
        assert predicted is not None
        return predicted.value

    assert found == Implied(4, speed(4))
    assert row.value is not None
    assert abs(speed(4) - row.value) < min(abs(speed(size) - row.value) for size in (3, 5))
    assert implied_batch(msgspec.structs.replace(row, batch=2), setting) is None
    code = msgspec.structs.replace(row, policy="megatrain_code")
    assert implied_batch(code, setting) is None


def test_packing_on_one_thread_slows_only_a_single_buffer() -> None:
    setting = load_settings()["gh200"]
    packing = msgspec.structs.replace(setting, packs=True)
    rows = {
        row.item: row
        for row in load_rows()
        if row.source == "paper Table 4" and row.quantity == "tflops"
    }
    for item, least in (("14b, full", 0.99), ("14b, no double buffering", 0.8)):
        before, after = predict(rows[item], setting), predict(rows[item], packing)
        assert before is not None
        assert after is not None
        assert least < after.value / before.value < least + 0.1


def test_groups_share_no_quantity() -> None:
    quantities = [quantity for group in GROUPS.values() for quantity in group]
    assert len(quantities) == len(set(quantities))


# ---- the command


def test_the_command_prints_one_json_object_and_writes_every_row(
    results: list[ValidationResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(validate_published, "validate", lambda: results)
    assert main(["--json", "--csv", str(tmp_path / "rows.csv")]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert set(found) == {"summary", "rows"}
    assert (
        len(found["rows"])
        == len(load_rows())
        == len(list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())))
    )
    assert main(["--json"]) == 0
    assert capsys.readouterr().out == out


def test_a_path_that_cannot_be_written_is_the_users_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--csv", str(tmp_path / "file" / "such.csv")]) == 2
    assert "\n" not in capsys.readouterr().err.strip()


def test_settings_refuse_unknown_keys() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(
            {
                "hardware": "h200",
                "sequence": 1,
                "batch": 1,
                "assumed": "",
                "linear_efficiency": 0.5,
            },
            Setting,
        )


@pytest.mark.parametrize(
    ("page", "first"),
    [
        ("experiments/results/published/README.md", "our measurements: all"),
        ("docs/accuracy.md", "our measurements of other systems"),
    ],
)
def test_the_tables_of_our_measurements_have_the_printed_errors(
    capsys: pytest.CaptureFixture[str], page: str, first: str
) -> None:
    """Both pages have the rows, and the absolute and symmetric errors, of the command."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    counted = re.search(r"^rows (\d+),", printed, re.MULTILINE)
    assert counted is not None
    lines = printed[printed.index("\nour measurements  ") :].splitlines()[2:]
    errors = {
        group: numbers
        for name, group, *numbers in (re.split(r"  +", line.strip()) for line in lines[:7])
        if name == "all"
    }
    text = (Path(__file__).parents[2] / page).read_text()
    assert re.search(rf"\b{counted[1]}\srows", text), "the number of all rows"
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    ]
    groups = {"": "all", "a step": "speed"}
    for name, *cells in rows:
        part = name.removeprefix(first).strip(": .")
        numbers = [cell.replace(" %", "%") for cell in cells]
        assert numbers == errors[groups.get(part, part)][: len(numbers)], name
