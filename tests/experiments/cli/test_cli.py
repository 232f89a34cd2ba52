"""Tests of the verbs of the command line: what each prints and writes.

They also show that the output of each verb is an input of the next one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import struct
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from short_model import shortened

from megatrain.experiments.cli.main import parse
from megatrain.experiments.cli.verdict import layout, this_machine
from megatrain.experiments.cli.verdict import text as verdict_text
from megatrain.experiments.commands.simulate import step_line
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.runtime.calibration.presets import LARGE, model_of, set_of_named
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_count, format_seconds
from megatrain.simulator.costs import Datasheet, cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.policies import evaluation, lower, names, peers
from megatrain.simulator.schedule.plan import Knobs, Plan
from megatrain.simulator.schedule.timeline import Timeline
from megatrain.simulator.verdict import alternatives
from megatrain.simulator.verdict import verdict as verdict_module
from megatrain.simulator.verdict.verdict import Verdict

WORK = ("--batch", 2, "--seq", 16, "--loss-chunk", 16, "--dtype", "fp32")
KEYS = {
    "feasible",
    "binding",
    "policy",
    "step_seconds",
    "tokens_per_second",
    "tflops_6n",
    "device_peak_bytes",
    "host_peak_bytes",
    "lower_bound_seconds",
    "advice",
}
RUN_FILES = {
    "checkpoints",
    "plan.toml",
    "hardware.toml",
    "config.toml",
    "loss.png",
    "environment.json",
    "data.json",
    "metrics.jsonl",
    "models.json",
    "measured.json",
    "memory.json",
    "model",
}
COMPARED = {
    "predicted.json",
    "comparison.json",
    "trace.json",
    "timeline.png",
    "errors.png",
    "memory.png",
}


def png_width(path: Path) -> int:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n", path
    return int(struct.unpack(">I", head[16:20])[0])


def only_object(text: str) -> dict[str, Any]:
    """Returns the JSON object in `text`, which must be one line and nothing else."""
    assert text.count("\n") == 1
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def lanes_by_process(trace: Path) -> dict[str, set[str]]:
    """Returns the names of the lanes of each process in a Chrome trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    lanes: dict[str, set[str]] = {name: set() for name in processes.values()}
    for event in events:
        if event["name"] == "thread_name":
            lanes[processes[event["pid"]]].add(event["args"]["name"])
    return lanes


@pytest.mark.usefixtures("workplace")
def test_a_second_calibration_says_whether_it_agrees(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = HardwareSpec.load(
        str(
            Path(__file__).parents[3]
            / "experiments"
            / "results"
            / "h200-qwen2.5-7b-whole"
            / "hardware.toml"
        )
    )
    assert hardware.costs is not None
    curves = {kind: hardware.costs.curves[kind] for kind in ("norm", "cpu_update")}
    names = [f"{kind} {size}" for kind, points in curves.items() for size, _ in points]
    spread = dict.fromkeys([*names, "contention.h2d.d2h"], 0.01)
    timed = msgspec.structs.replace(hardware.costs, spread=spread, activations={}, workspace={})
    first = msgspec.structs.replace(hardware, costs=timed)
    slower = {
        **hardware.costs.curves,
        **{
            kind: tuple((size, 2 * duration) for size, duration in points)
            for kind, points in curves.items()
        },
    }
    second = msgspec.structs.replace(hardware, costs=msgspec.structs.replace(timed, curves=slower))
    nothing = msgspec.structs.replace(hardware, costs=msgspec.structs.replace(timed, spread={}))
    words = (
        "calibrate",
        "tiny",
        "--batch",
        "2",
        "--seq",
        "16",
        "--dtype",
        "bf16",
        "--device",
        "cpu",
        "--out",
        "new/hardware.toml",
    )
    measured = [first, first, second, nothing]
    monkeypatch.setattr(
        "megatrain.runtime.calibration.calibrate.calibrate", lambda *_, **__: measured.pop(0)
    )
    assert command(*words).status == 0
    again = command(*words[:-1], "new/again.toml", "--again", "new/hardware.toml")
    assert again.status == 0
    assert "7 of 7 numbers agree with new/hardware.toml within their spreads" in again.out
    noisy = command(*words[:-1], "new/third.toml", "--again", "new/hardware.toml")
    assert noisy.status == 1
    assert "1 of 7 numbers agree" in noisy.out
    for name in names:  # each of them
        assert f"  {name}: changed by +100.0 %, more than the spread of 4.0%\n" in noisy.out
    assert "the machine is noisy" in noisy.out
    other = command(*words[:-1], "new/fourth.toml", "--again", "new/hardware.toml")
    assert other.status == 2
    assert "none of the numbers that this run measured" in other.err


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("options", "points"),
    [
        ((), [(2, 128, "fp32"), (4, 128, "fp32"), (1, 256, "fp32")]),
        (
            ("--batch", 4, "--dtype", "bf16"),
            [
                (4, 128, "bf16"),
                (1, 128, "bf16"),
                (2, 128, "bf16"),
                (8, 128, "bf16"),
                (8, 64, "bf16"),
                (2, 256, "bf16"),
            ],
        ),
        (("--grid", "3x64"), [(2, 128, "fp32"), (3, 64, "fp32")]),
    ],
)
def test_without_a_model_a_default_set_is_measured(
    command: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], points: list[Any]
) -> None:
    calls: list[Any] = []

    def calibrate(*args: Any, grid: list[Workload], others: list[Any], **_: Any) -> HardwareSpec:
        calls.append(([args[1].name, *(other.model.name for other in others)], [args[2], *grid]))
        return HardwareSpec.load("h200")

    monkeypatch.setattr("megatrain.runtime.calibration.calibrate.calibrate", calibrate)
    assert command("calibrate", "--device", "cpu", *options, "--out", "new.toml").status == 0
    (names, workloads), *more = calls
    assert (names, more) == (["llama-256", "llama-512", "llama-768"], [])
    assert [(work.batch, work.sequence, work.dtype) for work in workloads] == points


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("options", "points", "said"),
    [
        ((), [(8, 64, "fp32"), (1, 64, "fp32")], "8 x 64, 1 x 64 tokens in fp32"),
        (
            ("--seq", 16),
            [(32, 16, "fp32"), (4, 16, "fp32"), (1, 16, "fp32")],
            "32 x 16, 4 x 16, 1 x 16 tokens in fp32",
        ),
        (("--seq", 512), [(1, 512, "fp32")], "1 x 512 tokens in fp32"),
        (("--grid", "2x16"), [(8, 64, "fp32"), (2, 16, "fp32")], "8 x 64, 2 x 16 tokens in fp32"),
        (("--batch", 1, "--seq", 16, "--grid", "2x16"), [(1, 16, "fp32"), (2, 16, "fp32")], ""),
        (("--batch", 4, "--grid", "2x16"), [(4, 64, "fp32"), (2, 16, "fp32")], ""),
        (
            ("--batch", 1, "--seq", 16, "--grid", "2x16", "--dtype", "bf16"),
            [(1, 16, "bf16"), (2, 16, "bf16")],
            "",
        ),
    ],
)
def test_a_named_model_is_measured_with_a_workload_that_suits_the_machine(
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    points: list[Any],
    said: str,
) -> None:
    calls: list[Workload] = []

    def calibrate(*args: Any, grid: list[Workload], **_: Any) -> HardwareSpec:
        calls.extend([args[2], *grid])
        return HardwareSpec.load("h200")

    monkeypatch.setattr("megatrain.runtime.calibration.calibrate.calibrate", calibrate)
    machine = HardwareSpec.load("h200")
    rates = msgspec.structs.replace(machine, peak_tflops={"bf16": 1.0, "fp32": 1.0})
    monkeypatch.setattr(HardwareSpec, "load", lambda _: rates)
    outcome = command("calibrate", "tiny", "--device", "cpu", *options, "--out", "new.toml")
    assert outcome.status == 0, outcome.err
    assert [(work.batch, work.sequence, work.dtype) for work in calls] == points
    assert said in outcome.out
    assert outcome.out.startswith("micro-batches of " if said else "without a GPU, ")


@pytest.mark.parametrize(
    ("gib", "expected"), [(24, (8, 1024, ((1, 1024),))), (140, (32, 1024, None))]
)
def test_the_workload_of_a_named_model_suits_the_gpu(gib: int, expected: Any) -> None:
    found = set_of_named("cuda", gib * 2**30, sequence=None, longest=32_768)
    assert (found.batch, found.sequence, found.grid) == expected
    short = set_of_named("cuda", gib * 2**30, sequence=None, longest=512)
    assert (short.batch, short.sequence) == (2 * expected[0], 512)


@pytest.mark.usefixtures("workplace")
def test_another_model_is_predicted_from_the_default_set_and_flagged(command: Any) -> None:
    """Durations of the default set, scaled by FLOPs to another width, are right within 15 %.

    Here the datasheet gives both the durations of the set and the expected ones.
    """
    machine = HardwareSpec.load(
        str(
            Path(__file__).parents[3]
            / "experiments"
            / "results"
            / "h200-qwen2.5-7b-batches"
            / "hardware.toml"
        )
    )
    assert machine.costs is not None
    compute: dict[str, dict[str, tuple[int, int]]] = {}
    for name, (batch, sequence) in itertools.product(
        LARGE.models, ((LARGE.batch, LARGE.sequence), *LARGE.grid)
    ):
        work = Workload(batch=batch, sequence=sequence, documents=True)
        plan = Plan(
            policy="resident",
            hardware="",
            source="",
            device_limit_bytes=2**40,
            host_limit_bytes=2**40,
            model=model_of(name).shortest(3),
            workload=work,
            knobs=Knobs(),
        )
        costs = Datasheet(machine, plan.model, work)
        for op in (*lower(plan).ops, *evaluation(plan).ops):
            if op.shape:
                compute.setdefault(op.kind, {})[op.shape] = (op.amount, costs.duration_ns(op))
    table = msgspec.structs.replace(
        machine.costs, compute=compute, activations={}, workspace={}, loss_chunk=1024
    )
    write_hardware(
        Path("set.toml"), msgspec.structs.replace(machine, costs=table), "megatrain calibrate"
    )

    outcome = command(
        "plan",
        "qwen3-8b",
        "--hardware",
        "set.toml",
        "--batch",
        12,
        "--policy",
        "sequential",
        "--why",
        "--out",
        "plan.toml",
    )
    assert outcome.status == 0, outcome.err
    assert "some operations were not measured in this size" in flat(outcome.out)
    assert "Note the layers of this model were not measured on this machine; " in flat(outcome.out)
    flagged = flat(outcome.out).partition("Costs measured ")[2]
    assert "outside the measured range: " in flagged
    assert all(
        f"{kind} ({count} ops)" in flagged
        for kind, count in (("forward", 36), ("backward", 36), ("head", 1))
    )
    plan = Plan.load(Path("plan.toml"))
    priced, sheet = (
        cost_model(HardwareSpec.load("set.toml"), plan.model, plan.workload),
        Datasheet(machine, plan.model, plan.workload),
    )
    for op in lower(plan).ops:
        if op.kind in ("forward", "recompute", "backward", "head"):
            assert priced.extrapolated(op)
            assert priced.duration_ns(op) == pytest.approx(sheet.duration_ns(op), rel=0.15), op.kind
    measured = msgspec.structs.replace(
        plan,
        model=model_of("qwen2.5-14b"),
        workload=Workload(batch=32, sequence=1024, documents=True),
    )
    exact = cost_model(HardwareSpec.load("set.toml"), measured.model, measured.workload)
    assert not [op.id for op in lower(measured).ops if op.shape and exact.extrapolated(op)]


@pytest.mark.usefixtures("workplace", "fast_calibration", "with_pictures")
def test_from_calibration_to_comparison(command: Any) -> None:
    outcome = command(
        "calibrate",
        "tiny",
        *WORK,
        "--device",
        "cpu",
        "--name",
        "here",
        "--out",
        "new/hardware.toml",
    )
    assert outcome.status == 0, outcome.err
    assert outcome.out.splitlines()[-1].startswith("wrote new/hardware.toml: H2D ")
    hardware = HardwareSpec.load("new/hardware.toml")
    assert hardware.name == "here"
    assert hardware.costs is not None

    words = (
        "tiny",
        *WORK,
        "--hardware",
        "new/hardware.toml",
        "--device-memory",
        "500KiB",
        "--policy",
        "double_buffer",
    )
    outcome = command("plan", *words, "--out", "new/plans/plan.toml")
    assert outcome.status == 0, outcome.err
    plan = Plan.load(Path("new/plans/plan.toml"))
    assert (plan.hardware, plan.source, plan.policy, plan.device_limit_bytes) == (
        "../hardware.toml",
        "../../tiny",
        "double_buffer",
        500 * 1024,
    )
    assert plan.prediction is not None
    assert outcome.out.endswith(
        f"wrote new/plans/plan.toml: policy double_buffer, schedule {plan.digest}\n"
    )
    assert "(57.6 k) fits on machine here with 500 KiB of VRAM" in flat(outcome.out)

    outcome = command(
        *("simulate", "new/plans/plan.toml", "--json", "--trace", "new/simulated.json"),
        *("--picture", "new/simulated.png"),
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert Path("new/simulated.png").read_bytes().startswith(b"\x89PNG")
    simulated = only_object(outcome.out)
    assert simulated.keys() >= KEYS
    assert simulated["step_seconds"] == plan.prediction.step_seconds
    assert simulated["device_peak_bytes"] == plan.prediction.device_peak_bytes
    assert simulated["lower_bound_seconds"] <= simulated["step_seconds"]
    assert simulated["evaluation_seconds"] > 0
    assert list(lanes_by_process(Path("new/simulated.json"))) == ["predicted"]

    outcome = command(
        "train",
        "new/plans/plan.toml",
        "--data",
        "corpus",
        "--steps",
        4,
        "--device",
        "cpu",
        "--out",
        "new/run",
    )
    assert (outcome.status, outcome.err) == (0, "")
    run = Path("new/run")
    assert set(os.listdir(run)) == RUN_FILES
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert Timeline.load(run / "measured.json").digest == plan.digest
    check_model(run / "model")

    moved = Path("elsewhere")
    run.rename(moved)  # A run folder can be moved.
    outcome = command("compare", moved)
    assert (outcome.status, outcome.err) == (0, "")
    assert set(os.listdir(moved)) == RUN_FILES | COMPARED
    assert "\nend to end " in outcome.out
    assert "\nexposed h2d " in outcome.out
    assert "\n\n\n" not in outcome.out
    lanes = lanes_by_process(moved / "trace.json")
    assert list(lanes) == ["predicted", "measured"]
    assert lanes["predicted"] == lanes["measured"]
    assert any("compute" in lane for lane in lanes["measured"])
    for name in ("timeline.png", "errors.png", "memory.png", "loss.png"):
        assert png_width(moved / name) > 1000

    outcome = command("compare", moved, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    report = only_object(outcome.out)
    assert report["digest"] == plan.digest
    assert report["predicted_seconds"] == pytest.approx(
        simulated["step_seconds"] - hardware.costs.step_overhead_ns / 1e9
    )
    assert report["measured_seconds"] == Timeline.load(moved / "measured.json").makespan_ns / 1e9
    assert report["error"] == pytest.approx(
        report["predicted_seconds"] / report["measured_seconds"] - 1
    )
    assert {"forward", "backward", "load_weights", "save_gradients", "cpu_update"} <= {
        kind["kind"] for kind in report["kinds"]
    }
    assert json.loads((moved / "comparison.json").read_text()) == report
    assert report["error"] == pytest.approx(report["engine_error"] + report["cost_model_error"])
    assert sum(part["of_step"] for part in report["parts"]) == pytest.approx(report["error"])
    assert report["steps"]["count"] == 2, "the first two steps of four do not count as steady"
    assert {row["what"] for row in report["memory"]} >= {"device pools", "host pools"}
    assert all(
        row["predicted_bytes"] == row["measured_bytes"]
        for row in report["memory"]
        if row["what"].endswith("pools")
    )


def check_model(folder: Path) -> None:
    """Asserts that the model loads with transformers and differs from the one before training."""
    import torch
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    before = AutoModelForCausalLM.from_pretrained("tiny", local_files_only=True)
    pairs = [(value, before.state_dict()[name]) for name, value in trained.state_dict().items()]
    assert all(torch.isfinite(value).all() for value, _ in pairs)
    assert all(not torch.equal(value, old) for value, old in pairs)


@pytest.mark.usefixtures("workplace")
def test_the_same_words_make_the_same_plan(command: Any) -> None:
    words = ("plan", "tiny", *WORK, "--hardware", "h200", "--out")
    assert command(*words, "a.toml").status == command(*words, "b.toml").status == 0
    assert Path("a.toml").read_bytes() == Path("b.toml").read_bytes()


def test_the_parts_of_a_step_are_named() -> None:
    assert step_line(2.391, 2_386_000_000, 5_000_000) == (
        "step 2.391 s: 2.386 s for the schedule's operations, 5.000 ms for the host before the"
        " first and after the last operation (step_overhead_ns)"
    )
    assert step_line(1.5, 1_400_000_000, 0) == (
        "step 1.500 s: 1.400 s for the schedule's operations, 100.000 ms because the host's speed"
        " varies"
    )
    assert step_line(1.5, 1_500_000_000, 0) == "step 1.500 s: 1.500 s for the schedule's operations"


@pytest.mark.usefixtures("workplace")
def test_simulate_prints_every_lane_and_the_memory(command: Any) -> None:
    outcome = command("simulate", "plan.toml")
    assert (outcome.status, outcome.err) == (0, "")
    plan = Plan.load(Path("plan.toml"))
    assert plan.digest in outcome.out
    assert all(f"lane {lane} " in outcome.out for lane in ("compute", "h2d", "d2h", "cpu"))
    assert "DOES NOT FIT" not in outcome.out
    (line,) = re.findall(r"^step .*", outcome.out, re.MULTILINE)
    assert plan.prediction is not None
    overhead = HardwareSpec.load("h200").step_overhead_ns
    makespan = round(plan.prediction.step_seconds * 1e9) - overhead
    assert line == step_line(plan.prediction.step_seconds, makespan, overhead)
    text = Path("plan.toml").read_text()
    Path("plan.toml").write_text(
        text.replace(f"device_limit_bytes = {plan.device_limit_bytes}", "device_limit_bytes = 1000")
    )
    outcome = command("simulate", "plan.toml")
    assert (outcome.status, outcome.err) == (3, "")
    assert "of 1000 B: DOES NOT FIT" in outcome.out
    outcome = command("simulate", "plan.toml", "--json")
    assert outcome.status == 3
    assert only_object(outcome.out)["feasible"] is False


@pytest.mark.usefixtures("workplace")
def test_a_run_with_everything_resident_compares_too(command: Any) -> None:
    assert (
        command(
            "plan",
            "tiny",
            *WORK,
            "--hardware",
            "h200",
            "--policy",
            "resident",
            "--out",
            "resident.toml",
        ).status
        == 0
    )
    assert (
        command(
            "train",
            "resident.toml",
            "--data",
            "corpus",
            "--steps",
            3,
            "--device",
            "cpu",
            "--no-export",
            "--out",
            "run",
        ).status
        == 0
    )
    assert not Path("run/model").exists()
    outcome = command("compare", "run")
    assert (outcome.status, outcome.err) == (0, "")
    assert "host pools 0 B 0 B equal" in " ".join(outcome.out.split())
    assert command("report", "run").status == 0, "a run without copies has a page too"
    assert "<h3>Host</h3>" not in Path("run/report.html").read_text()


@pytest.mark.parametrize("source", ["tiny", "tiny/config.json", "qwen2.5-1.5b"])
def test_check_of_a_model_that_fits(
    source: str, workplace: Path, command: Any, files_in: Any
) -> None:
    before = files_in(workplace)
    outcome = command("check", source, "--hardware", "h200", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    report = only_object(outcome.out)
    assert report.keys() >= KEYS
    assert report.keys() == set(Verdict.__struct_fields__)
    assert report["feasible"] is True
    assert report["reason"] == ""
    assert 0 < report["lower_bound_seconds"] <= report["step_seconds"]
    assert report["tokens_per_second"] == pytest.approx(32 * 1024 / report["step_seconds"])
    assert 0 < report["device_peak_bytes"] <= report["device_limit_bytes"]
    assert files_in(workplace) == before


def flat(text: str) -> str:
    """Returns the text without line breaks and columns."""
    return " ".join(text.split())


@pytest.mark.usefixtures("without_advice", "searched_once")
def test_check_on_an_unmeasured_machine_gives_a_range(command: Any) -> None:
    words = (
        "check",
        "qwen2.5-1.5b",
        "--hardware",
        "rtx4090",
        "--host-memory",
        "128GiB",
        "--batch",
        "1",
        "--policy",
        "sequential",
    )
    report = only_object(command(*words, "--json").out)
    assert report["uncertainty"] == 0.20
    assert (report["step_seconds_low"], report["step_seconds_high"]) == pytest.approx(
        (0.8 * report["step_seconds"], 1.2 * report["step_seconds"])
    )
    low, high = (layout.rough(report[f"tokens_per_second_{end}"]) for end in ("low", "high"))
    text = command(*words).out
    assert f"({low} to {high}; from datasheets, not measured)" in text
    assert "assumed" not in text, "the host memory was given"
    assert not report["host_memory_assumed"]


@pytest.mark.usefixtures("searched_once")
def test_the_text_has_the_numbers_of_the_json(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "check",
        shortened("qwen2.5-7b", 5),
        "--hardware",
        "h200",
        "--device-memory",
        "20GiB",
        "--tokens",
        "1B",
        "--gpus",
        "8",
    )
    report = only_object(command(*words, "--json").out)
    printed = command(*words, "--why").out
    assert max(map(len, printed.splitlines())) <= 80
    text = flat(printed)
    assert f"Speed {report['tokens_per_second']:,.0f} tokens/s " in text
    ends = [layout.rough(report[f"tokens_per_second_{end}"]) for end in ("low", "high")]
    assert f"({ends[0]} to {ends[1]}; " in text
    assert f"{layout.seconds(report['step_seconds'])} a step of 32 x 1,024 tokens" in text
    assert report["batch_chosen"]
    assert ", the largest micro-batch up to 32 that fits, MFU " in text
    assert f"MFU {report['mfu']:.0%}" in text
    assert f"{report['mfu']:.1%} of the datasheet's peak (MFU)" in text
    assert (
        "no order of these operations takes less than"
        f" {format_seconds(report['lower_bound_seconds'])} ({report['lower_bound_lane']})" in text
    )
    for lane, seconds in report["exposed_seconds"].items():
        assert (f"{lane} {format_seconds(seconds)}" in text) == (
            seconds >= report["step_seconds"] / 1000
        )
    assert sum(report["step_shares"].values()) == pytest.approx(1)
    assert f"GPU computes {report['step_shares']['compute']:.0%}, waits for " in text
    assert f"for copies {report['step_shares']['copies']:.0%}" in text
    for label, place in (("VRAM", "device"), ("RAM", "host")):
        peak, limit = (report[f"{place}_{end}_bytes"] / 2**30 for end in ("peak", "limit"))
        assert f"{label} {peak:.1f} of {limit:.1f} GiB {layout.bar(peak, limit)}" in text
        for name, size in report["classes"][place].items():
            shown = f"{verdict_text.CLASS_NAMES[name]} {size / 2**30:.1f}"
            assert size < 0.05 * 2**30 or shown in text
    assert (
        f"a context of up to {report['longest_context']:,} tokens,"
        f" {report['longest_context_in_pieces']:,} with --token-piece 2048"
        " (the model's own limit is 131,072), or"
        f" {report['largest_batch']:,} sequences of 1,024" in text
    )
    assert report["advice"]
    for entry in report["advice"]:
        if entry["compressed"]:
            gain = f"{entry['change']} at least {entry['gain']:+.0%}: {entry['note']}"
            assert gain in text
        else:
            option = entry["change"].partition(",")[0]
            assert (
                f"{option} {entry['gain']:+.0%} {entry['tokens_per_second']:,.0f} tokens/s"
                f" {entry['note']}".strip()
                in text
            )
    training = report["training"]
    hours = [training[key] for key in ("hours", "hours_low", "hours_high")]
    assert (
        f"Time 1 B tokens in {layout.hours(*hours)} on 8 GPUs,"
        f" {layout.rough(training['energy_kwh'])} kWh of GPU energy" in text
    )
    assert training["days"] == pytest.approx(training["hours"] / 24)
    assert f"8 GPUs {report['multi_gpu']['tokens_per_second']:,.0f} tokens/s" in text
    assert report["multi_gpu"]["note"] in text
    assert "from the schedule of" in report["multi_gpu"]["note"]
    assert "megatrain plan qwen2.5-7b-5.json --hardware h200 --device-memory 20GiB" in text


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize(
    ("words", "early"),
    [
        (("--why",), True),
        (("--gpus", "8"), True),
        (("--json",), False),
        (("--host-memory", "10GiB", "--device-memory", "10GiB"), False),
    ],
    ids=str,
)
def test_the_answer_is_printed_before_other_plans_are_searched(
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    early: bool,
) -> None:
    """A NO names the memory with which another plan fits, so it waits for the search."""
    monkeypatch.chdir(tmp_path)
    model = shortened("qwen2.5-7b", 6)
    words = ("check", model, "--hardware", "a100-40", "--batch", "8", *words)
    whole = command(*words).out

    def nothing(*_: object, **__: object) -> None:
        raise UserError("the search", found="a stop", allowed="an answer first", fix="none")

    monkeypatch.setattr(verdict_module, "explored", nothing)
    outcome = command(*words)
    assert (outcome.status, outcome.out != "") == (2, early)
    assert whole.startswith(outcome.out)
    if early:
        first, rest = outcome.out.splitlines(), whole[len(outcome.out) :]
        assert first[0].startswith("YES")
        parts = [line for line in first if not line.startswith(" ")]
        assert parts[-1].startswith(("Step", "Note"))
        assert rest.startswith("\nRoom")


@pytest.mark.usefixtures("searched_once")
def test_check_of_a_model_that_does_not_fit(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "check",
        shortened("qwen2.5-32b", 12),
        "--hardware",
        "h200",
        "--device-memory",
        "10GiB",
        "--host-memory",
        "20GiB",
        "--batch",
        "32",
    )
    outcome = command(*words, "--json")
    assert (outcome.status, outcome.err) == (3, "")
    report = only_object(outcome.out)
    assert report.keys() >= KEYS
    assert report["feasible"] is False
    assert report["binding"] in report["pools"]
    first = report["advice"][0]
    outcome = command(*words, "--why")
    assert (outcome.status, outcome.err) == (3, "")
    text = flat(outcome.out)
    assert text.startswith(
        "NO Full fine-tuning of qwen2.5-32b-12 (7.41 B) does not fit on one H200"
    )
    assert f"Limit {report['binding']}: {report['reason']}" in text
    for entry in report["advice"]:
        name = entry["model"] or " ".join(f"--{key} {to}" for key, to in entry["options"].items())
        assert not entry["fits"] or (
            f"{name} {layout.speed(entry['tokens_per_second'])} tokens/s" in text
        )
        assert entry["fits"] or name not in text
    assert first["fits"]
    taken = [word for name, value in first["options"].items() for word in (f"--{name}", value)]
    again = command(*words, *taken, "--json")
    assert again.status == 0
    assert only_object(again.out)["tokens_per_second"] == pytest.approx(
        first["tokens_per_second"], rel=0.02
    )


@pytest.mark.usefixtures("without_advice", "searched_once")
def test_check_of_a_machine_with_one_memory(command: Any) -> None:
    words = (
        "check",
        "qwen2.5-1.5b",
        "--hardware",
        "apple-m4-max",
        "--batch",
        "1",
        "--tokens",
        "10M",
    )
    outcome = command(*words)
    assert (outcome.status, outcome.err) == (0, "")
    assert "fits on one Apple M4 Max with 96 GiB of memory." in flat(outcome.out)
    bars = [line.split()[0] for line in outcome.out.splitlines() if "##" in line]
    assert bars == ["Memory"]
    assert only_object(command(*words, "--json").out)["unified"] is True


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    ("model", "host", "batch"),
    [("qwen2.5-0.5b", "64GiB", 32), ("qwen2.5-7b", "104GiB", 16), ("qwen2.5-1.5b", "2GiB", 1)],
)
def test_without_a_batch_the_largest_that_fits_up_to_32_is_chosen(
    command: Any, model: str, host: str, batch: int
) -> None:
    words = ("check", model, "--hardware", "rtx3080-10gb", "--host-memory", host, "--policy")
    report = only_object(command(*words, "k_buffer", "--json").out)
    assert report["batch_chosen"]
    assert report["workload"]["batch"] == batch
    if batch < 32:
        larger = command(*words, "k_buffer", "--batch", 2 * batch)
        assert larger.status == 3, "twice as many do not fit"


def test_check_notes_a_sequence_beyond_the_model_s_limit(command: Any, workplace: Path) -> None:
    assert json.loads((workplace / "tiny/config.json").read_text())["max_position_embeddings"] == 64
    words = ("tiny", "--hardware", "h200", "--batch", "1", "--seq")
    outcome = command("check", *words, "128")
    assert (outcome.status, outcome.err) == (0, "")
    note = (
        "Note sequences of 128 tokens are longer than the model's own limit of 64"
        " (max_position_embeddings)"
    )
    assert note in flat(outcome.out)
    assert "(the model's own limit is 64)" in flat(outcome.out)
    assert "Note" not in command("check", *words, "64").out
    assert note in flat(command("plan", *words, "128", "--out", "new.toml").out)


@pytest.mark.usefixtures("without_advice")
def test_one_more_gib_is_tried_only_where_it_is_shown(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def nothing(*given: object) -> tuple[()]:
        tried.append(given)
        return ()

    monkeypatch.setattr("megatrain.simulator.verdict.verdict.one_more_gib", nothing)
    words = ("check", "qwen2.5-0.5b", "--hardware", "h200", "--batch", "1", "--policy", "resident")
    for more, times in (((), 0), (("--why",), 1), (("--json",), 2)):
        assert command(*words, *more).status == 0
        assert len(tried) == times


def answer_as_the_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Puts a program `nvidia-smi` first on the path, which prints `answer`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_without_hardware_check_uses_this_machine(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer_as_the_driver(tmp_path, monkeypatch, "NVIDIA GeForce RTX 4090, 24564")
    monkeypatch.setattr(this_machine, "usable_host_bytes", lambda: 100 * 2**30)
    monkeypatch.setattr(this_machine, "cores", lambda: 8)
    words = ("check", "qwen2.5-0.5b", "--batch", "1")
    outcome = command(*words)
    assert (outcome.status, outcome.err) == (0, "")
    assert "fits on one RTX 4090 (this machine) with 23 GiB of VRAM and 100 GiB of RAM." in flat(
        outcome.out
    )
    assert "megatrain train MODEL --data DATA" in outcome.out
    report = only_object(command(*words, "--json").out)
    assert report["device_limit_bytes"] == int(0.96 * 24564 * 2**20)
    assert not report["host_memory_assumed"]
    known, here = HardwareSpec.load("rtx4090"), this_machine.this_machine()
    assert here.cpu_update_per_s == known.cpu_update_per_s / 2


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, "no NVIDIA GPU on this machine"),
        ("", "no NVIDIA GPU on this machine"),
        ("NVIDIA TITAN X, 12288", "a GPU that the library does not have, NVIDIA TITAN X"),
    ],
)
def test_the_error_on_a_machine_without_a_known_gpu_asks_for_hardware(
    answer: str | None, found: str, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if answer is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        answer_as_the_driver(tmp_path, monkeypatch, answer)
    outcome = command("check", "qwen2.5-7b")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert f"--hardware: found no --hardware, and {found}" in outcome.err
    assert "--hardware " in outcome.err.partition("; fix: ")[2]


@pytest.mark.usefixtures("searched_once", "without_advice")
def test_without_a_model_check_lists_the_models_that_fit(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [ModelSpec.load(name) for name in ("qwen2.5-72b", "qwen2.5-1.5b", "qwen2.5-0.5b")]
    monkeypatch.setattr("megatrain.simulator.verdict.alternatives.library_models", lambda: few)
    words = ("check", "--hardware", "rtx3080-10gb")
    outcome = command(*words)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("YES     These models of the library can be fine-tuned in full")
    assert [line.split()[0] for line in lines[-3:-1]] == ["qwen2.5-1.5b", "qwen2.5-0.5b"]
    assert lines[-1] == "1 other model of the library does not fit."
    monkeypatch.setenv("COLUMNS", "50")
    narrow = command(*words).out.splitlines()
    assert max(map(len, narrow)) <= 50
    assert narrow[-5].split() == ["model", "size", "tokens/s", "RAM"]
    assert narrow[-1] == "left out in 50 columns: batch, VRAM"
    monkeypatch.delenv("COLUMNS")
    models = only_object(command(*words, "--json").out)["models"]
    assert [
        f"{model['tokens_per_second']:,.0f}" in line
        for model, line in zip(models, lines[-3:-1], strict=True)
    ] == [True, True]
    one = only_object(command("check", "qwen2.5-1.5b", *words[1:], "--json").out)
    assert models[0]["tokens_per_second"] == pytest.approx(one["tokens_per_second"])
    assert models[0]["workload"] == one["workload"]
    none = command(*words, "--host-memory", "1GiB", "--device-memory", "1GiB")
    assert (none.status, none.out) == (3, "NO      No model of the library fits.\n")


def test_a_model_whose_state_is_larger_than_the_memory_is_not_planned(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These models come first, and their searches take longest."""
    searched = []

    def record(model: ModelSpec, *args: Any, **kwargs: Any) -> Any:
        searched.append(model.name)
        return search(model, *args, **kwargs)

    search = candidates
    few = [ModelSpec.load(name) for name in ("qwen2.5-72b", "qwen2.5-0.5b")]
    monkeypatch.setattr("megatrain.simulator.verdict.alternatives.library_models", lambda: few)
    monkeypatch.setattr("megatrain.simulator.planner.search.candidates", record)
    outcome = command("check", "--hardware", "rtx3080-10gb")
    assert (outcome.status, searched) == (0, ["qwen2.5-0.5b"])
    assert outcome.out.endswith("1 other model of the library does not fit.\n")


@pytest.mark.usefixtures("searched_once", "without_advice")
@pytest.mark.parametrize(
    "words",
    [
        ("--clipping", "layer", "--state", "master24"),
        ("--optimizer", "muon", "--dtype", "fp8", "--fp8-scaling", "tensorwise"),
        ("--seq", "4096", "--state", "any"),
        ("--cores", "8", "--policy", "resident", "--plain-packing"),
    ],
)
def test_the_list_of_models_that_fit_uses_the_given_options(
    words: tuple[str, ...], command: Any
) -> None:
    machine = ("--hardware", "h200", "--device-memory", "8GiB", "--host-memory", "16GiB")
    outcome = command("check", "qwen2.5-32b", *machine, "--batch", "1", *words)
    assert outcome.status == 3
    after = flat(outcome.out).partition("Next ")[2]
    listed, what, _ = after.partition(" # lists the models that fit")
    assert what
    given = parse(["check", *machine, *words])
    assert parse(shlex.split(listed.replace("\\ ", ""))[1:]) == given


@pytest.mark.usefixtures("without_advice")
def test_the_list_has_models_that_fit_only_in_pieces_of_tokens(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: no model was listed, but `check` of this model said YES."""
    only = ModelSpec.load("qwen2.5-0.5b")
    monkeypatch.setattr(alternatives, "library_models", lambda: [only])
    machine = ("--hardware", "rtx4090", "--host-memory", "16GiB", "--seq", "259149")
    outcome = command("check", *machine)
    assert outcome.status == 0
    (line,) = [line for line in outcome.out.splitlines() if line.startswith(only.name)]
    one = json.loads(command("check", only.name, *machine, "--json").out)
    assert one["feasible"]
    assert one["workload"]["token_piece"]
    assert line.split()[3:5] == ["1", f"{one['tokens_per_second']:,.0f}"]


def test_the_list_has_the_largest_micro_batch_also_with_tokens_per_step(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: each model had a micro-batch of one sequence, and a seventh of its speed."""
    monkeypatch.setattr(alternatives, "library_models", lambda: [ModelSpec.load("qwen2.5-1.5b")])
    words = ("check", "--hardware", "rtx4090")
    assert command(*words).out == command(*words, "--tokens-per-step", "65536").out


@pytest.mark.usefixtures("searched_once", "without_advice")
def test_cores_and_tokens_per_step_are_kept_where_a_command_has_them(command: Any) -> None:
    """Regression test: a `plan` command without the cores had another step time than the verdict,
    and the `train` command had another number of tokens per step.
    """
    words = ("check", "qwen2.5-0.5b", "--hardware", "h200", "--gpus", "2")
    text = flat(command(*words, "--tokens-per-step", "65536").out)
    assert "megatrain train MODEL --data DATA --tokens-per-step 65536 --out RUN" in text
    assert text.count("megatrain plan qwen2.5-0.5b") == 2
    text = flat(command(*words, "--cores", "8", "--batch", "4").out)
    assert "megatrain train MODEL --data DATA --out RUN" in text
    assert "megatrain plan qwen2.5-0.5b" not in text


@pytest.mark.usefixtures("without_advice")
def test_time_is_that_of_several_gpus_if_one_does_not_suffice(command: Any) -> None:
    """Regression test: `--tokens` was ignored."""
    words = ("check", "llama-3.2-1b", "--hardware", "rtx3080-10gb", "--host-memory", "8GiB")
    text = flat(command(*words, "--gpus", "8", "--tokens", "1B", "--batch", "1").out)
    assert "It does not fit on one RTX 3080" in text
    assert re.search(
        r"Time 1 B tokens in [\d.]+ (hours|days) \([\d.]+ to [\d.]+\) on 8 GPUs, ", text
    )
    assert "Time" not in flat(command(*words, "--tokens", "1B", "--batch", "1").out)


@pytest.mark.usefixtures("searched_once", "without_advice")
@pytest.mark.parametrize(("machine", "trains"), [("apple-m4-max", False), ("dgx-spark", True)])
def test_a_machine_without_cuda_is_for_prediction_only(
    machine: str, trains: bool, command: Any
) -> None:
    outcome = command("check", "qwen2.5-0.5b", "--hardware", machine, "--batch", "1")
    assert outcome.status == 0
    text = flat(outcome.out)
    assert ("megatrain train MODEL" in text) == trains
    assert ("megatrain plan" in text) == trains
    assert ("`megatrain train` cannot use the GPU of Apple M4 Max" in text) != trains


@pytest.mark.usefixtures("without_advice")
def test_policies_that_the_options_rule_out_are_named_below_the_table(command: Any) -> None:
    words = ("check", "qwen2.5-0.5b", "--hardware", "h200", "--batch", "1", "--optimizer", "muon")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = command(*words, "--policy", "all")
    assert (outcome.status, outcome.err) == (0, "")
    assert flat(outcome.out).startswith(
        "qwen2.5-0.5b on one H200 with 133.7 GiB of VRAM and 120.9 GiB of RAM (assumed free; give"
        " yours by --host-memory), with 1 x 1,024 tokens a step: policy step tokens/s "
    )
    assert "not with these options: double_buffer, k_buffer, sequential, fsdp2_offload, " in flat(
        outcome.out
    )
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.usefixtures("without_advice")
def test_a_runner_up_is_another_plan(command: Any) -> None:
    words = ("check", "qwen2.5-7b", "--hardware", "rtx4090", "--host-memory", "192GiB")
    found = only_object(command(*words, "--batch", "32", "--optimizer", "muon", "--json").out)
    second = found["runner_up"]
    assert second is None or (second["policy"], second["knobs"]) != (
        found["policy"],
        found["knobs"] | {"gradient_staging": second["knobs"]["gradient_staging"]},
    )


@pytest.mark.usefixtures("without_advice", "searched_once")
def test_check_of_every_policy(command: Any) -> None:
    words = (
        "check",
        "qwen2.5-7b",
        "--hardware",
        "h200",
        "--policy",
        "all",
        "--host-memory",
        "512GiB",
    )
    outcome = command(*words, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    reports = only_object(outcome.out)["policies"]
    assert sorted(report["policy"] for report in reports) == sorted(names() + peers())
    assert all(report.keys() >= KEYS for report in reports)
    assert [report["step_seconds"] for report in reports] == sorted(
        report["step_seconds"] for report in reports
    )  # all fit: fastest first
    *table, last = command(*words).out.partition("\n\n")[2].splitlines()
    assert last == "* another system, for prediction only"
    tight = (
        "check",
        "qwen2.5-7b",
        "--hardware",
        "h200",
        "--policy",
        "all",
        "--host-memory",
        "120GiB",
    )
    lines = {line.split()[0]: line for line in command(*tight).out.splitlines()[3:-1]}
    for report in only_object(command(*tight, "--json").out)["policies"]:
        line = lines[report["policy"]]
        assert (" OOM " in line) == (not report["feasible"])
        assert report["feasible"] or line.endswith((" RAM", " VRAM"))
        assert len(line) <= 80
    assert " OOM " in lines["zero3_offload"]
    long = (*tight, "--tokens", "1B")
    days = {line.split()[0]: line for line in command(*long).out.splitlines() if line}
    for report in only_object(command(*long, "--json").out)["policies"]:
        assert (report["training"] is not None) == report["feasible"]
        if report["feasible"]:
            assert report["training"]["days"] == pytest.approx(
                1e9 / report["tokens_per_second"] / 86400
            )
            assert f" {report['training']['hours']:,.1f} " in days[report["policy"]]
    assert [line.split()[0] for line in table[1:]] == [report["policy"] for report in reports]
    assert (
        {line.split()[0] for line in table if line.split()[1] == "*"}
        == {report["policy"] for report in reports if report["prediction_only"]}
        == set(peers())
    )


@pytest.mark.usefixtures("without_advice")
def test_another_system_is_never_the_best_plan_and_not_trained(
    command: Any, tmp_path: Path
) -> None:
    best = only_object(
        command("check", "qwen2.5-7b", "--hardware", "h200", "--batch", "1", "--json").out
    )
    assert best["policy"] in names()
    plan = tmp_path / "plan.toml"
    assert (
        command(
            "plan", "qwen2.5-7b", "--hardware", "h200", "--policy", "megatrain_code", "--out", plan
        ).status
        == 0
    )
    assert command("simulate", plan).status == 0
    outcome = command(
        "train",
        plan,
        "--data",
        tmp_path,
        "--steps",
        1,
        "--out",
        tmp_path / "run",
        "--init",
        "random",
    )
    assert outcome.status != 0
    assert "found megatrain_code, the policy of another system, which" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.usefixtures("without_advice")
def test_fewer_cores_are_slower_and_a_named_policy_is_kept(command: Any) -> None:
    words = ("check", "qwen2.5-0.5b", "--hardware", "h200", "--batch", "1", "--json")
    words = (*words, "--policy", "sequential")
    few, many = (only_object(command(*words, "--cores", cores).out) for cores in (2, 16))
    assert few["policy"] == many["policy"] == "sequential"
    assert few["step_seconds"] > many["step_seconds"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7_615_616_512, "7.616 G"),
        (11_300_000, "11.3 M"),
        (57_632, "57.63 k"),
        (999, "999"),
        (32_763_876_352, "32.76 G"),
    ],
)
def test_parameter_counts_are_readable(count: int, text: str) -> None:
    assert format_count(count) == text
