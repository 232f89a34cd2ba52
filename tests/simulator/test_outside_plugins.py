"""Tests of model families, machines and cost models from outside the package."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy
import pytest
from forget import forget
from pages import read

from megatrain.experiments.cli import main as cli
from megatrain.experiments.cli.options import machine_notes
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, Datasheet, EstimatedCosts, cost_model
from megatrain.simulator.costs.contention import Demand
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import search
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op
from megatrain.simulator.verdict.verdict import summarize

H200 = HardwareSpec.load("h200")
OUTSIDE = msgspec.structs.replace(FAMILIES["qwen2"])
MACHINE = msgspec.structs.replace(H200, name="ours")
MACHINE_FILE = str(Path(__file__).parents[2] / "simulator" / "library" / "hardware" / "h200.toml")
NOTHING = 7
WORK = Workload(batch=2, sequence=16)


def doubled(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> Datasheet:
    made = Datasheet(hardware, model, workload)
    alone = made.duration_ns
    made.duration_ns = lambda op: 2 * alone(op)  # type: ignore[method-assign]
    return made


def broken(*_: object) -> Datasheet:
    raise ZeroDivisionError("no rate\nfor this link")


def exiting(*_: object) -> Datasheet:
    raise SystemExit(7)


Install = Callable[[str, str, str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Returns a function that installs an object of this module under a group and a name."""
    points: list[importlib.metadata.EntryPoint] = []

    def found(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [point for point in points if point.group == group]

    def add(group: str, name: str, value: str) -> None:
        points.append(importlib.metadata.EntryPoint(name, f"outside:{value}", group))
        forget()

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.setattr(
        importlib.metadata.EntryPoint, "load", lambda point: globals()[point.value.split(":")[1]]
    )
    forget()
    yield add
    forget()
    for name in ("mine", "qwen2_of_mine"):
        FAMILIES._loaded.pop(name, None)


def config(model_type: str) -> dict[str, object]:
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }


def test_an_installed_copy_of_a_family_gives_the_same_model(install: Install) -> None:
    """An installed family that copies a built-in one describes the same model."""
    install("megatrain.families", "qwen2_of_mine", "OUTSIDE")
    mine, twin = (ModelSpec.from_config(config(name), name) for name in ("qwen2_of_mine", "qwen2"))
    assert mine.parameters == twin.parameters
    assert mine.family == "qwen2_of_mine"
    assert "qwen2_of_mine" in list(FAMILIES)
    assert OUTSIDE in FAMILIES.loaded()


def test_a_built_in_family_is_not_replaced(install: Install) -> None:
    install("megatrain.families", "llama", "NOTHING")
    assert ModelSpec.from_config(config("llama"), "llama").family == "llama"


def test_an_installed_object_that_is_no_family_is_refused(install: Install) -> None:
    install("megatrain.families", "mine", "NOTHING")
    with pytest.raises(UserError, match="entry point outside:NOTHING: found int"):
        ModelSpec.from_config(config("mine"), "mine")


@pytest.mark.parametrize("value", ["MACHINE", "MACHINE_FILE"])
def test_an_installed_machine_is_found_by_its_name(install: Install, value: str) -> None:
    install("megatrain.hardware", "ours", value)
    assert HardwareSpec.load("ours") == (MACHINE if value == "MACHINE" else H200)


def test_an_installed_object_that_is_no_machine_is_refused(install: Install) -> None:
    install("megatrain.hardware", "ours", "NOTHING")
    with pytest.raises(UserError, match="found int; allowed: a HardwareSpec"):
        HardwareSpec.load("ours")


def test_a_machine_s_installed_cost_model_predicts(install: Install) -> None:
    install("megatrain.cost_models", "doubled", "doubled")
    model = ModelSpec.load("qwen2.5-0.5b")
    usual = msgspec.structs.replace(H200, step_overhead_ns=0)
    slow = msgspec.structs.replace(usual, cost_model="doubled")
    steps = [
        search(model, hardware, WORK, policies=["sequential"])[0].step_seconds
        for hardware in (slow, usual)
    ]
    assert steps[0] == pytest.approx(2 * steps[1], rel=1e-3)


def test_a_calibrated_machine_with_a_cost_model_of_its_own_is_not_called_measured(
    install: Install,
) -> None:
    install("megatrain.cost_models", "doubled", "doubled")
    results = Path(__file__).parents[2] / "experiments" / "results"
    measured = HardwareSpec.load(str(results / "h200-heldout" / "hardware.toml"))
    model = ModelSpec.load("qwen2.5-0.5b")
    found = []
    for hardware in (measured, msgspec.structs.replace(measured, cost_model="doubled")):
        verdict = summarize(search(model, hardware, WORK, policies=["sequential"])[0], hardware)
        found.append((verdict.calibrated, verdict.cost_model, machine_notes(hardware, model)))
    (date, none, notes), (no_date, name, no_notes) = found
    assert (bool(date), none, len(notes)) == (True, "", 1)
    assert (no_date, name, no_notes) == ("", "doubled", [])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nobody",
            "found no such cost model; allowed: an installed one \\(broken, exiting, nothing\\)",
        ),
        ("nothing", "found no function cost_model"),
        ("exiting", "found SystemExit: 7 .*; allowed: "),
        ("broken", "found ZeroDivisionError: no rate .*; allowed: "),
        ("missing.py", "found no file missing.py"),
    ],
)
def test_a_cost_model_that_cannot_be_used_gives_a_one_line_error(
    install: Install, name: str, message: str
) -> None:
    install("megatrain.cost_models", "broken", "broken")
    install("megatrain.cost_models", "exiting", "exiting")
    install("megatrain.cost_models", "nothing", "NOTHING")
    hardware = msgspec.structs.replace(H200, cost_model=name)
    with pytest.raises(UserError, match=message):
        cost_model(hardware, ModelSpec.load("qwen2.5-0.5b"), WORK)


def speed(text: str) -> int:
    """Returns the tokens per second in the text of `check`."""
    (found,) = re.findall(r"^Speed +([\d,]+) tokens/s", text, re.MULTILINE)
    return int(found.replace(",", ""))


def test_the_guide_s_cost_model_halves_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = read("docs/adding.md")
    code = next(
        each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HalfLink" in each
    )
    assert "Saved as `half_link.py`" in page
    (line,) = re.findall(r"```toml\n(cost_model = .*\n)```", page)
    Path("half_link.py").write_text(code, encoding="utf-8")
    Path("ours.toml").write_text(line + Path(MACHINE_FILE).read_text(encoding="utf-8"))
    model, hardware = ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load("ours.toml")
    costs, usual = (cost_model(each, model, WORK) for each in (hardware, H200))
    found = search(model, hardware, WORK, policies=["sequential"])[0]
    for op in lower(found.plan).ops:
        factor = 2 if op.lane in ("h2d", "d2h") else 1
        assert costs.duration_ns(op) == factor * usual.duration_ns(op)
    words = ["check", "qwen2.5-0.5b", "--batch", "2", "--seq", "16", "--policy", "sequential"]
    assert cli.main([*words, "--hardware", "ours.toml"]) == 0
    slow = speed(capsys.readouterr().out)
    assert cli.main([*words, "--hardware", "h200"]) == 0
    assert 0 < slow < speed(capsys.readouterr().out)


NS = "duration_ns"
LINE = r"\(half_link\.py, line \d+\); allowed: a"
MISTAKES = {
    "negative": (NS, "return -5", "-5 as duration_ns of embed E.m0; allowed: a whole number of ns"),
    "a float": (NS, "return 0.5 + super().duration_ns(op)", r"\d+\.5 as duration_ns of "),
    "no time": (NS, "return 0", r"0 as duration_ns of \w+ .*; allowed: a whole number of ns >= 1"),
    "nothing": (NS, "pass", "None as duration_ns of "),
    "a failure": (NS, "return op.byts", rf"AttributeError in duration_ns of .* 'byts' {LINE}"),
    "zero rates": ("rates", "return (0,) * len(op)", r"\(0.* as rates; allowed: . whole numbers"),
    "too few rates": ("rates", "return ()", r"\(\) as rates; allowed: . whole numbers"),
    "no demand": ("demand", "return 7", "7 as demand of .*; allowed: None, or a Demand"),
    "half bytes": ("collective_bytes", "return 0.5", "0.5 as collective_bytes; allowed: a whole"),
    "no model": ("", "return None", "NoneType without dispatch_ns; allowed: a CostModel"),
    "a failing function": ("", "return hardware.rate", f"AttributeError: .*'rate' {LINE}"),
    "an attribute": ("", "made.step_overhead_ns = -1", "-1 as step_overhead_ns; allowed: a whole "),
    "a dispatch": ("", "made.dispatch_ns = 3", "3 as dispatch_ns; allowed: lane -> a whole number"),
    "factors": ("", "made.host_factors = (0.0,)", r"\(0.0,\) as host_factors; allowed: a tuple of"),
}
"""Mistake -> the method of the guide's cost model that has it, the body of this method, and the
error. If no method is named, the function that makes the cost model has the mistake."""


def with_mistake(machine: Path, mistake: str) -> list[str]:
    """Writes a mistake into the cost model of `machine`, and returns words of a command."""
    method, body, _ = MISTAKES[mistake]
    path = machine.with_name("half_link.py")
    code = path.read_text(encoding="utf-8")
    if method:
        start, end = code.index("    def duration_ns"), code.index("def cost_model")
        code = f"{code[:start]}    def {method}(self, op):\n        {body}\n\n\n{code[end:]}"
    else:
        code = code.replace("    return HalfLink(", "    made = HalfLink(")
        code += f"    {body}\n    return made\n"
    path.write_text(code, encoding="utf-8")
    return ["qwen2.5-0.5b", "--seq", "16", "--hardware", str(machine)]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_cost_model_is_one_line(
    machine: Path, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *with_mistake(machine, mistake), "--batch", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    start = rf"megatrain: hardware h200: cost_model {machine.parent}/half_link\.py: found "
    assert re.match(start + MISTAKES[mistake][2], error), error


def test_a_sweep_says_why_a_cost_model_gives_no_time(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*with_mistake(machine, "negative"), "--jobs", "1", "--out", str(machine.parent)]
    assert cli.main(["sweep", *words, "--over", "policy", "k_buffer", "--over", "batch", "2"]) == 1
    assert "half_link.py: found -5 as duration_ns of load_weights" in capsys.readouterr().out


def dispatched(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> Datasheet:
    made = Datasheet(hardware, model, workload)
    made.dispatch_ns = {"compute": 10**6}
    made.duration_ns = lambda _: 0  # type: ignore[method-assign]
    return made


def test_a_cost_model_may_have_dispatch_times_alone(install: Install) -> None:
    install("megatrain.cost_models", "dispatched", "dispatched")
    hardware = msgspec.structs.replace(H200, cost_model="dispatched")
    best = search(ModelSpec.load("qwen2.5-0.5b"), hardware, WORK, policies=["overlapped"])[0]
    assert best.step_seconds > 0.048, "24 layers, forward and backward"


class Constant(EstimatedCosts):
    """A cost model whose duration is a NumPy number, and which is made once."""

    def __init__(self) -> None:
        self.dispatch_ns, self.step_overhead_ns = {"compute": 1}, 0
        self.sharing = Datasheet(H200, ModelSpec.load("qwen2.5-0.5b"), WORK).sharing

    def duration_ns(self, op: Op) -> int:
        return numpy.int64(7)  # type: ignore[return-value]


ONE = Constant()


def one(*_: object) -> Constant:
    return ONE


@dataclasses.dataclass(frozen=True)
class Frozen(Constant):
    """A cost model with numbers of NumPy, whose attributes cannot be set."""

    dispatch_ns = {"compute": numpy.int64(1)}  # type: ignore[assignment]  # noqa: RUF012
    step_overhead_ns = numpy.int64(7)  # type: ignore[assignment]
    sharing = Constant().sharing

    def rates(self, busy: tuple[Demand, ...]) -> tuple[int, ...]:
        return tuple(numpy.array(super().rates(busy), int))


def frozen(*_: object) -> Frozen:
    return Frozen()


def ours(hardware: HardwareSpec, model: ModelSpec, work: Workload) -> CostModel:
    return cost_model(msgspec.structs.replace(hardware, cost_model=""), model, work)


def test_the_checks_do_not_change_what_the_function_returned(install: Install) -> None:
    """Regression test: a cost model of the package itself was changed for everyone."""
    model = ModelSpec.load("qwen2.5-0.5b")
    for name, usual in (("one", ONE), ("ours", cost_model(H200, model, WORK))):
        install("megatrain.cost_models", name, name)
        before = type(usual.duration_ns)
        found = cost_model(msgspec.structs.replace(H200, cost_model=name), model, WORK)
        assert type(found.duration_ns) is not before
        assert type(usual.duration_ns) is before


@pytest.mark.parametrize("name", ["one", "frozen"])
def test_numbers_of_numpy_become_those_of_python(install: Install, name: str) -> None:
    install("megatrain.cost_models", name, name)
    hardware = msgspec.structs.replace(H200, cost_model=name)
    model = ModelSpec.load("qwen2.5-0.5b")
    found = cost_model(hardware, model, WORK)
    best = search(model, hardware, WORK, policies=["sequential"])[0]
    assert type(found.duration_ns(op=lower(best.plan).ops[0])) is int
    assert type(found.step_overhead_ns) is int
    assert {type(each) for each in found.dispatch_ns.values()} == {int}
    assert json.loads(msgspec.json.encode(best.plan.prediction))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Returns a machine's file with the guide's cost model beside it, seen from another folder."""
    page = read("docs/adding.md")
    code = next(
        each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HalfLink" in each
    )
    folder = tmp_path / "machines"
    folder.mkdir()
    (folder / "half_link.py").write_text(code, encoding="utf-8")
    text = 'cost_model = "half_link.py"\n' + Path(MACHINE_FILE).read_text(encoding="utf-8")
    (folder / "ours.toml").write_text(text, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    return folder / "ours.toml"


def test_a_cost_model_is_found_beside_the_machine_s_file(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands find it from any folder, also through a plan."""
    monkeypatch.chdir(machine.parents[1] / "elsewhere")
    words = ["qwen2.5-0.5b", "--batch", "2", "--seq", "16", "--policy", "sequential"]
    words += ["--hardware", "../machines/ours.toml"]
    assert cli.main(["check", *words]) == 0
    assert "by the cost model ../machines/half_link.py" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["plan", *words, "--out", "plans/plan.toml"]) == 0
    monkeypatch.chdir(machine.parent)
    assert cli.main(["simulate", "../elsewhere/plans/plan.toml"]) == 0
    (machine.parent / "half_link.py").unlink()
    capsys.readouterr()
    monkeypatch.chdir(machine.parents[1])
    assert cli.main(["simulate", "elsewhere/plans/plan.toml"]) == 2
    message = capsys.readouterr().err
    assert "cost model: found no file machines/half_link.py; allowed: " in message
    assert message.count("\n") == 1


def test_a_cost_model_relative_to_the_current_folder_is_still_found(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(machine.parents[1] / "elsewhere")
    (machine.parent / "half_link.py").rename("half_link.py")
    assert HardwareSpec.load(str(machine)).cost_model == "half_link.py"


def test_a_written_machine_finds_its_cost_model(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that `train --adapt` corrects is in another folder than the file it was in."""
    monkeypatch.chdir(machine.parents[1])
    before = HardwareSpec.load("machines/ours.toml")
    write_hardware(Path("elsewhere/ours.toml"), before, "a test")
    assert 'cost_model = "../machines/half_link.py"' in Path("elsewhere/ours.toml").read_text()
    assert HardwareSpec.load("elsewhere/ours.toml") == before
    monkeypatch.chdir("elsewhere")
    written = HardwareSpec.load("ours.toml")
    assert cost_model(written, ModelSpec.load("qwen2.5-0.5b"), WORK)


def test_an_installed_machine_s_file_finds_its_cost_model(
    machine: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("megatrain.hardware", "ours", "MACHINE_FILE")
    monkeypatch.setitem(globals(), "MACHINE_FILE", str(machine))
    assert HardwareSpec.load("ours").cost_model == str(machine.parent / "half_link.py")
