"""Tests of `megatrain train MODEL`: what it chooses, its calibration cache, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megatrain.experiments.cli import options
from megatrain.experiments.cli.training import adaptation, prepare
from megatrain.experiments.cli.training.row_choice import chosen_rows, chosen_sequence, described
from megatrain.experiments.commands import train
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware import machine
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import search
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict import verdict
from megatrain.simulator.verdict.suggestion import Suggestion

RESULTS = Path(__file__).parents[3] / "experiments" / "results"
TRAIN = ("train", "tiny", "--data", "chat.jsonl", "--out", "run", "--device", "cpu")
GRADIENTS = ("--dtype", "bf16", "--policy", "overlapped", "--gradients", "8bit")
HARDWARE = ("--hardware", "h200", "--dtype", "fp32", "--policy", "resident")


@pytest.fixture
def place(
    workplace: Path, tmp_path: Path, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Makes a folder with a model, its tokenizer and conversations, and an empty cache."""
    make_tokenizer(workplace / "tiny")
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    turns = [
        {"role": "user", "content": "how are you?"},
        {"role": "assistant", "content": "I am well"},
    ]
    (workplace / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 200)
    return workplace


@pytest.fixture(scope="module")
def calibrations() -> dict[str, HardwareSpec]:
    """The calibrations that were made for `calibrated_once`."""
    return {}


@pytest.fixture
def calibrated_once(
    fast_calibration: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    calibrations: dict[str, HardwareSpec],
) -> None:
    """Measures the machine once for each model and workload of these tests."""
    from megatrain.experiments.cli.training import calibration_cache

    measure = calibration_cache.calibrate

    def calibrate(*args: Any, device_bytes: int | None, **given: Any) -> HardwareSpec:
        key = repr((args, given["grid"]))
        if key not in calibrations:
            calibrations[key] = measure(*args, device_bytes=None, **given)
        found = calibrations[key]
        return msgspec.structs.replace(found, device_bytes=device_bytes or found.device_bytes)

    monkeypatch.setattr(calibration_cache, "calibrate", calibrate)


@pytest.mark.usefixtures("calibrated_once")
def test_a_model_and_data_give_a_trained_model(
    place: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.experiments.cli.training import calibration_cache

    outcome = command(*TRAIN, "--policy", "sequential")
    assert (outcome.status, outcome.err) == (0, "")
    assert "sequence 64 cuts none\n4 x 64 tokens a step, 25 steps an epoch\n" in outcome.out
    said = ["fits this machine", "speed", "memory", "time"]
    beginnings = [line.partition(":")[0] for line in outcome.out.splitlines()]
    assert [each for each in beginnings if each in said] == said
    said = " ".join(outcome.out.split())
    assert " for 25 steps, without compilation, evaluations, checkpoints and the export " in said
    run = place / "run"
    assert (run / "metrics.jsonl").read_text().count("\n") == 25, "one epoch, if none is named"
    assert (run / "model" / "model.safetensors").is_file()
    plan = Plan.load(run / "plan.toml")
    assert (plan.hardware, plan.source, plan.workload.dtype) == ("hardware.toml", "../tiny", "fp32")
    assert plan.workload.step_tokens == 256
    (cached,) = (tmp_path / "cache" / "calibrations").iterdir()
    assert plan.model.shape.partition("/")[0].split(":")[0] in cached.name
    assert "x64-fp32-documents.toml" in cached.name
    assert cached.read_bytes() == (run / "hardware.toml").read_bytes()

    def measure(*_: object, **__: object) -> None:
        raise AssertionError("the calibration is in the cache")

    monkeypatch.setattr(calibration_cache, "calibrate", measure)
    asked = ("--batch", 2, "--steps", 1, "--no-export", "--policy", "sequential")
    asked += ("--document-length", 9)  # a calibration measures rows of one document
    outcome = command(*TRAIN[:5], "again", *TRAIN[6:], *asked)
    assert (outcome.status, outcome.err) == (0, "")
    assert f"this machine's calibration: {cached}" in " ".join(outcome.out.split())
    work = Plan.load(place / "again" / "plan.toml").workload
    assert (work.batch, work.accumulation) == (2, 2)
    cached.write_text("format = 0")
    with pytest.raises(AssertionError, match="in the cache"):
        command(*TRAIN[:5], "third", *TRAIN[6:])


@pytest.mark.usefixtures("place")
def test_a_library_name_with_options_instead_of_choices(command: Any) -> None:
    config = json.loads(Path("tiny/config.json").read_text())
    Path("shape.json").write_text(json.dumps(config))
    asked = ("--seq", 32, "--tokens-per-step", 64, "--accumulation", 2, "--steps", 2)
    words = ("train", "shape.json", "--data", "corpus", "--out", "run", "--init", "random")
    outcome = command(*words, *HARDWARE, *asked, "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    assert "\n2 x 32 tokens a step, " in outcome.out
    plan = Plan.load(Path("run/plan.toml"))
    work = plan.workload
    assert (work.batch, work.sequence, work.accumulation, plan.policy) == (1, 32, 2, "resident")
    assert plan.hardware == "h200"


@pytest.mark.usefixtures("place")
def test_tokens_a_step_are_rounded_aloud_to_a_sequence_that_was_chosen(command: Any) -> None:
    outcome = command(*TRAIN, *HARDWARE, "--tokens-per-step", 150, "--steps", 1, "--no-export")
    assert (outcome.status, outcome.err) == (0, "")
    line = "\n--tokens-per-step: asked 150, uses 128, in whole sequences\n"
    assert outcome.out.count(line) == 1
    assert "\n2 x 64 tokens a step, " in outcome.out
    assert Plan.load(Path("run/plan.toml")).workload.step_tokens == 128


@pytest.mark.usefixtures("place", "calibrated_once")
def test_a_plan_for_another_machine_is_said_before_the_first_step(command: Any) -> None:
    said = "warning: the plan is for another machine, H200; speed and memory may differ here, on "
    steps = ("--policy", "sequential", "--steps", 1, "--no-export")
    outcome = command(*TRAIN, *HARDWARE[:4], *steps)
    assert (outcome.status, outcome.err) == (0, "")
    text = " ".join(outcome.out.split())
    assert text.count(said) == 1
    assert text.index(said) < text.index("step 1")
    for name, hardware in (("own", ()), ("again", ("--hardware", "own/hardware.toml"))):
        outcome = command(*TRAIN[:5], name, *TRAIN[6:], *hardware, *steps)
        assert (outcome.status, outcome.err) == (0, "")
        assert "another machine" not in " ".join(outcome.out.split())


@pytest.mark.parametrize("extrapolated", [(), ("F0.m0",)])
def test_a_note_says_that_a_size_was_not_measured(
    extrapolated: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = HardwareSpec.load(str(RESULTS / "h200-heldout" / "hardware.toml"))
    model = ModelSpec.load("qwen2.5-3b").with_layers(10)
    best = search(model, hardware, Workload(batch=12, sequence=2048), policies=["resident"])[0]
    prepare._show(msgspec.structs.replace(best, extrapolated=extrapolated), hardware, 3)
    note = "note: some operations were not measured in this size, so the step time is less certain"
    assert (note in " ".join(capsys.readouterr().out.split())) == bool(extrapolated)


def test_a_note_says_that_the_layers_were_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = HardwareSpec.load(str(RESULTS / "h200-heldout" / "hardware.toml"))
    model = ModelSpec.load("mistral-7b").with_layers(2)
    best = search(model, hardware, Workload(batch=12, sequence=2048), policies=["resident"])[0]
    prepare._show(best, hardware, 3)
    (note,) = options.machine_notes(hardware, model)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(f"note: {note}") == 1
    assert "in this size" not in said


def test_a_machine_is_known_by_the_name_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatrain.runtime import machine as this_machine

    gpu, h200 = torch.device("cuda"), HardwareSpec.load("h200")
    for name, other in ((h200.gpu_names[0], False), ("NVIDIA GeForce RTX 4090", True)):
        monkeypatch.setattr(this_machine, "describe", lambda _, name=name: {"device": name})
        assert bool(prepare.other_machine(h200, gpu)) == other


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("kernel", "expected"), [("flash", "flash"), ("cudnn", None)])
def test_the_fastest_attention_kernel_is_chosen_if_the_device_has_it(
    command: Any, kernel: str, expected: str | None
) -> None:
    """A CPU has a flash kernel and no cuDNN, so no run is refused because of a chosen kernel."""
    text = (Path(machine.__file__).parents[1] / "library/hardware/h200.toml").read_text()
    Path("fast.toml").write_text(text.replace("[attention.cudnn]", f"[attention.{kernel}]"))
    asked = ("--hardware", "fast.toml", "--dtype", "bf16", "--policy", "resident", "--steps", 1)
    outcome = command(*TRAIN, *asked, "--plain-packing")
    assert (outcome.status, outcome.err) == (0, "")
    assert Plan.load(Path("run/plan.toml")).workload.attention == expected
    said = " ".join(outcome.out.split())
    assert ("note: attention kernel flash was chosen: layers compute" in said) == bool(expected)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("options", "length"),
    [((), 32), (("--document-length", 9), 9), (("--plain-packing",), None)],
    ids=str,
)
def test_attention_is_predicted_for_the_documents_of_the_data(
    command: Any, options: tuple[object, ...], length: int | None
) -> None:
    """Each row of 64 tokens has two documents of 32 tokens."""
    Path("rows.jsonl").write_text(
        (json.dumps({"prompt": "a" * 20, "completion": "b" * 11}) + "\n") * 80
    )
    words = ("train", "tiny", "--data", "rows.jsonl", "--out", "run", "--seq", 64, *HARDWARE)
    asked = ("--dtype", "bf16", "--steps", 1, "--no-export", "--device", "cpu")
    outcome = command(*words, *asked, *options)
    assert (outcome.status, outcome.err) == (0, "")
    assert Plan.load(Path("run/plan.toml")).workload.document_length == length
    said = f"\nattention is predicted for documents of {length} tokens, the mean" in outcome.out
    assert said == bool(length)


@pytest.mark.usefixtures("place")
def test_gradients_in_8_bits_have_one_micro_batch_if_only_the_batch_is_named(command: Any) -> None:
    asked = ("--gradients", "8bit", "--batch", 2, "--steps", 1, "--policy", "overlapped")
    outcome = command(*TRAIN, *HARDWARE, *asked, "--dtype", "bf16", "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
    work = Plan.load(Path("run/plan.toml")).workload
    assert (work.batch, work.accumulation, work.gradients) == (2, 1, "8bit")


@pytest.mark.usefixtures("place")
def test_a_model_that_does_not_fit_gives_a_verdict_and_an_exit_status(command: Any) -> None:
    outcome = command(*TRAIN, *HARDWARE, "--device-memory", "1KiB")
    assert outcome.status == 3
    assert "does not fit H200: tiny (57.63 k parameters), " in outcome.out
    assert outcome.err.startswith("megatrain: model tiny: found no plan that fits; nothing was ")
    assert "; fix: --device-memory " in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ((), "--seq 8 --batch 1 --accumulation {count} would fit"),
        (("--tokens-per-step", 64, "--seq", 32), "--seq 8 --batch 1 would fit"),
    ],
)
def test_a_fix_names_the_number_of_micro_batches_that_was_tried(
    command: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], fix: str
) -> None:
    """`train` would choose another number from the data, which may not fit."""
    counts = []
    advice = (
        Suggestion(change="--seq 8 --batch 1", options={"seq": "8", "batch": "1"}, fits=True),
    )
    explain = verdict.explain

    def explained(*args: Any) -> Any:
        found = explain(*args)
        counts.append(found.workload.accumulation)
        return msgspec.structs.replace(found, advice=advice)

    monkeypatch.setattr(verdict, "explain", explained)
    outcome = command(*TRAIN, *HARDWARE, *words, "--device-memory", "1KiB")
    assert f"; fix: {fix.format(count=counts[-1])}" in outcome.err


@pytest.mark.usefixtures("place")
def test_another_machine_is_no_fix_for_a_training(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = (
        Suggestion(change="--hardware rtx4090", options={"hardware": "rtx4090"}, fits=True),
        Suggestion(change="--seq 8", options={"seq": "8"}, fits=True),
    )
    explain = verdict.explain
    monkeypatch.setattr(
        verdict, "explain", lambda *args: msgspec.structs.replace(explain(*args), advice=advice)
    )
    outcome = command(*TRAIN, *HARDWARE, "--device-memory", "1KiB")
    assert "; fix: --seq 8 would fit" in outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train", "tiny", "--data", "none.jsonl", "--out", "run"),
            "none.jsonl: found no such file or folder",
        ),
        (("train", "empty", "--data", "corpus", "--out", "run"), "config.json"),
        (
            ("train", "weightless", "--data", "corpus", "--out", "run"),
            "weightless: found no *.safetensors file; allowed: a Hugging Face model folder with",
        ),
        (("train", "nowhere"), "model nowhere: found no such folder, file or name"),
        (("train", "nowhere", "--data", "gone"), "model nowhere: found no such folder"),
        (("train", "nowhere.toml"), "nowhere.toml: found no such file"),
        (
            ("train", "corpus/gone", "--data", "gone", "--out", "run"),
            "model corpus/gone: found no such folder, file or name",
        ),
        ((*TRAIN, "--model", "weightless", *HARDWARE), "weightless: found no *.safetensors file"),
        (
            ("train", "qwen2.5-7b", "--data", "corpus", "--out", "run"),
            "model qwen2.5-7b: found a config without weights; allowed: a folder with weights, or",
        ),
        (
            ("train", "tiny", "--data", "corpus", "--out", "corpus"),
            "corpus: found something there already",
        ),
        (
            ("train", "tiny", "--data", "corpus", "--out", "run", "--hardware", "h2000"),
            "hardware h2000: found no such file",
        ),
        (("train", "tiny", "--resume", "old"), "train --resume: found a model, tiny"),
        (("train", "tiny", "--resume", "nothere"), "megatrain: nothere: found no such folder; all"),
        (
            ("train", "llama", "--data", "corpus", "--resume", "nothere"),
            "megatrain: nothere: found no such folder; allowed: the folder of a run that has"
            " started; fix: check the path, and leave llama out",
        ),
        *(
            (
                (*TRAIN, "--betas", text),
                f"--betas: found {found}; allowed: two numbers in brackets; fix: write it like"
                " --betas [0.9,0.99]",
            )
            for text, found in (("0.9,0.99", "`str`"), ("[0.9]", "1"), ("[0.9,0.9,0.9]", "3"))
        ),
        (
            ("train", "plan.toml", "--data", "corpus", "--out", "run", "--epochs", 1, "--seq", 64),
            "train: --seq: found a plan, which has this already; allowed: `train MODEL`",
        ),
        (
            ("train", "plan.toml", "--data", "corpus", "--out", "run", "--plain-packing"),
            "train: --plain-packing: found a plan, which has this already; allowed: `train MODEL`",
        ),
        (
            (*TRAIN, "--batch", 1, "--accumulation", 1, "--tokens-per-step", 64),
            "--tokens-per-step: found --batch and --accumulation as well; allowed: at most two",
        ),
        (
            (*TRAIN, "--seq", 256, "--tokens-per-step", 7),
            "--tokens-per-step: found 7; allowed: whole sequences of 256 tokens; fix: use 256, or",
        ),
        (
            (*TRAIN, "--seq", 128, "--batch", 3, "--tokens-per-step", 1000),
            "--tokens-per-step: found 1000; allowed: whole sequences of 128 tokens; fix: use 1024",
        ),
        (
            (*TRAIN, "--seq", 128, "--batch", 3, "--tokens-per-step", 1024),
            "--tokens-per-step: found 1024; allowed: whole micro-batches, so a multiple of 3 x 128"
            " tokens; fix: use 1152, or change --batch",
        ),
        (
            (*TRAIN, "--seq", 64, "--accumulation", 3, "--tokens-per-step", 256),
            "--tokens-per-step: found 256; allowed: whole micro-batches, so a multiple of 192"
            " tokens; fix: use 192, or change --accumulation",
        ),
        (
            (*TRAIN, "--seq", 64, "--batch", 2, *GRADIENTS, "--tokens-per-step", 256),
            "--tokens-per-step: found 256; allowed: 128, one micro-batch of 2 x 64 tokens, because",
        ),
        (("train", "tiny", "--out", "run"), "train: found no --data"),
        (
            (*TRAIN, "--hardware", "h200", "--recalibrate"),
            "--recalibrate: found --hardware as well",
        ),
    ],
    ids=lambda value: " ".join(map(str, value[1:])) if isinstance(value, tuple) else "",
)
def test_mistakes_give_one_line_errors_before_anything_is_measured(
    workplace: Path,
    command: Any,
    words: tuple[object, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatrain.experiments.cli.training import prepare

    monkeypatch.setattr(prepare, "plan_file", None)
    (workplace / "empty").mkdir()
    (workplace / "old").mkdir()
    (workplace / "old" / "config.toml").touch()
    (workplace / "weightless").mkdir()
    (workplace / "weightless" / "config.json").write_bytes(
        (workplace / "tiny" / "config.json").read_bytes()
    )
    (workplace / "chat.jsonl").touch()
    outcome = command(*words)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("damage", "words", "message"),
    [
        ("tiny/model.safetensors", (), "tiny/model.safetensors: found "),
        ("chat.jsonl", (), "chat.jsonl: found no row"),
        ("", ("--attention", "cudnn"), "--attention: found cudnn on cpu; allowed: a kernel that"),
        ("", ("--tokens-per-step", 7), "found 7; allowed: whole sequences of 64 tokens; fix: use"),
        ("", ("--tokens-per-step", "1M"), "100 rows of 64 tokens; allowed: at least the 15,625 "),
    ],
)
def test_mistakes_in_weights_and_data_are_found_before_a_calibration(
    place: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    from megatrain.experiments.cli.training import calibration_cache

    monkeypatch.setattr(calibration_cache, "calibration", None)
    if damage:
        (place / damage).write_bytes(b"{\n")
    outcome = command(*TRAIN, *words)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (place / "run").exists()


@pytest.mark.usefixtures("place")
def test_mistakes_are_reported_without_loading_torch() -> None:
    program = (
        "import sys\nfrom megatrain.experiments.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "sys.exit(status if 'torch' not in sys.modules else 'torch is loaded')"
    )
    for words in (("--data", "none.jsonl", "--out", "run"), ("--data", "corpus", "--out", "tiny")):
        done = subprocess.run(
            [sys.executable, "-c", program, "train", "tiny", *words],
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ),
        )
        assert done.returncode == 2, done.stderr


@pytest.mark.parametrize(
    ("lengths", "whole", "limit", "sequence"),
    [
        ([150] * 90 + [310] * 9 + [420], True, None, 320),
        ([150] * 90 + [310] * 9 + [420], True, 256, 256),
        ([150] * 50 + [420], True, 100_000, 448),
        ([64], True, None, 64),
        ([65], True, None, 128),
        ([1_000_000], False, 131_072, 2048),
        ([1_000_000], False, 1024, 1024),
        ([6400], False, None, 320),
        ([100], False, None, 50),
        ([500] * 1000, False, None, 512),
    ],
)
def test_the_sequence_covers_99_percent_of_the_documents(
    lengths: list[int], whole: bool, limit: int | None, sequence: int
) -> None:
    found = chosen_sequence(np.array(lengths), whole=whole, limit=limit)
    assert found == sequence


def test_a_step_is_a_power_of_two_rows_and_an_epoch_has_20_steps() -> None:
    assert [chosen_rows(rows, 448) for rows in (1, 20, 39, 40, 400, 10**6)] == [1, 1, 1, 2, 16, 64]
    assert chosen_rows(10**6, 100_000) == 1


def test_the_summary_of_choices_gives_the_number_of_cut_documents() -> None:
    lengths = np.array([150] * 90 + [310] * 9 + [420])
    assert described(lengths, 320, cuts=True) == (
        "median 150 tokens, 95 % up to 310, longest 420: sequence 320 cuts 1 of 100"
    )
    assert described(lengths, 448, cuts=True).endswith("sequence 448 cuts none")
    assert described(lengths, 320, cuts=False).endswith(
        "sequence 320; longer documents continue in the next row"
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_note_names_layers_that_are_not_compiled(
    capsys: pytest.CaptureFixture[str], compiled: bool
) -> None:
    model = ModelSpec.load("qwen3-next-80b-a3b").with_layers(4)
    hardware, work = HardwareSpec.load("h200"), Workload(batch=1, sequence=64, compiled=compiled)
    (best,) = search(model, hardware, work, policies=["resident"])
    prepare._show(best, hardware, 1)
    said = "note: 3 of 4 layers are not compiled, since layers with linear attention always run"
    assert (said in capsys.readouterr().out) == compiled


@pytest.mark.parametrize(
    ("free", "word"), [(0.5, "more"), (0.96, "more"), (0.98, ""), (1.02, ""), (1.5, "less")]
)
def test_plans_use_the_device_memory_that_is_free_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: float, word: str
) -> None:
    """A forgotten program used memory when the machine was measured, or uses it now."""
    import torch

    from megatrain.runtime import machine as this_machine

    measured = HardwareSpec.load(str(RESULTS / "h200-heldout" / "hardware.toml"))
    now = round(free * measured.device_bytes)
    monkeypatch.setattr(this_machine, "usable_device_bytes", lambda _: now)
    found = prepare.with_free_memory(measured, torch.device("cuda"))
    assert found.device_bytes == (now if word else measured.device_bytes)
    said = " ".join(capsys.readouterr().out.split())
    assert (f"other programs use {word} of it" in said) == bool(word)
    assert prepare.with_free_memory(measured, torch.device("cpu")) == measured


@pytest.mark.usefixtures("place", "calibrated_once")
@pytest.mark.parametrize(
    ("options", "asked"),
    [((), True), (("--device-memory", "1GiB"), False), (HARDWARE, False)],
    ids=["measured", "given", "hardware"],
)
def test_free_memory_limits_a_plan_for_this_machine(
    command: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], asked: bool
) -> None:
    """The plan's machine has this memory, so that the plan can be planned again."""
    less, calls = 2**29, list[HardwareSpec]()

    def halved(hardware: HardwareSpec, _: object) -> HardwareSpec:
        calls.append(hardware)
        return msgspec.structs.replace(hardware, device_bytes=less)

    monkeypatch.setattr(prepare, "with_free_memory", halved)
    outcome = command(*TRAIN, *options, "--steps", 1, "--no-export")
    assert (outcome.status, outcome.err) == (0, "")
    assert len(calls) == asked
    plan = Plan.load(Path("run/plan.toml"))
    assert (plan.device_limit_bytes == less) == asked
    if asked:
        assert HardwareSpec.load("run/hardware.toml").device_bytes == less


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("named", "expected"), [("resident", ["resident"]), ("best", None)])
def test_adapting_keeps_a_policy_that_was_asked_for(
    command: Any, monkeypatch: pytest.MonkeyPatch, named: str, expected: list[str] | None
) -> None:
    made: list[Any] = []

    class Recorded(adaptation.Adaptation):
        def __init__(self, policies: list[str] | None = None) -> None:
            made.append(policies)
            super().__init__(policies)

    monkeypatch.setattr(adaptation, "Adaptation", Recorded)
    asked = ("--hardware", "h200", "--dtype", "fp32", "--policy", named, "--adapt", "--steps", 1)
    outcome = command(*TRAIN, *asked, "--no-export")
    assert (outcome.status, outcome.err) == (0, "")
    assert made == [expected]


def test_without_out_the_run_is_in_a_new_folder_named_after_the_model(
    place: Path, command: Any
) -> None:
    words = [*TRAIN[:4], *TRAIN[6:], *HARDWARE, "--steps", "1"]
    for name in ("tiny-run", "tiny-run-2"):
        outcome = command(*words)
        assert (outcome.status, outcome.err) == (0, "")
        assert outcome.out.startswith(f"run folder: {name}\n")
        assert f"wrote {name}; see" in outcome.out
        assert (place / name / "model").is_dir()


@pytest.mark.parametrize(
    ("model", "folder"),
    [("org/name@v1", "name-run"), ("plans/fast.toml", "fast-run"), ("./tiny", "tiny-run")],
)
def test_the_folder_of_a_run_is_named_after_the_last_part_of_the_model(
    model: str, folder: str
) -> None:
    assert train.new_run(Path(model)) == Path(folder)


def test_ranks_need_a_named_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="found no --out, and WORLD_SIZE"):
        train.new_run(Path("plan.toml"))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.3, "less than 1 s"), (12.4, "12 s"), (7200, "2.0 h")]
)
def test_a_short_training_is_not_predicted_to_take_no_time(seconds: float, text: str) -> None:
    assert prepare.planned_time(seconds) == text
