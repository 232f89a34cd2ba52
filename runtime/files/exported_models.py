"""The models that a run has exported: `model` and, if the run became longer, `model-STEP`.

No model is replaced. `models.json` in the run's folder lists them in the order in which they were
exported. This module does not import torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatrain.simulator.base.files import convert, read_json, write_json

_LIST = "models.json"


class ExportedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a run."""

    folder: str
    """name of its folder, in that of the run"""
    step: int
    """number of the step after which it was exported"""


def exported_models(run: Path) -> list[ExportedModel]:
    """Returns the models of `run` that are there, the newest last.

    The model of a run that has no list counts as exported before the first step. Raises UserError
    if the list is damaged.
    """
    path = run / _LIST
    listed = convert(read_json(path), list[ExportedModel], str(path)) if path.is_file() else []
    if "model" not in [each.folder for each in listed]:
        listed = [ExportedModel(folder="model", step=0), *listed]
    return [each for each in listed if (run / each.folder / "config.json").is_file()]


def newest_model(run: Path) -> Path | None:
    """Returns the folder of the model that `run` exported last, or None if there is none."""
    models = exported_models(run)
    return run / models[-1].folder if models else None


def add_model(run: Path, step: int) -> Path:
    """Returns the folder for the model of `run` after `step`, and adds it to the list.

    The folder does not exist. An export that is interrupted leaves an entry without a folder, which
    does not count.
    """
    others = (f"model-{step}-{number}" for number in range(2, 10_000))
    names = ["model", f"model-{step}", *others]
    name = next(name for name in names if not (run / name).exists())
    added = ExportedModel(folder=name, step=step)
    write_json(run / _LIST, [*(each for each in exported_models(run) if each != added), added])
    return run / name
