"""Tests of checkpoints: resuming under any plan of the workload, and which checkpoints are kept.

A resumed run has the bits of a run that never stopped.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import SETTINGS, everything, run_of

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.checkpoint import restore, save, verify
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import EVALUATION_DATA
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Placement, Plan

# ---- resume ----

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "double_buffer": ("double_buffer", {}),
    "resident": ("resident", {}),
    "overlapped": ("overlapped", {}),
    "overlapped, placed": (
        "overlapped",
        {
            "weight_slots": 3,
            "chunk_bytes": 16384,
            "device_limit_bytes": 2**25,
            "placement": Placement(weights="0,h", master_low="1-2", moments="e,3", gradients="0-1"),
        },
    ),
}


@pytest.mark.parametrize(
    "workload",
    [
        {},
        pytest.param({"clipping": "none"}, marks=pytest.mark.nightly),
        {"dtype": "fp32", "accumulation": 2},
        pytest.param({"state": "master24"}, marks=pytest.mark.nightly),
        {"state": "bf16-sr", "clipping": "update"},
        {"clipping": "adagc"},
    ],
    ids=["bf16", "unclipped", "fp32", "master24", "bf16-sr", "adagc"],
)
def test_a_resume_under_another_plan_equals_a_run_that_never_stopped(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    workload: dict[str, Any],
) -> None:
    """A run that resumes under another plan has the losses, norms, weights and moments of a run
    that never stopped. Saving does not change them either.
    """
    plans = {
        name: executable(policy, **workload, **knobs) for name, (policy, knobs) in PLANS.items()
    }
    expected: dict[str, Any] = {}
    for name, plan in plans.items():
        with session(plan) as running:
            losses = []
            for step in range(1, 4):
                result = running.step(step)
                losses.append((result.loss, result.gradient_norm))
                if step == 2 and name != "double_buffer":  # this run never saves
                    save(running.executor, run_of(step), tmp_path / name)
            expected[name] = (losses, everything(running))
    assert all(found == expected["double_buffer"] for found in expected.values())
    for old, new in itertools.pairwise([*list(plans)[1:], "overlapped", "double_buffer"]):
        with session(plans[new]) as running:
            assert restore(running.executor, tmp_path / old, SETTINGS) == run_of(2)
            result = running.step(3)
            assert (result.loss, result.gradient_norm) == expected[new][0][2], f"{old} -> {new}"
            assert everything(running) == expected[new][1], f"{old} -> {new}"


def test_a_running_executor_can_go_back_to_a_checkpoint(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    """Restoring a checkpoint into a running executor discards its deferred update."""
    plan, folder = saved
    with session(plan) as running:
        checkpoints = Checkpoints(folder)
        checkpoints.restore(running.executor, SETTINGS)
        before = everything(running)
        running.step(3)
        checkpoints.restore(running.executor, SETTINGS)
        assert everything(running) == before


def test_the_random_generators_are_restored(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    plan, _ = saved

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    with session(plan) as running:
        save(running.executor, run_of(1), tmp_path / "one")
        expected = draw()
        draw()
        restore(running.executor, tmp_path / "one", SETTINGS)
        assert draw() == expected


def test_the_files_are_safetensors_of_bounded_size(
    saved: tuple[Plan, Path],
    session: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, folder = saved
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    with session(plan) as running:
        Checkpoints(folder).restore(running.executor, SETTINGS)
        save(running.executor, run_of(2), tmp_path / "sharded")
        tensors = running.state.tensors()
        files = sorted((tmp_path / "sharded").glob("state-*.safetensors"))
        assert len(files) > 3
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert stored.keys() == tensors.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
        before = everything(running)
        running.step(3)
        restore(running.executor, tmp_path / "sharded", SETTINGS)
        assert everything(running) == before
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


# ---- what is kept ----


def test_the_last_and_the_best_checkpoints_are_kept(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    plan, _ = saved
    with session(plan) as running:
        checkpoints = Checkpoints(tmp_path / "kept", keep_last=2, keep_best=2)
        for step, loss in enumerate([3.0, 1.0, None, 2.0, float("nan"), 4.0, 5.0], 1):
            path = checkpoints.save(running.executor, run_of(step, loss))
            assert path.is_dir()
    assert checkpoints.steps() == [2, 4, 6, 7]
    assert len(list((tmp_path / "kept").iterdir())) == 4


def test_the_two_newest_checkpoints_are_kept_by_default(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    with session(saved[0]) as running:
        checkpoints = Checkpoints(tmp_path / "kept")
        for step in (1, 2, 3):
            checkpoints.save(running.executor, run_of(step, float(step)))
    assert checkpoints.steps() == [2, 3]


def test_the_newer_of_two_equally_good_checkpoints_is_kept(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    with session(saved[0]) as running:
        checkpoints = Checkpoints(tmp_path / "kept", keep_last=1, keep_best=1)
        for step, loss in enumerate([2.0, 1.0, 1.0, 3.0, 1.5], 1):
            checkpoints.save(running.executor, run_of(step, loss))
    assert checkpoints.steps() == [3, 5]


def test_losses_on_different_evaluation_data_are_not_compared(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    """A run may be resumed with other evaluation data, on which losses are higher or lower."""
    evaluated = [("a", 2.0), ("a", 1.0), ("a", 3.0), ("b", 7.0), ("b", 8.0), ("b", 9.0)]
    with session(saved[0]) as running:
        checkpoints = Checkpoints(tmp_path / "kept", keep_last=1, keep_best=1)
        for step, (data, loss) in enumerate(evaluated, 1):
            run = msgspec.structs.replace(run_of(step, loss), progress={EVALUATION_DATA: data})
            checkpoints.save(running.executor, run)
    assert checkpoints.steps() == [2, 4, 6]


def test_later_checkpoints_are_removed_after_the_run_went_back(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    """If a run goes back to an earlier step, its next checkpoint replaces all later ones.

    Otherwise the next resume would use one of the later ones.
    """
    plan, folder = saved
    with session(plan) as running:
        checkpoints = Checkpoints(folder, keep_last=9)
        assert checkpoints.restore(running.executor, SETTINGS, step=1) == run_of(1)
        assert checkpoints.steps() == [1, 2]
        everything_at_1 = everything(running)
        running.step(2)
        checkpoints.save(running.executor, run_of(2, 0.5))  # replaces the earlier run's checkpoint
        assert everything(running) != everything_at_1
    assert checkpoints.steps() == [1, 2]
    assert verify(checkpoints.path(2)).run.loss == 0.5
    with session(plan) as running:
        checkpoints = Checkpoints(folder)
        checkpoints.restore(running.executor, SETTINGS, step=1)
        assert Checkpoints(folder).steps() == [1, 2]
        checkpoints.save(running.executor, run_of(1))
        assert checkpoints.steps() == [1, 2], "saving step 1 again changed the checkpoints"


@pytest.mark.parametrize("left", [".saving-step-00000003-x", ".removing-step-00000001"])
def test_an_incomplete_checkpoint_is_never_used(
    saved: tuple[Plan, Path], session: Callable[..., Any], left: str
) -> None:
    plan, folder = saved
    shutil.copytree(folder / "step-00000002", folder / left)
    assert Checkpoints(folder).steps() == [1, 2]
    with session(plan) as running:
        assert Checkpoints(folder).restore(running.executor, SETTINGS) == run_of(2)
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_that_was_being_replaced_is_moved_back(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    (folder / "step-00000002").rename(folder / ".replaced-step-00000002")
    with session(plan) as running:
        assert Checkpoints(folder).restore(running.executor, SETTINGS) == run_of(2)
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


def test_a_folder_without_a_checkpoint_restores_nothing(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path
) -> None:
    with session(saved[0]) as running:
        assert Checkpoints(tmp_path / "nowhere").restore(running.executor, SETTINGS) is None
        with pytest.raises(
            UserError,
            match=(
                "nowhere: found no checkpoint of step 7; allowed: none yet; fix: name one of these"
            ),
        ):
            Checkpoints(tmp_path / "nowhere").restore(running.executor, SETTINGS, step=7)


@pytest.mark.parametrize("kept", [{"keep_last": 0}, {"keep_best": -1}])
def test_keeping_no_checkpoint_is_refused(tmp_path: Path, kept: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"checkpoints: {next(iter(kept))}: found"):
        Checkpoints(tmp_path, **kept)


def test_a_shard_holds_as_many_tensors_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is larger than a shard has one of its own."""
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 64)
    sizes = {"a": 32, "b": 32, "c": 1, "d": 100, "e": 64}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert [list(part) for part in checkpoint._parts(tensors)] == [["a", "b"], ["c"], ["d"], ["e"]]
