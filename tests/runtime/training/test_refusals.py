"""Tests of what the trainer refuses, in one line and before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.runtime.checkpoint.stored_steps import checkpoint_name
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.training import run_folder
from megatrain.runtime.training import trainer as trainer_module
from megatrain.runtime.training.callback import Callback, Step
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.runtime.training.run_lock import RunLock
from megatrain.runtime.training.stopped_run import command_to_continue, last_checkpoint
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan


def change_plan(place: Path, **changes: Any) -> None:
    msgspec.structs.replace(Plan.load(place / "plan.toml"), **changes).save(place / "plan.toml")


def test_checkpoints_need_a_run_folder(place: Path, prepare: Any) -> None:
    with pytest.raises(
        UserError,
        match="training: out: found no run folder; allowed: a run folder, which checkpoints need",
    ):
        prepare(place, None, **{"saving.every_steps": 2})


def test_neither_a_config_nor_a_model_is_needed(place: Path) -> None:
    plan = place / "plan.toml"
    trainer = Trainer(plan, data=place / "corpus", device=torch.device("cpu"))
    assert trainer.source == str(place / "small")
    assert trainer.config.training == Config().training == TrainingSettings(epochs=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": [1, 2]}, "data: found a list; allowed: a path, or an object with a method step"),
        ({"callbacks": Callback()}, "callbacks: found a Callback; .*; fix: put it in a list"),
        ({"callbacks": [Callback]}, r"callbacks: found class Callback; .*; fix: pass Callback\(\)"),
        (
            {"callbacks": [print]},
            "callbacks: found a builtin_function_or_method; allowed: instances",
        ),
    ],
)
def test_other_objects_than_data_and_callbacks_are_refused(
    place: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^training: {message}"):
        Trainer(place / "plan.toml", device=torch.device("cpu"), **arguments)


def test_weights_are_read_while_fit_runs(place: Path, prepare: Any) -> None:
    trainer = prepare(place)
    with pytest.raises(UserError, match=r"state: found a training that has not begun; .* callback"):
        _ = trainer.state
    trainer.fit()
    with pytest.raises(UserError, match=r"state: found a training that has ended; .* afterwards"):
        _ = trainer.state


def test_a_group_that_matches_nothing_is_refused_before_a_trainer_is_made(
    place: Path, prepare: Any
) -> None:
    with pytest.raises(UserError, match=r"optimizer: groups: match: found 'nothing\*'"):
        prepare(place, groups=[{"match": "nothing*"}])


def test_weights_that_are_not_finite_are_named(place: Path, prepare: Any) -> None:
    file = place / "small" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    message = r"small: found infinity or NaN in model\.norm\.weight; allowed: finite numbers"
    with pytest.raises(UserError, match=message):
        prepare(place, None, steps=1).fit()


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
        (
            remove_model,
            (
                r"model .*small: found no config\.json; allowed: a Hugging Face model folder; fix:"
                r" check `source` in the plan, or pass --init random"
            ),
        ),
        (remove_weights, r"small: found no \*\.safetensors file"),
        (truncate_weights, r"small/model\.safetensors: found a file that cannot be read"),
        (empty_corpus, r"data .*corpus: found 5 tokens; allowed: at least the 65 of one step"),
        (remove_corpus, r"data .*corpus: found a folder without data"),
        (wrong_digest, r"digest: found '0123456789abcdef'; allowed: "),
        (
            small_device,
            (
                r"device memory: found a plan that needs .*; allowed: 9\.77 KiB; fix: raise the"
                r" limit by "
            ),
        ),
        (broken_plan, r"plan\.toml.*unknown"),
        (remove_plan, r"plan\.toml: found "),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(
    place: Path, spoil: Callable[[Path], None], message: str, run: Any
) -> None:
    spoil(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(UserError, match=message) as error:
        run(place)
    assert "\n" not in str(error.value)
    assert sorted(place.rglob("*")) == before


def test_a_machine_that_lacks_something_is_refused_before_a_weight_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """A machine that lacks something is refused before weights are read. A plan for a calibrated
    machine has that machine's limit, because a virtual machine may show less memory than it can
    get.
    """
    monkeypatch.setattr(trainer_module, "host_bytes", lambda: 2**20)
    remove_weights(place)  # the refusal comes before they are read
    with pytest.raises(
        UserError,
        match=(
            r"host memory: found a plan that needs .*; allowed: 1\.00 MiB, what this machine"
            r" has; fix: make a plan for this machine"
        ),
    ):
        run(place)
    (place / "corrected.toml").write_text("[corrections]\ncompute = 2.0\n")
    change_plan(place, hardware="corrected.toml")
    with pytest.raises(UserError, match="what this machine has"):
        run(place)
    (place / "calibrated.toml").write_text("[costs]\n")
    change_plan(place, hardware="calibrated.toml")
    run(place, steps=1, export=False, init="random")


@pytest.mark.parametrize("taken", ["run", "run/precious"])
def test_an_out_that_is_in_use_is_not_changed(place: Path, taken: str, run: Any) -> None:
    (place / taken).parent.mkdir(exist_ok=True)
    (place / taken).write_text("mine")
    before = sorted(place.rglob("*"))
    with pytest.raises(
        UserError,
        match=(
            "run: found something there already; allowed: a new or empty folder; fix: name another"
            " one with --out"
        ),
    ):
        run(place)
    assert sorted(place.rglob("*")) == before
    assert (place / taken).read_text() == "mine"


def test_a_run_that_ended_since_the_trainer_was_made_is_not_overwritten(
    place: Path, prepare: Any
) -> None:
    """For example, two scripts were started at the same time with the same folder."""
    first, second = (prepare(place, steps=1, export=False) for _ in range(2))
    first.fit()
    log = (place / "run" / "config.toml").read_bytes()
    with pytest.raises(UserError, match="run: found a run that ended after step 1"):
        second.fit()
    assert (place / "run" / "config.toml").read_bytes() == log


def test_other_files_in_the_folder_of_a_killed_run_are_not_removed(place: Path, run: Any) -> None:
    """If there were no other files, the first files of the killed run would be removed."""
    folder = place / "run"
    folder.mkdir()
    (folder / ".lock").write_text("a process that died\n")
    (folder / "plan.toml").write_text("")
    (folder / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="run: found something there already"):
        run(place)
    assert (folder / "mine.txt").read_text() == "precious"
    (folder / "mine.txt").unlink()
    (folder / ".lock").write_text("a process that died\n")
    RunLock(folder).refuse_taken()
    assert not (folder / "plan.toml").exists()


def test_a_run_that_was_killed_before_it_had_begun_does_not_block_its_folder(
    place: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder has a file of each kind that a run writes first, but no config.toml."""
    written: list[str] = []

    def killed(path: Path, *_: object) -> None:
        written.extend(each.name for each in path.parent.iterdir())
        raise KeyboardInterrupt

    (place / "own.jinja").write_text("one's own")
    options = {"steps": 1, "export": False, "data.chat_template": str(place / "own.jinja")}
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_toml", killed)
        with pytest.raises(KeyboardInterrupt):
            run(place, **options)
    assert {"plan.toml", "chat_template.jinja", "environment.json", "data.json"} < set(written)
    (place / "run" / ".lock").write_text("a process that died\n")  # only a kill leaves it there
    run(place, **options)
    assert (place / "run" / "config.toml").is_file()


def test_a_run_that_fails_before_its_first_step_leaves_its_folder_free(
    place: Path, run: Any
) -> None:
    def fails(_: object) -> None:
        raise UserError("start", found="a mistake", allowed="none", fix="correct it")

    callback = Callback()
    callback.on_start = fails  # type: ignore[method-assign]
    (place / "own.jinja").write_text("one's own")
    options = {"steps": 1, "export": False, "data.chat_template": str(place / "own.jinja")}
    with pytest.raises(UserError, match="start: found a mistake"):
        run(place, callbacks=[callback], **options)
    assert not (place / "run").exists()


def test_a_run_continues_from_its_newest_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) == 0
    assert command_to_continue(tmp_path).endswith(" --from-scratch")
    for step in (9, 10):
        (tmp_path / "checkpoints" / checkpoint_name(step)).mkdir(parents=True)
    assert last_checkpoint(tmp_path) == 10
    assert command_to_continue(tmp_path) == f"megatrain train --resume {tmp_path}"


def test_an_empty_out_is_used(place: Path, run: Any) -> None:
    (place / "run").mkdir()
    run(place, steps=1, export=False)
    assert (place / "run" / "metrics.jsonl").read_text()


def test_a_run_without_a_checkpoint_is_not_resumed(place: Path) -> None:
    given = (place / "plan.toml", None, place / "corpus", Config.load(None, {"training.steps": 1}))
    resumed = Trainer(
        *given, out=place / "run", resume="newest", device=torch.device("cpu"), progress=False
    )
    with pytest.raises(UserError, match="/run: found no checkpoint"):
        resumed.fit()
    assert not (place / "run").exists()


def test_an_out_that_cannot_be_made_is_an_error_before_the_first_step(
    place: Path, run: Any
) -> None:
    (place / "file").write_text("")
    before = sorted(place.rglob("*"))
    steps: list[Step] = []
    listener = Callback()
    listener.on_step = lambda _, step: steps.append(step)  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"file/run: found not a directory; allowed: a folder that can be made"
    ):
        run(place, "file/run", steps=1, callbacks=[listener])
    assert steps == []
    assert sorted(place.rglob("*")) == before


def test_a_corpus_with_documents_is_refused_by_a_plan_without_documents(place: Path) -> None:
    plan = Plan.load(place / "plan.toml")
    config = Config(training=TrainingSettings(steps=1), schedule=LearningRate(warm_up_steps=0))
    for packing, refused in (("none", True), ("documents", True), ("plain", False)):
        corpus, _ = open_data(
            DataOptions(data=str(place / "corpus"), packing=packing), plan.workload, None, 300
        )
        trainer = Trainer(place / "plan.toml", None, corpus, config, device=torch.device("cpu"))
        if refused:
            with pytest.raises(
                UserError,
                match=(
                    rf"data: packing: found {packing}; allowed: plain, since the plan attends over"
                    r" whole rows"
                ),
            ):
                trainer.fit()
        else:
            trainer.fit()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate": 2e-3}, r"schedule\.rate 0\.001 in the checkpoint and 0\.002"),
        ({"weight_decay": 0.1}, r"optimizer\.weight_decay 0\.0 in the checkpoint and 0\.1"),
        ({"seed": 1}, r"training\.seed 0"),
    ],
)
def test_another_run_is_refused_before_data_is_read_and_memory_allocated(
    place: Path,
    changed: dict[str, Any],
    message: str,
    run: Any,
    prepare: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(place, steps=2, **{"saving.every_steps": 1}, export=False)
    for heavy in ("find_data", "find_model", "Executor"):
        monkeypatch.setattr(
            trainer_module, heavy, lambda *_, heavy=heavy, **__: pytest.fail(f"{heavy} was begun")
        )
    with pytest.raises(UserError, match=message):
        resumed(place, prepare, **changed).fit()


def test_other_data_and_a_checkpoint_that_lacks_a_file_are_refused_before_memory_is_allocated(
    place: Path, run: Any, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(place, steps=2, **{"saving.every_steps": 1}, export=False)
    monkeypatch.setattr(
        trainer_module, "Executor", lambda *_, **__: pytest.fail("memory was allocated")
    )
    text = (place / "corpus" / "text.py").read_text()
    (place / "corpus" / "text.py").write_text(text + "# another one\n")
    with pytest.raises(UserError, match=r"data\.digest"):
        resumed(place, prepare).fit()
    (place / "corpus" / "text.py").write_text(text)
    (place / "run" / "checkpoints" / "step-00000002" / "state-00001.safetensors").unlink()
    with pytest.raises(
        UserError,
        match=(
            r"state-00001\.safetensors: found no such file; .*; fix: resume from step 1, the newest"
            r" undamaged checkpoint before it"
        ),
    ):
        resumed(place, prepare).fit()


def resumed(place: Path, prepare: Any, **fields: Any) -> Trainer:
    """Returns a trainer that resumes `run`."""
    (place / "run").rename(place / "moved")
    trainer: Trainer = prepare(place, steps=4, **{"saving.every_steps": 1}, **fields)
    (place / "moved").rename(place / "run")
    trainer._resume = "newest"
    return trainer
