"""export_run: a Hugging Face folder of a run's checkpoint, afterwards, without a GPU and without the memory that training takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.stored_state import StoredState
from megatrain.runtime.files.checkpoint_names import CheckpointNames
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.model_files import export, folder_weights
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.files.tensor_file import MalformedFile
from megatrain.runtime.layers.skeleton import skeleton
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.opening import exported_config, find_model, not_trained
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.workload import Dtype


class Exported(NamedTuple):
    """What was written."""

    step: int
    parameters: int
    dtype: Dtype


def export_run(
    run: Path, out: Path, *, step: int | None = None, dtype: Dtype | None = None, model: str | None = None, on_note: Callable[[str], None] = lambda _: None
) -> Exported:
    """Writes the weights of a checkpoint to the new folder `out`, which `from_pretrained` loads, streamed: a piece of a tensor is in memory at one time.

    `run`: a run's folder, of which the newest sound checkpoint is taken, or that of `step`; or one checkpoint's folder. `dtype`: of the weights; None for
    what the run's config says, else for what it computes in. `model`: the folder or the hub's name that config, tokenizer and generation config come from;
    None for the one that the run began with. Each file is held against its checksum before anything is written.

    Raises UserError where there is no sound checkpoint, and for an `out` that is there already or cannot be written.
    """
    if out.exists():
        raise UserError(str(out), found="something there already", allowed="a folder that does not exist", fix="name another one with --out")
    folder, manifest = _checkpoint(run, step, on_note)
    home = run if folder != run else run.parent.parent  # RUN/checkpoints/step-00000123
    config = Config.load(home / "config.toml") if (home / "config.toml").is_file() else None
    random = config is not None and config.training.init == "random"
    origin = find_model(model, manifest.model, needed=True) if model is not None else _origin(home, manifest, on_note)
    settled = exported_config(origin, manifest.model, init="random" if random else "model")
    if note := not_trained(origin, settled):
        on_note(note)
    if origin is not None and not random:
        with contextlib.suppress(UserError), folder_weights(origin, on_note):  # for its notes; an export does without the folder's weights
            pass
    buffers = _buffers(manifest, settled, None if random else origin, random=random)
    chosen = dtype or (config.saving.export_dtype if config else "") or manifest.workload.dtype
    export(StoredState(folder, manifest, buffers), manifest, settled, out, dtype=chosen, source=origin, chat_template=home / CHAT_TEMPLATE)
    return Exported(manifest.run.step, manifest.model.parameters, chosen)


def _checkpoint(run: Path, step: int | None, on_note: Callable[[str], None]) -> tuple[Path, Manifest]:
    """The folder and the manifest of what is to be exported, all of which has been read once. Raises UserError."""
    if (run / "manifest.json").exists():
        return run, verify(run)
    checkpoints = Checkpoints(run / "checkpoints")
    steps = checkpoints.steps()
    if step is not None and step not in steps:
        raise UserError(
            str(checkpoints.folder), found=f"no checkpoint of step {step}", allowed=", ".join(map(str, steps)) or "none yet", fix="name one of these"
        )
    if not steps:
        raise UserError(
            str(run), found="no checkpoint", allowed="a checkpoint's folder, or that of a run with one", fix="train with --save-every, or check the path"
        )
    for number in [step] if step is not None else reversed(steps):
        try:
            return checkpoints.path(number), verify(checkpoints.path(number))
        except MalformedFile as error:
            if step is not None or number == steps[0]:
                raise
            on_note(f"left out: {error.where}: found {error.found}")
    raise AssertionError("a checkpoint is sound or raises")


def _origin(home: Path, manifest: Manifest, on_note: Callable[[str], None]) -> Path | None:
    """The model's folder that the run in `home` began with, as its plan has it; None where it is gone. Raises UserError where another model is there."""
    file = home / "plan.toml"
    source = Plan.load(file).source if file.is_file() else ""
    if source and (home / source).is_dir():
        return find_model(str(home / source), manifest.model, needed=False)
    try:
        return find_model(source, manifest.model, needed=True)
    except UserError as error:
        on_note(f"no tokenizer and no generation config go along: {error.where}: {error.found}; --model names a folder that has them")
        return None


def _buffers(manifest: Manifest, config: PretrainedConfig, origin: Path | None, *, random: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Of the decoder layers, by layer and name, from the folder that the run began with, or where it began at random those that transformers starts with."""
    shapes = {layer: named for layer, named in CheckpointNames(config).buffers().items() if named}
    if not shapes:
        return {}
    if origin is None and random:
        whole = skeleton(config, torch.float32, torch.device("cpu"))
        layers = DecoderStack.of(whole).layers_of(whole)
        return {layer: {name: layers[int(layer)].get_buffer(name) for name in named} for layer, named in shapes.items()}
    if origin is None:
        raise UserError(
            f"model {manifest.model.name}", found="no folder with its buffers", allowed="the folder that the run began with", fix="name it with --model"
        )
    with folder_weights(origin) as weights:
        return {layer: {name: weights(layer, name, shape).clone() for name, shape in named.items()} for layer, named in shapes.items()}
