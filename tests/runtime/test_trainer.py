"""Trainer: a run leaves its folder whole; what it refuses, it refuses before it writes anything."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.runtime import trainer as trainer_module
from megatrain.runtime.callback import Callback, CallbackError, Evaluation, Step
from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.config import Config, Training, full_name
from megatrain.runtime.learning_rate import LearningRate
from megatrain.runtime.model_files import random_weights
from megatrain.runtime.run_folder import append
from megatrain.runtime.templates import config_of
from megatrain.runtime.trainer import Trainer
from megatrain.simulator.errors import RunError, UserError
from megatrain.simulator.memory import account
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import lower
from megatrain.simulator.timeline import Timeline

CPU = torch.device("cpu")
TEXT = "".join(f"def function_{index}(argument):\n    return argument + {index}\n\n" for index in range(200))


@pytest.fixture
def place(executable: Callable[..., Plan], tmp_path: Path) -> Path:
    """A folder with a plan, the model that it names, and a corpus."""
    plan = executable(vocabulary=300, dtype="fp32", accumulation=2)
    config = config_of(plan.model)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "small")
    plan.save(tmp_path / "plan.toml")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.py").write_text(TEXT)
    return tmp_path


class Recorder(Callback):
    """Everything it is told, in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.loaded: list[int] = []
        self.told: list[tuple[str, Any]] = []

    def on_load(self, parameters: int) -> None:
        self.loaded.append(parameters)

    def on_start(self, trainer: Trainer) -> None:
        self.told.append(("start", trainer.first_step))

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)
        self.told.append(("step", step.number))

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.told.append(("evaluation", evaluation.number))

    def on_save(self, trainer: Trainer, number: int) -> None:
        self.told.append(("save", number))

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.told.append(("end", error))


def prepare(place: Path, out: str | None = "run", *, callbacks: Sequence[Callback] = (), **fields: Any) -> Trainer:
    """`fields`: of the config, as on the command line."""
    given = {"training.steps": 5, "schedule.warm_up_steps": 2, **{full_name(name): value for name, value in fields.items()}}
    path = None if out is None else place / out
    return Trainer(place / "plan.toml", None, place / "corpus", Config.load(None, given), out=path, callbacks=callbacks, device=CPU)


def run(place: Path, out: str | None = "run", **fields: Any) -> Trainer:
    trainer = prepare(place, out, **fields)
    trainer.fit()
    return trainer


def change_plan(place: Path, **changes: Any) -> None:
    msgspec.structs.replace(Plan.load(place / "plan.toml"), **changes).save(place / "plan.toml")


def test_a_run_leaves_its_folder_whole(place: Path) -> None:
    recorder = Recorder()
    steps, measured = recorder.steps, run(place, callbacks=[recorder], rate=3e-3).measured
    out, plan = place / "run", Plan.load(place / "plan.toml")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.toml",
        "environment.json",
        "measured.json",
        "memory.json",
        "metrics.jsonl",
        "model",
        "plan.toml",
    ]

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step.number for step in steps] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == [step.loss for step in steps]
    assert all(math.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert rows[0]["loss"] == pytest.approx(math.log(300), rel=0.05)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert [row["rate"] for row in rows] == [1.5e-3, 3e-3, 3e-3, 3e-3, 3e-3]
    assert all(row["tokens_per_second"] == pytest.approx(plan.workload.step_tokens / row["seconds"], abs=0.1) for row in rows)
    assert sum(recorder.loaded) == plan.model.parameters

    assert Timeline.load(out / "measured.json") == measured
    assert measured.digest == plan.digest
    assert measured in [step.timeline for step in steps[2:]], "a step after the warm-up"
    memory = json.loads((out / "memory.json").read_text())
    predicted = account(lower(plan), 1, 1, 0, 0)
    assert (memory["device_pool_bytes"], memory["host_pool_bytes"]) == (predicted.device_peak_bytes, predicted.host_peak_bytes)
    environment = json.loads((out / "environment.json").read_text())
    assert {"device", "cores", "torch", "python"} <= environment.keys()

    kept = Plan.load(out / "plan.toml")
    assert kept.digest == plan.digest
    assert (out / kept.source).resolve() == (place / "small").resolve()
    exported = AutoModelForCausalLM.from_pretrained(out / "model")
    start = AutoModelForCausalLM.from_pretrained(place / "small")
    assert all(not torch.equal(parameter, start.get_parameter(name)) for name, parameter in exported.named_parameters())
    ids = torch.tensor([list(TEXT[:32].encode())])
    with torch.no_grad():
        assert float(exported(ids, labels=ids).loss) < float(start(ids, labels=ids).loss)


def test_the_same_seed_gives_the_same_run(place: Path) -> None:
    losses = []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(place, out, seed=seed, init="random", export=False, steps=2)
        losses.append([json.loads(line)["loss"] for line in (place / out / "metrics.jsonl").read_text().splitlines()])
        assert not (place / out / "model").exists()
    assert losses[0] == losses[1] != losses[2]


def test_a_run_keeps_the_hardware_file_of_its_plan(place: Path) -> None:
    (place / "measured-here.toml").write_text("# a machine\n")
    change_plan(place, hardware="measured-here.toml")
    run(place, steps=1, export=False)
    assert (place / "run" / "hardware.toml").read_text() == "# a machine\n"
    assert Plan.load(place / "run" / "plan.toml").hardware == "hardware.toml"


# ---- callbacks, evaluation, saving ----


def test_a_library_user_needs_few_lines(place: Path) -> None:
    config = Config(training=Training(steps=3), schedule=LearningRate(kind="cosine", warm_up_steps=1))
    recorder = Recorder()
    fitted = Trainer(place / "plan.toml", place / "small", place / "corpus", config, callbacks=[recorder], device=CPU).fit()
    assert (fitted.steps, fitted.loss, fitted.evaluation, fitted.stopped) == (3, recorder.steps[-1].loss, None, "")
    assert recorder.told == [("start", 1), ("step", 1), ("step", 2), ("step", 3), ("end", None)]
    assert sorted(path.name for path in place.iterdir()) == ["corpus", "plan.toml", "small"], "no run folder was asked for"


def test_evaluation_and_saving_come_every_n_steps_and_at_the_end_and_change_nothing(place: Path) -> None:
    (place / "held-out.txt").write_text(TEXT[:3000])
    straight = run(place, "straight")
    recorder = Recorder()
    held_out = str(place / "held-out.txt")
    trainer = prepare(place, "both", callbacks=[recorder], evaluation_data=held_out, **{"evaluation.every_steps": 2, "over_steps": 3, "saving.every_steps": 3})
    fitted = trainer.fit()
    between = [("evaluation", 2), ("step", 3), ("save", 3), ("step", 4), ("evaluation", 4), ("step", 5), ("evaluation", 5), ("save", 5), ("end", None)]
    assert recorder.told == [("start", 1), ("step", 1), ("step", 2), *between]
    rows = [json.loads(line) for line in (place / "both" / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if "evaluation_loss" in row]
    assert [row["step"] for row in found] == [2, 4, 5]
    assert all(row["perplexity"] == pytest.approx(math.exp(row["evaluation_loss"])) for row in found)
    assert fitted.evaluation is not None
    assert (fitted.evaluation.loss, fitted.evaluation.tokens) == (found[-1]["evaluation_loss"], 3 * straight.plan.workload.step_tokens)
    assert found[-1]["evaluation_loss"] < found[0]["evaluation_loss"] < math.log(300)
    exported = [(place / name / "model" / "model.safetensors").read_bytes() for name in ("straight", "both")]
    assert exported[0] == exported[1]
    assert sorted(path.name for path in (place / "both" / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    assert not (place / "straight" / "checkpoints").exists()


def test_an_evaluation_is_over_all_labels_of_all_its_data(place: Path) -> None:
    """Also of rows and of a step that are not full."""
    (place / "held-out.txt").write_text(TEXT[:200])
    evaluation = prepare(place, None, evaluation_data=str(place / "held-out.txt"), steps=1, rate=0.0).fit().evaluation
    assert evaluation is not None
    assert evaluation.tokens == 200
    model = AutoModelForCausalLM.from_pretrained(place / "small")
    ids, length, losses = [*TEXT[:200].encode(), 256], Plan.load(place / "plan.toml").workload.sequence, []
    for start in range(0, 200, length):
        row = torch.tensor([ids[start : min(start + length, 200) + 1]])
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum")))
    assert evaluation.loss == pytest.approx(sum(losses) / 200, rel=1e-5)


def test_a_checkpoint_in_between_is_what_a_shorter_run_ends_with(place: Path) -> None:
    run(place, "long", **{"saving.every_steps": 2, "steps": 4})
    run(place, "short", steps=2)
    config = Config.load(place / "long" / "config.toml", {"training.steps": 2})
    assert Trainer(place / "long" / "plan.toml", None, None, config, out=place / "long", resume=2, device=CPU).fit().steps == 2
    between, end = (place / name / "model" / "model.safetensors" for name in ("long", "short"))
    assert between.read_bytes() == end.read_bytes()


def refuse_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_stops_the_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_tensors", refuse_to_write)
    recorder = Recorder()
    with pytest.raises(RunError, match=r"checkpoint .*step-00000002 was not saved: no space left on device; the ones before it are as they were"):
        prepare(place, callbacks=[recorder], **{"saving.every_steps": 2}).fit()
    assert recorder.told[-2:] == [("step", 2), ("end", recorder.told[-1][1])]


def test_or_it_is_said_and_the_training_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_tensors", refuse_to_write)
    notes: list[str] = []
    recorder = Recorder()
    monkeypatch.setattr(recorder, "on_note", notes.append)
    prepare(place, callbacks=[recorder], on_failure="go on", **{"saving.every_steps": 2}).fit()
    assert sum("was not saved: no space left on device" in note for note in notes) == 3
    assert (place / "run" / "model" / "model.safetensors").exists()


def test_checkpoints_need_a_run_folder(place: Path) -> None:
    with pytest.raises(UserError, match="training: out: found no run folder; allowed: one, for checkpoints to lie in"):
        prepare(place, None, **{"saving.every_steps": 2})


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_export_has_the_dtype_that_was_asked_for_and_the_model_s_companions(place: Path, dtype: str) -> None:
    run(place, steps=1, export_dtype=dtype)
    assert AutoModelForCausalLM.from_pretrained(place / "run" / "model", dtype="auto").dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert (place / "run" / "model" / "generation_config.json").read_text() == (place / "small" / "generation_config.json").read_text()


def test_a_callback_may_stop_the_training(place: Path) -> None:
    class Stop(Recorder):
        def on_step(self, trainer: Trainer, step: Step) -> None:
            super().on_step(trainer, step)
            if step.number == 2:
                trainer.stop("enough")

    stop = Stop()
    fitted = prepare(place, callbacks=[stop], **{"saving.every_steps": 10}).fit()
    assert (fitted.steps, fitted.stopped) == (2, "enough")
    assert stop.told[-2:] == [("save", 2), ("end", None)]
    assert (place / "run" / "model" / "model.safetensors").exists()


def test_a_callback_may_say_where_to_go_on(place: Path) -> None:
    """As one does that restores a checkpoint: the steps, their numbers and their data are those that are left."""
    whole = Recorder()
    run(place, None, callbacks=[whole], rate=0.0)

    class Resume(Recorder):
        def on_start(self, trainer: Trainer) -> None:
            trainer.first_step = 4

    rest = Resume()
    assert prepare(place, None, callbacks=[rest], rate=0.0).fit().steps == 5
    assert [(step.number, step.loss) for step in rest.steps] == [(step.number, step.loss) for step in whole.steps[3:]]


@pytest.mark.parametrize("event", ["on_load", "on_start", "on_step", "on_evaluation", "on_save", "on_end"])
def test_a_callback_that_fails_is_named_and_memory_is_released(place: Path, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh\nno")

    class Broken(Callback):
        pass

    monkeypatch.setattr(Broken, event, fail)
    recorder = Recorder()
    every = {"evaluation.every_steps": 1, "saving.every_steps": 1, "over_steps": 1}
    trainer = prepare(place, callbacks=[Broken(), recorder], evaluation_data=str(place / "corpus"), **every)
    threads = threading.active_count()
    with pytest.raises(CallbackError, match=rf"^callback Broken\.{event}: ZeroDivisionError: oh$"):
        trainer.fit()
    assert trainer.executor.arenas._place == {}
    assert threading.active_count() == threads
    assert event == "on_load" or isinstance(recorder.told[-1][1], CallbackError), "the others hear of the end"


def test_deterministic_mode_comes_from_the_config(place: Path) -> None:
    try:
        run(place, steps=1, deterministic=True, export=False)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_config_is_kept_and_read_back(place: Path) -> None:
    trainer = run(place, steps=1, kind="wsd", warm_up_steps=0, groups=[{"match": "*norm*", "weight_decay": 0.1}], export=False)
    assert Config.load(place / "run" / "config.toml") == trainer.config


# ---- refusals ----


def remove_model(place: Path) -> None:
    (place / "small" / "config.json").unlink()


def remove_weights(place: Path) -> None:
    (place / "small" / "model.safetensors").unlink()


def truncate_weights(place: Path) -> None:
    file = place / "small" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def empty_corpus(place: Path) -> None:
    (place / "corpus" / "text.py").write_text("pass")


def remove_corpus(place: Path) -> None:
    (place / "corpus" / "text.py").unlink()


def wrong_digest(place: Path) -> None:
    change_plan(place, digest="0123456789abcdef")


def small_device(place: Path) -> None:
    change_plan(place, device_limit_bytes=10_000)


def broken_plan(place: Path) -> None:
    (place / "plan.toml").write_text((place / "plan.toml").read_text() + "\nunknown = 1\n")


def remove_plan(place: Path) -> None:
    (place / "plan.toml").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_model, r"model .*small: found no config\.json; allowed: a Hugging Face model folder; fix: check `source` in the plan, or pass --init random"),
        (remove_weights, r"small: found no \*\.safetensors file"),
        (truncate_weights, r"small/model\.safetensors: found a file that cannot be read"),
        (empty_corpus, r"data .*corpus: found 5 tokens; allowed: at least the 65 of one step"),
        (remove_corpus, r"data .*corpus: found a folder without data"),
        (wrong_digest, r"digest: found '0123456789abcdef'; allowed: "),
        (small_device, r"device memory: found a plan whose peak is .*; allowed: 9\.77 KiB; fix: raise the limit by "),
        (broken_plan, r"plan\.toml.*unknown"),
        (remove_plan, r"plan\.toml: found "),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(place: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        run(place)
    assert "\n" not in str(error.value)
    assert sorted(place.rglob("*")) == before


def test_what_the_machine_lacks_is_refused_before_a_weight_is_read_unless_the_plan_knows_the_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a calibrated machine brings its limit: a virtual machine may show less memory than it can grow to."""
    monkeypatch.setattr(trainer_module, "host_bytes", lambda: 2**20)
    remove_weights(place)  # nothing asks for them
    with pytest.raises(UserError, match=r"host memory: found a plan whose peak is .*; allowed: 1\.00 MiB, what this machine has; fix: raise the limit by"):
        run(place)
    (place / "calibrated.toml").write_text("# a machine\n")
    change_plan(place, hardware="calibrated.toml")
    run(place, steps=1, export=False, init="random")


def test_allocation_is_told_before_loading(place: Path) -> None:
    told: list[tuple[int, int]] = []
    recorder = Recorder()
    recorder.on_allocate = lambda done, total: told.append((done, total))  # type: ignore[method-assign]
    trainer = prepare(place, None, callbacks=[recorder], steps=1)
    trainer.fit()
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (sum(trainer.executor.arenas.pool_bytes.values()),) * 2


@pytest.mark.parametrize("taken", ["run", "run/precious"])
def test_an_out_that_is_taken_is_left_alone(place: Path, taken: str) -> None:
    (place / taken).parent.mkdir(exist_ok=True)
    (place / taken).write_text("mine")
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match="run: found something there already; allowed: a new or empty folder; fix: name another one with --out"):
        run(place)
    assert sorted(place.rglob("*")) == before
    assert (place / taken).read_text() == "mine"


def test_an_empty_out_is_used(place: Path) -> None:
    (place / "run").mkdir()
    run(place, steps=1, export=False)
    assert (place / "run" / "metrics.jsonl").read_text()


def test_an_out_that_cannot_be_made_is_an_error_before_the_first_step(place: Path) -> None:
    (place / "file").write_text("")
    before = sorted(place.rglob("*"))
    recorder = Recorder()
    with pytest.raises(UserError, match=r"file/run: found not a directory; allowed: a folder that can be made"):
        run(place, "file/run", steps=1, callbacks=[recorder])
    assert recorder.steps == []
    assert sorted(place.rglob("*")) == before


def test_weights_come_from_the_folder_unless_random_ones_are_asked_for(place: Path) -> None:
    """At rate 0 and without decay, training leaves the weights as they were loaded."""
    for out, random_init in (("from-folder", False), ("random", True)):
        run(place, out, steps=1, rate=0.0, init="random" if random_init else "model")
    start = AutoModelForCausalLM.from_pretrained(place / "small").get_parameter("model.layers.1.mlp.up_proj.weight")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(AutoModelForCausalLM.from_pretrained(place / "from-folder" / "model").get_parameter(name), start)
    drawn = random_weights(0)("1", "mlp.up_proj.weight", (96, 32))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(place / "random" / "model").get_parameter(name), drawn)


def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(UserError, match=r"/dev/full: found no space left on device; allowed: a disk with room; fix: "):
        append(Path("/dev/full"), {"step": 1})
