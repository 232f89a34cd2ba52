"""Summarizes the rows of a comparison: means and spreads over seeds, and differences from `exact`.

Runs of a variant and of `exact` with the same seed are compared in pairs, because they start from
the same weights and have the same data. The *spread* is the standard deviation over seeds. The
*standard error* of a mean difference is the standard deviation of the differences divided by the
square root of their number. Both need two seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatrain.experiments.quality.rows import Part, QualityRow
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.model.state_format import EXACT

_LAST = 10
"""The number of last values of `QualityRow.training` that are averaged for the table."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of some numbers and their spread."""

    mean: float
    """The mean."""
    deviation: float | None
    """Standard deviation with n - 1; None for one number."""
    error: float | None
    """Standard error of the mean; None for one number."""
    count: int
    """How many numbers there are."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the mean and the spread of at least one value."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(
            mean=statistics.fmean(values),
            deviation=deviation,
            error=None if deviation is None else deviation / len(values) ** 0.5,
            count=len(values),
        )


class MovementSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How far fine-tuning moved the weights, compared with `exact`, as means over the seeds."""

    relative: float
    """L2 norm of the change, divided by that of the first weights."""
    changed: float
    """Share of the weights that changed."""
    progress: float | None
    """The component of the change in the direction of `exact`'s change, divided by the length of
    `exact`'s change. 1 means as far as `exact` in its direction. None without `exact`."""
    cosine: float | None
    """Cosine of the angle between the change and `exact`'s change. None without `exact`."""


class VariantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the runs of one variant."""

    part: Part
    """Whether the runs are trainings from random weights or fine-tunings."""
    variant: str
    """The variant's name."""
    seeds: tuple[int, ...]
    """Seeds of the complete runs."""
    failures: tuple[str, ...]
    """One line for each failed run, with the reason."""
    held_out: Spread | None = None
    """Loss on the held-out text after the last step; None if no run is complete."""
    difference: Spread | None = None
    """`held_out` minus that of `exact` with the same seed; None without such runs."""
    gain: Spread | None = None
    """Change of the loss on the held-out text in a fine-tuning; None for trainings."""
    training: float | None = None
    """Mean training loss of the last steps."""
    step_seconds: float | None = None
    """Median over the runs of their median step times, in seconds."""
    curve: tuple[tuple[int, Spread], ...] = ()
    """(number of a step, loss on the held-out text after it)."""
    differences: tuple[tuple[int, Spread], ...] = ()
    """(number of a step, difference from `exact` with the same seed after it)."""
    movement: MovementSummary | None = None
    """How far the weights moved; None for trainings."""


def summarize_variants(
    rows: Sequence[QualityRow], folder: Path | None = None
) -> list[VariantSummary]:
    """Returns a summary of each variant of each part, with `exact` first.

    Args:
        rows: the rows of all runs.
        folder: the folder of the comparison, which has the changes of weights. With None, progress
            and cosine are left out.
    """
    keys = dict.fromkeys((row.spec.part, row.spec.variant) for row in rows)
    ordered = sorted(keys, key=lambda key: (key[0] != "training", key[1] != EXACT))
    return [_summary(rows, part, variant, folder) for part, variant in ordered]


def _summary(
    rows: Sequence[QualityRow], part: Part, variant: str, folder: Path | None
) -> VariantSummary:
    """Returns the summary of one variant over its seeds that ended without a failure."""
    of_part = [row for row in rows if row.spec.part == part]
    found = {row.spec.seed: row for row in of_part if row.spec.variant == variant}
    done = {seed: row for seed, row in sorted(found.items()) if not row.failure}
    exact = {row.spec.seed: row for row in of_part if row.spec.variant == EXACT and not row.failure}
    failures = tuple(
        f"seed {row.spec.seed}: {row.failure}" for row in found.values() if row.failure
    )
    empty = VariantSummary(part=part, variant=variant, seeds=tuple(done), failures=failures)
    if not done:
        return empty
    pairs = [(row, exact[seed]) for seed, row in done.items() if seed in exact]
    differs = bool(pairs) and variant != EXACT
    steps = [step for step, _ in next(iter(done.values())).held_out]
    curves = {seed: dict(row.held_out) for seed, row in done.items()}
    return msgspec.structs.replace(
        empty,
        held_out=Spread.of([_last(row) for row in done.values()]),
        difference=Spread.of([_last(row) - _last(other) for row, other in pairs])
        if differs
        else None,
        gain=(
            Spread.of([_last(row) - row.held_out[0][1] for row in done.values()])
            if part == "fine-tune"
            else None
        ),
        training=statistics.fmean(
            statistics.fmean(loss for _, loss in row.training[-_LAST:]) for row in done.values()
        ),
        step_seconds=statistics.median(row.step_seconds for row in done.values()),
        curve=tuple(
            (step, Spread.of([curve[step] for curve in curves.values()]))
            for step in steps
            if all(step in curve for curve in curves.values())
        ),
        differences=tuple(
            (step, Spread.of([dict(a.held_out)[step] - dict(b.held_out)[step] for a, b in pairs]))
            for step in steps
            if differs and all(step in dict(each.held_out) for pair in pairs for each in pair)
        ),
        movement=_movement(list(done.values()), folder),
    )


def _last(row: QualityRow) -> float:
    return row.held_out[-1][1]


def _movement(rows: Sequence[QualityRow], folder: Path | None) -> MovementSummary | None:
    """Returns how far the weights moved in the runs of one variant, or None for trainings."""
    moved = [(row, row.movement) for row in rows if row.movement is not None]
    if not moved:
        return None
    along = [
        found
        for row, _ in moved
        if folder is not None and (found := _against_exact(row, folder)) is not None
    ]
    return MovementSummary(
        relative=statistics.fmean(movement.relative for _, movement in moved),
        changed=statistics.fmean(movement.changed for _, movement in moved),
        progress=statistics.fmean(progress for progress, _ in along) if along else None,
        cosine=statistics.fmean(cosine for _, cosine in along) if along else None,
    )


def _against_exact(row: QualityRow, folder: Path) -> tuple[float, float] | None:
    """Returns the progress and the cosine of a run, compared with `exact` and the same seed.

    They are computed from the stored changes of weights. Returns None if one of the two runs has
    not stored them.
    """
    other = msgspec.structs.replace(row.spec, variant=EXACT)
    paths = [folder / "runs" / f"{spec.name}.npy" for spec in (row.spec, other)]
    if not all(path.is_file() for path in paths):
        return None
    mine, exact = (np.load(path).astype(np.float64) for path in paths)
    return along(mine, exact)


def along(mine: np.ndarray, exact: np.ndarray) -> tuple[float, float] | None:
    """Returns the component of `mine` [n] in the direction of `exact` [n], divided by the length of
    `exact`, and the cosine between them. Returns None if one of them is zero.
    """
    product, square = float(mine @ exact), float(exact @ exact)
    length = float(mine @ mine) ** 0.5
    return (product / square, product / (length * square**0.5)) if square and length else None


def table(summaries: Sequence[VariantSummary]) -> str:
    """Returns a table for each part, with a line for each variant and for each failure."""
    lines: list[str] = []
    for part, title in (
        ("training", "from random weights"),
        ("fine-tune", "fine-tuning at a constant rate, from the weights of one `exact` run"),
    ):
        chosen = [each for each in summaries if each.part == part]
        if not chosen:
            continue
        lines += [
            *([""] if lines else []),
            title,
            *_part_table(chosen, fine_tune=part != "training"),
        ]
    return "\n".join(lines)


def _part_table(chosen: Sequence[VariantSummary], *, fine_tune: bool) -> list[str]:
    """Returns the lines of one part's table, and after them one line for each failure."""
    head = ["variant", "seeds", "held-out loss", "spread", "minus exact", "standard error"]
    head += ["training loss", "step"]
    if fine_tune:
        head += ["change of loss", "moved", "weights changed", "along exact", "cosine"]
    rows, digits = [head], ".6f" if fine_tune else ".4f"
    for each in chosen:
        if each.held_out is None:
            continue
        assert each.training is not None
        assert each.step_seconds is not None
        row = [
            each.variant,
            str(len(each.seeds)),
            f"{each.held_out.mean:{digits}}",
            _number(each.held_out.deviation, digits),
            _number(each.difference.mean if each.difference else None, f"+{digits}"),
            _number(each.difference.error if each.difference else None, digits),
            f"{each.training:.4f}",
            f"{1e3 * each.step_seconds:.1f} ms",
        ]
        if fine_tune:
            moved = each.movement
            row += [
                _number(each.gain.mean if each.gain else None, f"+{digits}"),
                _number(moved.relative if moved else None, ".2e"),
                _number(moved.changed if moved else None, ".1%"),
                _number(moved.progress if moved else None, ".3f"),
                _number(moved.cosine if moved else None, ".3f"),
            ]
        rows.append(row)
    failures = [f"{each.variant}, {text}" for each in chosen for text in each.failures]
    return align(rows) + failures if len(rows) > 1 else failures


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
