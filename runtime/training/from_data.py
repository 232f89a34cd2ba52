"""What the training data decides: the length of documents in the plan, and the steps of epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatrain.runtime.training.config import Config
from megatrain.runtime.training.notes import epochs_note
from megatrain.runtime.training.opening import BatchSource
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.model.attention_masks import document_tokens
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan


def with_document_length(
    plan: Plan, origin: Path, data: BatchSource, predict: Callable[[Plan, Path], float] | None
) -> tuple[Plan, str]:
    """Returns the plan with the length of the documents of `data`, and a note about it. Returns
    `plan` itself and an empty string if it has a length already, if `data` does not know the
    length, or if the step time does not depend on it.

    No bit depends on the length, but the step time does, so the plan gets a new prediction of it.

    Args:
        plan: the plan.
        origin: the folder to which its paths are relative.
        data: the training data.
        predict: returns the predicted step time in seconds of a plan with this origin, or None to
            keep the plan's prediction.
    """
    length = getattr(data, "document_length", None)
    if length is None or plan.workload.document_length is not None:
        return plan, ""
    work = msgspec.structs.replace(plan.workload, document_length=length)
    tokens = document_tokens(plan.model, work)
    if tokens is None:
        return plan, ""
    plan = msgspec.structs.replace(plan, workload=work)
    note = (
        "the plan is for rows of one document, but the mean over all tokens of the data is"
        f" documents of {tokens:,} tokens"
    )
    if predict is not None and plan.prediction is not None:
        seconds = predict(plan, origin)
        prediction = msgspec.structs.replace(plan.prediction, step_seconds=seconds)
        plan = msgspec.structs.replace(plan, prediction=prediction)
        note += f"; a step is predicted to take {format_seconds(seconds)} with these"
    return plan, f"{note}; `megatrain plan --document-length {tokens}` plans for them"


def with_counted_steps(config: Config, work: Workload, data: BatchSource) -> tuple[Config, str]:
    """Returns the config with steps instead of epochs, and a note that says how many steps an epoch
    has. The note is empty if `data` does not know its number of rows.

    Raises UserError if the config has epochs and `data` does not know its number of rows.
    """
    training = config.training
    rows: int = getattr(data, "rows", 0)
    steps_per_epoch = rows / (work.batch * work.accumulation)
    if training.epochs:
        if not rows:
            raise UserError(
                "training: epochs",
                found=f"{training.epochs:g}, and data without the attribute `rows`",
                allowed="steps, or data that knows its number of rows",
                fix="set steps",
            )
        # Rounded before `ceil`, because 0.1 * 30 is a little more than 3.
        steps = math.ceil(round(training.epochs * steps_per_epoch, 6))
        config = config.with_steps(max(1, steps))
    return config, epochs_note(config.training.steps, steps_per_epoch) if rows else ""
