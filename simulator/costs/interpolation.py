"""Linear interpolation of measured durations: over a size, or over tokens and sequence length.

`between` interpolates a compute op's duration over tokens T and sequence length S:

    duration(T, S) = f(T) + T g(S)

f is linear between the token counts that were measured at one sequence length, the length with the
most token counts. g is the extra time per token at another length, and is linear between the
measured lengths. A causal attention kernel that reaches efficiency x S / (S + h) of the peak
(`datasheet.py`) takes a time proportional to T (S + h), which is linear in S. Ops without attention
do not depend on S, so g is 0. There is no extrapolation.

f has one exception. The layers of a small model take the same time for few tokens, whatever their
number, because the GPU waits for the host to call their functions. Above such a flat part, f is
constant until the GPU takes longer: its time is proportional to the tokens.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


def interpolate(points: tuple[tuple[int, int], ...], size: int) -> tuple[int, bool]:
    """Returns (duration in ns, extrapolated) at `size` on a curve of (size, ns) points.

    The points are in ascending order of size. Between two points the duration is linear. Beyond an
    outermost point it continues the line from that point to the nearest one whose size differs by
    at least a quarter. The slope of a shorter line has a large error. Without such a point, the
    line to the farthest point is used, between the duration of the outermost point and one that is
    proportional to the size. The result is at least 0. A curve of one point is proportional, or a
    constant if the point's size is 0.

    >>> interpolate(((100, 20), (200, 30)), 150), interpolate(((100, 20), (200, 30)), 400)
    ((25, False), (50, True))
    >>> interpolate(((100, 20), (200, 30), (201, 33)), 402)
    (59, True)
    """
    (least, _), (most, longest) = points[0], points[-1]
    if least <= size <= most:
        right = bisect.bisect_left(points, (size, -1))
        if points[right][0] == size:
            return points[right][1], False
        return _line_at(points[right - 1], points[right], size), False
    if not most:
        return longest, False
    end, *others = points if size < least else points[::-1]
    x, y = end
    if far := next((other for other in others if 4 * abs(other[0] - x) >= x), None):
        return max(_line_at(end, far, size), 0), True
    proportional = -(-y * size // x)
    if not others:
        return proportional, True
    low, high = sorted((y, proportional))
    return min(max(_line_at(end, others[-1], size), low), high), True


def _line_at(one: tuple[int, int], other: tuple[int, int], size: int) -> int:
    """Returns the duration in ns at `size` on the line through two points, rounded up."""
    (x0, y0), (x1, y1) = one, other
    return y0 - (y1 - y0) * (size - x0) // (x0 - x1)


_FLAT, _MORE = 1.1, 1.5
"""Two token counts that differ by at least the factor `_MORE` are a flat part if their durations
differ by at most the factor `_FLAT`."""


class Point(NamedTuple):
    """One measurement of a compute op."""

    tokens: int
    """Tokens per micro-batch."""
    sequence: int
    """Tokens per sequence."""
    duration_ns: int
    """The measured duration."""


def between(points: Iterable[Point], tokens: int, sequence: int, *, attends: bool) -> int | None:
    """Returns the duration in ns at `tokens` and `sequence`, or None if one of them is outside the
    measured range or if there are too few points. `attends` says whether the op has attention, and
    therefore a duration that depends on the sequence length.

    >>> measured = [Point(100, 10, 50), Point(300, 10, 130), Point(200, 30, 110)]
    >>> between(measured, 200, 10, attends=True), between(measured, 200, 20, attends=True)
    (90, 100)
    >>> between(measured, 400, 10, attends=True) is None
    True
    """
    # sequence length -> tokens -> durations
    lengths: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        lengths[point.sequence if attends else 0][point.tokens].append(point.duration_ns)
    if not lengths:
        return None
    reference = max(lengths, key=lambda length: (len(lengths[length]), -length))
    curve = _curve(lengths[reference])
    length = sequence if attends else 0
    if len(curve) < 2 or not curve[0][0] <= tokens <= curve[-1][0]:
        return None
    more = {reference: 0.0}  # extra ns per token, by sequence length
    for other, measured in lengths.items():
        inside = [
            (ns - interpolate(curve, count)[0]) / count
            for count, ns in _curve(measured)
            if curve[0][0] <= count <= curve[-1][0]
        ]
        if other != reference and inside:
            more[other] = statistics.mean(inside)
    if not min(more) <= length <= max(more):
        return None
    extra = more[length] if length in more else _line(sorted(more.items()), length)
    return max(round(_time_at(curve, tokens) + tokens * extra), 1)


def fixed_ns(points: Iterable[Point], fewest: Point) -> float:
    """Returns the part of the duration of `fewest` that does not depend on the tokens, in ns, such
    as reading the weights of all experts. It is the duration with 0 tokens on the line through
    `fewest` and the next larger point of its sequence length that has at least a quarter more
    tokens. It is 0 without such a point, and at least 0.

    >>> fixed_ns([Point(8, 1, 100), Point(9, 1, 300), Point(32, 1, 340)], Point(8, 1, 100))
    20.0
    """
    more = [
        point
        for point in points
        if point.sequence == fewest.sequence and point.tokens >= 1.25 * fewest.tokens
    ]
    if not more:
        return 0.0
    next_one = min(more, key=lambda point: point.tokens)
    slope = (next_one.duration_ns - fewest.duration_ns) / (next_one.tokens - fewest.tokens)
    return max(fewest.duration_ns - slope * fewest.tokens, 0.0)


def _time_at(curve: tuple[tuple[int, int], ...], tokens: int) -> int:
    """Returns f, the duration in ns at `tokens`, which are within the measured range.

    >>> _time_at(((1, 300), (2, 310), (20, 800)), 4), _time_at(((1, 300), (2, 310), (20, 800)), 10)
    (310, 400)
    >>> _time_at(((1, 40), (2, 80), (20, 800)), 10)
    400
    """
    line, _ = interpolate(curve, tokens)
    right = bisect.bisect_left(curve, (tokens, -1))
    if right < 2:
        return line
    (fewer, shorter), (few, short), (many, long) = curve[right - 2 : right + 1]
    if few < _MORE * fewer or short > _FLAT * shorter:
        return line
    return min(line, max(short, -(-long * tokens // many)))


def _curve(durations: dict[int, list[int]]) -> tuple[tuple[int, int], ...]:
    """Returns points (tokens, mean duration) in ascending order of tokens."""
    return tuple(
        (tokens, round(statistics.mean(times))) for tokens, times in sorted(durations.items())
    )


def _line(points: list[tuple[int, float]], place: int) -> float:
    """Interpolates between the two neighbors of `place`."""
    (x0, y0), (x1, y1) = next(
        pair for pair in itertools.pairwise(points) if pair[0][0] <= place <= pair[1][0]
    )
    return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
