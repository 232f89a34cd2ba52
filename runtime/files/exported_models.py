"""The models that a run has exported: `model` and, if the run became longer, `model-STEP`.

An export never replaces a model. `models.json` in the run's folder lists the models in the order of
their export. This module does not import PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, write_json

_LIST = "models.json"


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that a run has exported."""

    folder: str
    """Name of the model's folder in the run's folder."""
    step: int
    """Number of the step after which the model was exported."""


def exported_models(run: Path) -> list[ExportedModel]:
    """Returns the models of `run` that exist, the newest last.

    If a run has no list, its model counts as exported at step 0. Raises UserError if the list is
    damaged.
    """
    path = run / _LIST
    listed = convert(read_json(path), list[ExportedModel], str(path)) if path.is_file() else []
    if "model" not in [model.folder for model in listed]:
        listed = [ExportedModel(folder="model", step=0), *listed]
    return [model for model in listed if (run / model.folder / "config.json").is_file()]


def newest_model(run: Path) -> Path | None:
    """Returns the folder of the newest model of `run`, or None if there is no model."""
    models = exported_models(run)
    return run / models[-1].folder if models else None


def model_to_evaluate(run: Path) -> Path:
    """Returns the folder of the newest model of `run`. Raises UserError if there is no model."""
    if (model := newest_model(run)) is None:
        raise UserError(
            str(run),
            found="no exported model",
            allowed="a run with the folder model/",
            fix=f"megatrain export {run} --out MODEL, and pass --model MODEL",
        )
    return model


def add_model(run: Path, step: int) -> Path:
    """Adds a model of `run` after `step` to the list, and returns its folder, which does not exist
    yet. If the export is interrupted, the entry has no folder and is ignored.
    """
    others = (f"model-{step}-{number}" for number in range(2, 10_000))
    names = ["model", f"model-{step}", *others]
    name = next(name for name in names if not (run / name).exists())
    added = ExportedModel(folder=name, step=step)
    write_json(run / _LIST, [*(model for model in exported_models(run) if model != added), added])
    return run / name
