"""Notes for the user on the settings of a run: learning rate, epochs, and checkpoints."""

from __future__ import annotations

import math

from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.training.config import Config, Saving
from megatrain.runtime.training.learning_rate import (
    HIGHEST_PRETRAINED_RATE,
    PRETRAINED_RATE,
    format_rate,
)
from megatrain.simulator.base.units import format_bytes


def epochs_note(steps: int, steps_per_epoch: float) -> str:
    """Returns a line with the number of steps in an epoch, and the number of epochs in `steps`."""
    text = f"{steps_per_epoch:,.1f}".removesuffix(".0")
    return (
        f"{text} step{'s' * (text != '1')} an epoch; {steps:,}"
        f" step{'s are' if steps > 1 else ' is'} {steps / steps_per_epoch:.2f} epochs"
    )


def learning_rate_notes(config: Config) -> list[str]:
    """Returns a line with the learning rate, and a warning if it is 0, or high for pretrained
    weights.
    """
    rate = config.schedule.rate or 0
    notes = [f"learning rate {config.schedule}"]
    if rate == 0:
        notes.append("warning: a learning rate of 0 changes no weight; --lr sets another one")
    if rate > HIGHEST_PRETRAINED_RATE and config.training.init == "model":
        notes.append(
            f"warning: a learning rate of {format_rate(rate)} can destroy what"
            f" pretrained weights have learned; usual is {format_rate(PRETRAINED_RATE)} to"
            f" {format_rate(2 * PRETRAINED_RATE)}"
        )
    return notes


def best_checkpoints_note(config: Config) -> str:
    """Returns a line with the checkpoints among which `keep_best` can choose, or an empty string if
    all checkpoints are evaluated.
    """
    steps, evaluate, save = (
        config.training.steps,
        config.evaluation.every_steps,
        config.saving.every_steps,
    )
    if not (config.saving.keep_best and save and save % (evaluate or steps)):
        return ""
    evaluated = (
        f"every {math.lcm(save, evaluate)} steps and after the last step"
        if evaluate
        else "only after the last step"
    )
    return (
        f"keep_best chooses only among checkpoints with an evaluation at the same step: {evaluated}"
    )


def little_room_note(saving: Saving, checkpoints: Checkpoints, size: int) -> str:
    """Returns a warning if the free disk space is less than the run's checkpoints need, or an empty
    string. A checkpoint has `size` bytes.
    """
    free = checkpoints.free_bytes()
    # A checkpoint is removed only after the new one is written.
    most = saving.keep_last + saving.keep_best + 1
    if (most - len(checkpoints.steps())) * size <= free:
        return ""
    return (
        f"warning: up to {most} checkpoints of {format_bytes(size)} are on the disk at the same"
        f" time, and {format_bytes(free)} are free; a run stops when it cannot save."
        " --keep-last 1 keeps fewer, and --save-every-minutes 0 saves none"
    )
