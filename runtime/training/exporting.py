"""export_run: writes a checkpoint of a run as a Hugging Face folder.

This needs no GPU, and only a small part of the memory that training needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from megatrain.runtime.checkpoint.checkpoint import verify
from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.stored_state import StoredState
from megatrain.runtime.checkpoint.stored_steps import checkpoint_name, steps_to_export
from megatrain.runtime.files.checkpoint_names import CheckpointNames
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.model_files import export, folder_weights
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.files.model_source import planned_source
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.opening import exported_config, find_model, not_trained
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import refuse_existing
from megatrain.simulator.model.workload import Dtype
from megatrain.simulator.schedule.plan import Plan


class Exported(NamedTuple):
    """The result of `export_run`."""

    step: int
    """The step of the exported checkpoint."""
    parameters: int
    """The number of parameters of the model."""
    dtype: Dtype
    """The dtype of the exported weights."""


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: Dtype | None = None,
    model: str | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Writes the weights of a checkpoint to the new folder `out`, which `from_pretrained` can load.

    Only a piece of one tensor is in memory at a time. The checksums of all files of the checkpoint
    are verified before anything is written.

    Args:
        run: the folder of a run or of one checkpoint.
        out: the folder to write. It must not exist.
        step: the step of the checkpoint to export, or None for the newest undamaged one.
        dtype: the dtype of the exported weights, or None for `export_dtype` in the run's config. If
            this is empty, it is the dtype that the run computes in.
        model: the folder, or the name on the hub, from which config, tokenizer and generation
            config are copied, or None for the initial model of the run.
        on_note: called with lines for the user.

    Raises UserError if there is no undamaged checkpoint, or if `out` exists or cannot be written.
    """
    refuse_existing(out)
    folder, manifest = undamaged_checkpoint(run, step, on_note)
    home = run if folder != run else run.parent.parent  # RUN/checkpoints/step-00000123
    config = Config.load(home / "config.toml") if (home / "config.toml").is_file() else None
    random = config is not None and config.training.init == "random"
    origin = (
        find_model(model, manifest.model, needed=True)
        if model is not None
        else _origin(home, manifest, on_note)
    )
    model_config = exported_config(origin, manifest.model, init="random" if random else "model")
    if note := not_trained(origin, model_config):
        on_note(note)
    if origin is not None and not random:
        # Opened only for its notes. An export does not need the folder's weights.
        with contextlib.suppress(UserError), folder_weights(origin, on_note):
            pass
    buffers = _buffers(manifest, model_config, None if random else origin, random=random)
    chosen = dtype or (config.saving.export_dtype if config else "") or manifest.workload.dtype
    export(
        StoredState(folder, manifest, buffers),
        manifest,
        model_config,
        out,
        dtype=chosen,
        source=origin,
        chat_template=home / CHAT_TEMPLATE,
    )
    return Exported(manifest.run.step, manifest.model.parameters, chosen)


def undamaged_checkpoint(
    run: Path, step: int | None, on_note: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """Returns the folder and the manifest of a checkpoint, after verifying its files.

    Args:
        run: the folder of a run or of one checkpoint.
        step: the step of the checkpoint, or None for the newest undamaged one.
        on_note: called with a line for each damaged checkpoint that is skipped.

    Raises UserError if there is no such checkpoint, or if it is damaged.
    """
    if (run / "manifest.json").exists():
        manifest = verify(run)
        if step not in (None, manifest.run.step):
            raise UserError(
                str(run),
                found=f"the checkpoint of step {manifest.run.step}",
                allowed=f"a run that has a checkpoint of step {step}",
                fix="name the run, or leave out --from-step",
            )
        return run, manifest
    steps = steps_to_export(run, step)
    for number in steps:
        folder = run / "checkpoints" / checkpoint_name(number)
        try:
            return folder, verify(folder)
        except MalformedFile as error:
            if number == steps[-1]:
                raise
            on_note(f"skipped a damaged checkpoint: {error.where}: found {error.found}")
    raise AssertionError("the last checkpoint is returned or raises")


def _origin(home: Path, manifest: Manifest, on_note: Callable[[str], None]) -> Path | None:
    """Returns the folder of the initial model of the run in `home`, or None if it is not there.

    Raises UserError if the folder contains another model.
    """
    file = home / "plan.toml"
    source = Plan.load(file).source if file.is_file() else ""
    if source and (local := Path(planned_source(source, home))).is_dir():
        return find_model(str(local), manifest.model, needed=False)
    try:
        return find_model(source, manifest.model, needed=True)
    except UserError as error:
        on_note(
            "the tokenizer and the generation config are not exported:"
            f" {error.where}: {error.found}; pass --model with a folder that has them"
        )
        return None


def _buffers(
    manifest: Manifest, config: PretrainedConfig, origin: Path | None, *, random: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the buffers of the decoder layers, by layer and name.

    They are read from the initial model of the run, in `origin`. For a run with random initial
    weights, they are taken from a new model that transformers builds. Raises UserError if neither
    is possible.
    """
    shapes = {layer: named for layer, named in CheckpointNames(config).buffers().items() if named}
    if not shapes:
        return {}
    if origin is None and random:
        whole = meta_model(config, torch.float32, torch.device("cpu"))
        layers = DecoderStack.of(whole).layers_of(whole)
        return {
            layer: {name: layers[int(layer)].get_buffer(name) for name in named}
            for layer, named in shapes.items()
        }
    if origin is None:
        raise UserError(
            f"model {manifest.model.name}",
            found="no folder with the model's buffers",
            allowed="the folder of the model that the run began with",
            fix="pass it with --model",
        )
    with folder_weights(origin) as weights:
        return {
            layer: {name: weights(layer, name, shape).clone() for name, shape in named.items()}
            for layer, named in shapes.items()
        }
