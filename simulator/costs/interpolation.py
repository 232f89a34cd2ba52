"""Interpolation: a duration at any size from a curve of measured ones."""

from __future__ import annotations

import bisect


def interpolate(points: tuple[tuple[int, int], ...], size: int) -> tuple[int, bool]:
    """(duration in ns, extrapolated) at `size` on a curve of ascending (size, ns) points; never below 0.

    One point of size 0 is a constant. One point of another size stands for a proportion.

    >>> interpolate(((100, 20), (200, 30)), 150), interpolate(((100, 20), (200, 30)), 400)
    ((25, False), (50, True))
    """
    if len(points) == 1:
        known, duration = points[0]
        return (duration, False) if known in (0, size) else (-(-duration * size // known), True)
    right = min(max(bisect.bisect_left(points, (size, -1)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(y0 + -(-(y1 - y0) * (size - x0) // (x1 - x0)), 0), not points[0][0] <= size <= points[-1][0]
