"""Reads the machine and the steps of a run from its folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json, read_text


class Evaluation(NamedTuple):
    """One evaluation of a run."""

    step: int
    """Number of the step after which the weights were evaluated."""
    loss: float
    """Mean loss over all labelled tokens."""
    perplexity: float | None
    """exp(loss), or None if this is too large for a float."""
    tokens: int
    """Number of labelled tokens."""
    seconds: float
    """Wall time of the evaluation."""


class StepRecord(NamedTuple):
    """The machine and the steps of a run. The lists of steps have one entry for each step."""

    device: str
    """Name of the GPU, or of the CPU if there is none."""
    cores: int
    """CPU cores of the host."""
    steps: list[int]
    """Number of each step."""
    losses: list[float]
    """Loss of each step."""
    rates: list[float]
    """Learning rate of each step."""
    norms: list[float | None]
    """Gradient norm of each step before clipping. None if the plan does not clip."""
    speeds: list[float]
    """Tokens per second of each step."""
    seconds: list[float]
    """Wall time of each step."""
    evaluations: list[Evaluation]
    """The evaluations."""
    first: int = 0
    """Position in `steps` of the first step under the run's current plan."""

    @property
    def steady_seconds(self) -> dict[int, float]:
        """Step number -> wall time in seconds, for the steps under the run's current plan. Warm-up
        steps are left out, unless there are no other steps.
        """
        times = list(zip(self.steps, self.seconds, strict=True))[self.first :]
        return dict(times[WARM_UP_STEPS:] or times)

    @property
    def known_norms(self) -> list[tuple[int, float]]:
        """(step number, gradient norm) of the steps with a norm."""
        pairs = zip(self.steps, self.norms, strict=True)
        return [(step, norm) for step, norm in pairs if norm is not None]

    @property
    def smoothing(self) -> int:
        """Number of steps over which the loss is averaged in pictures; 0 for a short run."""
        return window if (window := len(self.steps) // 25) > 1 else 0

    @property
    def final_loss(self) -> float:
        """Mean loss of the last `smoothing` steps, or of the last one in a short run."""
        return statistics.fmean(self.losses[-max(self.smoothing, 1) :])


def read_record(folder: Path) -> StepRecord:
    """Returns the contents of `environment.json` and `metrics.jsonl` in a run's folder.

    Raises UserError if their content is unexpected.
    """
    machine, text = read_json(folder / "environment.json"), read_text(folder / "metrics.jsonl")
    name = "environment.json"
    try:
        device, cores = str(machine["device"]), int(machine["cores"])
        name = "metrics.jsonl"
        rows = [json.loads(line) for line in text.splitlines()]
        evaluations = [
            Evaluation(
                int(row["step"]),
                float(row["evaluation_loss"]),
                None if row["perplexity"] is None else float(row["perplexity"]),
                int(row["tokens"]),
                float(row["seconds"]),
            )
            for row in rows
            if row.get("evaluation_loss") is not None
        ]
        rows = [row for row in rows if "evaluation_loss" not in row]

        def column(key: str) -> list[float]:
            return [float(row[key]) for row in rows]

        norms = [row["gradient_norm"] for row in rows]
        return StepRecord(
            device=device,
            cores=cores,
            steps=[int(row["step"]) for row in rows],
            losses=column("loss"),
            rates=column("rate"),
            norms=[None if norm is None else float(norm) for norm in norms],
            speeds=column("tokens_per_second"),
            seconds=column("seconds"),
            evaluations=evaluations,
            first=_first_of_plan([str(row.get("schedule")) for row in rows]),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            str(folder / name),
            found="other content",
            allowed="what `megatrain train` writes",
            fix="train again",
        ) from None


def _first_of_plan(schedules: Sequence[str]) -> int:
    """Returns the position of the first step after which the schedule did not change. `schedules`
    has the digest of each step's schedule.
    """
    others = [index for index, digest in enumerate(schedules) if digest != schedules[-1]]
    return others[-1] + 1 if others else 0
