"""Linear interpolation of a measured curve."""

from __future__ import annotations

import bisect


def interpolate(points: tuple[tuple[int, int], ...], size: int) -> tuple[int, bool]:
    """Returns (duration in ns, extrapolated) at `size` on a curve of (size, ns) points.

    The points are in ascending order of size. Between two points the duration is linear. Beyond the
    outermost points it continues the outermost segment. It is at least 0. A curve of one point is a
    constant if the point's size is 0. Otherwise the duration is proportional to the size.

    >>> interpolate(((100, 20), (200, 30)), 150), interpolate(((100, 20), (200, 30)), 400)
    ((25, False), (50, True))
    """
    if len(points) == 1:
        known, duration = points[0]
        return (duration, False) if known in (0, size) else (-(-duration * size // known), True)
    right = min(max(bisect.bisect_left(points, (size, -1)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return (
        max(y0 + -(-(y1 - y0) * (size - x0) // (x1 - x0)), 0),
        not points[0][0] <= size <= points[-1][0],
    )
