"""Grid: a compute op's duration at tokens T and sequence length S between those that were measured.

    duration(T, S) = f(T) + T g(S)

f is a line between the token counts measured at one sequence length, the one with most of them; g is what a token takes more at another length,
a line between the lengths: a causal kernel that reaches efficiency x S / (S + h) of the peak takes T (S + h) over a constant (`datasheet.py`). Ops
without attention do not hang on S, and g is 0. Nothing is said beyond what was measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from megatrain.simulator.costs.interpolation import interpolate


class Point(NamedTuple):
    """One measurement."""

    tokens: int
    sequence: int
    duration_ns: int


def between(points: Iterable[Point], tokens: int, sequence: int, *, attends: bool) -> int | None:
    """ns at `tokens` and `sequence`; None where either lies outside of what was measured, or too little was. `attends`: it hangs on the sequence.

    >>> measured = [Point(100, 10, 50), Point(300, 10, 130), Point(200, 30, 110)]
    >>> between(measured, 200, 10, attends=True), between(measured, 200, 20, attends=True), between(measured, 400, 10, attends=True)
    (90, 100, None)
    """
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        found[point.sequence if attends else 0][point.tokens].append(point.duration_ns)
    if not found:
        return None
    reference = max(found, key=lambda length: (len(found[length]), -length))
    curve = _curve(found[reference])
    length = sequence if attends else 0
    if len(curve) < 2 or not curve[0][0] <= tokens <= curve[-1][0]:
        return None
    more = {reference: 0.0}  # ns a token
    for other, measured in found.items():
        inside = [(ns - interpolate(curve, count)[0]) / count for count, ns in _curve(measured) if curve[0][0] <= count <= curve[-1][0]]
        if other != reference and inside:
            more[other] = statistics.mean(inside)
    if not min(more) <= length <= max(more):
        return None
    extra = more[length] if length in more else _line(sorted(more.items()), length)
    return max(round(interpolate(curve, tokens)[0] + tokens * extra), 1)


def _curve(durations: dict[int, list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((tokens, round(statistics.mean(times))) for tokens, times in sorted(durations.items()))


def _line(points: list[tuple[int, float]], place: int) -> float:
    """Between the two neighbours of `place`."""
    (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(points) if pair[0][0] <= place <= pair[1][0])
    return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
