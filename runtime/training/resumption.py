"""The settings that must not change when a run is resumed, and what else a run must have for it.
This module does not import PyTorch.

The optimizer and the workload must not change either. A checkpoint stores them separately, so they
are not included here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.same_run import INIT, refuse_other_run
from megatrain.runtime.checkpoint.stored_steps import checkpoint_name, stored_steps
from megatrain.runtime.files.exported_models import newest_model
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.training.config import Config, checked
from megatrain.runtime.training.stopped_run import no_checkpoint
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

if TYPE_CHECKING:
    from megatrain.runtime.checkpoint.folder import Checkpoints
    from megatrain.runtime.training.opening import BatchSource

_DATA_FIELDS = ("split", "columns", "loss", "evaluation_fraction", "evaluation_documents")


def settings_of(config: Config, data: BatchSource | None) -> dict[str, Any]:
    """Returns the settings that must not change, as plain values keyed by `SECTION.FIELD`.

    They are the learning-rate schedule, the seed, the initial weights, the options for reading and
    packing the data, and the digest of the data. The path of the data may change. The number of
    steps is included only if the learning rate depends on it.

    Args:
        config: the config of the run.
        data: the training data, or None if it has not been read yet. Without data, the packing and
            the digest are left out. If the config has epochs and not yet steps, the number of steps
            is left out, too. The digest is empty if `data` has none.
    """
    settings = {
        f"schedule.{key}": value
        for key, value in msgspec.to_builtins(config.schedule).items()
        if value is not None
    }
    settings |= {f"data.{key}": getattr(config.data, key) for key in _DATA_FIELDS}
    if data is not None:
        settings |= {
            "data.packing": getattr(data, "packing", ""),
            "data.digest": getattr(data, "digest", ""),
        }
    settings["training.seed"] = config.training.seed
    settings[INIT] = config.training.init
    if config.training.steps:
        decays = config.schedule.kind != "constant"
        settings["training.steps"] = config.training.steps if decays else None
    return settings


def refuse_to_start_over(
    checkpoints: Checkpoints, resume: Literal["newest", "scratch"] | int
) -> None:
    """Raises UserError if a resumed run has no checkpoint, or if a run that is to begin again
    ("scratch") has a checkpoint or a model, which would be lost.
    """
    run, done = checkpoints.folder.parent, checkpoints.steps()
    if resume != "scratch":
        if not done:
            raise no_checkpoint(run)
        return
    model = newest_model(run)
    if done or model:
        raise UserError(
            f"{run}: --from-scratch",
            found=f"a checkpoint of step {done[-1]}" if done else f"a trained model, {model}",
            allowed="a run without checkpoints and model",
            fix="leave --from-scratch out" if done else "train again with another --out",
        )


def refuse_done_steps(
    done: list[int], start: Literal["newest"] | int | None, steps: int, epochs: float = 0.0
) -> None:
    """Raises UserError if the checkpoint to continue from is after the last step.

    Args:
        done: the steps of the run's checkpoints, in ascending order.
        start: the checkpoint to continue from, or None for a run that begins at step 1.
        steps: the last step of the training, or 0 if it is not known yet.
        epochs: the epochs that these steps are, or 0 if the config has a number of steps.
    """
    least = done[-1] if done and start == "newest" else start
    if done and steps and isinstance(least, int) and least > steps:
        raise UserError(
            f"training: {'epochs' if epochs else 'steps'}",
            found=f"{epochs:g}, which is {steps} steps" if epochs else steps,
            allowed=f"{'steps ' if epochs else ''}>= {least}, since that many steps are done"
            " already",
            fix=f"train to a step after {least}",
        )


def refuse_changed_run(
    run: Path, plan: Plan, config: Config, start: Literal["newest"] | int
) -> None:
    """Raises UserError if `plan` or `config` do not continue the run in the folder `run`.

    Only what is known before the data is read is compared. A damaged checkpoint is ignored here:
    the trainer reports it, with the newest undamaged one.

    Args:
        run: the folder of the run.
        plan: the plan under which it is to continue.
        config: the settings with which it is to continue.
        start: the checkpoint to continue from.
    """
    config = checked(config)
    done = stored_steps(run / "checkpoints")
    refuse_done_steps(done, start, config.training.steps)
    step = done[-1] if done and start == "newest" else start
    if step not in done:
        return
    folder = run / "checkpoints" / checkpoint_name(step)
    try:
        manifest = Manifest.load(folder)
    except MalformedFile:
        return
    refuse_other_run(
        manifest, plan, config.optimizer, settings_of(config, None), folder, known=False
    )
