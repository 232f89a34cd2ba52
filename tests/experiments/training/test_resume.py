"""Tests of `megatrain train --resume` after a stop, a signal and a kill.

The resumed run is bit for bit the same as a run without an interruption.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FIRST, SECOND, FakeHub, jsonl
from started_ranks import Driver

from megatrain.runtime.checkpoint.checkpoint import CheckpointError
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.data.tokens.tokenize import tokenizer_files
from megatrain.runtime.files.exported_models import newest_model
from megatrain.runtime.training.config import Config
from megatrain.simulator.base.files import read_json
from megatrain.simulator.schedule.plan import Plan

Command = Callable[..., Any]
# A background process of a shell ignores SIGINT, so the handler is set again here.
PROGRAM = (
    "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom"
    " megatrain.experiments.cli.main import main\nsys.exit(main())"
)
NEW = (
    "train",
    "plan.toml",
    "--data",
    "corpus",
    "--device",
    "cpu",
    "--lr",
    "3e-3",
    "--set",
    "kind=constant",
    "--warm-up",
    "10",
    "--eval-fraction",
    "0.5",
    "--eval-every",
    "3",
    "--save-every",
    "2",
)
TIMES = ("seconds", "tokens_per_second", "check")


@pytest.fixture(autouse=True)
def small_workplace(workplace: Path) -> None:
    """Shortens the corpus, because half of it is evaluated several times in a run."""
    for path in (workplace / "corpus").iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:30]))


def rows(run: str) -> list[dict[str, Any]]:
    """Returns the complete rows of metrics.jsonl without their durations."""
    lines = [
        line
        for line in (Path(run) / "metrics.jsonl").read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


def losses(run: str) -> list[dict[str, Any]]:
    """Returns the rows of steps."""
    return [row for row in rows(run) if "loss" in row]


def weights(run: str) -> bytes:
    model = newest_model(Path(run))
    assert model is not None
    return (model / "model.safetensors").read_bytes()


def saved(run: str) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (Path(run) / "checkpoints").iterdir()
    )


def good(outcome: Any) -> str:
    assert (outcome.status, outcome.err) == (0, "")
    return str(outcome.out)


@pytest.mark.usefixtures("workplace")
def test_a_resumed_run_equals_a_run_that_never_stopped(command: Command) -> None:
    good(command(*NEW, "--steps", 9, "--out", "straight"))
    good(command(*NEW, "--steps", 4, "--out", "run"))
    assert saved("run") == [2, 4]
    first = weights("run")
    out = good(command("train", "--resume", "run", "--steps", 9, "--device", "cpu"))
    assert "continues after step 4\n" in out
    # The first part was also evaluated after step 4, because that was its last step.
    assert [row for row in rows("run") if row["step"] != 4 or "loss" in row] == rows("straight")
    assert weights("run") == weights("straight") != first
    assert saved("run") == saved("straight") == [8, 9]
    assert "the model after step 9 is in run/model-9; earlier ones stay: model\n" in out
    assert 'trained model: AutoModelForCausalLM.from_pretrained("run/model-9")\n' in out
    assert (Path("run") / "model" / "model.safetensors").read_bytes() == first
    assert {path.name for path in Path("run").iterdir()} == {
        "model-9",
        *(path.name for path in Path("straight").iterdir()),
    }
    assert command("compare", "run").status == 0


@pytest.mark.usefixtures("workplace")
def test_a_run_is_resumed_under_another_plan(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = ("--batch", 2, "--seq", 16, "--loss-chunk", 16, "--dtype", "fp32")
    good(
        command(
            "plan",
            "tiny",
            "--hardware",
            "h200",
            "--policy",
            "overlapped",
            *work,
            "--out",
            "overlapped.toml",
        )
    )
    good(command(*NEW, "--steps", 6, "--out", "straight"))
    good(command(*NEW, "--steps", 2, "--out", "run"))
    good(command("train", "overlapped.toml", "--resume", "run", "--steps", 4, "--device", "cpu"))
    assert 'policy = "overlapped"' in Path("run/plan.toml").read_text()
    good(
        command(
            "train",
            "plan.toml",
            "--resume",
            "run",
            "--from-step",
            2,
            "--steps",
            3,
            "--device",
            "cpu",
        )
    )
    monkeypatch.chdir("corpus")  # paths in a run's config are absolute
    good(
        command(
            "train", "../overlapped.toml", "--resume", "../run", "--steps", 6, "--device", "cpu"
        )
    )
    monkeypatch.chdir("..")
    trained, straight = losses("run"), losses("straight")
    schedules = [row.pop("schedule") for row in trained]
    (only,) = {row.pop("schedule") for row in straight}
    assert trained == straight
    assert weights("run") == weights("straight")
    other = Plan.load(Path("overlapped.toml")).digest
    assert schedules == [only, only, only, other, other, other]
    former = Path("run/plans") / only
    assert Plan.load(former / "plan.toml").digest == only
    assert (former / Plan.load(former / "plan.toml").source / "config.json").is_file()


@pytest.mark.usefixtures("workplace")
def test_another_run_s_settings_are_refused_by_name(command: Command, files_in: Any) -> None:
    good(command(*NEW, "--steps", 4, "--out", "run"))
    shutil.copytree("corpus", "other")
    Path("other/one.txt").write_text("other text\n" * 300)
    before = files_in(Path("run"))
    for words, field in (
        (("--lr", "1e-3"), "schedule.rate 0.003 in the checkpoint and 0.001"),
        (
            ("--set", "kind=linear", "--warm-up", 1),
            (
                "schedule.kind constant in the checkpoint and linear in this run,"
                " schedule.warm_up_steps 10"
            ),
        ),
        (("--seed", 1), "training.seed 0 in the checkpoint and 1"),
        (("--init", "random"), "training.init model in the checkpoint and random in this run"),
        (("--weight-decay", "0.1"), "optimizer.weight_decay 0.0 in the checkpoint and 0.1"),
        (("--eval-fraction", "0.6"), "data.evaluation_fraction 0.5"),
        (("--data", "other"), "data.digest"),
        (
            ("--steps", 3),
            (
                "megatrain: --steps: found 3; allowed: >= 4, since that many steps are done"
                " already; fix: train to a step after 4"
            ),
        ),
        (
            ("--from-step", 3),
            "found no checkpoint of step 3; allowed: 2, 4; fix: name one of these",
        ),
    ):
        outcome = command("train", "--resume", "run", "--device", "cpu", *words)
        assert outcome.status == 2
        assert field in outcome.err, outcome.err
        assert outcome.err.count("\n") == 1
        assert files_in(Path("run")) == before
    Path("empty").mkdir()
    assert (
        "empty: found a folder without config.toml, so no run; allowed: the folder of a run"
        in command("train", "--resume", "empty", "--device", "cpu").err
    )


@pytest.mark.usefixtures("workplace")
def test_changed_settings_are_refused_before_torch_is_loaded(command: Command) -> None:
    """Loading torch and transformers takes up to half a minute, and so may listing the data."""
    good(command(*NEW, "--steps", 2, "--out", "run"))
    program = (
        "import sys\nfrom megatrain.experiments.cli import main as cli\nstatus ="
        " cli.main(sys.argv[1:])\nheavy = [name for name in ('torch', 'transformers') if name in"
        " sys.modules]\nsys.exit(f'{status} {heavy}')"
    )
    shutil.rmtree("corpus")
    for words, message in (
        (("--steps", "1"), "--steps: found 1"),
        (("--lr", "1e-3"), "schedule.rate 0.003 in the checkpoint and 0.001"),
        (("--seed", "1"), "training.seed 0 in the checkpoint and 1"),
        (("--init", "random"), "training.init model in the checkpoint and random in this run"),
        (("--weight-decay", "0.1"), "optimizer.weight_decay 0.0 in the checkpoint and 0.1"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, "train", "--resume", "run", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        error, loaded = done.stderr.splitlines()
        assert message in error
        assert loaded == "2 []"


@pytest.mark.usefixtures("workplace")
def test_a_finished_run_is_resumed_for_more_steps_and_keeps_its_models(
    command: Command, files_in: Any
) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--out", "run")
    out = good(command(*words, "--steps", 2))
    assert 'trained model: AutoModelForCausalLM.from_pretrained("run/model")\n' in out
    before = rows("run"), weights("run")
    files = files_in(Path("run/model"))
    out = good(command("train", "--resume", "run", "--steps", 4, "--device", "cpu"))
    assert "continues after step 2\nthe learning rate now decays over 4 steps, not 2" in out
    assert "step 3/4  loss " in out
    assert "step 2/4  loss " not in out
    assert rows("run")[:2] == before[0]
    assert weights("run") != before[1]
    assert saved("run") == [2, 4]
    assert newest_model(Path("run")) == Path("run/model-4")

    # A run without further steps is not exported again.
    models = [*Path("run").glob("model*")]
    out = good(command("train", "--resume", "run", "--device", "cpu"))
    assert 'trained model: AutoModelForCausalLM.from_pretrained("run/model-4")\n' in out
    assert [*Path("run").glob("model*")] == models
    # steps that are repeated do not replace their model either
    good(command("train", "--resume", "run", "--from-step", 2, "--device", "cpu"))
    assert newest_model(Path("run")) == Path("run/model-4-2")
    assert files_in(Path("run/model")) == files


@pytest.mark.usefixtures("workplace")
def test_a_run_is_resumed_with_data_that_has_moved(command: Command) -> None:
    good(command(*NEW, "--steps", 4, "--out", "run"))
    Path("corpus").rename("elsewhere")
    good(
        command("train", "--resume", "run", "--data", "elsewhere", "--steps", 5, "--device", "cpu")
    )


@pytest.mark.usefixtures("workplace")
def test_a_resumed_run_keeps_the_model_that_it_began_with(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan names the model from whose weights the run began, so the run can be repeated."""
    good(command(*NEW, "--steps", 2, "--out", "run"))
    resume = ("train", "--resume", "run", "--device", "cpu", "--steps")
    shutil.copytree("tiny", "other")
    out = good(command(*resume, 3, "--model", "other"))
    assert (
        "the weights are those of the checkpoint, not of other; the plan still names tiny, with"
        " which the run began\n" in out
    )
    assert Plan.load(Path("run/plan.toml")).source == "../tiny"
    assert "the plan still names" not in good(command(*resume, 4, "--model", "run/../tiny"))

    Path("tiny").rename("moved")
    gone = command(*resume, 5)
    line = (
        "megatrain: model {}: found no such folder; allowed: a Hugging Face model folder, or a name"
        " on the hub such as org/name; fix: pass --model with the folder where the model is now\n"
    )
    assert (gone.status, gone.err) == (2, line.format(Path("tiny").resolve()))
    with monkeypatch.context() as patch:
        patch.chdir("corpus")
        there = command("train", "--resume", "../run", "--device", "cpu", "--steps", 5)
    assert (there.status, there.err) == (2, line.format(Path("tiny").resolve()))
    good(command(*resume, 5, "--model", "moved"))
    assert Plan.load(Path("run/plan.toml")).source == "../moved"

    Path("moved/model.safetensors").unlink()
    weightless = command(*resume, 6)
    assert weightless.err.startswith("megatrain: moved: found no *.safetensors file; ")
    assert weightless.err.endswith("; fix: pass --model with the folder where the model is now\n")


@pytest.mark.usefixtures("workplace")
def test_an_error_says_whether_the_data_or_the_tokenizer_changed(
    command: Command, make_tokenizer: Callable[[Path], None]
) -> None:
    make_tokenizer(Path("tiny"))
    good(command(*NEW, "--steps", 2, "--out", "run"))
    resume = ("train", "--resume", "run", "--device", "cpu", "--steps", 3)
    shutil.copytree("corpus", "other")
    Path("other/one.txt").write_text("other text\n" * 300)
    outcome = command(*resume, "--data", "other")
    assert "; the tokenizer is the same, so the data or the chat template changed; " in outcome.err
    file = Path("tiny/tokenizer.json")
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["l"], vocabulary["i"] = vocabulary["i"], vocabulary["l"]
    file.write_text(json.dumps(tokenizer))
    outcome = command(*resume)
    assert outcome.status == 2
    assert " in this run; the tokenizer changed; allowed: the same in both; " in outcome.err
    for path in tokenizer_files(Path("tiny")):
        path.unlink()
    assert "; the tokenizer is gone; " in command(*resume).err


@pytest.mark.usefixtures("workplace")
def test_a_resumed_run_says_that_its_evaluations_or_metrics_are_others(command: Command) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--out", "run")
    for name in ("one", "two", "three"):
        Path(f"{name}.txt").write_text("held out\n" * (200 if name == "two" else 100))
    good(command(*words, "--steps", 2, "--evaluation-data", "one.txt", "--keep-best", 1))
    resume = ("train", "--resume", "run", "--device", "cpu", "--steps")
    others = "the evaluation data is not that of the steps until"
    lost = "metrics.jsonl has no earlier steps"
    out = good(command(*resume, 3, "--evaluation-data", "three.txt"))
    assert others not in out, "the same data under another name"
    assert lost not in out
    Path("run/metrics.jsonl").unlink()
    out = good(command(*resume, 4, "--evaluation-data", "two.txt"))
    assert (
        f"{others} 3: evaluation losses before and after cannot be compared, and keep_best keeps"
        " the best checkpoints of each\n" in out
    )
    assert (
        f"run/{lost}: it was lost or emptied, so reports begin with step 4; the weights are not"
        " affected\n" in out
    )
    assert [row["step"] for row in losses("run")] == [4]


def test_the_last_line_names_the_model_if_no_checkpoint_was_saved(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full when the last checkpoint is written, after the model."""

    def full(*_: object) -> None:
        raise CheckpointError("checkpoint run/checkpoints was not saved: no space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    outcome = command(*NEW, "--steps", 1, "--out", "run")
    assert outcome.status == 1
    assert outcome.err.endswith(
        "megatrain: checkpoint run/checkpoints was not saved: no space left on device; the run"
        " stopped after step 1; no checkpoint was saved, but the model is in run/model\n"
    )
    assert Path("run/model/model.safetensors").is_file()


@pytest.mark.usefixtures("workplace")
def test_a_run_killed_before_its_first_checkpoint_starts_again_with_from_scratch(
    command: Command, files_in: Any
) -> None:
    good(command(*NEW, "--steps", 3, "--out", "straight"))
    shutil.copytree("straight", "run")
    resume = ("train", "--resume", "run", "--device", "cpu")
    assert (
        "run: --from-scratch: found a checkpoint of step 3; allowed: a run without checkpoints and"
        " model; fix: leave --from-scratch out"
    ) in command(*resume, "--from-scratch").err
    shutil.rmtree("run/checkpoints")
    before = files_in(Path("run"))
    outcome = command(*resume)
    assert (outcome.status, outcome.err) == (
        2,
        "megatrain: run: found no checkpoint to continue from, but a trained model, run/model;"
        " allowed: a run with a checkpoint; fix: train again with another --out\n",
    )
    outcome = command(*resume, "--from-scratch")
    assert outcome.status == 2
    assert "found a trained model, run/model;" in outcome.err
    assert files_in(Path("run")) == before
    shutil.rmtree("run/model")
    assert command(*resume).err == (
        "megatrain: run: found no checkpoint to continue from; allowed: a run with a checkpoint;"
        " fix: pass --from-scratch to begin it again at step 1\n"
    )
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    Path("run/.model.aside-abc").mkdir()
    good(command(*resume, "--from-scratch"))
    assert rows("run") == rows("straight")
    assert weights("run") == weights("straight")
    assert not Path("run/.model.aside-abc").exists()


@pytest.mark.usefixtures("workplace")
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_can_be_resumed(
    command: Command,
) -> None:
    good(command(*NEW, "--steps", 6, "--out", "straight"))
    good(command(*NEW, "--steps", 4, "--out", "run"))
    state = Path("run/checkpoints/step-00000004/state-00001.safetensors")
    content = bytearray(state.read_bytes())
    content[-100] ^= 1
    state.write_bytes(content)
    outcome = command("train", "--resume", "run", "--steps", 6, "--device", "cpu")
    assert outcome.status == 2
    assert "fix: resume from step 2, the newest undamaged checkpoint before it" in outcome.err
    good(command("train", "--resume", "run", "--from-step", 2, "--steps", 6, "--device", "cpu"))
    assert (rows("run"), weights("run")) == (rows("straight"), weights("straight"))


@pytest.mark.usefixtures("workplace")
def test_deterministic_mode_reports_a_checksum_for_each_step_also_after_a_resume(
    command: Command,
) -> None:
    import torch

    try:
        out = good(command(*NEW, "--steps", 4, "--deterministic", "--out", "straight"))
        good(command(*NEW, "--steps", 2, "--deterministic", "--out", "run"))
        good(command("train", "--resume", "run", "--steps", 4, "--device", "cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    trained = [row for row in rows("straight") if "loss" in row]
    assert len({row["checksum"] for row in trained}) == 4
    for row in trained:
        assert f"step {row['step']}: loss {row['loss']!r}, checksum {row['checksum']}\n" in out
    assert [row for row in rows("run") if "loss" in row] == trained


# ---- processes that a signal ends ----


class Process:
    """A separate process of `megatrain WORDS`."""

    def __init__(self, *words: object) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = [sys.executable, "-c", PROGRAM, *map(str, words)]
        self.process = subprocess.Popen(
            given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )

    def end(self, number: signal.Signals, when: Callable[[], bool], after_s: float = 0.0) -> str:
        """Sends the signal `after_s` seconds after `when` holds; returns the standard error."""
        try:
            deadline = time.monotonic() + 60
            while not when():
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < deadline, "the moment for the signal has come"
                time.sleep(0.002)
            time.sleep(after_s)
            self.process.send_signal(number)
            return self.process.communicate(timeout=30)[1]
        finally:
            self.process.kill()


@pytest.mark.usefixtures("workplace")
def test_a_config_file_changes_only_its_fields_of_a_resumed_run(command: Command) -> None:
    good(command(*NEW, "--steps", 4, "--out", "run"))
    Path("more.toml").write_text("[training]\nsteps = 6\n[saving]\nkeep_last = 1\n")
    good(command("train", "--resume", "run", "--config", "more.toml", "--device", "cpu"))
    assert saved("run") == [6]
    before = Config.load(Path("run/config.toml"))
    Path("epochs.toml").write_text("[training]\nepochs = 0.1\n")
    words = ("train", "--resume", "run", "--config", "epochs.toml", "--device", "cpu")
    outcome = command(*words)
    assert re.match(
        r"megatrain: training: epochs: found 0\.1, which is \d steps; allowed: steps >= 6, since",
        outcome.err,
    )
    outcome = command("train", "--resume", "run", "--epochs", "0.1", "--device", "cpu")
    assert outcome.err.startswith("megatrain: --epochs: found 0.1, which is ")
    good(command(*words, "--steps", 7))
    after = Config.load(Path("run/config.toml"))
    assert after == before.with_steps(7)


@pytest.mark.usefixtures("workplace")
def test_options_without_effect_are_refused_unless_the_run_has_them(command: Command) -> None:
    words = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--steps", 2)
    for more, message in (
        (
            ("--evaluate-every", 2),
            "--evaluate-every: found 2, without evaluation data; allowed: only with evaluation"
            " data, because it has no effect otherwise; fix: keep a part of the data with"
            " evaluation_fraction, or name evaluation_data, or leave it out",
        ),
        (
            ("--set", "evaluate_over=1"),
            "config: evaluation.over_steps: found 1, without evaluation",
        ),
        (("--adagc-decay", 0.5), "--adagc-decay: found 0.5, without clipping by adagc"),
        (("--run-name", "mine"), "--run-name: found mine, without a tracker"),
        (("--decay-steps", 1), "--decay-steps: found 1, without the schedule wsd"),
        (("--export-dtype", "fp32", "--no-export"), "--export-dtype: found fp32, without an exp"),
    ):
        outcome = command(*words, *more, "--out", "run")
        assert (outcome.status, outcome.out) == (2, "")
        assert outcome.err.startswith(f"megatrain: {message}")
    assert not Path("run").exists()
    model = ("train", "tiny", "--data", "corpus", "--hardware", "h200", "--out", "run")
    outcome = command(*model, "--adagc-factor", 2)
    assert outcome.err.startswith("megatrain: --adagc-factor: found 2.0, without clipping by adagc")
    good(command(*words, "--save-every", 1, "--out", "run"))
    file = Path("run/config.toml")
    file.write_text(file.read_text().replace("over_steps = 0", "over_steps = 1"))
    good(command("train", "--resume", "run", "--steps", 3, "--device", "cpu"))
    assert Config.load(file).evaluation.over_steps == 1
    outcome = command("train", "--resume", "run", "--evaluate-every", 1, "--device", "cpu")
    assert outcome.err.startswith("megatrain: --evaluate-every: found 1, without evaluation data")


def lines(run: str) -> int:
    path = Path(run) / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def assert_as_if_never_stopped(
    command: Command, process_words: tuple[object, ...], steps: int
) -> None:
    """Asserts that `run`, resumed up to `steps`, equals an uninterrupted run of as many steps."""
    good(command("train", "--resume", "run", "--steps", steps, "--device", "cpu"))
    good(command(*process_words, "--steps", steps, "--out", "straight"))
    assert rows("run") == rows("straight")
    assert weights("run") == weights("straight")


@pytest.mark.nightly  # tests/life stops runs by every signal in the normal tests
@pytest.mark.usefixtures("workplace")
def test_a_run_saves_on_a_signal_and_can_be_resumed(command: Command) -> None:
    """After SIGTERM, the last step in the metrics is saved, so no step is lost."""
    words = (*NEW[:-2], "--save-every", 0)
    process = Process(*words, "--steps", 10**6, "--out", "run")
    said = process.end(signal.SIGTERM, lambda: lines("run") >= 5)
    assert process.process.returncode == 143
    last = rows("run")[-1]["step"]
    command_to_continue = "megatrain train --resume run"
    how = f"stopped after step {last}; saved; continue with: {command_to_continue}"
    assert said == f"megatrain: {how}\n"
    assert saved("run") == [last]
    assert not Path("run/model").exists()
    for verb in ("compare", "report"):
        assert command(verb, "run").status == 0, "as far as it has steps"
    new = command(*words, "--steps", 5, "--out", "run")
    assert (
        f"run: found a run that ended after step {last}; allowed: a new or empty folder; fix:"
        f" continue it with `{command_to_continue}`, or name another folder with --out"
    ) in new.err
    assert_as_if_never_stopped(command, words, last + 3)


@pytest.mark.usefixtures("workplace")
def test_a_run_whose_terminal_is_closed_saves_and_can_be_resumed(
    command: Command, driver: Driver
) -> None:
    words = (*NEW[:-2], "--save-every", 0)
    ours, theirs = os.openpty()
    process = driver.in_terminal(
        Path.cwd(), os.ttyname(theirs), *map(str, (*words, "--steps", 10**6, "--out", "run"))
    )
    try:
        os.close(theirs)
        os.set_blocking(ours, False)
        deadline, shown = time.monotonic() + 60, b""
        while lines("run") < 5:
            with contextlib.suppress(OSError):  # nothing to read, or not yet taken
                shown += os.read(ours, 2**16)  # a full terminal would block the training
            assert time.monotonic() < deadline, shown.decode()
            time.sleep(0.002)
        os.close(ours)
        assert driver.wait() == [129]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    last = rows("run")[-1]["step"]
    assert saved("run") == [last]
    assert_as_if_never_stopped(command, words, last + 3)


@pytest.mark.usefixtures("workplace")
def test_a_signal_in_an_evaluation_leaves_it_for_later(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in an evaluation saves a checkpoint, and the resumed run evaluates first."""
    from megatrain.runtime.execution.executor import Executor

    evaluate = Executor.evaluate

    def interrupted(self: Executor, batches: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return evaluate(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "evaluate", interrupted)
        outcome = command(*NEW, "--steps", 4, "--out", "run")
    how = "stopped after step 3; saved; continue with: megatrain train --resume run"
    assert (outcome.status, outcome.err) == (130, f"megatrain: {how}\n")
    assert [row["step"] for row in rows("run")] == [1, 2, 3]
    manifest = read_json(Path("run/checkpoints/step-00000003/manifest.json"))
    assert manifest["content"]["run"]["progress"]["evaluation_owed"] is True
    assert_as_if_never_stopped(command, NEW, 6)
    assert [row["step"] for row in rows("run") if "evaluation_loss" in row] == [3, 6]


def kill_and_resume(command: Command, kills: int) -> None:
    """Kills a run `kills` times, each time at a random moment after two more checkpoints.

    Asserts that the run then ends like an uninterrupted one.
    """
    generator = random.Random(7)
    for number in range(kills):
        words = (
            ("train", "--resume", "run", "--device", "cpu")
            if number
            else (*NEW, "--steps", 10**6, "--out", "run")
        )
        enough = newest() + 4
        process = Process(*words)
        delay = generator.uniform(0, 0.05)
        process.end(signal.SIGKILL, lambda enough=enough: newest() >= enough, delay)
        assert process.process.returncode == -signal.SIGKILL
    last = max(int(row["step"]) for row in rows("run"))
    assert_as_if_never_stopped(command, NEW, last + 3)


def newest() -> int:
    """Returns the step of the last checkpoint of `run`, or 0 if there is none.

    The run may be writing there at the same time.
    """
    folder = Path("run/checkpoints")
    return (
        max(
            [
                int(path.name.removeprefix("step-"))
                for path in folder.iterdir()
                if path.name.startswith("step-")
            ],
            default=0,
        )
        if folder.exists()
        else 0
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("workplace")
def test_a_kill(command: Command) -> None:
    kill_and_resume(command, 1)


@pytest.mark.nightly
@pytest.mark.usefixtures("workplace")
def test_five_kills(command: Command) -> None:
    kill_and_resume(command, 5)


def test_a_resumed_run_reads_the_commit_of_the_hub_that_it_began_with(
    workplace: Path, command: Any, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(workplace / "tiny")
    hub = FakeHub(workplace, monkeypatch)
    hub.write("some/letters", {"train.jsonl": jsonl(*["how are you"] * 200)})
    words = ("train", "plan.toml", "--data", "some/letters", "--steps", 2, "--device", "cpu")
    outcome = command(*words, "--schedule.kind", "constant", "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    assert f'data = "some/letters@{FIRST}"' in (workplace / "run" / "config.toml").read_text()
    hub.write("some/letters", {"train.jsonl": jsonl(*["I am well"] * 200)}, SECOND)
    hub.online = False
    outcome = command("train", "--resume", "run", "--steps", 3, "--device", "cpu")
    assert (outcome.status, outcome.err) == (0, "")
