"""Checkpoints: resume is bit-identical to never having stopped, under any plan of the workload; what is kept; what is refused."""

from __future__ import annotations

import itertools
import json
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
import xxhash
from safetensors.torch import load_file

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.checkpoint import CheckpointError, restore, save, verify
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import Manifest, Run
from megatrain.runtime.files.tensor_stream import Source, write_tensors
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Placement, Plan

SETTINGS = {"rate": 1e-2, "seed": 0}


def run_of(step: int, loss: float | None = None) -> Run:
    return Run(step=step, loss=loss, settings=SETTINGS, progress={"patience": 3})


def everything(running: Any) -> dict[str, bytes]:
    """Bits of weights, low planes and moments, with nothing owed."""
    running.executor.flush_update()
    return {name: tensor.clone().view(torch.uint8).numpy().tobytes() for name, tensor in running.state.tensors().items()}


@pytest.fixture
def saved(executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path) -> tuple[Plan, Path]:
    """A plan, and the folder of its checkpoints of steps 1 and 2."""
    plan = executable("overlapped")
    with session(plan) as running:
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=9)
        for step in (1, 2):
            running.step(step)
            checkpoints.save(running.executor, run_of(step))
    return plan, tmp_path / "checkpoints"


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
            "placement": Placement(weights="0,h", low="1-2", moments="e,3", gradients="0-1"),
        },
    ),
}


@pytest.mark.parametrize("workload", [{}, {"clipping": "none"}, {"dtype": "fp32", "accumulation": 2}], ids=["bf16", "unclipped", "fp32"])
def test_resume_under_another_plan_is_as_if_it_had_never_stopped(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path, workload: dict[str, Any]
) -> None:
    """Losses, norms, weights and moments of every later step, from each plan to the next; saving in between changes nothing either."""
    plans = {name: executable(policy, **workload, **knobs) for name, (policy, knobs) in PLANS.items()}
    expected: dict[str, Any] = {}
    for name, plan in plans.items():
        with session(plan) as running:
            losses = []
            for step in range(1, 4):
                result = running.step(step)
                losses.append((result.loss, result.gradient_norm))
                if step == 2 and name != "double_buffer":  # that one never saves
                    save(running.executor, run_of(step), tmp_path / name)
            expected[name] = (losses, everything(running))
    assert all(found == expected["double_buffer"] for found in expected.values())
    for old, new in itertools.pairwise([*list(plans)[1:], "overlapped", "double_buffer"]):
        with session(plans[new]) as running:
            assert restore(running.executor, tmp_path / old, SETTINGS) == run_of(2)
            result = running.step(3)
            assert (result.loss, result.gradient_norm) == expected[new][0][2], f"{old} -> {new}"
            assert everything(running) == expected[new][1], f"{old} -> {new}"


def test_a_running_executor_goes_back(saved: tuple[Plan, Path], session: Callable[..., Any]) -> None:
    """An update that it owes at that moment is not applied to what was restored."""
    plan, folder = saved
    with session(plan) as running:
        checkpoints = Checkpoints(folder)
        checkpoints.restore(running.executor, SETTINGS)
        before = everything(running)
        running.step(3)
        checkpoints.restore(running.executor, SETTINGS)
        assert everything(running) == before


def test_the_random_generators_go_on_where_they_were(saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path) -> None:
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
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_the_last_and_the_best_are_kept(saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path) -> None:
    plan, _ = saved
    with session(plan) as running:
        checkpoints = Checkpoints(tmp_path / "kept", keep_last=2, keep_best=2)
        for step, loss in enumerate([3.0, 1.0, None, 2.0, float("nan"), 4.0, 5.0], 1):
            path = checkpoints.save(running.executor, run_of(step, loss))
            assert path.is_dir()
    assert checkpoints.steps() == [2, 4, 6, 7]
    assert len(list((tmp_path / "kept").iterdir())) == 4


def test_of_equally_good_ones_the_newer_is_kept(saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path) -> None:
    with session(saved[0]) as running:
        checkpoints = Checkpoints(tmp_path / "kept", keep_last=1, keep_best=1)
        for step, loss in enumerate([2.0, 1.0, 1.0, 3.0, 1.5], 1):
            checkpoints.save(running.executor, run_of(step, loss))
    assert checkpoints.steps() == [3, 5]


def test_what_was_left_behind_is_removed_when_the_run_has_gone_back(saved: tuple[Plan, Path], session: Callable[..., Any]) -> None:
    """Otherwise the next resume would take the newest, which is not this run's."""
    plan, folder = saved
    with session(plan) as running:
        checkpoints = Checkpoints(folder, keep_last=9)
        assert checkpoints.restore(running.executor, SETTINGS, step=1) == run_of(1)
        assert checkpoints.steps() == [1, 2]
        everything_at_1 = everything(running)
        running.step(2)
        checkpoints.save(running.executor, run_of(2, 0.5))  # in the place of the other one
        assert everything(running) != everything_at_1
    assert checkpoints.steps() == [1, 2]
    assert verify(checkpoints.path(2)).run.loss == 0.5
    with session(plan) as running:
        checkpoints = Checkpoints(folder)
        checkpoints.restore(running.executor, SETTINGS, step=1)
        assert Checkpoints(folder).steps() == [1, 2]
        checkpoints.save(running.executor, run_of(1))
        assert checkpoints.steps() == [1, 2], "nothing was saved: step 1 is what is there"


@pytest.mark.parametrize("left", [".saving-step-00000003-x", ".removing-step-00000001"])
def test_half_a_checkpoint_is_never_picked_up(saved: tuple[Plan, Path], session: Callable[..., Any], left: str) -> None:
    plan, folder = saved
    shutil.copytree(folder / "step-00000002", folder / left)
    assert Checkpoints(folder).steps() == [1, 2]
    with session(plan) as running:
        assert Checkpoints(folder).restore(running.executor, SETTINGS) == run_of(2)
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


def test_one_that_was_being_replaced_is_moved_back(saved: tuple[Plan, Path], session: Callable[..., Any]) -> None:
    plan, folder = saved
    (folder / "step-00000002").rename(folder / ".replaced-step-00000002")
    with session(plan) as running:
        assert Checkpoints(folder).restore(running.executor, SETTINGS) == run_of(2)
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


def test_no_checkpoint_yet(saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path) -> None:
    with session(saved[0]) as running:
        assert Checkpoints(tmp_path / "nowhere").restore(running.executor, SETTINGS) is None
        with pytest.raises(UserError, match="nowhere: found no checkpoint of step 7; allowed: none yet; fix: name one of these"):
            Checkpoints(tmp_path / "nowhere").restore(running.executor, SETTINGS, step=7)


@pytest.mark.parametrize("kept", [{"keep_last": 0}, {"keep_best": -1}])
def test_keeping_nothing_is_refused(tmp_path: Path, kept: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"checkpoints: {next(iter(kept))}: found"):
        Checkpoints(tmp_path, **kept)


# ---- what is refused ----


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The manifest with a `change`, and a checksum that says that this is right."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    change(content)
    text = json.dumps(content, separators=(",", ":"))
    (folder / "manifest.json").write_text(f'{{"checksum":"{xxhash.xxh3_128_hexdigest(text.encode())}","content":{text}}}')


def state_file(folder: Path) -> Path:
    return folder / "state-00001.safetensors"


def elsewhere(folder: Path) -> None:
    file = state_file(folder)
    file.rename(folder.parent / "outside.safetensors")
    file.symlink_to("../outside.safetensors")


def other_tensors(folder: Path) -> None:
    size, checksum = write_tensors(folder / "new", {"0.weights": Source.of(torch.zeros(3))})
    (folder / "new").rename(state_file(folder))
    reseal(folder, lambda content: content["shards"][0].update(bytes=size, checksum=checksum))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda folder: os.truncate(state_file(folder), 1000), r"state-00001\.safetensors: found 1000 bytes; allowed: a file of \d+ bytes"),
    "missing": (lambda folder: state_file(folder).unlink(), r"state-00001\.safetensors: found no such file"),
    "a bit of a tensor": (
        lambda folder: flip(state_file(folder), 50_000),
        r"state-00001\.safetensors: found checksum [0-9a-f]+; allowed: [0-9a-f]+, as it was",
    ),
    "a bit of the last tensor": (lambda folder: flip(state_file(folder), -1), r"state-00001\.safetensors: found checksum"),
    "a bit of the header's length": (lambda folder: flip(state_file(folder), 6), r"state-00001\.safetensors: found a file that cannot be read"),
    "a bit of the header": (lambda folder: flip(state_file(folder), 60), r"state-00001\.safetensors"),
    "a bit of the manifest": (lambda folder: flip(folder / "manifest.json", 60), r"manifest\.json: found another checksum"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 500), r"manifest\.json: found no manifest"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json: found no such file"),
    "a link": (elsewhere, r"state-00001\.safetensors: found a link, which may leave the checkpoint's folder"),
    "a path that leaves the folder": (
        lambda folder: reseal(folder, lambda content: content["shards"][0].update(file="../step-00000001/state-00001.safetensors")),
        r"manifest\.json: file: found '\.\./step-00000001/state-00001\.safetensors'; allowed: state-00001\.safetensors and so on, beside",
    ),
    "a tensor twice": (lambda folder: reseal(folder, lambda content: content["shards"].append(content["shards"][0])), r"tensors: found 0\.low, 0\.moments"),
    "a tensor less": (lambda folder: reseal(folder, lambda content: content["shards"][0]["tensors"].pop()), r"tensors: found h\.moments; allowed: each"),
    "another tensor": (other_tensors, r"state-00001\.safetensors: e\.weights: found no such tensor; allowed: \(torch\.bfloat16"),
    "another step": (lambda folder: reseal(folder, lambda content: content["run"].update(step=9)), r"step-00000002: found a checkpoint of step 9"),
    "a later format": (lambda folder: reseal(folder, lambda content: content.update(format=2)), r"format: found 2; allowed: 1"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_spoiled_checkpoint_is_refused_by_name_and_the_one_before_it_offered(saved: tuple[Plan, Path], session: Callable[..., Any], spoiled: str) -> None:
    plan, folder = saved
    spoil, message = SPOILED[spoiled]
    spoil(folder / "step-00000002")
    with session(plan) as running:
        with pytest.raises(UserError, match=message) as error:
            Checkpoints(folder).restore(running.executor, SETTINGS)
        assert "step-00000002" in str(error.value)
        assert error.value.fix == "resume from step 1, the newest sound one before it"
        assert "\n" not in str(error.value)
        assert Checkpoints(folder).restore(running.executor, SETTINGS, step=1) == run_of(1)


def test_of_two_spoiled_checkpoints_none_is_offered(saved: tuple[Plan, Path], session: Callable[..., Any]) -> None:
    plan, folder = saved
    for step in (1, 2):
        flip(state_file(folder / f"step-0000000{step}"), -1)
    with session(plan) as running, pytest.raises(UserError, match="fix: there is no sound one before it: start anew"):
        Checkpoints(folder).restore(running.executor, SETTINGS)


def test_an_earlier_checkpoint_that_resuming_would_refuse_is_not_offered(saved: tuple[Plan, Path], session: Callable[..., Any]) -> None:
    """A link leads to the right bytes, but a file outside the folder is never read."""
    plan, folder = saved
    flip(state_file(folder / "step-00000002"), -1)
    elsewhere(folder / "step-00000001")
    with session(plan) as running:
        with pytest.raises(UserError, match="fix: there is no sound one before it: start anew"):
            Checkpoints(folder).restore(running.executor, SETTINGS)
        with pytest.raises(UserError, match=r"step-00000001/state-00001\.safetensors: found a link"):
            verify(folder / "step-00000001")


def test_another_state_of_the_generators_is_refused(saved: tuple[Plan, Path], session: Callable[..., Any]) -> None:
    plan, folder = saved
    reseal(folder / "step-00000002", lambda content: content["random"]["numpy"].__setitem__(2, -5))
    with session(plan) as running, pytest.raises(UserError, match="random state: found no state of numpy's generator"):
        Checkpoints(folder).restore(running.executor, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"layers": 5}, SETTINGS, r"found model\.num_hidden_layers 4, model \[.*; allowed: model\.num_hidden_layers 5, model .*as in this run"),
        ({"sequence": 8}, SETTINGS, r"step-00000002: found workload\.sequence 16; allowed: workload\.sequence 8, as in this run; fix: resume with what"),
        ({"clipping": "none"}, SETTINGS, r"found workload\.clipping global; allowed: workload\.clipping none"),
        ({}, {"rate": 2e-2, "seed": 0}, r"found settings\.rate 0\.01; allowed: settings\.rate 0\.02"),
        ({}, {"rate": 1e-2}, r"found settings\.seed 0; allowed: settings\.seed None"),
    ],
)
def test_another_run_is_refused_before_anything_is_changed(
    saved: tuple[Plan, Path], executable: Callable[..., Plan], session: Callable[..., Any], changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    _, folder = saved
    with session(executable("double_buffer", **changes)) as running:
        before = everything(running)
        with pytest.raises(UserError, match=message) as error:
            Checkpoints(folder).restore(running.executor, settings)
        assert "sound one before" not in str(error.value)
        assert everything(running) == before


def test_what_a_run_says_of_itself_is_plain(saved: tuple[Plan, Path]) -> None:
    manifest = Manifest.load(saved[1] / "step-00000002")
    assert manifest.run == run_of(2)
    assert manifest.optimizer == {"name": "AdamW", "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1, "max_norm": 0.05, "groups": []}
    with pytest.raises(UserError, match="checkpoint: step: found -1"):
        msgspec.structs.replace(manifest.run, step=-1)


# ---- a crash, a failure ----


def test_all_of_it_is_on_the_disk_before_it_has_its_name(
    saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file, then the folder's list of names, then the rename, then the list of names that the rename has changed."""
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def watched_sync(handle: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def watched_rename(path: Path, target: Path) -> Path:
        events.append(("rename", str(path)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    with session(saved[0]) as running:
        save(running.executor, run_of(1), tmp_path / "new" / "one")
    aside = next(path for event, path in events if event == "rename")
    place = events.index(("rename", aside))
    before, after = events[:place], events[place + 1 :]
    assert before.index(("sync", str(tmp_path))) == 0, "the folder was made"
    assert before[-1] == ("sync", aside)
    assert {Path(path).name.partition(".json")[0].lstrip(".") for event, path in before[1:-1]} == {"state-00001.safetensors", "manifest"}
    assert all(path.startswith(f"{aside}/") for _, path in before[1:-1])
    assert after == [("sync", str(tmp_path / "new"))]


def test_the_old_one_is_put_back_where_the_new_one_cannot_take_its_place(
    saved: tuple[Plan, Path], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = saved
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(checkpoint.ASIDE):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with session(plan) as running, pytest.raises(CheckpointError, match="was not saved: input/output error; the ones before it are as they were"):
        save(running.executor, run_of(2, 9.0), folder / "step-00000002")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


# ---- a disk with no room ----


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_the_checkpoint_before_as_it_was(
    saved: tuple[Plan, Path], session: Callable[..., Any], small_disk: Path, monkeypatch: pytest.MonkeyPatch, foreseen: bool
) -> None:
    """Refused before a byte is written where the disk says how much is free; where it lies, at the byte that does not fit. Training may go on."""
    plan, _ = saved
    checkpoints = Checkpoints(small_disk / "checkpoints", keep_last=9)
    with session(plan) as running:
        running.step(1)
        checkpoints.save(running.executor, run_of(1))
        before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
        (small_disk / "other").write_bytes(bytes(3_000_000))
        if not foreseen:
            monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))
        running.step(2)
        with pytest.raises(CheckpointError, match=r"^checkpoint .*step-00000002 was not saved: no space left on device.*; the ones before it are as they were"):
            checkpoints.save(running.executor, run_of(2))
        (small_disk / "other").unlink()
        assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
        assert checkpoints.steps() == [1]
        running.step(3)
        checkpoints.save(running.executor, run_of(3))
        expected = everything(running)
    with session(plan) as running:
        assert checkpoints.restore(running.executor, SETTINGS) == run_of(3)
        assert everything(running) == expected


def test_a_folder_that_cannot_be_made_is_one_line(saved: tuple[Plan, Path], session: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with session(saved[0]) as running, pytest.raises(CheckpointError, match=r"was not saved: (not a directory|file exists)"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(running.executor, run_of(1))


def test_an_interrupted_save_leaves_nothing(saved: tuple[Plan, Path], session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, folder = saved

    def interrupt(path: Path, _: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_tensors", interrupt)
    with session(plan) as running, pytest.raises(KeyboardInterrupt):
        Checkpoints(folder).save(running.executor, run_of(3))
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]
