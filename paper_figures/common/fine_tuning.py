"""Table 3's job with a model of 0.5 B parameters: exact state against bf16 weights alone, at two
learning rates and with three seeds. `experiments/paper_data/table3_large.py` trains it.

All means and ranges are over seeds. The seed sets the initial weights and the order of the data, so
the two ways to train are compared seed by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from megatrain.paper_figures.common.results import Results
from megatrain.simulator.base.errors import UserError

FOLDER = "h200-table3"
"""The folder of the stored results."""
EXACT, BF16 = "exact", "bf16 weights alone"


class SeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one way to train, with one seed and one learning rate."""

    way: str
    """`EXACT` or `BF16`."""
    rate: float
    """Learning rate of fine-tuning."""
    losses: list[float]
    """Training loss of each step, in nats per byte."""
    evaluations: list[tuple[int, float, float]]
    """(step, held-out loss in nats per byte, share of held-out bytes predicted correctly)."""
    moved: float
    """Distance of the last weights from the first, divided by the norm of the first."""
    changed: float
    """Share of the weights that differ from the first."""

    @property
    def fall(self) -> float:
        """The first held-out loss minus the last, in nats per byte."""
        return self.evaluations[0][1] - self.evaluations[-1][1]


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/table3_large.py` stores for one seed."""

    date: str
    """Day of the run."""
    commit: str
    """Commit of the code. A `+` means that tracked files were changed."""
    machine: dict[str, str | int]
    """Device, versions and sizes of the machine."""
    model: str
    """A model of the library."""
    parameters: int
    """Number of parameters."""
    batch: int
    """Sequences in a step."""
    sequence: int
    """Bytes in a sequence."""
    seed: int
    """The seed."""
    steps_before: int
    """Steps of the training before, on other text."""
    rate_before: float
    """Learning rate of the training before."""
    text: str
    """What the texts are, and their checksum."""
    runs: list[SeedRun]
    """A run for each way and learning rate."""

    def run(self, way: str, rate: float) -> SeedRun:
        """Returns the run of a way to train at a learning rate."""
        return next(run for run in self.runs if (run.way, run.rate) == (way, rate))


class MeanAndRange(NamedTuple):
    """The mean and the range of a value over seeds."""

    mean: float
    """The mean."""
    least: float
    """The smallest value."""
    most: float
    """The largest value."""


class FineTuning:
    """The stored seeds of one job. `seeds` must not be empty and must have the same job."""

    def __init__(self, seeds: list[Seed]) -> None:
        self.seeds = sorted(seeds, key=lambda seed: seed.seed)
        self.job = self.seeds[0]

    @property
    def rates(self) -> list[float]:
        """The learning rates, largest first."""
        return sorted({run.rate for run in self.job.runs}, reverse=True)

    @property
    def steps(self) -> list[int]:
        """The steps at which the held-out text was evaluated, from 0."""
        return [step for step, *_ in self.job.runs[0].evaluations]

    def spread(self, way: str, rate: float, value: Callable[[SeedRun], float]) -> MeanAndRange:
        """Returns the spread of a value of the runs of a way to train at a learning rate."""
        return _spread(value(seed.run(way, rate)) for seed in self.seeds)

    def held_out(self, way: str, rate: float) -> list[MeanAndRange]:
        """Returns the spread of the held-out loss at each of `steps`, in nats per byte."""
        count = len(self.steps)
        return [
            self.spread(way, rate, lambda run, at=at: run.evaluations[at][1])  # type: ignore[misc]
            for at in range(count)
        ]

    def relative(self, rate: float, value: Callable[[SeedRun], float]) -> MeanAndRange:
        """Returns the spread of a value with bf16 weights alone, divided by the value with exact
        state and the same seed.
        """
        return _spread(
            value(seed.run(BF16, rate)) / value(seed.run(EXACT, rate)) for seed in self.seeds
        )

    def exact_is_always_lower(self) -> bool:
        """Returns whether exact state has the lower held-out loss with each seed, at each learning
        rate and in each evaluation after the first.
        """
        return all(
            exact[1] < rounded[1]
            for seed in self.seeds
            for rate in self.rates
            for exact, rounded in zip(
                seed.run(EXACT, rate).evaluations[1:],
                seed.run(BF16, rate).evaluations[1:],
                strict=True,
            )
        )


def fine_tuning(results: Results) -> FineTuning:
    """Returns the stored seeds. Raises UserError if there is none, if a file is malformed, or if
    the seeds belong to different jobs or lack a run.
    """
    found = FineTuning(results.seeds(FOLDER, Seed))
    wanted = {(way, rate) for way in (EXACT, BF16) for rate in found.rates}
    lacking = [
        seed.seed for seed in found.seeds if {(run.way, run.rate) for run in seed.runs} != wanted
    ]
    jobs = len({_job(seed) for seed in found.seeds})
    if jobs > 1 or lacking:
        raise UserError(
            str(results.folder / FOLDER),
            found=f"seed {lacking[0]} without a run" if lacking else f"seeds of {jobs} jobs",
            allowed="the same model, text, batch and steps, and both ways at each rate",
            fix=f"make them with the command that {results.folder / FOLDER / 'README.md'} names",
        )
    return found


def _job(seed: Seed) -> tuple[object, ...]:
    """Returns what all seeds of a job have in common."""
    steps = {tuple(step for step, *_ in run.evaluations) for run in seed.runs}
    return (seed.model, seed.batch, seed.sequence, seed.steps_before, seed.text, *sorted(steps))


def _spread(values: Iterable[float]) -> MeanAndRange:
    found = list(values)
    return MeanAndRange(statistics.fmean(found), min(found), max(found))
