"""Tests of refused checkpoints: damaged ones and those of another run.

The error names the checkpoint, and nothing is changed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from small_runs import SETTINGS, everything, run_of

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.same_run import refuse_other_run
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.tensor_stream import TensorSource, write_tensors
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Applies `change` to the manifest and writes a checksum that matches it."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    change(content)
    text = json.dumps(content, separators=(",", ":"))
    (folder / "manifest.json").write_text(
        f'{{"checksum":"{xxhash.xxh3_128_hexdigest(text.encode())}","content":{text}}}'
    )


def state_file(folder: Path) -> Path:
    return folder / "state-00001.safetensors"


def elsewhere(folder: Path) -> None:
    file = state_file(folder)
    file.rename(folder.parent / "outside.safetensors")
    file.symlink_to("../outside.safetensors")


def other_tensors(folder: Path) -> None:
    size, checksum = write_tensors(folder / "new", {"0.weights": TensorSource.of(torch.zeros(3))})
    (folder / "new").rename(state_file(folder))
    reseal(folder, lambda content: content["shards"][0].update(bytes=size, checksum=checksum))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (
        lambda folder: os.truncate(state_file(folder), 1000),
        r"state-00001\.safetensors: found 1000 bytes; allowed: a file of \d+ bytes",
    ),
    "missing": (
        lambda folder: state_file(folder).unlink(),
        r"state-00001\.safetensors: found no such file",
    ),
    "a bit of a tensor": (
        lambda folder: flip(state_file(folder), 50_000),
        r"state-00001\.safetensors: found checksum [0-9a-f]+; allowed: [0-9a-f]+, as it was",
    ),
    "a bit of the last tensor": (
        lambda folder: flip(state_file(folder), -1),
        r"state-00001\.safetensors: found checksum",
    ),
    "a bit of the header's length": (
        lambda folder: flip(state_file(folder), 6),
        r"state-00001\.safetensors: found a file that cannot be read",
    ),
    "a bit of the header": (
        lambda folder: flip(state_file(folder), 60),
        r"state-00001\.safetensors",
    ),
    "a bit of the manifest": (
        lambda folder: flip(folder / "manifest.json", 60),
        r"manifest\.json: found a checksum that differs from",
    ),
    "half a manifest": (
        lambda folder: os.truncate(folder / "manifest.json", 500),
        r"manifest\.json: found not a manifest",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        r"manifest\.json: found no such file",
    ),
    "a link": (
        elsewhere,
        r"state-00001\.safetensors: found a link, which may point outside the checkpoint's folder",
    ),
    "a path that leaves the folder": (
        lambda folder: reseal(
            folder,
            lambda content: content["shards"][0].update(
                file="../step-00000001/state-00001.safetensors"
            ),
        ),
        (
            r"manifest\.json: file: found '\.\./step-00000001/state-00001\.safetensors'; allowed:"
            r" state-00001\.safetensors and so on, next to"
        ),
    ),
    "a tensor twice": (
        lambda folder: reseal(
            folder, lambda content: content["shards"].append(content["shards"][0])
        ),
        r"tensors: found 0\.master_low, 0\.moments",
    ),
    "a tensor less": (
        lambda folder: reseal(folder, lambda content: content["shards"][0]["tensors"].pop()),
        r"tensors: found h\.moments; allowed: each",
    ),
    "another tensor": (
        other_tensors,
        r"state-00001\.safetensors: e\.weights: found no such tensor; allowed: \(torch\.bfloat16",
    ),
    "another step": (
        lambda folder: reseal(folder, lambda content: content["run"].update(step=9)),
        r"step-00000002: found a checkpoint of step 9",
    ),
    "a later format": (
        lambda folder: reseal(folder, lambda content: content.update(format=2)),
        r"format: found 2; allowed: 1",
    ),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_suggested(
    saved: tuple[Plan, Path], session: Callable[..., Any], spoiled: str
) -> None:
    plan, folder = saved
    spoil, message = SPOILED[spoiled]
    spoil(folder / "step-00000002")
    with session(plan) as running:
        with pytest.raises(UserError, match=message) as error:
            Checkpoints(folder).restore(running.executor, SETTINGS)
        assert "step-00000002" in str(error.value)
        assert error.value.fix == "resume from step 1, the newest undamaged checkpoint before it"
        assert "\n" not in str(error.value)
        assert Checkpoints(folder).restore(running.executor, SETTINGS, step=1) == run_of(1)


def test_no_checkpoint_is_suggested_if_all_are_damaged(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    for step in (1, 2):
        flip(state_file(folder / f"step-0000000{step}"), -1)
    with (
        session(plan) as running,
        pytest.raises(UserError, match="fix: start a new run, since there is no undamaged"),
    ):
        Checkpoints(folder).restore(running.executor, SETTINGS)


def test_an_earlier_checkpoint_is_not_suggested_if_a_resume_would_refuse_it(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    """The error suggests only earlier checkpoints that can be resumed.

    A link to a file outside the folder is never read, even if its bytes are right.
    """
    plan, folder = saved
    flip(state_file(folder / "step-00000002"), -1)
    elsewhere(folder / "step-00000001")
    with session(plan) as running:
        with pytest.raises(UserError, match="fix: start a new run, since there is no undamaged"):
            Checkpoints(folder).restore(running.executor, SETTINGS)
        with pytest.raises(
            UserError, match=r"step-00000001/state-00001\.safetensors: found a link"
        ):
            verify(folder / "step-00000001")


def test_another_state_of_the_generators_is_refused(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    reseal(folder / "step-00000002", lambda content: content["random"]["numpy"].__setitem__(2, -5))
    with (
        session(plan) as running,
        pytest.raises(UserError, match="random state: found not a state of numpy's generator"),
    ):
        Checkpoints(folder).restore(running.executor, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {"layers": 5},
            SETTINGS,
            (
                r"found model\.num_hidden_layers 4 in the checkpoint and 5 in this run, model \[.*;"
                r" allowed: the same in both"
            ),
        ),
        (
            {"sequence": 8},
            SETTINGS,
            (
                r"step-00000002: found workload\.sequence 16 in the checkpoint and 8 in"
                r" this run; allowed: the same in both; fix: resume with the settings of the"
                r" checkpoint \(`megatrain plan --from PLAN --set sequence=16 --out NEW`\), or"
            ),
        ),
        (
            {"clipping": "none"},
            SETTINGS,
            r"found workload\.clipping global in the checkpoint and none",
        ),
        (
            {"state": "master24"},
            SETTINGS,
            r"found workload\.state exact in the checkpoint and master24 in this run",
        ),
        ({"attention": "flash"}, SETTINGS, r"--from PLAN --set attention=null --out NEW"),
        ({}, {"rate": 2e-2, "seed": 0}, r"found rate 0\.01 in the checkpoint and 0\.02"),
        ({}, {"rate": 1e-2}, r"found seed 0 in the checkpoint and None"),
    ],
)
def test_another_run_is_refused_before_anything_is_changed(
    saved: tuple[Plan, Path],
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    changes: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    _, folder = saved
    with session(executable("double_buffer", **changes)) as running:
        before = everything(running)
        with pytest.raises(UserError, match=message) as error:
            Checkpoints(folder).restore(running.executor, settings)
        assert "undamaged checkpoint before" not in str(error.value)
        assert everything(running) == before


def test_a_manifest_stores_the_run_and_the_optimizer(saved: tuple[Plan, Path]) -> None:
    manifest = Manifest.load(saved[1] / "step-00000002")
    assert manifest.run == run_of(2)
    assert manifest.optimizer == {
        "name": "AdamW",
        "betas": [0.9, 0.95],
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_norm": 0.05,
        "adagc_factor": 1.05,
        "adagc_decay": 0.98,
        "adagc_warm_up": 100,
        "groups": [],
    }
    with pytest.raises(UserError, match="checkpoint: step: found -1"):
        msgspec.structs.replace(manifest.run, step=-1)


def test_a_checkpoint_from_before_a_setting_was_added_is_resumed(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    """A setting that the checkpoint lacks has its default."""
    plan, folder = saved
    reseal(folder / "step-00000002", lambda content: content["optimizer"].pop("adagc_decay"))
    with session(plan) as running:
        assert Checkpoints(folder).restore(running.executor, SETTINGS).step == 2
    changed = AdamW(max_norm=0.05, weight_decay=0.1, adagc_decay=0.5)
    with session(plan, settings=changed) as running, pytest.raises(UserError) as error:
        Checkpoints(folder).restore(running.executor, SETTINGS)
    assert "found optimizer.adagc_decay 0.98" in str(error.value)


def test_a_checkpoint_that_does_not_name_its_initial_weights_is_resumed(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    settings = {**SETTINGS, "training.init": "random"}
    with session(plan) as running:
        assert Checkpoints(folder).restore(running.executor, settings).step == 2
    reseal(
        folder / "step-00000002",
        lambda content: content["run"]["settings"].update({"training.init": "model"}),
    )
    with (
        session(plan) as running,
        pytest.raises(
            UserError, match=r"found training\.init model in the checkpoint and random in this run"
        ),
    ):
        Checkpoints(folder).restore(running.executor, settings)


def test_a_checkpoint_from_before_short_recomputes_is_resumed(
    saved: tuple[Plan, Path], executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """Eager layers have the same bits with and without them. Compiled layers may not."""
    plan, folder = saved
    assert not plan.workload.short_recompute
    other = executable("double_buffer", short_recompute=True)
    with session(other) as running:
        assert Checkpoints(folder).restore(running.executor, SETTINGS).step == 2
    manifest = Manifest.load(folder / "step-00000002")
    compiled = [msgspec.structs.replace(each.workload, compiled=True) for each in (manifest, other)]
    with pytest.raises(
        UserError, match=r"workload\.short_recompute False in the checkpoint and True"
    ):
        refuse_other_run(
            msgspec.structs.replace(manifest, workload=compiled[0]),
            msgspec.structs.replace(other, workload=compiled[1]),
            AdamW(max_norm=0.05, weight_decay=0.1),
            SETTINGS,
            folder,
        )


def test_a_run_whose_learning_rate_depends_on_its_steps_cannot_become_shorter(
    saved: tuple[Plan, Path], session: Callable[..., Any]
) -> None:
    plan, folder = saved
    reseal(
        folder / "step-00000002",
        lambda content: content["run"]["settings"].update({"training.steps": 40}),
    )
    with session(plan) as running, pytest.raises(UserError) as error:
        Checkpoints(folder).restore(running.executor, {**SETTINGS, "training.steps": 5})
    assert str(error.value).endswith(
        "step-00000002: found 40 steps; allowed: at least 40 steps, not 5: the learning rate"
        " depends on the number of steps, so a run can become longer, but not shorter; fix: leave"
        " out --steps, or pass at least 40"
    )


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_read_error_of_the_disk_gives_a_one_line_error(
    saved: tuple[Plan, Path],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    in_parts: bool,
) -> None:
    """This holds for files with parts of tensors and with whole ones, also in verification."""
    plan, folder = saved
    newest = folder / "step-00000002"

    def fail(*_: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    def give_parts(content: dict[str, Any]) -> None:
        (shard,) = content["shards"]
        shard["firsts"] = [0] * len(shard["tensors"])

    if in_parts:
        reseal(newest, give_parts)
    for name in ("checksum_of", "read_tensors"):
        monkeypatch.setattr(checkpoint, name, fail)
    message = r"state-00001\.safetensors: found input/output error; allowed: a readable file"
    with session(plan) as running, pytest.raises(MalformedFile, match=message):
        Checkpoints(folder).restore(running.executor, SETTINGS)
    with pytest.raises(MalformedFile, match=message):
        verify(newest)
