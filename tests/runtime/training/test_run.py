"""Tests of the files in a run's folder after training."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.training import opening
from megatrain.runtime.training import trainer as trainer_module
from megatrain.runtime.training.callback import Callback, EvaluationResult, Step
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.runtime.training.converting import convert_run
from megatrain.runtime.training.exporting import export_run
from megatrain.runtime.training.metrics_file import MetricsFile
from megatrain.runtime.training.notes import epochs_note
from megatrain.runtime.training.run_folder import RunFolder, save_plan
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.memory.account import WITHOUT_ACTIVATIONS, account
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

CPU = torch.device("cpu")
TEXT = "".join(
    f"def function_{index}(argument):\n    return argument + {index}\n\n" for index in range(200)
)


def test_a_run_leaves_a_complete_folder(place: Path, run: Any) -> None:
    steps: list[Step] = []
    loaded: list[int] = []
    listener = Callback()
    listener.on_step = lambda _, step: steps.append(step)  # type: ignore[method-assign]
    listener.on_load = loaded.append  # type: ignore[method-assign]
    measured = run(place, callbacks=[listener], rate=3e-3).measured
    out, plan = place / "run", Plan.load(place / "plan.toml")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.toml",
        "data.json",
        "environment.json",
        "measured.json",
        "memory.json",
        "metrics.jsonl",
        "model",
        "models.json",
        "plan.toml",
    ]

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step.number for step in steps] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == [step.loss for step in steps]
    assert all(math.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(math.log(300), rel=0.05)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert [row["rate"] for row in rows] == [1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3]
    for row in rows:  # seconds have six decimals, and tokens/s have one
        speed = plan.workload.step_tokens / row["seconds"]
        rounding = 0.1 + speed * 1e-6 / row["seconds"]
        assert row["tokens_per_second"] == pytest.approx(speed, abs=rounding)
    assert sum(loaded) == plan.model.parameters

    assert Timeline.load(out / "measured.json") == measured
    assert measured.digest == plan.digest
    assert measured in [step.timeline for step in steps[2:]], (
        "the measured timeline is not of a step after the warm-up"
    )
    memory = json.loads((out / "memory.json").read_text())
    assert memory.keys() == {"pools", "device_pool_bytes", "host_pool_bytes"}, "no GPU was used"
    predicted = account(lower(plan), 1, 1, WITHOUT_ACTIVATIONS, 0)
    assert (memory["device_pool_bytes"], memory["host_pool_bytes"]) == (
        predicted.device_peak_bytes,
        predicted.host_peak_bytes,
    )
    environment = json.loads((out / "environment.json").read_text())
    assert {"device", "cores", "torch", "python"} <= environment.keys()

    kept = Plan.load(out / "plan.toml")
    assert kept.digest == plan.digest
    assert (out / kept.source).resolve() == (place / "small").resolve()
    exported = AutoModelForCausalLM.from_pretrained(out / "model")
    start = AutoModelForCausalLM.from_pretrained(place / "small")
    assert all(
        not torch.equal(parameter, start.get_parameter(name))
        for name, parameter in exported.named_parameters()
    )
    ids = torch.tensor([list(TEXT[:32].encode())])
    with torch.no_grad():
        assert float(exported(ids, labels=ids).loss) < float(start(ids, labels=ids).loss)


def test_the_measured_step_is_chosen_from_the_newest_ones(
    place: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "_KEPT_TIMELINES", 3)
    steps: list[Step] = []
    listener = Callback()
    listener.on_step = lambda _, step: steps.append(step)  # type: ignore[method-assign]
    trainer = run(place, None, callbacks=[listener], steps=7)
    newest = [step.timeline for step in steps[-3:]]
    assert trainer.timelines == newest
    assert sorted(each.makespan_ns for each in newest)[1] == trainer.measured.makespan_ns


def test_the_same_seed_gives_the_same_run(place: Path, run: Any) -> None:
    losses = []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(place, out, seed=seed, init="random", export=False, steps=2)
        losses.append(
            [
                json.loads(line)["loss"]
                for line in (place / out / "metrics.jsonl").read_text().splitlines()
            ]
        )
        assert not (place / out / "model").exists()
    assert losses[0] == losses[1] != losses[2]


def test_a_run_keeps_the_hardware_file_of_its_plan(place: Path, run: Any) -> None:
    (place / "measured-here.toml").write_text("# a machine\n")
    msgspec.structs.replace(Plan.load(place / "plan.toml"), hardware="measured-here.toml").save(
        place / "plan.toml"
    )
    run(place, steps=1, export=False)
    assert (place / "run" / "hardware.toml").read_text() == "# a machine\n"
    assert Plan.load(place / "run" / "plan.toml").hardware == "hardware.toml"


def test_a_kill_during_a_switch_leaves_the_former_plan_with_its_hardware_file(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(machine: str) -> Plan:
        (place / machine).write_text(f"# {machine}\n")
        return msgspec.structs.replace(Plan.load(place / "plan.toml"), hardware=machine)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    def machine() -> str:
        return (place / "run" / Plan.load(place / "run" / "plan.toml").hardware).read_text()

    former, other, run = named("former.toml"), named("other.toml"), place / "run"
    save_plan(former, place, "small", run)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            save_plan(other, place, "small", run)
    assert machine() == "# former.toml\n"
    save_plan(other, place, "small", run)
    assert machine() == "# other.toml\n"
    save_plan(Plan.load(run / "plan.toml"), run, "small", run)  # as a run that is resumed
    assert machine() == "# other.toml\n"
    assert len(list(run.glob("hardware*.toml"))) == 2


def test_an_intermediate_checkpoint_equals_the_end_of_a_shorter_run(place: Path, run: Any) -> None:
    run(place, "long", **{"saving.every_steps": 2, "steps": 4})
    run(place, "short", steps=2)
    config = Config.load(place / "long" / "config.toml", {"training.steps": 2})
    assert (
        Trainer(
            place / "long" / "plan.toml",
            None,
            None,
            config,
            out=place / "long",
            resume=2,
            device=CPU,
        )
        .fit()
        .steps
        == 2
    )
    between, end = (place / name / "model.safetensors" for name in ("long/model-2", "short/model"))
    assert between.read_bytes() == end.read_bytes()


def test_epochs_of_data_without_a_number_of_rows_are_refused(place: Path) -> None:
    class Endless:
        def step(self, number: int) -> list[Any]:
            raise NotImplementedError

    config = Config(training=TrainingSettings(epochs=2.0))
    with pytest.raises(
        UserError, match="training: epochs: found 2, and data without the attribute"
    ):
        Trainer(place / "plan.toml", None, Endless(), config, device=CPU).fit()


def notes_of(trainer: Trainer) -> list[str]:
    """Trains, and returns the notes to the user."""
    notes: list[str] = []
    trainer.note = notes.append  # type: ignore[method-assign]
    trainer.fit()
    return notes


@pytest.mark.parametrize(("init", "warned"), [("model", True), ("random", False)])
def test_a_note_gives_the_learning_rate_and_a_high_one_is_warned_of(
    place: Path, prepare: Any, init: str, warned: bool
) -> None:
    given = {"init": init, "rate": 1e-3, "kind": "cosine", "steps": 1, "warm_up_steps": 0}
    notes = notes_of(prepare(place, None, **given))
    assert "learning rate 1e-3, cosine, 0 warm-up steps" in notes
    warning = "warning: a learning rate of 1e-3 can destroy what pretrained weights have learned"
    assert any(note.startswith(warning) for note in notes) == warned


def test_a_note_gives_the_number_of_epochs(place: Path, prepare: Any) -> None:
    notes = notes_of(prepare(place, None, steps=2))
    assert (
        sum(
            bool(re.fullmatch(r"[\d.]+ steps an epoch; 2 steps are .* epochs", note))
            for note in notes
        )
        == 1
    )
    assert epochs_note(1, 1.0) == "1 step an epoch; 1 step is 1.00 epochs"
    assert epochs_note(3000, 1200.25) == "1,200.2 steps an epoch; 3,000 steps are 2.50 epochs"


@pytest.mark.parametrize("conversations", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_note_warns_of_conversations_that_attend_to_each_other(
    place: Path, monkeypatch: pytest.MonkeyPatch, conversations: bool, apart: bool
) -> None:
    corpus = types.SimpleNamespace(conversations=conversations, documents=apart)
    monkeypatch.setattr(opening, "open_data", lambda *_, **__: (corpus, None))
    notes: list[str] = []
    plan, options = Plan.load(place / "plan.toml"), DataOptions(data="corpus", packing="plain")
    assert opening.find_data(options, plan, None, 0, notes.append) == (corpus, None)
    flags = [note.startswith("each conversation attends to those before it") for note in notes]
    assert flags == [True] * (conversations and not apart)


def test_a_run_with_a_decaying_rate_may_become_longer_with_a_note(place: Path, run: Any) -> None:
    saving = {"saving.every_steps": 2, "export": False}
    run(place, kind="cosine", steps=2, warm_up_steps=0, **saving)
    config = Config.load(place / "run" / "config.toml", {"training.steps": 4})
    folder = place / "run"
    given = (folder / "plan.toml", None, None, config)
    longer = Trainer(*given, out=folder, resume="newest", device=CPU)
    notes = notes_of(longer)
    assert (
        "the learning rate now decays over 4 steps, not 2: the result differs from that of a run"
        " that began with as many"
    ) in notes
    rates = [json.loads(line)["rate"] for line in (folder / "metrics.jsonl").open()]
    assert rates[2:] == [config.schedule.at(number, 4) for number in (3, 4)]
    shorter = Config.load(place / "run" / "config.toml", {"training.steps": 3})
    with pytest.raises(UserError, match="steps: found 3; allowed: >= 4"):
        Trainer(folder / "plan.toml", None, None, shorter, out=folder, resume="newest").fit()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_export_has_the_requested_dtype_and_the_model_s_other_files(
    place: Path, dtype: str, run: Any
) -> None:
    run(place, steps=1, export_dtype=dtype)
    assert (
        AutoModelForCausalLM.from_pretrained(place / "run" / "model", dtype="auto").dtype
        == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    )
    assert (place / "run" / "model" / "generation_config.json").read_text() == (
        place / "small" / "generation_config.json"
    ).read_text()


def test_the_chat_template_of_the_user_is_exported_as_it_was_when_the_run_began(
    place: Path, run: Any
) -> None:
    vocabulary = {
        character: number
        for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab=vocabulary, merges=[]))
    )
    tokenizer.chat_template = "the tokenizer's"
    tokenizer.save_pretrained(place / "small")
    (place / "small" / "chat_template.json").write_text("{}")
    (place / "own.jinja").write_text("one's own")
    run(place, steps=1, **{"data.chat_template": str(place / "own.jinja"), "saving.every_steps": 1})
    (place / "own.jinja").write_text("changed")
    export_run(place / "run", place / "later")
    for model in (place / "run" / "model", place / "later"):
        assert (model / "chat_template.jinja").read_text() == "one's own"
        assert not (model / "chat_template.json").exists()
    assert Config.load(place / "run" / "config.toml").data.chat_template == str(place / "own.jinja")
    run(place, "without", steps=1)
    assert (place / "without" / "model" / "chat_template.jinja").read_text() == "the tokenizer's"


def test_deterministic_mode_comes_from_the_config(place: Path, run: Any) -> None:
    try:
        run(place, steps=1, deterministic=True, export=False)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_note_says_that_deterministic_mode_is_not_predicted(
    place: Path, prepare: Any, deterministic: bool
) -> None:
    trainer = prepare(place, None, steps=1, deterministic=deterministic)
    try:
        notes = notes_of(trainer)
    finally:
        torch.use_deterministic_algorithms(False)
    said = [note for note in notes if note.startswith("deterministic mode takes longer than pred")]
    assert len(said) == deterministic


def test_the_config_is_kept_and_read_back(place: Path, run: Any) -> None:
    trainer = run(
        place,
        steps=1,
        kind="wsd",
        warm_up_steps=0,
        groups=[{"match": "*norm*", "weight_decay": 0.1}],
        export=False,
    )
    assert Config.load(place / "run" / "config.toml") == trainer.config


def test_weights_come_from_the_folder_unless_random_ones_are_asked_for(
    place: Path, run: Any
) -> None:
    """Weights come from the folder by default, and are random on request.

    At rate 0 and without decay, training does not change them.
    """
    for out, random_init in (("from-folder", False), ("random", True)):
        run(place, out, steps=1, rate=0.0, init="random" if random_init else "model")
    start = AutoModelForCausalLM.from_pretrained(place / "small").get_parameter(
        "model.layers.1.mlp.up_proj.weight"
    )
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(place / "from-folder" / "model").get_parameter(name),
        start,
    )
    drawn = random_weights(0)("1", "mlp.up_proj.weight", (96, 32))
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(place / "random" / "model").get_parameter(name), drawn
    )


@pytest.mark.parametrize(
    ("done", "left"),
    [(0, []), (1, ["config.toml", "data.json", "environment.json", "metrics.jsonl", "plan.toml"])],
)
def test_a_run_that_fails_in_its_first_step_leaves_nothing(
    place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch, done: int, left: list[str]
) -> None:
    """A run that fails in its first step leaves no file.

    A run that fails later keeps its config, environment, metrics and plan.
    """
    step = Executor.step

    def fail(executor: Executor, batches: Any, *, number: int, **others: Any) -> Any:
        if number > done:
            raise FloatingPointError("loss is nan")
        return step(executor, batches, number=number, **others)

    monkeypatch.setattr(Executor, "step", fail)
    with pytest.raises(FloatingPointError):
        prepare(place).fit()
    assert sorted(path.name for path in (place / "run").glob("*") if path.name != ".lock") == left


def test_a_line_of_the_metrics_is_on_the_disk_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line of the metrics is synced to the disk before the next step.

    Infinity and NaN are written as null, because JSON lacks them.
    """
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").read_text())
    )
    metrics = MetricsFile(tmp_path)
    metrics.append({"step": 1, "loss": math.inf})
    metrics.append({"step": 2, "loss": 0.5})
    rows = [[json.loads(line) for line in text.splitlines()] for text in synced]
    assert [[(row["step"], row["loss"]) for row in each] for each in rows] == [
        [(1, None)],
        [(1, None), (2, 0.5)],
    ]


def test_durations_in_the_metrics_have_microseconds(tmp_path: Path) -> None:
    evaluation = EvaluationResult(number=3, loss=2.0, tokens=5, seconds=1 / 3)
    trainer: Any = None
    RunFolder(tmp_path).on_evaluation(trainer, evaluation)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row.pop("check")
    assert row == {
        "step": 3,
        "evaluation_loss": 2.0,
        "perplexity": math.exp(2.0),
        "tokens": 5,
        "seconds": 0.333333,
    }


def test_a_full_disk_gives_a_one_line_error() -> None:
    metrics = MetricsFile(Path())
    metrics.path = Path("/dev/full")
    with pytest.raises(
        UserError,
        match=r"/dev/full: found no space left on device; allowed: a disk with room; fix: ",
    ):
        metrics.append({"step": 1})


def test_an_export_or_a_conversion_into_something_is_refused_before_the_run_is_read(
    tmp_path: Path,
) -> None:
    """Reading all files of a large checkpoint takes minutes."""
    (tmp_path / "out").mkdir()
    for write in (export_run, functools.partial(convert_run, state="bf16-sr")):
        with pytest.raises(UserError, match=r"/out: found something there already"):
            write(tmp_path / "no run", tmp_path / "out")
