"""Tests of the folder of a run that ended early: the run can be started again or resumed.

This also holds for a run that was killed while it wrote its first files.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

NEW = (
    "train",
    "double_buffer.toml",
    "--data",
    "corpus",
    "--device",
    "cpu",
    "--steps",
    2,
    "--no-export",
)
STARTED = ("plan.toml", "environment.json", "data.json", "config.toml")
RESUME = ("train", "--resume", "run", "--device", "cpu")


@pytest.mark.parametrize(
    "function", ["os:replace", pytest.param("os:fsync", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("file", range(1, 5))
def test_a_run_killed_between_its_first_files_can_be_started_again(
    driver: Any, workplace: Path, function: str, file: int, leftovers: Any
) -> None:
    """A run that is killed while it writes one of its first four files can be started again.

    The first call of each function writes the token cache, so call N + 1 writes file N.
    """
    killed = driver.run(
        workplace, *NEW, "--data-cache", "cache", "--out", "run", at=(function, file + 1, "SIGKILL")
    )
    assert killed.status == -signal.SIGKILL
    begun = (workplace / "run" / "config.toml").exists()
    assert begun == (workplace / "run" / "metrics.jsonl").exists() == False  # noqa: E712
    assert [name for name in STARTED if (workplace / "run" / name).exists()] == list(
        STARTED[: file - 1]
    )
    assert (
        "or start a new run: `megatrain train MODEL --data DATA --out RUN`"
        in driver.run(workplace, *RESUME).refusal
    )
    ended = driver.run(workplace, *NEW, "--out", "run")
    assert ended.status == 0, ended.text
    assert leftovers(workplace) == []


def test_a_run_killed_right_after_its_first_files_is_resumed_from_scratch(
    driver: Any, workplace: Path
) -> None:
    killed = driver.run(
        workplace,
        *NEW,
        "--out",
        "run",
        at=("megatrain.runtime.execution.executor:Executor.step", 1, "SIGKILL"),
    )
    assert killed.status == -signal.SIGKILL
    refusal = driver.run(workplace, *NEW, "--out", "run").refusal
    assert "found a run that ended after step 0; allowed: a new or empty folder" in refusal
    assert "continue it with `megatrain train --resume run --from-scratch`" in refusal
    assert "fix: pass --from-scratch" in driver.run(workplace, *RESUME).refusal
    assert driver.run(workplace, *RESUME, "--from-scratch").status == 0


def test_a_plan_of_the_user_does_not_count_as_a_file_of_a_killed_run(
    driver: Any, workplace: Path
) -> None:
    (workplace / "run").mkdir()
    plan = (workplace / "double_buffer.toml").read_bytes()
    (workplace / "run" / "plan.toml").write_bytes(plan)
    assert "found something there already" in driver.run(workplace, *NEW, "--out", "run").refusal
    assert [path.name for path in (workplace / "run").iterdir()] == ["plan.toml"]
    assert (workplace / "run" / "plan.toml").read_bytes() == plan


def test_a_run_that_cannot_do_its_first_step_leaves_no_folder(driver: Any, workplace: Path) -> None:
    """A run whose model has a NaN weight leaves no folder."""
    import torch
    from safetensors.torch import load_file, save_file

    file = workplace / "tiny" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    refusal = driver.run(workplace, *NEW, "--out", "run").refusal
    assert refusal.endswith(
        "model tiny: found infinity or NaN in model.norm.weight; allowed: finite numbers; fix:"
        " fetch the model again"
    ), refusal
    assert not (workplace / "run").exists()


DAMAGED = (
    b'{"step": 2, "loss": 1\n',
    b'{"loss": 2.0}\n',
    b"\xff\xfe\x00\n",
    b'{"step": -1}\n',
    b"[1]\n",
    b"\n",
)


@pytest.mark.parametrize(
    ("damaged", "removed"),
    [(DAMAGED[:1], "1 damaged line removed"), (DAMAGED, "6 damaged lines removed")],
)
def test_damaged_lines_of_the_metrics_do_not_stop_a_resume(
    driver: Any, trained: Path, damaged: tuple[bytes, ...], removed: str
) -> None:
    metrics = trained / "run" / "metrics.jsonl"
    first, second = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + b"".join(damaged) + second + b'{"step": 3, "lo')
    ended = driver.run(trained, *RESUME, "--steps", 3)
    assert ended.status == 0, ended.text
    assert f"metrics.jsonl: {removed}; the weights are not affected\n" in ended.text
    assert metrics.read_bytes().splitlines(keepends=True)[:-1] == [first, second]
