"""Tests of `megatrain train --adapt`, which plans again from measurements and switches plans.

A switch does not change the bits of the training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from counted_costs import write_machine

from megatrain.experiments.cli.training import adaptation
from megatrain.experiments.cli.training.adaptation import (
    Adaptation,
    Proposal,
    described_change,
    largest,
)
from megatrain.experiments.run_report.step_record import read_record
from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.compare.corrections import corrections, durations
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.discrete_event import makespan_ns, simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

TRAIN = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--lr", "3e-3")
OF_THE_PLAN = ("seconds", "tokens_per_second", "schedule", "check")


@pytest.fixture
def counted(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives `plan.toml` a machine with counted costs (`counted_costs.py`)."""
    monkeypatch.setattr(adaptation, "LEAST_GAIN", adaptation.LEAST_GAIN)  # the machine changes it
    write_machine(workplace)
    plan = workplace / "plan.toml"
    plan.write_text(plan.read_text().replace('hardware = "h200"', 'hardware = "counted.toml"'))
    return workplace


def rows(run: str) -> list[dict[str, Any]]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in OF_THE_PLAN}
        for line in lines
    ]


def schedules(run: str) -> list[str]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["schedule"] for line in lines]


def weights(run: str) -> bytes:
    model = newest_model(Path(run))
    assert model is not None
    return (model / "model.safetensors").read_bytes()


def good(outcome: Any) -> str:
    assert (outcome.status, outcome.err) == (0, "")
    return str(outcome.out)


@pytest.mark.usefixtures("counted")
def test_a_training_with_a_switch_has_the_bits_of_one_without(command: Callable[..., Any]) -> None:
    first = Plan.load(Path("plan.toml"))
    good(command(*TRAIN, "--steps", 9, "--out", "straight"))
    out = good(command(*TRAIN, "--steps", 9, "--adapt", "--out", "run"))
    assert rows("run") == rows("straight")
    assert weights("run") == weights("straight")
    other = Plan.load(Path("run/plan.toml"))
    assert other.digest != first.digest
    assert schedules("run") == [first.digest] * 5 + [other.digest] * 4
    (line,) = [line for line in out.splitlines() if line.endswith(" switches to this plan")]
    assert other.prediction is not None
    assert f"; predicted {format_seconds(other.prediction.step_seconds)} a step instead of" in line
    assert line.startswith("measured ")
    assert f"policy double_buffer -> {other.policy}" in line
    assert "switching takes about" in line
    assert (
        "step 5  checkpoint saved\nthe training continues under the other plan; switching took "
        in out
    )

    # the folder of the former plan is one that `plan --from` and `train` can read
    former = Path("run/plans") / first.digest
    assert Plan.load(former / "plan.toml").digest == first.digest
    assert {path.name for path in former.iterdir()} == {
        "plan_code",  # with the cost model
        "plan.toml",
        "hardware.toml",
        "measured.json",
        "memory.json",
    }
    assert list(read_record(Path("run")).steady_seconds) == [8, 9]
    compared = json.loads(good(command("compare", "run", "--json")))
    assert (compared["digest"], compared["steps"]["count"]) == (other.digest, 2)

    # a run that is resumed keeps the other plan, which is the best one
    out = good(command("train", "--resume", "run", "--steps", 15, "--adapt", "--device", "cpu"))
    assert "the plan stays, since no faster one was found" in out
    good(command("train", "--resume", "straight", "--steps", 15, "--device", "cpu"))
    assert rows("run") == rows("straight")
    assert weights("run") == weights("straight")
    assert set(schedules("run")[9:]) == {other.digest}

    # the way back by hand, if the other plan ends the process
    resume = ("--resume", "run", "--steps", 16, "--device", "cpu")
    good(command("train", former / "plan.toml", *resume))
    good(command("train", "--resume", "straight", "--steps", 16, "--device", "cpu"))
    assert schedules("run")[-1] == first.digest
    assert weights("run") == weights("straight")


@pytest.mark.usefixtures("workplace")
def test_a_switch_that_gains_too_little_is_not_made(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "LEAST_GAIN", 1.0)  # no switch saves all of the time
    out = good(command(*TRAIN, "--steps", 6, "--adapt", "--no-export", "--out", "run"))
    assert "the plan stays, since a switch would save less than 100 % of the time left" in out
    assert len(set(schedules("run"))) == 1
    assert not Path("run/plans").exists()


@pytest.mark.usefixtures("workplace")
def test_a_damaged_hardware_file_does_not_stop_a_training(command: Callable[..., Any]) -> None:
    plan = Path("plan.toml")
    plan.write_text(plan.read_text().replace('hardware = "h200"', 'hardware = "here.toml"'))
    Path("here.toml").write_text("spoilt")
    out = good(command(*TRAIN, "--steps", 6, "--adapt", "--no-export", "--out", "run"))
    assert "the plan stays: " in out


class Run:
    """A fake training that records notes and switches. A test gives the seconds of its steps."""

    def __init__(self, folder: Path | None, plan: Plan) -> None:
        self.out, self.origin, self.source, self.plan = folder, Path(), "small", plan
        self.first_step, self.config = 1, SimpleNamespace(training=SimpleNamespace(steps=1000))
        self.notes: list[str] = []
        self.switched: list[Path] = []
        self.executor = None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def switch(self, plan: Path) -> None:
        self.switched.append(plan)

    def steps(self, adaptation: Adaptation, seconds: float, count: int = 5) -> None:
        """Takes steps under the plan, and then makes the switch, if there is one."""
        before = len(self.switched)
        for number in range(self.first_step, self.first_step + count):
            step: Any = SimpleNamespace(number=number, seconds=seconds)
            adaptation.on_step(self, step)
        self.first_step += count
        if len(self.switched) > before:
            self.plan = Plan.load(self.switched[-1])
            adaptation.on_switch(self, 2.0)  # type: ignore[arg-type]


@pytest.fixture
def run(
    make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Returns a run with a proposed plan that would reduce its steps from two seconds to one."""

    def digested(policy: str) -> Plan:
        plan = make_plan(policy, hardware="h200")
        return msgspec.structs.replace(plan, digest=policies.lower(plan).digest)

    made, other = Run(tmp_path, digested("double_buffer")), digested("overlapped")
    choice = SimpleNamespace(plan=other, feasible=True, step_seconds=0.8)
    proposal = Proposal(choice, HardwareSpec.load("h200"), 1.6, "")  # type: ignore[arg-type]
    monkeypatch.setattr(adaptation, "propose", lambda *_: proposal)
    monkeypatch.setattr(adaptation, "checkpoint_bytes", lambda _: 500)
    monkeypatch.setattr(adaptation, "write_rate", lambda *_: 1000.0)
    former = tmp_path / "plans" / made.plan.digest
    former.mkdir(parents=True)
    made.plan.save(former / "plan.toml")
    return made


@pytest.mark.parametrize(
    ("seconds", "back", "said"),
    [
        (1.5, False, "1.500 s a step under the other plan, 2.000 s under the former one: 25.0 %"),
        (2.0001, False, "slower, but returning would take longer than it saves"),
        (2.5, True, "slower, so the training returns to the former one"),
    ],
)
def test_a_plan_that_is_slower_is_undone_once(
    run: Run, seconds: float, back: bool, said: str
) -> None:
    former, adapting = run.plan.digest, Adaptation()
    adapting.on_start(run)  # type: ignore[arg-type]
    run.steps(adapting, 2.0)
    assert (
        "predicted 800.000 ms a step instead of 1.600 s, 50.0 % less; switching takes about 1.000 s"
        in (run.notes[0])
    )
    assert run.notes[1] == "the training continues under the other plan; switching took 2.000 s"
    run.steps(adapting, seconds)
    assert any(said in note for note in run.notes), run.notes
    run.steps(adapting, 9.0, 20)
    assert len(run.switched) == 1 + back
    assert (run.plan.digest == former) == back
    assert run.notes[-1].startswith("the training continues under the former plan") == back


def test_a_policy_that_was_asked_for_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, proposed = list[Any](), adaptation.propose

    def recorded(*given: Any) -> Any:
        asked.append(given[2])
        return proposed(*given)

    monkeypatch.setattr(adaptation, "propose", recorded)
    adapting = Adaptation(["sequential"])
    adapting.on_start(run)  # type: ignore[arg-type]
    run.steps(adapting, 2.0)
    assert asked == [["sequential"]]


@pytest.mark.usefixtures("workplace")
def test_a_proposal_has_one_of_the_policies(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    propose = adaptation.propose

    def both(trainer: Any, measured: float, _: Any) -> Any:
        found.extend(
            propose(trainer, measured, names).choice.plan.policy for names in (None, ["sequential"])
        )
        return propose(trainer, measured)

    monkeypatch.setattr(adaptation, "propose", both)
    good(command(*TRAIN, "--steps", 6, "--adapt", "--no-export", "--out", "run"))
    assert found[0] != found[1] == "sequential"


def test_a_plan_that_the_run_has_left_is_not_tried_again(run: Run) -> None:
    adapting = Adaptation()
    adapting.on_start(run)  # type: ignore[arg-type]
    other = adaptation.propose(run, 2.0).choice.plan  # type: ignore[arg-type]
    assert run.out is not None
    (run.out / "plans" / other.digest).mkdir()
    run.steps(adapting, 2.0)
    assert not run.switched
    assert run.notes[0].endswith("the plan stays, since this run has tried the other before")


def test_a_plan_that_is_refused_can_be_tried_when_the_run_is_resumed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise UserError("host memory", found="too little", allowed="more", fix="none")

    with monkeypatch.context() as patch:
        patch.setattr(run, "switch", refuse)
        adapting = Adaptation()
        adapting.on_start(run)  # type: ignore[arg-type]
        run.steps(adapting, 2.0)
        (note,) = run.notes
        assert note.startswith("the plan stays: host memory")
    resumed = Adaptation()
    resumed.on_start(run)  # type: ignore[arg-type]
    run.steps(resumed, 2.0)
    assert len(run.switched) == 1


@pytest.mark.parametrize("end", ["step", "stop", "kill", "signal"])
def test_a_plan_that_was_chosen_but_never_used_can_be_tried_again(run: Run, end: str) -> None:
    """There is no switch if the checkpoint fails or the run ends before it."""
    adapting = Adaptation()
    adapting.on_start(run)  # type: ignore[arg-type]
    for number in range(1, 6):
        adapting.on_step(run, SimpleNamespace(number=number, seconds=2.0))  # type: ignore[arg-type]
    (chosen,) = run.switched
    assert (chosen.parent / "not_entered.txt").is_file()
    if end == "step":
        adapting.on_step(run, SimpleNamespace(number=6, seconds=2.0))  # type: ignore[arg-type]
    elif end == "stop":
        adapting.on_end(run, None)  # type: ignore[arg-type]
    elif end == "signal":  # after the memory for the other plan was allocated
        adapting.on_allocate(1, 1)
        adapting.on_end(run, KeyboardInterrupt())  # type: ignore[arg-type]
    else:
        Adaptation().on_start(run)  # type: ignore[arg-type]
    assert not chosen.parent.exists()


def test_a_plan_whose_memory_was_allocated_counts_as_tried(run: Run) -> None:
    adapting = Adaptation()
    adapting.on_start(run)  # type: ignore[arg-type]
    for number in range(1, 6):
        adapting.on_step(run, SimpleNamespace(number=number, seconds=2.0))  # type: ignore[arg-type]
    adapting.on_allocate(1, 1)
    Adaptation().on_start(run)  # type: ignore[arg-type]
    adapting.on_end(run, RuntimeError())  # type: ignore[arg-type]
    assert run.switched[0].is_file()


def test_a_plan_that_is_predicted_slower_is_not_described_as_a_gain(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapting = Adaptation()
    adapting.on_start(run)  # type: ignore[arg-type]
    proposal = adaptation.propose(run, 0.9)._replace(present_seconds=0.7)  # type: ignore[arg-type]
    monkeypatch.setattr(adaptation, "propose", lambda *_: proposal)
    run.steps(adapting, 0.9)
    (note,) = run.notes
    assert note.endswith(": the plan stays, since no faster one was found")


@pytest.mark.parametrize(
    ("left", "said"), [(4, ["4 steps are"]), (1, ["1 step is"]), (5, []), (0, [])]
)
def test_a_training_that_is_too_short_to_plan_again_says_so(
    run: Run, left: int, said: list[str]
) -> None:
    run.first_step = run.config.training.steps - left + 1
    Adaptation().on_start(run)  # type: ignore[arg-type]
    assert run.notes == [
        f"the plan stays: {what} left, and planning again needs 5" for what in said
    ]


@pytest.mark.parametrize(("digest", "noted"), [("former", 1), ("other", 0)])
def test_a_return_that_failed_is_not_announced(digest: str, noted: int) -> None:
    """If the former plan cannot be opened again, the trainer says that the other one stays."""
    notes = list[str]()
    adaptation = Adaptation()
    adaptation._phase, adaptation._former = "return", "former"
    trainer: Any = SimpleNamespace(plan=SimpleNamespace(digest=digest), note=notes.append)
    adaptation.on_switch(trainer, 0.0)
    assert len(notes) == noted
    assert adaptation._phase == "done"


def test_a_training_without_a_run_folder_is_refused(run: Run) -> None:
    run.out = None
    with pytest.raises(UserError, match="a training without a run folder"):
        Adaptation().on_start(run)  # type: ignore[arg-type]


def test_corrections_turn_a_prediction_into_what_was_measured(
    make_plan: Callable[..., Plan],
) -> None:
    plan = make_plan(hidden=64)
    hardware, schedule = HardwareSpec.load("h200"), policies.lower(plan)
    costs = cost_model(hardware, plan.model, plan.workload)
    slower = ScaledCosts(costs, lambda op: op, {"h2d": 3.0, "compute": 2.0})
    measured = simulate(schedule, slower)
    factors = corrections(simulate(schedule, costs), [measured, measured], schedule)
    assert factors["forward@compute"] == pytest.approx(2.0, rel=0.01)
    assert factors["load_weights@h2d"] == pytest.approx(3.0, rel=0.1)  # both directions share DRAM
    corrected = msgspec.structs.replace(hardware, corrections=factors)
    found = cost_model(corrected, plan.model, plan.workload)
    assert makespan_ns(schedule, found) == pytest.approx(measured.makespan_ns, rel=0.05)
    unknown = next(op for op in policies.evaluation(plan).ops if op.kind == "loss")
    assert found.duration_ns(unknown) == round(factors["compute"] * costs.duration_ns(unknown))
    assert not found.extrapolated(unknown)


def test_only_kinds_that_explain_the_difference_are_named(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(hidden=64)
    schedule = policies.lower(plan)
    predicted = simulate(schedule, cost_model(HardwareSpec.load("h200"), plan.model, plan.workload))
    lanes = {op.kind: f"{op.kind}@{op.lane}" for op in schedule.ops}
    forward, norm = lanes["forward"], lanes["norm"]
    times = durations([predicted], schedule)
    assert times[norm] > 0

    def named(seconds: float, **factors: float) -> str:
        by_lane = {lanes[kind]: factor for kind, factor in factors.items()}
        return largest(predicted, by_lane, schedule, seconds)

    step = predicted.makespan_ns / 1e9
    slow = 1 + 0.02 * predicted.makespan_ns / times[forward]
    tiny = 1 + 0.001 * predicted.makespan_ns / times[norm]
    found = named(1.02 * step, forward=slow, norm=tiny)
    assert found.startswith(f" ({forward.replace('@', ' on ')} ")
    assert "norm" not in found
    assert named(1.001 * step, norm=tiny) == ""
    assert named(1.02 * step, forward=0.5) == "", "it is faster and the step is slower"


@pytest.mark.parametrize(("key", "factor"), [("forward@nowhere", 1.0), ("compute", 0.0)])
def test_meaningless_corrections_are_refused(key: str, factor: float) -> None:
    with pytest.raises(UserError, match=f"corrections.{key}"):
        msgspec.structs.replace(HardwareSpec.load("h200"), corrections={key: factor})


def test_a_change_names_the_knobs_that_the_other_policy_reads(
    make_plan: Callable[..., Plan],
) -> None:
    before = make_plan("double_buffer")
    knobs = Knobs(weight_slots=3, chunk_bytes=2**20, placement=Placement(moments="all"))
    after = make_plan("overlapped", weight_slots=3, chunk_bytes=2**20, placement=knobs.placement)
    change = described_change(before, after)
    assert change.startswith("policy double_buffer -> overlapped")
    for part in ("weight_slots 2 -> 3", "chunk_bytes 4.00 KiB -> 1.00 MiB", "moments none -> all"):
        assert part in change
    shared = msgspec.structs.replace(
        after, knobs=msgspec.structs.replace(after.knobs, exchange_bytes=2**20)
    )
    assert described_change(after, shared) == "exchange_bytes 0 B -> 1.00 MiB"


def test_the_rate_of_a_disk_is_positive(tmp_path: Path) -> None:
    assert 0 < adaptation.write_rate(tmp_path, 3 * 2**20) < math.inf
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="no such file or directory"):
        adaptation.write_rate(tmp_path / "nowhere", 1)
