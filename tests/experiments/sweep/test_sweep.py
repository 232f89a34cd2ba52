"""Tests of sweeps: shared work, stored rows, policies in files of the user, and execution.

Sharing work between plans changes no number. Stored rows are not computed again. A policy of the
user needs only its file. `--execute` measures the plans.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
import torch
from pages import saved_examples

from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.commands import sweep
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.experiments.sweep import executed, grid, load_sweep, running, simulated, store
from megatrain.experiments.sweep.flat import latest, outdated, write_csv
from megatrain.experiments.sweep.front import fastest, front
from megatrain.experiments.sweep.running import SweepEntry, simulate
from megatrain.experiments.sweep.simulated import Simulator, likeness
from megatrain.experiments.sweep.store import Keys, Store, SweepRow, sources_digest
from megatrain.experiments.sweep.table import settings as shown
from megatrain.experiments.sweep.table import table
from megatrain.runtime.memory.fitting import LOADING_BYTES
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.base.outside_source import outside_source
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Kernel, Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.attention_kernel import with_attention_kernel
from megatrain.simulator.schedule.plan import Placement, Plan

H200 = HardwareSpec.load("h200")
WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16, "--dtype", "fp32")
ADDING = Path(__file__).parents[3] / "docs" / "adding.md"


def axes(**values: Any) -> grid.Axes:
    return dict(grid.axis(name.replace("__", "."), found, "test") for name, found in values.items())


def plan_of(row: SweepRow) -> Plan:
    """Returns the plan of a row with the model `tiny` of the workplace."""
    return Plan(
        policy=row.policy,
        hardware="h200",
        source="tiny",
        model=ModelSpec.load("tiny"),
        knobs=row.knobs,
        workload=row.workload,
        device_limit_bytes=row.device_limit_bytes,
        host_limit_bytes=row.host_limit_bytes,
    )


def rows_of(plans: list[Plan]) -> dict[int, SweepRow]:
    """Returns the row of each plan by its index. The order of simulation shares most work."""
    work = Simulator(H200)
    return {
        index: work.row(plans[index], str(index))
        for index in sorted(range(len(plans)), key=lambda index: likeness(plans[index]))
    }


@pytest.mark.parametrize("policy", [*policies.names(), *policies.peers()])
def test_work_that_plans_share_changes_no_number(policy: str, make_plan: Any) -> None:
    """A plan has the same numbers in a sweep as when it is assessed alone."""
    able = policies.find(policy).places_state
    placement = Placement(saved_attention="0-1", offloaded_attention="0") if able else Placement()
    base = make_plan(policy, layers=5, dtype="bf16", heads=4, placement=placement)
    placed = (
        {"placement__saved_activations": ["", "3-4"], "placement__offloaded_inputs": ["", "all"]}
        if able
        else {"checkpoint_interval": [1, 2]}
    )
    found = grid.plans(
        base,
        [
            axes(
                policy=[policy],
                batch=[1, 2, 5],
                seq=[16, 32],
                accumulation=[1, 2],
                device_memory=["300KiB", "16MiB"],
                **placed,
            )
        ],
    )
    rows = rows_of(found)
    assert len(rows) == len(found)
    for index, plan in enumerate(found):
        choice, row = assess(plan, cost_model(H200, plan.model, plan.workload)), rows[index]
        assert (row.device_peak_bytes, row.host_peak_bytes) == (
            choice.account.device_peak_bytes,
            choice.account.host_peak_bytes,
        )
        assert row.step_seconds == (choice.step_seconds if choice.feasible else None)
        assert row.binding == (choice.bounds.binding if choice.feasible else choice.account.binding)
    assert {row.decided_by for row in rows.values()} <= {"engine", "evaluator", "memory"}


def test_a_policy_whose_order_depends_on_the_tokens_is_lowered_for_each_batch(
    make_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep checks whether the schedule for one batch size is valid for the others.

    The policy here orders its ops differently for large batches.
    """
    from megatrain.simulator.policies.k_buffer import KBuffer

    honest = KBuffer.lower

    def fickle(self: KBuffer, plan: Plan) -> Any:
        wide = (
            msgspec.structs.replace(plan.knobs, weight_slots=4)
            if plan.workload.batch > 2
            else plan.knobs
        )
        return honest(self, msgspec.structs.replace(plan, knobs=wide))

    monkeypatch.setattr(KBuffer, "lower", fickle)
    monkeypatch.setattr(KBuffer, "buffers", policies.Policy.buffers)
    found = grid.plans(
        make_plan("k_buffer", layers=6),
        [axes(policy=["k_buffer"], batch=[1, 2, 3, 4], chunk_bytes=[4096, 8192])],
    )
    for index, row in rows_of(found).items():
        assert (
            row.device_peak_bytes
            == assess(
                found[index], cost_model(H200, found[index].model, found[index].workload)
            ).account.device_peak_bytes
        )


@pytest.mark.usefixtures("with_pictures")
def test_existing_rows_are_not_computed_again(
    command: Any, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--policy",
        "k_buffer",
        "--jobs",
        1,
        "--out",
        "swept",
        "--over",
        "weight_slots",
        1,
        2,
        3,
    )
    outcome = command(*words)
    assert (outcome.status, outcome.err) == (0, "")
    assert "3 plans in " in outcome.out
    rows = Path("swept/rows.jsonl")
    whole = rows.read_bytes()
    lines = whole.splitlines(keepends=True)
    rows.write_bytes(lines[0] + lines[1] + lines[2][:50])  # like after an interrupted write
    asked: list[str] = []
    row = Simulator.row
    monkeypatch.setattr(
        Simulator, "row", lambda self, plan, key: (asked.append(key), row(self, plan, key))[1]
    )
    outcome = command(*words, 4)
    assert "2 plans in " in outcome.out
    assert "2 had been done before" in outcome.out
    assert len(asked) == 2
    assert sorted(rows.read_bytes().splitlines(keepends=True)[:3]) == sorted(lines)
    for kind in ("png", "pdf"):
        assert (workplace / f"swept/sweep.{kind}").stat().st_size > 1000
    rows.write_bytes(b'{"key": 1}\n' + whole)
    outcome = command(*words)
    assert outcome.status == 2
    assert "line 1: found no row: Expected `str`, got `int` - at `$.key`" in outcome.err


def test_a_policy_in_a_file_of_its_own_is_swept(command: Any, workplace: Path) -> None:
    """The example policy of docs/adding.md is swept together with a policy of the library."""
    code = re.findall(r"```python\n(.*?)```", ADDING.read_text(), re.DOTALL)[0]
    (workplace / "more").mkdir()
    file = workplace / "more" / "pinned.py"
    file.write_text(code)
    words = (
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--jobs",
        1,
        "--out",
        "swept",
        "--over",
        "policy",
        "more/pinned.py",
        "k_buffer",
        "--over",
        "batch",
        1,
        2,
        4,
    )
    outcome = command(*words)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("planned 6 points: ")
    assert "\n6 plans: " in outcome.out
    assert re.search(r"^more/pinned.py ", outcome.out, re.MULTILINE)


def test_the_sources_are_part_of_a_key(
    make_plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatrain.simulator

    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "mine.py").write_text("a = 1\n")
    monkeypatch.setattr(megatrain.simulator, "__file__", str(tmp_path / "__init__.py"))
    plan, digests = make_plan(), [sources_digest()]
    (tmp_path / "policies" / "mine.py").write_text("a = 2\n")
    digests.append(sources_digest())
    faster = msgspec.structs.replace(H200, h2d_gb_per_s=100.0)
    keys = [
        Keys(plan, machine, digest).of(plan) for machine in (H200, faster) for digest in digests
    ]
    assert len(set(keys)) == 4
    assert Keys(plan, H200, digests[0]).of(make_plan(weight_slots=3)) not in keys


@pytest.mark.parametrize("edited", ["pinned.py", "lion.py", "half_link.py", "beside.py"])
def test_a_point_is_simulated_again_if_a_file_outside_the_package_changed(
    command: Any, workplace: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    """The files define the policy, the optimizer and the cost model. The last one is a module that
    the cost model imports.
    """
    codes = re.findall(r"```python\n(.*?)```", ADDING.read_text(), re.DOTALL)
    files = {
        name: next(code for code in codes if f"class {defined}(" in code)
        for name, defined in (
            ("pinned.py", "Pinned"),
            ("lion.py", "Lion"),
            ("half_link.py", "HalfLink"),
        )
    }
    files["half_link.py"] += "\nimport beside\n"
    files["beside.py"] = "TIMES = 2\n"
    for name, code in files.items():
        (workplace / name).write_text(code)
    monkeypatch.syspath_prepend(workplace)
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    machine = msgspec.to_builtins(HardwareSpec.load("h200"))
    machine = {name: value for name, value in machine.items() if value is not None}
    write_toml(Path("machine.toml"), {**machine, "cost_model": "half_link.py"}, "a machine")
    line = ("sweep", "tiny", "--hardware", "machine.toml", *WORK, "--jobs", 1, "--out", "swept")
    line = (*line, "--optimizer", "lion.py", "--over", "policy", "pinned.py", "--over", "batch", 1)
    for text in ("1 plans in", "0 plans in"):
        outcome = command(*line)
        assert outcome.status == 0, outcome.err
        assert f"\n{text}" in outcome.out
    (workplace / "other.py").write_text("no policy imports this\n")
    assert "\n0 plans in" in command(*line).out
    (workplace / edited).write_text(files[edited] + "\nEDITED = True\n")
    assert "\n1 plans in" in command(*line).out


def test_the_source_of_a_file_has_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    files = {
        "first.py": "import json\nimport torch\nimport bare.one\n\n"
        "def late():\n    from helper import value\n",
        "bare/one.py": "from .two import *\nfrom .. import top\n",  # no package
        "bare/two.py": "import data, os.path\n",
        "top.py": "c = 1\n",
        "helper.py": "import package.deep\n",
        "package/__init__.py": "a = 1\n",
        "package/deep.py": "from . import near\n",
        "package/near.py": "from .... import far\nraise RuntimeError  # not executed\n",
        "unrelated.py": "b = 1\n",
        "broken.py": "def (\n",
    }
    for name in ("package", "bare", "data"):
        (tmp_path / name).mkdir()
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    found = {
        str(name): text.decode() for name, text in outside_source(tmp_path / "first.py").items()
    }
    assert found == {
        name: text for name, text in files.items() if name not in ("unrelated.py", "broken.py")
    }
    assert outside_source(tmp_path / "broken.py") == {Path("broken.py"): b"def (\n"}
    assert outside_source(tmp_path / "missing.py") == {}


def test_a_worker_that_loaded_an_edited_file_stores_no_row(
    make_plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its row would have the key of the content before the edit."""
    policy = tmp_path / "mine.py"
    policy.write_text("a = 1\n")
    plan = msgspec.structs.replace(make_plan("k_buffer"), policy=str(policy))
    hardware = HardwareSpec.load("h200")
    outside = running._outside([running.SweepEntry(plan, "key")], hardware)
    assert list(outside) == [("policy", str(policy))]
    started = [(running.Simulator(hardware), plan, outside)]
    monkeypatch.setattr(running, "_started_with", started)
    assert running._work([]) == []
    policy.write_text("a = 2\n")
    with pytest.raises(UserError, match=r"mine\.py: found an edit while the sweep began"):
        running._work([])


def test_each_point_is_planned_unless_knobs_are_swept(
    command: Any, monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    """A planned point has the step time that `check` predicts for its policy.

    If a knob is swept, or with `--default-knobs`, plans are used as given.
    """
    over = ("--over", "policy", "overlapped", "--over", "batch", 1)
    words = ("sweep", "tiny", "--hardware", "h200", *WORK, *over, "--jobs", 1, "--out", "swept")
    outcome = command(*words)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("planned 1 points: knobs and placement are the fastest that fit")
    checked = command(
        *("check", "tiny", "--hardware", "h200", *WORK, "--batch", 1),
        *("--policy", "overlapped", "--json"),
    )
    verdict = msgspec.json.decode(checked.out)
    frame = load_sweep("swept")
    (row,) = frame.to_dict("records")
    assert row["step_seconds"] == verdict["step_seconds"]
    assert (row["planned"], row["placement.weights"], row["fits"]) == (True, "all", True)
    assert (row["model"], row["policy"], row["batch"]) == ("tiny", "overlapped", 1)

    monkeypatch.setattr(Simulator, "planned_row", lambda *_: pytest.fail("planned again"))
    assert "1 had been done before" in command(*words).out
    given = command(*words, "--default-knobs")
    assert given.out.startswith(
        "took 1 plans as given: knobs that are not swept have their default"
    )
    knobs = command(*words, "--over", "weight_slots", 2, 3)
    assert knobs.out.startswith("took 2 plans as given: ")
    frame = load_sweep(workplace / "swept")
    assert list(frame["planned"]) == [True, False, False]
    assert list(frame["weight_slots"][1:]) == [2, 3]
    assert frame["step_seconds"][0] < frame["step_seconds"][1:].min()


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.usefixtures("workplace")
def test_a_point_that_fails_does_not_lose_the_others(
    command: Any, monkeypatch: pytest.MonkeyPatch, planned: Any
) -> None:
    """Its row says what failed, and where."""
    name = "candidates" if planned else "plan_account"
    works = getattr(simulated, name)

    def fails(*found: Any, **also: Any) -> Any:
        if "double_buffer" in (*also.get("policies", ()), getattr(found[0], "policy", "")):
            return {}["cpu"]
        return works(*found, **also)

    monkeypatch.setattr(simulated, name, fails)
    knobs = () if planned else ("--over", "weight_slots", 2)
    outcome = command(
        *("sweep", "tiny", "--hardware", "h200", *WORK, *knobs, "--jobs", 1, "--out", "out"),
        *("--over", "policy", "double_buffer", "k_buffer"),
    )
    assert outcome.status == 0, outcome.err
    assert re.search("2 plans: 1 timed .*, 1 refused", outcome.out)
    assert re.search(r"refused, 1 plans: KeyError: 'cpu' \(test_sweep\.py, line \d+\)", outcome.out)


def test_rows_are_flat(make_plan: Any, tmp_path: Path) -> None:
    """`rows.csv` and the DataFrame have one column for each axis and each result.

    If a plan was simulated twice, they have only the last row.
    """
    plans = [make_plan("k_buffer"), make_plan("k_buffer", device_limit_bytes=4096)]
    first, unfit = (Simulator(H200).row(plan, str(plan.device_limit_bytes)) for plan in plans)
    again = msgspec.structs.replace(first, key="later sources", step_seconds=2.5)
    with Store(tmp_path / "rows.jsonl") as store:
        store.add([first, unfit, again])
        write_csv(tmp_path / "rows.csv", store.rows.values())
    frame = load_sweep(tmp_path)
    assert list(frame["step_seconds"].fillna(0)) == [0, 2.5]
    assert list(frame["fits"]) == [False, True]
    axes_of_plan = {name for name in grid.AXES if name not in ("device_memory", "host_memory")}
    assert axes_of_plan <= set(frame.columns)
    assert all(not isinstance(value, dict) for value in frame.iloc[0])
    assert all(frame[name].dtype == float for name in ("step_seconds", "predicted_seconds"))
    read = pd.read_csv(tmp_path / "rows.csv")
    assert list(read.columns) == list(frame.columns)
    assert list(read["step_seconds"].fillna(0)) == [0, 2.5]
    with pytest.raises(UserError, match="found no such file"):
        load_sweep(tmp_path / "none")


def test_two_processes_give_the_results_of_one(make_plan: Any, tmp_path: Path) -> None:
    found = grid.plans(
        make_plan("k_buffer"),
        [
            axes(
                weight_slots=[1, 2, 3, 4],
                gradient_slots=[1, 2],
                gradient_staging=[1, 2, 3],
                batch=[1, 2, 3, 4],
            )
        ],
    )
    keys = Keys(found[0], H200, "")
    entries, stores = [SweepEntry(plan, keys.of(plan)) for plan in found], []
    for jobs in (1, 2):
        with Store(tmp_path / f"{jobs}.jsonl") as store:
            counts = Counter[str]()
            simulate(
                entries,
                H200,
                store,
                lambda rows, counts=counts: counts.update(row.key for row in rows),
                jobs=jobs,
            )  # type: ignore[misc]
            assert set(counts.values()) == {1}
            stores.append(store.rows)
        assert len((tmp_path / f"{jobs}.jsonl").read_bytes().splitlines()) == len(found)
    assert stores[0] == stores[1]
    assert len(stores[0]) == len(found) == 96


def test_only_one_sweep_at_a_time_writes_a_file(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "rows.jsonl"),
        pytest.raises(UserError, match=r"in use by process .* fix: wait for that sweep"),
    ):
        Store(tmp_path / "rows.jsonl")


def test_the_front_has_the_plans_that_no_other_beats(make_plan: Any) -> None:
    row = rows_of([make_plan("k_buffer", device_limit_bytes=2**30)])[0]

    def at(size: int, speed: float, policy: str = "k_buffer", limit: int = 100) -> SweepRow:
        changes: dict[str, Any] = {
            "device_peak_bytes": size,
            "tokens_per_second": speed,
            "policy": policy,
            "device_limit_bytes": limit,
        }
        return msgspec.structs.replace(row, key=f"{size} {speed} {limit}", **changes)

    rows = [
        at(4, 10.0),
        at(1, 1.0),
        at(2, 5.0, limit=200),
        at(2, 5.0),
        at(3, 4.0),
        at(5, 10.05, "overlapped"),
        at(6, 10.05),
    ]
    unfit = msgspec.structs.replace(
        at(0, 1.0), decided_by="memory", step_seconds=None, tokens_per_second=None
    )
    assert [found.key for found in front([*rows, unfit])] == [
        "1 1.0 100",
        "2 5.0 100",
        "4 10.0 100",
        "5 10.05 100",
    ]
    assert [found.key for found in front(rows, 0.01)] == ["1 1.0 100", "2 5.0 100", "4 10.0 100"]
    assert [found.key for found in fastest(rows)] == ["5 10.05 100", "6 10.05 100"]
    text = table([*rows, unfit], [])
    assert text.startswith("8 plans: 7 timed by the engine, 1 do not fit")
    room = msgspec.structs.replace(
        row, planned=False, knobs=msgspec.structs.replace(row.knobs, exchange_bytes=2**16)
    )
    assert shown(room)["exchange_bytes"] == "64.00 KiB"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--over", "slots", 1), "'slots'; allowed: policy, a knob"),
        (("--over", "weight_slots", "two"), "found 'two'"),
        (("--over", "weight_slots", 0), "knobs: weight_slots: found 0"),
        (
            ("--over", "clipping", "some"),
            "found 'some'; allowed: global, layer, update, adagc, none",
        ),
        (("--over", "gradients", "foo"), "found 'foo'; allowed: exact, 8bit; fix: write another"),
        (
            ("--over", "attention", "none"),
            "allowed: flash, cudnn, flash4, or null to leave it unset",
        ),
        (
            ("--over", "dtype", "fp8"),
            "allowed: bf16, fp32; fix: set fp8 instead, which is rowwise, tens",
        ),
        (("--over", "token_piece", "none"), "allowed: a whole number, or null to leave it unset"),
        (("--over", "documents", "maybe"), "found 'maybe'; allowed: true, false; fix: "),
        (("--over", "state", "exakt", "exact"), "state: found exakt; allowed: exact, master24, bf"),
        (("--over", "optimizer", "adamw", "adamm"), "found 'adamm'; allowed: a name that"),
        (("--over", "batch", 1, 0), "batch: found 0; allowed: 1 to"),
        (("--over", "sum_group", 1, 0), "sum_group: found 0; allowed: a divisor"),
        (
            ("--over", "token_piece", 0, "--over", "fp8", "rowwise"),
            "token_piece: found 0; allowed:",
        ),
        (("--over", "weight_slots"), "no value"),
        (("--over", "batch", 1, "--over", "batch", 2), "batch twice"),
        (("--over", "policy", "k_buffers"), "did you mean k_buffer?"),
        (("--over", "device_memory", "much"), "found 'much'"),
        (
            ("--over", "weight_slots", *range(1, 1002), "--over", "batch", *range(1, 1002)),
            "1,002,001 plans; allowed: at most 1,000,000",
        ),
        (("--grid", "none.toml"), "none.toml"),
        (("--grid", "zero.toml"), "device_limit_bytes: found 0; allowed: >= 1"),
        (("--grid", "half.toml"), "found 0.5; allowed: a size such as 24GiB, or a whole number of"),
    ],
)
@pytest.mark.usefixtures("workplace")
def test_mistakes_give_one_line_errors(
    command: Any, words: tuple[object, ...], message: str
) -> None:
    for name, limit in (("zero", 0), ("half", 0.5)):
        Path(f"{name}.toml").write_text(f'[[grid]]\ndevice_memory = ["24GiB", {limit}]\n')
    outcome = command(
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--policy",
        "k_buffer",
        "--out",
        "swept",
        *words,
    )
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path("swept").exists()


@pytest.mark.usefixtures("workplace")
def test_gradients_are_those_of_the_workload(command: Any) -> None:
    """The class of the placement with this name has its full name, also in the table."""
    words = ("sweep", "tiny", "--hardware", "h200", *WORK, "--jobs", 1, "--out", "swept")
    over = ("--over", "gradients", "exact", "8bit", "--policy", "overlapped")
    outcome = command(*words, *over, "--over", "placement.gradients", "", "0-1")
    assert outcome.status == 0, outcome.err
    assert header(outcome.out) == ["policy", "gradients", "placement.gradients", *RESULTS]
    rows = load_sweep("swept")
    assert rows["fits"].all()
    assert sorted(zip(rows["gradients"], rows["placement.gradients"], strict=True)) == [
        (stored, placed) for stored in ("8bit", "exact") for placed in ("", "0-1")
    ]


def test_the_help_has_every_axis_and_the_values_that_a_sweep_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = OneLineParser()
    sweep.describe(parser)
    parser.print_help()
    text = " ".join(capsys.readouterr().out.split())
    _, _, axes_on = text.partition("The axes are")
    listed, _, _ = axes_on.partition("--grid FILE")
    named = set(re.findall(r"\w+(?:\.\w+)?", listed))
    assert set(grid.AXES) <= named
    assert "null leaves a field of the workload unset" in text
    assert "--state {exact,master24,bf16-sr}" in text
    assert "any" not in re.findall(r"`(\w+)`", text)


def test_null_leaves_a_field_unset() -> None:
    assert axes(attention=["flash", "null"], token_piece=["null", "64"], exchange_bytes=["0"]) == {
        "attention": ("flash", None),
        "token_piece": (None, 64),
        "exchange_bytes": (0,),
    }


def test_no_other_name_of_an_axis_is_the_name_of_an_axis() -> None:
    assert grid.ALIASES.keys().isdisjoint(grid.AXES)
    assert set(grid.ALIASES.values()) <= set(grid.AXES)
    assert len(set(grid.AXES)) == len(grid.AXES)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (
            "--over optimizer lion.py adamw muon --over state exact master24",
            {"lion.py master24": "state: found master24 with optimizer lion.py; allowed: master24"},
        ),
        (
            "--over dtype bf16 fp32 --over state exact master24",
            {"fp32 master24": "state: found master24 with dtype fp32; allowed: master24 with"},
        ),
        (
            "--gradients 8bit --over accumulation 1 2",
            {"2": "gradients: found 8bit with accumulation 2; allowed: 8bit with accumulation 1"},
        ),
        (
            "--over optimizer adamw muon --over clipping global update",
            {"muon update": "clipping: found update with optimizer muon; allowed: update with"},
        ),
        (
            "--over accumulation 2 3 --over micro_batch_group 1 3",
            {"2 3": "micro_batch_group: found 3; allowed: a divisor of the accumulation, 2"},
        ),
        (
            "--over accumulation 4 3 --over sum_group 1 3 --default-knobs",
            {"4 3": "sum_group: found 3; allowed: a divisor of the accumulation, 4"},
        ),
    ],
)
def test_an_impossible_combination_is_a_row_with_the_reason(
    command: Any, workplace: Path, words: str, refused: dict[str, str]
) -> None:
    """The other combinations are simulated. A sweep that is continued has both kinds of rows."""
    (workplace / "lion.py").write_text(saved_examples("docs/adding.md")["lion.py"])
    line = ("sweep", "tiny", "--hardware", "h200", *WORK[:-2], "--policy", "overlapped")
    line = (*line, "--jobs", 1, "--out", "swept", *words.split())
    outcome = command(*line)
    assert (outcome.status, outcome.err) == (0, "")
    rows = load_sweep("swept")
    axes = re.findall(r"--over (\w+)", words)
    assert len(rows) == 2 ** len(axes) * (1.5 if "lion.py" in words else 1)
    found = {
        " ".join(str(row[name]) for name in axes): row["reason"]
        for row in rows[rows["decided_by"] == "refused"].to_dict("records")
    }
    assert all(reason in found[key] for key, reason in refused.items())
    assert len(rows) - len(found) == rows["fits"].sum() > 0
    assert f"\nrefused {len(refused)} point whose values exclude each other\n" in outcome.out
    before = Path("swept/rows.jsonl").read_bytes()
    again = command(*line)
    assert re.search(rf"\n0 plans in .* s, {len(rows)} had been done before", again.out)
    assert Path("swept/rows.jsonl").read_bytes() == before


@pytest.mark.usefixtures("workplace")
def test_grids_of_a_file_are_joined(command: Any) -> None:
    Path("grid.toml").write_text(
        '[[grid]]\npolicy = ["k_buffer"]\nweight_slots = [1, 2]\n\n[[grid]]\npolicy ='
        ' ["overlapped"]\n"placement.moments" = ["", "0-1"]\nchunk_bytes = ["4KiB", 8192]\n'
    )
    words = (
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--grid",
        "grid.toml",
        "--over",
        "batch",
        1,
        2,
        "--jobs",
        1,
        "--out",
        "swept",
    )
    outcome = command(*words)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("took 12 plans as given: ")
    assert "\n12 plans: " in outcome.out


@pytest.mark.usefixtures("workplace")
def test_a_sweep_that_is_executed(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep with `--execute` measures the plans that fit and can be executed.

    Two plans run in this process, so torch is not started twice. Other plans can only be predicted,
    or do not fit.
    """
    from megatrain.experiments.benchmarks import child

    def timed(system: str, path: Path, steps: int, device: str) -> Any:
        return msgspec.to_builtins(child.attempt(system, path, steps, device))

    monkeypatch.setattr(executed.benchmark, "time_system", timed)
    words = (
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--execute",
        "--steps",
        3,
        "--device",
        "cpu",
        "--out",
        "swept",
        "--device-memory",
        "164440KiB",  # 600 KiB, and 160 MiB for libraries
        *("--over", "policy", "k_buffer", "zero3_offload"),
        *("--over", "weight_slots", 1, 2),
    )
    outcome = command(*words, "--over", "batch", 1, 64)
    assert outcome.status == 0, outcome.err
    # Each plan is named before its steps.
    assert re.search(
        r"^plan 1 of 8: k_buffer, weight_slots 1, batch 1\nk_buffer step 1: .*\n"
        r"k_buffer step 2: .*\nk_buffer step 3: .*\n"
        r"plan 2 of 8: k_buffer, weight_slots 1, batch 64\n"
        r"not run: it does not fit, limited by device\.\w+\nplan 3 of 8: k_buffer, weight_slots 2,"
        r" batch 1\nk_buffer step 1: ",
        outcome.err,
        re.MULTILINE,
    ), outcome.err
    rows = [
        msgspec.json.decode(line, type=SweepRow)
        for line in Path("swept/rows.jsonl").read_bytes().splitlines()
    ]
    ran = [row for row in rows if row.decided_by == "execution"]
    assert [(row.policy, row.knobs.weight_slots, row.workload.batch) for row in ran] == [
        ("k_buffer", 1, 1),
        ("k_buffer", 2, 1),
    ]
    for row in ran:
        assert row.step_seconds is not None
        assert row.predicted_seconds is not None
        assert row.tokens_per_second == pytest.approx(16 / row.step_seconds)
        # Predicted with the libraries of a GPU, which this CPU does not have. The process is larger
        # than its pools.
        assert 2**27 < row.device_peak_bytes <= row.device_limit_bytes
        assert 0 < (row.measured_device_peak_bytes or 0) < 2**20
        assert (row.measured_host_peak_bytes or 0) > row.host_peak_bytes
        simulated = Simulator(H200).row(plan_of(row), row.key)
        assert (row.device_peak_bytes, row.host_peak_bytes) == (
            simulated.device_peak_bytes,
            simulated.host_peak_bytes,
        )
    frame = load_sweep("swept")
    for name in ("measured_device_peak_bytes", "measured_host_peak_bytes"):
        measured = frame[name]
        assert measured.dtype == float
        assert list(measured.notna()) == list(frame["decided_by"] == "execution")
    assert {row.decided_by for row in rows if row.workload.batch == 64} == {"memory"}
    assert "2 executed" in outcome.out
    measured = ["step", "predicted", "tokens/s", "device", "measured", "host", "measured", "by"]
    assert header(outcome.out) == ["policy", "weight_slots", "batch", *measured]
    fastest = min(ran, key=lambda row: row.step_seconds or 0)
    assert f"  {format_bytes(fastest.measured_host_peak_bytes or 0)}  execution" in outcome.out


@pytest.mark.usefixtures("workplace")
def test_a_plan_for_more_memory_than_this_machine_has_is_not_executed(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the system ends a process. The row keeps what was predicted."""
    from megatrain.experiments.benchmarks import child, own

    plans: list[Plan] = []

    def timed(system: str, path: Path, steps: int, device: str) -> Any:
        plans.append(Plan.load(path))
        return msgspec.to_builtins(child.attempt(system, path, steps, device))

    monkeypatch.setattr(executed.benchmark, "time_system", timed)
    monkeypatch.setattr(own, "Executor", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.setattr(own, "host_bytes", lambda: LOADING_BYTES)  # nothing is left for pools
    words = (
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--policy",
        "k_buffer",
        "--device",
        "cpu",
    )
    outcome = command(*words, "--execute", "--out", "swept", "--over", "batch", 2)
    assert outcome.status == 1
    (row,) = load_sweep("swept").to_dict("records")
    assert (row["decided_by"], row["fits"]) == ("refused", False)
    assert re.match(
        r"host memory: found a plan that needs .*; allowed: 128.00 MiB, what this machine has; ",
        row["reason"],
    )
    assert f"  refused, 1 plans: {row['reason']}\n" in outcome.out
    assert f"\nno result: {row['reason']}\n" in outcome.err
    assert row["predicted_seconds"] > 0
    (plan,) = plans
    assert plan.prediction is not None, "the peaks with what is not in pools are compared, too"
    assert (row["device_peak_bytes"], row["host_peak_bytes"]) == (
        plan.prediction.device_peak_bytes,
        plan.prediction.host_peak_bytes,
    )


def header(text: str) -> list[str]:
    """Returns the names of the columns of the first table."""
    return re.findall(r"^policy .*", text, re.MULTILINE)[0].split()


RESULTS = ["step", "tokens/s", "device", "host", "by"]


@pytest.mark.usefixtures("workplace")
def test_the_table_has_the_axes_that_are_swept(command: Any) -> None:
    """Also if the plans in the table do not differ in them, but no axis with one value."""
    words = ("sweep", "tiny", "--hardware", "h200", *WORK, "--jobs", 1, "--out", "swept")
    swept = ("--over", "chunk_bytes", "4KiB", "8KiB", "--over", "batch", 1, 4, "--over", "seq", 8)
    outcome = command(*words, *swept, "--over", "policy", "k_buffer")
    assert outcome.status == 0, outcome.err
    assert header(outcome.out) == ["policy", "chunk_bytes", "batch", *RESULTS]
    best = load_sweep("swept").sort_values("tokens_per_second").iloc[-1]
    assert re.search(
        rf"^k_buffer +{best['chunk_bytes'] // 1024}.00 KiB +{best['batch']} ",
        outcome.out,
        re.MULTILINE,
    )
    # Of a planned grid, the knobs are a result. They have no columns.
    Path("grid.toml").write_text(
        '[[grid]]\npolicy = ["overlapped"]\nweight_slots = [2, 3]\n\n'
        '[[grid]]\npolicy = ["k_buffer"]\nbatch = [2]\n'
    )
    outcome = command(*words, "--grid", "grid.toml")
    assert outcome.status == 0, outcome.err
    assert header(outcome.out) == ["policy", "weight_slots", *RESULTS]
    assert re.search(r"^k_buffer +planned ", outcome.out, re.MULTILINE)


def test_points_have_the_attention_kernel_that_check_chooses(command: Any, workplace: Path) -> None:
    """Without a kernel, the scores of gpt-oss are written out, which takes 43 % longer."""
    model = ModelSpec.load("gpt-oss-20b")
    work = Workload(batch=2, sequence=512, documents=True)
    chosen = with_attention_kernel(model, HardwareSpec.load("h200"), work).attention
    assert chosen == "flash"
    line = ("sweep", "gpt-oss-20b", "--hardware", "h200", "--seq", 512, "--policy", "overlapped")
    for name, options, kernels in (
        ("a", ("--over", "batch", 1, 2), [chosen, chosen]),
        ("b", ("--batch", 2, "--over", "attention", "flash", "cudnn"), ["cudnn", "flash"]),
    ):
        outcome = command(*line, "--host-memory", "512GiB", *options, "--jobs", 1, "--out", name)
        assert outcome.status == 0, outcome.err
        assert sorted(load_sweep(workplace / name)["attention"]) == kernels


def test_a_device_that_executes_plans_has_the_chosen_kernel(make_plan: Any) -> None:
    model = ModelSpec.load("qwen2.5-0.5b")
    plan = make_plan("resident", model=model, batch=1, sequence=2048, dtype="bf16")
    work = plan.workload
    for device, kernel in ((None, "cudnn"), (torch.device("cpu"), None)):
        found = sweep._with_kernel(plan, HardwareSpec.load("h200"), device, {})
        assert found.workload.attention == kernel
    known: dict[Workload, Kernel | None] = {}
    for rows in (1, 4):
        for tokens in (256, 2048):
            sized = msgspec.structs.replace(work, batch=rows, sequence=tokens)
            changed = msgspec.structs.replace(plan, workload=sized)
            sweep._with_kernel(changed, HardwareSpec.load("h200"), None, known)
    assert sorted(each.sequence for each in known) == [256, 2048]


@pytest.mark.usefixtures("workplace")
def test_a_run_that_fails_says_why(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executed.benchmark, "time_system", lambda *_: {"failure": "out of luck", "steps": []}
    )
    outcome = command(
        "sweep",
        "tiny",
        "--hardware",
        "h200",
        *WORK,
        "--policy",
        "k_buffer",
        "--execute",
        "--out",
        "swept",
    )
    assert outcome.status == 1
    assert "1 plans: 1 refused\n  refused, 1 plans: out of luck" in outcome.out
    assert not Path("swept/sweep.png").exists()


def test_the_engine_decides_most_plans_of_14_billion() -> None:
    hardware, model = H200, ModelSpec.load("qwen2.5-14b")
    base = Plan(
        policy="overlapped",
        hardware="h200",
        source="qwen2.5-14b",
        model=model,
        workload=Workload(batch=32, sequence=1024),
        device_limit_bytes=hardware.device_bytes,
        host_limit_bytes=2**39,
    )
    caps = ["24GiB", "48GiB", "80GiB", "140GiB"]
    found = grid.plans(
        base,
        [
            axes(
                policy=["k_buffer", "overlapped"],
                chunk_bytes=["64MiB", "256MiB"],
                batch=[4, 8, 16, 32, 64],
                device_memory=caps,
            )
        ],
    )
    rows = rows_of(found)
    assert sum(row.decided_by == "engine" for row in rows.values()) > len(found) / 2


@pytest.mark.parametrize("policy", ["overlapped", "resident"])
def test_rebuilt_outputs_are_an_axis(policy: str, make_plan: Any) -> None:
    """Schedules of other batches are resized to those of layers that rebuild outputs."""
    base = make_plan(
        policy,
        layers=5,
        dtype="bf16",
        compiled=True,
        placement=Placement(saved_activations="3-4"),
        device_limit_bytes=2**32,
    )
    found = grid.plans(base, [axes(policy=[policy], batch=[2, 512], rebuild_outputs=[0, 1])])
    rows = rows_of(found)
    for index, plan in enumerate(found):
        choice = assess(plan, cost_model(H200, plan.model, plan.workload))
        assert rows[index].device_peak_bytes == choice.account.device_peak_bytes
        assert rows[index].step_seconds == choice.step_seconds
    saving, rebuilt = (
        next(
            row
            for index, row in rows.items()
            if (found[index].workload.batch, row.knobs.rebuild_outputs) == (512, rebuild)
        )
        for rebuild in (0, 1)
    )
    assert rebuilt.device_peak_bytes < saving.device_peak_bytes
    assert rebuilt.step_seconds != saving.step_seconds


def test_rows_of_another_simulator_or_machine_file_are_left_out(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: after a change of the machine's memory or of the simulator, `rows.csv` had
    two rows for each point, because they differ in a limit or in a default.
    """
    machine, out = tmp_path / "machine.toml", tmp_path / "out"

    def swept(
        host: int, *batches: str, machine: Path = machine
    ) -> tuple[str, list[tuple[int, int]]]:
        write_hardware(machine, msgspec.structs.replace(H200, host_bytes=host * 2**30), "a test")
        text = command(
            "sweep", "qwen2.5-0.5b", "--hardware", str(machine), "--policy", "k_buffer",
            "--over", "batch", *batches, "--out", str(out),
        ).out  # fmt: skip
        frame = load_sweep(out)
        assert list(pd.read_csv(out / "rows.csv")["batch"]) == list(frame["batch"])
        return text, sorted(zip(frame["batch"], frame["host_limit_bytes"] // 2**30, strict=True))

    text, rows = swept(100, "1", "2")
    assert "earlier row" not in text
    assert rows == [(1, 100), (2, 100)]
    assert swept(100, "4")[1] == [(1, 100), (2, 100), (4, 100)]
    text, rows = swept(90, "1", "4")
    assert "left 3 earlier rows out of rows.csv: made with another simulator" in text
    assert rows == [(1, 90), (4, 90)]
    # Rows of the first file are reused, and the last command decides what is current.
    text, rows = swept(100, "1", "4")
    assert "left 2 earlier rows out" in text
    assert "2 had been done before" in text
    assert rows == [(1, 100), (2, 100), (4, 100)]
    # Another file is another machine, even if its name is the same.
    text, rows = swept(80, "2", machine=tmp_path / "other.toml")
    assert "earlier row" not in text
    assert rows == [(1, 100), (2, 80), (2, 100), (4, 100)]
    monkeypatch.setattr(store, "sources_digest", lambda: "other")
    text, rows = swept(100, "4")
    assert "left 5 earlier rows out of rows.csv" in text
    assert rows == [(2, 80), (4, 100)]


def test_rows_that_were_stored_before_keys_had_parts_are_replaced(make_plan: Any) -> None:
    old = Simulator(H200).row(make_plan("k_buffer"), "0123456789abcdef")
    new = msgspec.structs.replace(old, key="a-b-c", host_limit_bytes=old.host_limit_bytes - 1)
    assert latest([old]) == [old]
    assert latest([old, new]) == [new]
    assert outdated([old, new], [new]) == [old]
    elsewhere = msgspec.structs.replace(new, hardware="another")
    assert latest([old, elsewhere]) == [old, elsewhere]


def test_executed_and_impossible_rows_replace_no_simulated_ones(make_plan: Any) -> None:
    row = Simulator(H200).row(make_plan("k_buffer"), "here-old-1")
    measured = msgspec.structs.replace(row, key="here-new-2", predicted_seconds=1.0)
    impossible = msgspec.structs.replace(row, key="here-new-3", decided_by="refused", reason="no")
    impossible = msgspec.structs.replace(impossible, host_limit_bytes=1)
    later = msgspec.structs.replace(row, key="here-new-4")
    assert [each.kind for each in (row, measured, impossible)] == [
        "simulated", "executed", "impossible"
    ]  # fmt: skip
    assert latest([row, impossible]) == [row]
    assert latest([row, measured, impossible]) == [row, measured, impossible]
    assert latest([row, measured, later]) == [measured, later]
    assert outdated([row, measured], [measured]) == []
    assert outdated([row, measured, later], [later]) == [row]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--batch", "16"), "--batch 16"),
        (("--policy", "resident", "--over", "policy", "k_buffer"), "--policy resident"),
        (("--compile", "--over", "compile", "true", "false"), "--compile"),
        (("--seq", "512", "--over", "seq", "256"), "--seq 512"),
        (("--device-memory", "9GiB", "--over", "device_memory", "8GiB"), "--device-memory 9GiB"),
    ],
)
def test_an_option_that_an_axis_replaces_is_named(
    command: Any, tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    """Regression test: it had no effect, and nothing said so."""
    base = ("sweep", "qwen2.5-0.5b", "--hardware", "h200", "--out", str(tmp_path / "out"))
    text = command(*base, "--over", "batch", "1", *words).out
    assert f"{named} has no effect, because an axis gives each point its own value" in text
    assert text.count("has no effect") == 1


def test_an_option_that_one_of_two_grids_uses_is_not_named(command: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "grids.toml", str(tmp_path / "out")
    file.write_text("[[grid]]\nbatch = [1]\n[[grid]]\nclipping = ['none']\n")
    base = ("sweep", "qwen2.5-0.5b", "--hardware", "h200", "--out", out, "--grid", str(file))
    outcome = command(*base, "--batch", "4", "--policy", "k_buffer")
    assert "has no effect" not in outcome.out
    assert sorted(load_sweep(out)["batch"]) == [1, 4]


@pytest.mark.usefixtures("workplace")
def test_a_knob_that_changes_no_result_is_named(command: Any) -> None:
    """`k_buffer` has no slots for the state, and does not obey the placement of weights."""
    words: tuple[object, ...] = ("sweep", "tiny", "--hardware", "h200", *WORK, "--jobs", 1)
    words += ("--over", "state_slots", 1, 2, "--over", "weight_slots", 1, 3)
    outcome = command(
        *words, "--over", "weights", "", "0", "--policy", "k_buffer", "--out", "swept"
    )
    assert [
        line.partition(" has no effect")[0]
        for line in outcome.out.splitlines()
        if " has no" in line
    ] == ["state_slots", "placement.weights"]
    assert (
        "has no effect"
        not in command(*words, "--over", "policy", "k_buffer", "overlapped", "--out", "both").out
    )


@pytest.mark.usefixtures("workplace")
def test_no_knob_is_named_if_no_two_plans_differ_only_in_it(command: Any) -> None:
    """`sequential` accepts one slot only, and `double_buffer` other numbers."""
    words = ("sweep", "tiny", "--hardware", "h200", *WORK, "--jobs", 1, "--out", "swept")
    words += ("--over", "policy", "sequential", "double_buffer", "--over", "weight_slots", 1, 2)
    assert "has no effect" not in command(*words).out


@pytest.mark.usefixtures("workplace")
def test_an_interrupted_sweep_says_how_many_plans_it_keeps(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, asked = Simulator.row, list[str]()

    def interrupting(self: Simulator, plan: Plan, key: str) -> SweepRow:
        asked.append(key)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return row(self, plan, key)

    monkeypatch.setattr(Simulator, "row", interrupting)
    monkeypatch.setattr("megatrain.experiments.sweep.running._TASK", 1)
    outcome = command(
        *("sweep", "tiny", "--hardware", "h200", *WORK, "--policy", "k_buffer", "--jobs", 1),
        *("--over", "weight_slots", 1, 2, 3, 4, "--out", "swept"),
    )
    assert outcome.status == 130
    assert outcome.err == (
        "megatrain: interrupted; swept/rows.jsonl keeps 2 of 4 plans; the same command continues\n"
    )
