"""Within the spread: a measured machine as slow, or as fast, as its own repeats say it may be.

A spread is the interquartile range of a number's repeats over their median: of normally distributed repeats 82 % lie within one of it to either side. All
durations are taken to be long together, or short together, as they are where the host or its neighbours are. Of the held-out steps of
experiments/results/h200-prove 61 of 66 lie between the two predictions; of its fifth run, on a noisy machine, 62 of 65; of its seventh, between whose calibration
and steps the host became 20 % faster, 34 of 63.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.hardware import CostTable


def slower(table: CostTable) -> CostTable:
    """Every measured duration longer by its spread."""
    return _scaled(table, {name: 1 + spread for name, spread in table.spread.items()})


def faster(table: CostTable) -> CostTable:
    """Every measured duration shorter, by as many times."""
    return _scaled(table, {name: 1 / (1 + spread) for name, spread in table.spread.items()})


def _scaled(table: CostTable, factors: dict[str, float]) -> CostTable:
    def scaled(kind: str, size: int | str, duration: int) -> int:
        return max(round(factors.get(f"{kind} {size}", 1.0) * duration), min(duration, 1))

    return msgspec.structs.replace(
        table, curves={kind: tuple((size, scaled(kind, size, duration)) for size, duration in points) for kind, points in table.curves.items()},
        compute={kind: {shape: (amount, scaled(kind, shape, duration)) for shape, (amount, duration) in shapes.items()} for kind, shapes in table.compute.items()},
    )  # fmt: skip
