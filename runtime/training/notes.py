"""Notes for the user on a run: its plan, learning rate, epochs and checkpoints, and what changed
when it continues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import EVALUATION_DATA, RunState
from megatrain.runtime.checkpoint.same_run import is_longer
from megatrain.runtime.training.config import Config, Saving
from megatrain.runtime.training.learning_rate import (
    HIGHEST_PRETRAINED_RATE,
    PRETRAINED_RATE,
    format_rate,
)
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.schedule.plan import Plan


def plan_notes(plan: Plan, *, deterministic: bool) -> list[str]:
    """Returns a warning if the rows of `plan` are too long for the model, and a line on step times
    if the run is `deterministic`.
    """
    notes = []
    longest, sequence = plan.model.longest_row, plan.workload.sequence
    if longest is not None and sequence > longest:
        notes.append(
            f"warning: rows of {sequence:,} tokens are longer than the model's own limit of"
            f" {longest:,}"
        )
    if deterministic:
        notes.append(
            "deterministic mode takes longer than predicted: its kernels are slower, and a"
            " checksum of all weights follows each step"
        )
    return notes


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
    steps = config.training.steps
    evaluate = config.evaluation.every_steps
    save = config.saving.every_steps
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


def continuation_notes(
    run: RunState, config: Config, settings: Mapping[str, Any], evaluation_digest: str
) -> list[str]:
    """Returns a line with the step after which a run continues, and a line for each change that
    makes its later steps or losses differ.

    Args:
        run: the run in the checkpoint.
        config: the config with which it continues.
        settings: the settings with which it continues (`settings_of`).
        evaluation_digest: the digest of its evaluation data, or empty if it has none.
    """
    steps = config.training.steps
    more = ", the last step: pass more --steps or --epochs to train further"
    notes = [f"continues after step {run.step}{more if run.step == steps else ''}"]
    if is_longer(run.settings, settings):
        notes.append(
            f"the learning rate now decays over {steps} steps, not"
            f" {run.settings['training.steps']}: the result differs from that of a run that began"
            " with as many"
        )
    before = run.progress.get(EVALUATION_DATA)
    if before and evaluation_digest not in ("", before):
        best = ", and keep_best keeps the best checkpoints of each"
        notes.append(
            f"the evaluation data is not that of the steps until {run.step}: evaluation losses"
            f" before and after cannot be compared{best if config.saving.keep_best else ''}"
        )
    return notes
