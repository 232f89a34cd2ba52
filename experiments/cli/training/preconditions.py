"""Checks the inputs of a training run before PyTorch is loaded.

Loading PyTorch and transformers takes up to half a minute, so mistakes in the command are reported
first. Mistakes in the contents of the model and of the data are reported later.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.experiments.cli import file_arguments
from megatrain.runtime.training.config import Config
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import printable

_MOVED = "pass --model with the folder where the model is now"
"""The fix for a resumed run whose model is gone. Random initial weights would not help, because the
run also needs the model's tokenizer."""


def check_training(
    plan_file: Path, model: str | None, config: Config, *, continues: bool = False
) -> None:
    """Raises UserError if the plan cannot be executed, or if the model, the data or the package of
    a tracker is missing.

    Args:
        plan_file: the plan's file.
        model: the value of `--model`, or None for the model in the plan.
        config: the settings of the run.
        continues: whether the run continues from a checkpoint.
    """
    from megatrain.runtime.files.model_source import planned_source
    from megatrain.runtime.layers.supported import refuse_unsupported
    from megatrain.simulator.policies import executable
    from megatrain.simulator.schedule.plan import Plan

    plan = Plan.load(plan_file)
    with file_arguments.naming(plan_file):
        refuse_unsupported(plan.model, plan.workload)
        executable(plan)
    refuse_missing_weights(model)
    source = model or planned_source(plan.source, plan_file.parent)
    check_inputs(source, config, fix=_MOVED if continues else "")


def refuse_missing_weights(model: str | None) -> None:
    """Raises UserError if `--model` names no folder and cannot be a name on the hub. Random initial
    weights need no model, but a wrong name is still a mistake.
    """
    from megatrain.runtime.files.model_source import hub_name, no_folder

    if model is not None and not hub_name(model) and not os.path.isdir(model):
        error = no_folder(f"--model {model}", model)
        raise UserError(
            error.where,
            found=error.found,
            allowed=error.allowed,
            fix=f"{error.fix}, or leave --model out",
        )


def check_inputs(source: str, config: Config, *, fix: str = "") -> None:
    """Raises UserError if the weights, the data or the package of a tracker is missing, or if a
    path or the chat template cannot be used.

    Args:
        source: the model's folder or its name on the hub. The hub is not asked for it. With random
            initial weights, it is not used.
        config: the settings of the run.
        fix: the fix in the error message for a model that is missing, if there is a better one than
            the usual.
    """
    from megatrain.runtime.data.rows.sources import sources_of
    from megatrain.runtime.data.tokens.tokenize import read_chat_template
    from megatrain.runtime.files.model_folder import NO_WEIGHTS, weight_files
    from megatrain.runtime.files.model_source import name_on_hub
    from megatrain.runtime.training.trackers import refuse_missing

    data = config.data
    if config.training.init == "model" and name_on_hub(source, fix=fix) is None:
        weight_files(Path(source), otherwise=fix or NO_WEIGHTS)
    for path in (*data.paths, data.evaluation_data, data.chat_template, data.cache):
        _refuse_other_than_utf8(path)
    sources_of(data)
    if data.chat_template:
        read_chat_template(data.chat_template)
    refuse_missing(config.logging)


def _refuse_other_than_utf8(path: str) -> None:
    """Raises UserError if `path` is not UTF-8 text, because TOML files cannot store it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(
            printable(path),
            found="a name that is not UTF-8 text, or a locale that is not UTF-8",
            allowed="a name that config.toml can store",
            fix="rename it, or set LC_ALL=C.UTF-8",
        ) from None
