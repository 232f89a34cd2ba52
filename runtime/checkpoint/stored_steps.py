"""Lists the checkpoints of a run by the names of their folders, without importing PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.base.errors import UserError

_NAME = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    """Returns the name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def stored_steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints in `folder`, even damaged ones, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    )


def steps_to_export(run: Path, step: int | None) -> list[int]:
    """Returns the steps of the checkpoints to try: only `step` or, if it is None, all steps, the
    newest first. Raises UserError if the folder `run` has no checkpoint, or no checkpoint of
    `step`.
    """
    steps = stored_steps(run / "checkpoints")
    if step is not None and step not in steps:
        raise UserError(
            str(run / "checkpoints"),
            found=f"no checkpoint of step {step}",
            allowed=", ".join(map(str, steps)) or "none yet",
            fix="name one of these",
        )
    if not steps:
        raise UserError(
            str(run),
            found="no checkpoint" if run.is_dir() else "no such folder",
            allowed="the folder of a checkpoint, or of a run with a checkpoint",
            fix=(
                f"use the trained model in {model}"
                if (model := newest_model(run))
                else "check the path"
            ),
        )
    return [step] if step is not None else steps[::-1]
