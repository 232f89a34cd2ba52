"""Tests of random sequences of interruptions, exports and changed files during a run.

The run either ends bit for bit like an uninterrupted run or is refused with one line.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.files.exported_models import newest_model

STEPS = 8
NEW = (
    "--data",
    "corpus",
    "--data-cache",
    "cache",
    "--device",
    "cpu",
    "--lr",
    "3e-3",
    "--set",
    "kind=constant",
    "--eval-fraction",
    "0.3",
    "--eval-every",
    3,
    "--deterministic",
)
SAVE = ("--save-every", 2, "--set", "saving.keep_last=99")
PLANS = ("double_buffer.toml", "overlapped.toml", "resident.toml")
SIGNALS = {
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 129,
    signal.SIGKILL: -signal.SIGKILL,
}
LONGEST_S = 4.0  # the longest wait before a signal, more than a whole run takes
OF_THE_PLAN = ("seconds", "tokens_per_second", "schedule", "check")
"""keys of the metrics that differ between plans"""


def rows(run: Path) -> list[dict[str, Any]]:
    """Returns the rows of the metrics without the keys that depend on the plan."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in OF_THE_PLAN} for row in found]


def tensors(checkpoint: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(checkpoint.glob("*.safetensors")))


def checkpoints(run: Path) -> dict[str, Path]:
    folder = run / "checkpoints"
    return (
        {path.name: path for path in folder.iterdir() if path.name.startswith("step-")}
        if folder.is_dir()
        else {}
    )


class Straight:
    """The uninterrupted run, which has a checkpoint of every step."""

    def __init__(self, driver: Any, place: Path) -> None:
        self.run = place / "straight"
        ended = driver.run(
            place,
            "train",
            PLANS[0],
            *NEW,
            "--save-every",
            1,
            "--set",
            "saving.keep_last=99",
            "--steps",
            STEPS,
            "--out",
            "straight",
        )
        assert ended.status == 0, ended.text
        self.model = (self.run / "model" / "model.safetensors").read_bytes()
        self.rows = rows(self.run)
        self.saved = {name: tensors(path) for name, path in checkpoints(self.run).items()}


@pytest.fixture(scope="module")
def straight(driver: Any, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    place = tmp_path_factory.mktemp("straight") / "place"
    shutil.copytree(prepared, place)
    return Straight(driver, place)


def change_config(place: Path) -> None:
    config = json.loads((place / "tiny" / "config.json").read_text())
    (place / "tiny" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def remove_weights(place: Path) -> None:
    (place / "tiny" / "model.safetensors").unlink()


def change_data(place: Path) -> None:
    with (place / "corpus" / "one.txt").open("a") as file:
        file.write("one more line\n")


def change_tokenizer(place: Path) -> None:
    file = place / "tiny" / "tokenizer.json"
    made = json.loads(file.read_text())
    made["model"]["merges"] = made["model"]["merges"][:-2]
    file.write_text(json.dumps(made))


def change_plan(place: Path) -> None:
    for plan in (*PLANS, "run/plan.toml"):
        file = place / plan
        if file.exists():
            file.write_text(file.read_text().replace("sequence = 16", "sequence = 32"))


def cut_config(place: Path) -> None:
    file = place / "run" / "config.toml"
    if file.exists():
        file.write_text(file.read_text().replace("seed = 0", "seed = 1"))


CHANGES: tuple[Callable[[Path], None], ...] = (
    change_config,
    remove_weights,
    change_data,
    change_tokenizer,
    change_plan,
    cut_config,
)


class Walk:
    """A run in `place / "run"` and random disturbances of it."""

    def __init__(
        self, driver: Any, place: Path, straight: Straight, leftovers: Any, seed: int
    ) -> None:
        self.driver, self.place, self.straight, self.leftovers = driver, place, straight, leftovers
        self.random, self.run, self.history = random.Random(seed), place / "run", [f"seed {seed}"]

    def go(self, moves: int) -> None:
        try:
            for _ in range(moves):
                self.random.choice(
                    (self.interrupt, self.interrupt, self.pause, self.export, self.change)
                )()
                self.look()
            ended = self.train(STEPS)
            assert ended.status == 0, ended
            self.look()
            assert [row for row in rows(self.run) if "loss" in row] == [
                row for row in self.straight.rows if "loss" in row
            ]
            mine, theirs = (
                {row["step"]: row for row in found if "evaluation_loss" in row}
                for found in (rows(self.run), self.straight.rows)
            )
            assert {step: mine[step] for step in theirs} == theirs
            model = newest_model(self.run)
            assert model is not None
            assert (model / "model.safetensors").read_bytes() == self.straight.model
            assert self.leftovers(self.place) == []
        except Exception as error:
            error.add_note("\n".join(self.history))
            raise

    def words(self, steps: int) -> tuple[object, ...]:
        """Returns the words that start the run or resume it, with a random plan."""
        plan = self.random.choice(PLANS)
        if (self.run / "config.toml").exists():
            return (
                "train",
                *([plan] if self.random.random() < 0.7 else []),
                "--resume",
                "run",
                *([] if checkpoints(self.run) else ["--from-scratch"]),
                "--device",
                "cpu",
                *SAVE,
                "--steps",
                steps,
            )
        return ("train", plan, *NEW, *SAVE, "--steps", steps, "--out", "run")

    def train(self, steps: int) -> Any:
        words = self.words(steps)
        ended = self.driver.run(self.place, *words)
        self.history.append(f"{' '.join(map(str, words))}: {ended.status}")
        return ended

    def done(self) -> int:
        return max((int(name.removeprefix("step-")) for name in checkpoints(self.run)), default=0)

    def interrupt(self) -> None:
        """Trains, and sends one or two signals at random moments."""
        words = self.words(STEPS)
        running = self.driver.start(self.place, *words)
        sent = []
        for _ in range(self.random.choice((1, 1, 1, 2))):
            number = self.random.choice(list(SIGNALS))
            if running.ends_within(self.random.uniform(0, LONGEST_S)):
                break
            running.send(number)
            sent.append(number)
        ended = running.wait()
        self.history.append(f"{' '.join(map(str, words))}, {sent}: {ended.status}\n{ended.text}")
        assert "Traceback" not in ended.text
        assert "not caught" not in ended.text
        assert ended.status in {
            0,
            *(SIGNALS[number] for number in sent),
            *(-number for number in sent),
        }

    def pause(self) -> None:
        """Trains up to a random step before the last, and ends normally."""
        steps = self.random.randint(1, STEPS - 1)
        ended = self.train(steps)
        if self.done() > steps and ended.status != 0:
            assert "steps are done already" in ended.refusal
        else:
            assert ended.status == 0, ended

    def export(self) -> None:
        """Exports a random checkpoint; asserts that the uninterrupted run has the same weights."""
        names = sorted(checkpoints(self.run))
        if not names:
            assert self.driver.run(self.place, "export", "run", "--out", "exported").refusal
            return
        step = int(self.random.choice(names).removeprefix("step-"))
        found = []
        for place, out in ((self.run, "exported"), (self.straight.run, "wanted")):
            ended = self.driver.run(
                self.place, "export", place, "--from-step", step, "--model", "tiny", "--out", out
            )
            assert ended.status == 0, ended
            found.append((self.place / out / "model.safetensors").read_bytes())
            shutil.rmtree(self.place / out)
        self.history.append(f"export of step {step}")
        assert found[0] == found[1]

    def change(self) -> None:
        """Changes an input file, trains one step and restores the file.

        Either the run is refused, or it no longer needs the file and its results stay the same.
        """
        if not checkpoints(self.run):  # a new run would accept the changed file
            return
        change = self.random.choice(CHANGES)
        kept = {
            path: path.read_bytes()
            for folder in ("tiny", "corpus")
            for path in (self.place / folder).iterdir()
        }
        kept |= {
            path: path.read_bytes()
            for path in (*(self.place / plan for plan in PLANS), *self.run.glob("*.toml"))
        }
        change(self.place)
        ended = self.train(min(self.done() + 1, STEPS))
        self.history.append(f"{change.__name__}\n{ended.text}")
        if ended.status != 0:
            assert ended.refusal
        for path, content in kept.items():
            if ended.status != 0 or path.parent != self.run:
                path.write_bytes(content)

    def look(self) -> None:
        """Asserts that checkpoints equal the uninterrupted run's and that metrics are ordered."""
        for name, path in checkpoints(self.run).items():
            assert tensors(path) == self.straight.saved[name], name
        if (self.run / "metrics.jsonl").exists():
            lines = (self.run / "metrics.jsonl").read_text().splitlines(keepends=True)
            steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
            assert steps == sorted(steps)


@pytest.mark.parametrize("seed", range(3))
def test_a_disturbed_run_ends_like_an_undisturbed_one(
    driver: Any, workplace: Path, straight: Straight, leftovers: Any, seed: int
) -> None:
    Walk(driver, workplace, straight, leftovers, seed).go(moves=4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_more_disturbed_runs_end_like_undisturbed_ones(
    driver: Any, workplace: Path, straight: Straight, leftovers: Any, seed: int
) -> None:
    Walk(driver, workplace, straight, leftovers, seed).go(moves=12)
