"""Agreement: whether a second calibration of a machine says what the first one said, within the spreads that both state.

A number is a median, and its spread the interquartile range over it. Two medians agree where they differ by no more than both spreads and a fiftieth; the
machine is noisy where more than a tenth of the numbers do not: then its speed changed between the two, by more than within either.
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.hardware import CostTable

_RESOLUTION = 0.02  # twice by what the medians of one plan's step differed in two runs (experiments/results/h200-x2-qwen2.5-7b-peers: 2.776 and 2.750 s)
_NOISY = 0.10


class Difference(NamedTuple):
    """A number that the two calibrations do not agree on."""

    name: str
    """`KIND SIZE` or `KIND SHAPE`"""
    first_ns: int
    second_ns: int
    allowed: float
    """relative"""

    @property
    def change(self) -> float:
        """Relative to the first, signed."""
        return self.second_ns / self.first_ns - 1


class Agreement(NamedTuple):
    """Of two calibrations."""

    compared: int
    differences: tuple[Difference, ...]
    """largest change first"""

    @property
    def noisy(self) -> bool:
        return len(self.differences) > _NOISY * self.compared


def agreement(first: CostTable, second: CostTable) -> Agreement:
    """Over the numbers that both have, with their spreads."""
    numbers = [_numbers(table) for table in (first, second)]
    shared = sorted(numbers[0].keys() & numbers[1].keys())
    found = []
    for name in shared:
        (one, spread), (other, again) = (known[name] for known in numbers)
        allowed = spread + again + _RESOLUTION
        if abs(one - other) > allowed * min(one, other):
            found.append(Difference(name, one, other, allowed))
    return Agreement(len(shared), tuple(sorted(found, key=lambda difference: -abs(difference.change))))


def _numbers(table: CostTable) -> dict[str, tuple[int, float]]:
    """(duration in ns, spread) by name."""
    durations = {f"{kind} {size}": duration for kind, points in table.curves.items() for size, duration in points}
    durations |= {f"{kind} {shape}": duration for kind, shapes in table.compute.items() for shape, (_, duration) in shapes.items()}
    return {name: (durations[name], spread) for name, spread in table.spread.items() if durations.get(name)}
