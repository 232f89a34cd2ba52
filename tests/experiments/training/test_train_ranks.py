"""Tests of `megatrain train` with a plan for several GPUs, by ranks on the CPU with gloo.

A run has the bits of one GPU, and its checkpoints can be resumed with any number of GPUs. Others
test lost ranks, also of two hosts. `test_train_hosts.py` starts the ranks of two hosts by torchrun.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from started_ranks import Driver

from megatrain.experiments.cli import main as cli
from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

WORDS = (
    *("--data", "corpus", "--init", "random", "--device", "cpu", "--lr", "1e-2"),
    *("--save-every", "2", "--keep-last", "9"),
)
EVALUATED = ("--evaluation-data", "corpus", "--evaluate-every", "2", "--evaluate-over", "2")


@pytest.fixture
def plans(workplace: Path, make_plan: Callable[..., Plan]) -> Path:
    """Makes plans of one workload in the workplace: `1.toml`, `2.toml` and `4.toml` for one host,
    and `2x1.toml` and `2x2.toml` for two hosts.

    Plans for 1, 2 and 4 GPUs keep different state on the device.
    """
    placements: dict[int, dict[str, str]] = {
        1: {"weights": "h"},
        2: {"weights": "0,h", "moments": "all", "gradients": "e"},
        4: {"weights": "all", "gradients": "all"},
    }
    for name, gpus, hosts in (
        *(("1", 1, 1), ("2", 2, 1), ("4", 4, 1)),
        *(("2x1", 2, 2), ("2x2", 4, 2)),
    ):
        plan = make_plan(
            "overlapped",
            layers=3,
            gpus=gpus,
            hosts=hosts,
            accumulation=8,
            sum_group=2,
            micro_batch_group=2,
            sequence=16,
            vocabulary=272,
            dtype="fp32",
            documents=True,
            placement=Placement(saved_activations="0", **placements[gpus]),
        )
        plan = msgspec.structs.replace(plan, digest=lower(plan).digest, hardware="h200")
        plan.save(workplace / f"{name}.toml")
    return workplace


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics, without times and the digest of the schedule."""
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    left_out = ("seconds", "tokens_per_second", "schedule", "check")
    return [{key: row[key] for key in row if key not in left_out} for row in rows]


def weights(run: str | Path) -> bytes:
    return (Path(run) / "model" / "model.safetensors").read_bytes()


def wait_for_the_end(process: int) -> None:
    """Waits until a rank has ended, even if the driver has not yet collected its status."""
    begin = time.monotonic()
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - begin < 60, "the rank does not end"
        time.sleep(0.02)


def on(driver: Driver, count: int, *runs: tuple[str, ...], **more: Any) -> list[int]:
    """Starts `count` ranks, which execute the runs one after the other. Returns the process ids."""
    words = [["train", *run] for run in runs]
    return driver.start([words] * count, folder=os.getcwd(), **more)


@pytest.mark.usefixtures("plans")
def test_two_ranks_are_one_run_with_the_bits_of_one_gpu(driver: Driver) -> None:
    """Losses, norms, evaluations and the exported model have the same bits.

    One GPU resumes a checkpoint of two ranks, and two ranks a checkpoint of one GPU.
    """
    steps = ("--steps", "4")
    assert cli.main(["train", "1.toml", "--out", "alone", *WORDS, *EVALUATED, *steps]) == 0
    shutil.copytree("alone", "to-two")
    on(
        driver,
        2,
        ("2.toml", "--out", "two", *WORDS, *EVALUATED, *steps),
        ("2.toml", "--resume", "to-two", "--from-step", "2"),
    )
    assert driver.wait() == [0, 0], driver.printed(0) + driver.printed(1)
    assert driver.printed(0).count("step 4/4") == 2
    assert driver.printed(1) == "", "rank 0 alone reports"
    shutil.copytree("two", "to-one")
    assert cli.main(["train", "1.toml", "--resume", "to-one", "--from-step", "2"]) == 0
    expected = metrics("alone")
    assert len(expected) == 6
    assert [metrics(run) for run in ("two", "to-two", "to-one")] == [expected] * 3
    for run in ("two", "to-two", "to-one"):
        model = max(Path(run).glob("model*/model.safetensors"))
        assert model.read_bytes() == weights("alone")
    manifest = verify(Path("two/checkpoints/step-00000002"))
    assert [shard.file for shard in manifest.shards] == [
        "state-00001.safetensors",
        "state-00002.safetensors",
    ]
    assert cli.main(["export", "two", "--out", "exported"]) == 0
    assert Path("exported/model.safetensors").read_bytes() == weights("alone")
    assert cli.main(["compare", "two"]) == 0


@pytest.mark.usefixtures("plans")
def test_a_killed_rank_leaves_a_whole_checkpoint(driver: Driver) -> None:
    """The other rank ends with a line that names the killed one. The run continues on one GPU."""
    constant = ("--schedule", "constant", "--warm-up-steps", "0")
    steps = ("--steps", "100000", *constant)
    processes = on(driver, 2, ("2.toml", "--out", "run", *WORDS, *steps))
    run, begin = Path("run"), time.monotonic()
    while not (run / "checkpoints" / "step-00000002").is_dir():
        assert time.monotonic() - begin < 60, driver.printed(0)
        time.sleep(0.01)
    os.kill(processes[1], signal.SIGKILL)
    assert driver.wait() == [1, -signal.SIGKILL]
    (line,) = [line for line in driver.printed(0).splitlines() if "megatrain: " in line]
    assert f"rank 1 (process {processes[1]}) has ended, " in line
    assert "rank 0" in line
    saved = max((run / "checkpoints").glob("step-*"))
    last = verify(saved).run.step
    done = str(last + 1)
    words = ["--resume", "run", "--steps", done]
    assert cli.main(["train", "1.toml", *words]) == 0
    straight = ("--steps", done, *constant)
    assert cli.main(["train", "1.toml", "--out", "alone", *WORDS, *straight]) == 0
    assert metrics("run")[-1] == metrics("alone")[-1]
    assert weights("run") == weights("alone")


@pytest.mark.usefixtures("plans")
def test_a_checkpoint_that_one_rank_cannot_write_leaves_nothing(driver: Driver) -> None:
    """Both ranks end with the same line, and no part of the checkpoint is left."""
    on(driver, 2, ("2.toml", "--out", "run", *WORDS, "--steps", "3"), file_bytes=20_000)
    assert driver.wait() == [1, 1]
    for rank in range(2):
        (line,) = [line for line in driver.printed(rank).splitlines() if "megatrain: " in line]
        assert "checkpoint run/checkpoints/step-00000002 was not saved: file too large" in line
    assert list(Path("run/checkpoints").iterdir()) == []


@pytest.mark.usefixtures("plans")
def test_unsupported_options_with_several_ranks_are_refused_in_one_line(driver: Driver) -> None:
    start = ("--out", "run", *WORDS, "--steps", "1")
    for words, found in (
        (("2.toml", *start, "--adapt"), "--adapt: found a plan for 2 GPUs"),
        (("1.toml", *start), "ranks: found 2 (WORLD_SIZE); allowed: 1, the GPUs of the plan"),
        (("4.toml", *start), "ranks: found 2 (WORLD_SIZE); allowed: 4, the GPUs of the plan"),
        (("tiny", *start), "train: found a model to plan, on 2 ranks"),
    ):
        on(driver, 2, words)
        assert driver.wait() == [2, 2]
        for rank in range(2):
            assert len(driver.printed(rank).splitlines()) == 1
            assert found in driver.printed(rank)
    assert not Path("run").exists()


@pytest.mark.usefixtures("plans")
def test_ranks_with_other_data_or_a_taken_folder_end(driver: Driver) -> None:
    other = ("--data", "corpus/one.txt", "--out", "run", *WORDS[2:], "--steps", "1")
    mine = ("--out", "run", *WORDS, "--steps", "1")
    driver.start([[["train", "2.toml", *each]] for each in (mine, other)], folder=os.getcwd())
    assert driver.wait() == [2, 2]
    found = f"ranks: data.data: found '{Path('corpus/one.txt').absolute()}' on rank 1; allowed: '"
    assert found in driver.printed(1)
    Path("run").mkdir(exist_ok=True)
    Path("run", "notes.txt").write_text("mine")
    on(driver, 2, ("2.toml", *mine))
    assert driver.wait() == [2, 1]
    assert "run: found something there already" in driver.printed(0)
    assert "has stopped: run: found something there already" in driver.printed(1)


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_four_ranks_save_and_two_or_one_continue(driver: Driver) -> None:
    steps = ("--steps", "4")
    assert cli.main(["train", "1.toml", "--out", "alone", *WORDS, *EVALUATED, *steps]) == 0
    on(driver, 4, ("4.toml", "--out", "four", *WORDS, *EVALUATED, *steps))
    assert driver.wait() == [0] * 4
    for name in ("to-two", "to-one"):
        shutil.copytree("four", name)
    on(driver, 2, ("2.toml", "--resume", "to-two", "--from-step", "2"))
    assert driver.wait() == [0, 0]
    assert cli.main(["train", "1.toml", "--resume", "to-one", "--from-step", "2"]) == 0
    for run in ("four", "to-two", "to-one"):
        assert metrics(run) == metrics("alone")
    shutil.rmtree("to-two")
    shutil.copytree("to-one", "to-four")
    on(driver, 4, ("4.toml", "--resume", "to-four", "--from-step", "2"))
    assert driver.wait() == [0] * 4
    assert metrics("to-four") == metrics("alone")


@pytest.mark.parametrize("look", [6, 7], ids=["after the third step", "before the fourth"])
@pytest.mark.usefixtures("plans")
def test_a_signal_between_two_steps_saves_the_last_one(driver: Driver, look: int) -> None:
    words = ("2.toml", "--out", "run", *WORDS, "--steps", "100000")
    on(driver, 2, words, interrupted_at=look)
    assert driver.wait() == [143, 143], driver.printed(0)
    assert metrics("run")[-1]["step"] == 3
    assert verify(Path("run/checkpoints/step-00000003")).run.step == 3


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_a_signal_to_the_ranks_saves_and_ends_the_run(driver: Driver) -> None:
    words = ("2.toml", "--out", "run", *WORDS, "--steps", "100000")
    processes = on(driver, 2, words)
    while "step 3/" not in driver.printed(0):
        time.sleep(0.01)
    os.kill(processes[1], signal.SIGTERM)
    assert driver.wait() == [143, 143]
    assert "stopped after step" in driver.printed(0)
    saved = max(Path("run/checkpoints").glob("step-*"))
    assert verify(saved).run.step == metrics("run")[-1]["step"]


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_a_stopped_rank_ends_the_others(driver: Driver) -> None:
    words = ("2.toml", "--out", "run", *WORDS, "--steps", "100000")
    processes = on(driver, 2, words, timeout_s=2)
    while "step 3/" not in driver.printed(0):
        time.sleep(0.01)
    os.kill(processes[1], signal.SIGSTOP)
    wait_for_the_end(processes[0])
    os.kill(processes[1], signal.SIGKILL)
    assert driver.wait() == [1, -signal.SIGKILL]
    assert f"rank 1 (process {processes[1]}) is stopped, " in driver.printed(0)


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_a_rank_that_is_stopped_between_steps_ends_the_others(driver: Driver) -> None:
    """Rank 0 is then in a collective that never ends. It must leave its files and lock in order."""
    words = ("2.toml", "--out", "run", *WORDS, "--steps", "100000")
    processes = on(driver, 2, words, timeout_s=1, stops_at=3)
    wait_for_the_end(processes[0])
    os.kill(processes[1], signal.SIGKILL)
    assert driver.wait() == [1, -signal.SIGKILL]
    last = driver.printed(0).splitlines()[-1]
    stopped = f"rank 1 (process {processes[1]}) is stopped, between ops"
    assert last == f"megatrain: rank 0, between steps: {stopped}"
    assert not Path("run/.lock").exists()
    assert verify(Path("run/checkpoints/step-00000002")).run.step == 2


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_a_rank_that_hangs_in_an_op_is_named(driver: Driver) -> None:
    words = ("2.toml", "--out", "run", *WORDS, "--steps", "100000")
    processes = on(driver, 2, words, timeout_s=2, hangs_at=10)
    while "megatrain: " not in driver.printed(0):
        time.sleep(0.02)
    os.kill(processes[1], signal.SIGKILL)
    assert driver.wait() == [1, -signal.SIGKILL]
    late = f"rank 1 (process {processes[1]}) has not reached it, in "
    assert late in driver.printed(0)
    assert "on lane compute" in driver.printed(0)


def begun(driver: Driver, name: str, count: int, **more: Any) -> list[int]:
    """Starts a run without end, and returns the process ids when it has a checkpoint."""
    words = (f"{name}.toml", "--out", "run", *WORDS, "--steps", "100000")
    processes, begin = on(driver, count, words, **more), time.monotonic()
    while not Path("run/checkpoints/step-00000002").is_dir():
        assert time.monotonic() - begin < 60, driver.printed(0)
        time.sleep(0.01)
    return processes


@pytest.mark.parametrize(
    ("name", "count"), [("2x1", 2), pytest.param("2x2", 4, marks=pytest.mark.nightly)]
)
@pytest.mark.usefixtures("plans")
def test_a_killed_rank_of_the_other_host_is_named(driver: Driver, name: str, count: int) -> None:
    """Each remaining rank ends with one line, which names the rank and its host.

    With one rank on each host, no process of its host can say that it has ended.
    """
    processes, last = begun(driver, name, count, silent_s=1.0), count - 1
    os.kill(processes[last], signal.SIGKILL)
    assert driver.wait() == [*[1] * last, -signal.SIGKILL]
    for rank in range(last):
        (line,) = [line for line in driver.printed(rank).splitlines() if "megatrain: " in line]
        assert f"rank {last} (process {processes[last]} on host 1, " in line
        assert ("has ended" if count == 4 else "does not answer") in line
    verify(max(Path("run/checkpoints").glob("step-*")))


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_a_stopped_rank_of_the_other_host_is_named(driver: Driver) -> None:
    processes = begun(driver, "2x1", 2, timeout_s=2, silent_s=1.0)
    os.kill(processes[1], signal.SIGSTOP)
    wait_for_the_end(processes[0])
    os.kill(processes[1], signal.SIGKILL)
    assert driver.wait() == [1, -signal.SIGKILL]
    assert f"rank 1 (process {processes[1]} on host 1, " in driver.printed(0)
    assert "does not answer" in driver.printed(0)


@pytest.mark.nightly
@pytest.mark.usefixtures("plans")
def test_a_signal_to_a_rank_of_the_other_host_saves_and_ends_the_run(driver: Driver) -> None:
    processes = begun(driver, "2x2", 4)
    os.kill(processes[3], signal.SIGTERM)
    assert driver.wait() == [143] * 4
    assert "stopped after step" in driver.printed(0)
    saved = max(Path("run/checkpoints").glob("step-*"))
    assert verify(saved).run.step == metrics("run")[-1]["step"]


def test_ranks_that_do_not_see_the_folder_of_rank_0_are_refused(
    plans: Path, tmp_path: Path, driver: Driver
) -> None:
    """All ranks end with one line, and no host has a new file."""
    other = tmp_path / "other host"
    shutil.copytree(plans, other)
    before = sorted(plans.rglob("*")), sorted(other.rglob("*"))
    data = str(plans / "corpus")
    words = ["train", "2x1.toml", "--out", "run", "--data", data, *WORDS[2:], "--steps", "1"]
    driver.start([[words]] * 2, folders=[str(plans), str(other)], appears_within_s=0.2)
    assert driver.wait() == [2, 2]
    for rank in range(2):
        (line,) = driver.printed(rank).splitlines()
        assert line.startswith("megatrain: run folder run: found no file of rank 0 in it on rank 1")
        assert "on host 1, " in line
        assert "allowed: a folder on storage that all hosts share" in line
    assert (sorted(plans.rglob("*")), sorted(other.rglob("*"))) == before


def test_ranks_with_other_evaluation_data_are_refused(
    plans: Path, tmp_path: Path, driver: Driver
) -> None:
    """Each host reads its own copy, at the same path. Without this, the loss would be one of no
    data, or the ranks would wait for each other for ever.
    """
    other = tmp_path / "other host"
    shutil.copytree(plans, other)
    for host, text in ((plans, "some text to evaluate. "), (other, "some other text to judge. ")):
        (host / "held.txt").write_text(20 * text)
    words = ["train", "2x1.toml", "--out", str(plans / "run"), "--data", str(plans / "corpus")]
    words += [*WORDS[2:], "--steps", "1", "--evaluation-data", "/proc/self/cwd/held.txt"]
    driver.start([[words]] * 2, folders=[str(plans), str(other)])
    assert driver.wait() == [2, 2]
    for rank in range(2):
        (line,) = [each for each in driver.printed(rank).splitlines() if "megatrain: " in each]
        assert line.startswith("megatrain: ranks: evaluation data: found ")
        assert "on several hosts, each reads its own copy" in line
    assert not list(plans.glob("run/checkpoints/*"))


@pytest.mark.usefixtures("plans")
def test_the_command_that_continues_starts_all_ranks(driver: Driver) -> None:
    on(driver, 2, ("2.toml", "--out", "run", *WORDS, "--steps", "100000"), interrupted_at=7)
    assert driver.wait() == [143, 143], driver.printed(0)
    assert (
        "continue with: torchrun --standalone --nproc-per-node 2 -m megatrain train --resume run"
        in driver.printed(0)
    )
    assert cli.main(["train", "--resume", "run"]) == 2


SCRIPT = """
import sys
from pathlib import Path
import msgspec
import torch
from megatrain.runtime import Callback, Config, Trainer
from megatrain.runtime.ranks import joined
from megatrain.simulator import Plan

device = torch.device("cpu")
config = Config.load(Path("alone/config.toml"))
with joined(Plan.load(Path("2.toml")), device) as ranks:
    def read(trainer):
        return trainer.state.masters(next(iter(trainer.plan.model.stack.values())))
    if sys.argv[1] in ("read", "start"):
        class Reads(Callback):
            def on_start(self, trainer):
                if sys.argv[1] == "start" and ranks.rank == 0:
                    read(trainer)
            def on_step(self, trainer, step):
                assert trainer.state._read is None, "memory that no plan counts is released"
                if sys.argv[1] == "read" and ranks.rank == 1:
                    read(trainer)
        more = {"callbacks": [Reads()]}
    elif sys.argv[1] == "first":
        class Later(Callback):
            def on_start(self, trainer):
                trainer.first_step += ranks.rank
        more = {"callbacks": [Later()]}
    elif sys.argv[1] == "rate":
        schedule = msgspec.structs.replace(config.schedule, rate=(1 + ranks.rank) / 100)
        config, more = msgspec.structs.replace(config, schedule=schedule), {}
    elif sys.argv[1].startswith("stop"):
        class Stops(Callback):
            def on_step(self, trainer, step):
                if ranks.rank == 1 and step.number == 2 and sys.argv[1] == "stop":
                    trainer.stop("rank 1 has seen enough")
            def on_evaluation(self, trainer, evaluation):
                if ranks.rank == 1:
                    trainer.stop("rank 1 has evaluated enough")
        more = {"callbacks": [Stops()]}
    else:
        class Few:
            def step(self, number):
                return []
        more = {"data": Few()}
        config = msgspec.structs.replace(config, data=type(config.data)())
    trainer = Trainer("2.toml", config=config, out="run", device=device, ranks=ranks, **more)
    trainer._evaluation_pending = sys.argv[1] == "start"
    fitted = trainer.fit()
    print(ranks.rank, fitted.stopped or fitted.steps)
"""
"""A program for two ranks. Its argument says what a rank does."""


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("stop", "0 rank 1 has seen enough"),
        ("stop in an evaluation", "0 rank 1 has evaluated enough"),
        ("start", "0 4"),
        ("read", "training: state: found a read of the weights on rank 1; allowed: reads on rank"),
        ("rate", "ranks: schedule.rate: found 0.02 on rank 1; allowed: 0.01, as on rank 0"),
        ("first", "ranks: first step: found 2 on rank 1; allowed: 1, as on rank 0"),
        ("few", "data: found 0 micro-batches on rank 0; allowed: 8, as planned for all ranks"),
    ],
)
@pytest.mark.usefixtures("plans")
def test_ranks_of_a_script_are_one_training(what: str, line: str, driver: Driver) -> None:
    """Rank 1 alone stops the training of both. Rank 0 may read weights before an evaluation that a
    checkpoint owes. A read on another rank has an error, and so have too few micro-batches, and
    settings and first steps that differ.
    """
    evaluated = EVALUATED if what in ("start", "stop in an evaluation") else ()
    assert cli.main(["train", "1.toml", "--out", "alone", *WORDS, *evaluated, "--steps", "4"]) == 0
    Path("script.py").write_text(SCRIPT)
    driver.start([[["script.py", what]]] * 2, folder=os.getcwd())
    statuses = driver.wait()
    assert line in driver.printed(0) + driver.printed(1)
    if what.startswith("stop"):
        assert statuses == [0, 0], driver.printed(0)
        steps = [row["step"] for row in metrics("run") if "evaluation_loss" not in row]
        assert steps == [1, 2]
