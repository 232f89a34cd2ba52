"""Functions on the folder of a run that has ended: its last step, its newest checkpoint, and the
command that continues it.

This module does not import torch, so a command can refuse a folder at once.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from megatrain.runtime.checkpoint.stored_steps import stored_steps
from megatrain.runtime.files.exported_models import newest_model
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan


class _Row(msgspec.Struct):
    """A line of `metrics.jsonl`, with the only key that every line has."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    """The number of the step, from 1."""


_CHECK = b', "check": "'
"""What precedes the checksum at the end of a line."""


def metrics_line(row: Mapping[str, object]) -> str:
    """Returns `row` as a line of JSON whose last key, `check`, has the CRC-32 of what precedes it.

    A resumed run recognizes by it a line that was changed.
    """
    text = json.dumps(row)
    return f'{text[:-1]}{_CHECK.decode()}{zlib.crc32(text.encode()):08x}"}}\n'


def _unchanged(line: bytes) -> bool:
    """Returns whether a line has its own checksum. Lines of older versions have none and count as
    unchanged.
    """
    text, found, check = line.rpartition(_CHECK)
    return not found or check.rstrip() == f'{zlib.crc32(text + b"}"):08x}"}}'.encode()


def readable(metrics: Path) -> tuple[list[tuple[int, str]], int]:
    """Returns (step, line) for each valid line of `metrics`, and the number of damaged lines.

    An incomplete line at the end is left out, and not counted as damaged.
    """
    kept: list[tuple[int, str]] = []
    damaged = 0
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    for line in lines:
        try:
            row = msgspec.json.decode(line, type=_Row)
            text = line.decode()
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged += line.endswith(b"\n")
        else:
            if _unchanged(line):
                kept.append((row.step, text))
            else:
                damaged += 1
    return kept, damaged


def last_step(run: Path) -> int:
    """Returns the number of the last step in the metrics of `run`, or 0."""
    return max((step for step, _ in readable(run / "metrics.jsonl")[0]), default=0)


def last_checkpoint(run: Path) -> int:
    """Returns the step of the newest checkpoint of `run`, or 0 if it has none."""
    return (stored_steps(run / "checkpoints") or [0])[-1]


def command_to_continue(run: Path) -> str:
    """Returns the command that continues `run`, or begins it again if it has no checkpoint. With
    several ranks, it begins with `torchrun`.
    """
    again = "" if last_checkpoint(run) else " --from-scratch"
    command = f"megatrain train --resume {shlex.quote(str(run))}{again}"
    with contextlib.suppress(UserError, OSError):
        plan = Plan.load(run / "plan.toml")
        if plan.gpus > 1:
            from megatrain.runtime.ranks import launcher  # slow

            return f"{launcher(plan)} -m {command}"
    return command


def how_to_continue(run: Path | None) -> str:
    """Returns what a training from Python has saved in `run`, and how to continue. `run` is None if
    there is no run folder.
    """
    if run is None:
        return "nothing was saved, since it has no run folder (`out`)"
    saved = last_checkpoint(run)
    state = f"the newest checkpoint is that of step {saved}" if saved else "there is no checkpoint"
    what, resume = ("continue", "newest") if saved else ("begin again", "scratch")
    return (
        f"{state}; to {what}, call `fit` of a new Trainer with the same arguments and"
        f' resume="{resume}"'
    )


def no_checkpoint(run: Path) -> UserError:
    """Returns the error for resuming `run`, which has no checkpoint."""
    model = newest_model(run)
    return UserError(
        str(run),
        found=f"no checkpoint to continue from{f', but a trained model, {model}' if model else ''}",
        allowed="a run with a checkpoint",
        fix="train again with another --out"
        if model
        else "pass --from-scratch to begin it again at step 1",
    )


def how_it_stopped(run: Path) -> str:
    """Returns one line with the last step, the newest checkpoint, and the command that continues
    `run`. If `run` has a model but no checkpoint, the line names the model instead of a command.
    """
    saved = last_checkpoint(run)
    # A step whose metrics could not be written may have a checkpoint.
    step = max(last_step(run), saved)
    if not saved:
        when = f"after step {step}" if step else "before the first step"
        if model := newest_model(run):
            return f"stopped {when}; no checkpoint was saved, but the model is in {model}"
        return f"stopped {when}; not saved; begin again with: {command_to_continue(run)}"
    what = "saved" if saved == step else f"saved after step {saved}"
    return f"stopped after step {step}; {what}; continue with: {command_to_continue(run)}"
