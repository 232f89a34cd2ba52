"""Checks of the numbers and names in a machine's file."""

from __future__ import annotations

import itertools

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule import LANES

Curve = tuple[tuple[int, float], ...]
"""Points (bytes of a copy, GB/s), in ascending order of bytes. Between two points, the time is
linear in the bytes."""
DRAM_LANES = {"h2d": "d2h+cpu", "d2h": "h2d+cpu", "cpu": "h2d+d2h"}
"""Lane that shares the host's DRAM -> the key in `contention` for both other such lanes being
busy."""
CALIBRATE_AGAIN = "correct the file, or make it again with `megatrain calibrate`"


def refuse_unknown(where: str, found: str, allowed: tuple[str, ...]) -> None:
    """Raises UserError if `found` is not one of `allowed`."""
    if found not in allowed:
        raise UserError(
            where,
            found=repr(found),
            allowed=", ".join(allowed),
            fix="correct its spelling, or remove it",
        )


def within(where: str, found: float | None, least: float, most: float) -> None:
    """Raises UserError if `found` is neither None nor between `least` and `most`."""
    if found is not None and not least <= found <= most:  # also true for NaN
        number = "a number" if least == 0 else "a positive number"
        raise UserError(
            where,
            found=found,
            allowed=f"{number}, {least:g} to {most:g}",
            fix=f"correct {where.rpartition(' ')[2]}",
        )


def check_curve(where: str, points: Curve) -> None:
    """Raises UserError if sizes are not ascending or a larger copy takes less time."""
    for size, rate in points:
        if not 1 <= size <= 2**60:
            raise UserError(
                where, found=f"a copy of {size} bytes", allowed=f"1 to {2**60}", fix=CALIBRATE_AGAIN
            )
        within(where, rate, 0.001, 1e6)
    for (left, slow), (right, fast) in itertools.pairwise(points):
        if left >= right:
            raise UserError(
                where,
                found=f"{right} bytes after {left}",
                allowed="ascending bytes",
                fix=CALIBRATE_AGAIN,
            )
        if left / slow > (1 + 1e-9) * right / fast:  # rates are rounded
            raise UserError(
                where,
                found=f"{right} bytes in less time than {left}",
                allowed="larger copies that take longer",
                fix=CALIBRATE_AGAIN,
            )


def at_least(where: str, found: int, least: int) -> None:
    """Raises UserError if `found` is less than `least`."""
    if found < least:
        raise UserError(where, found=found, allowed=f">= {least}", fix="correct this value")


def check_lanes(
    where: str, contention: dict[str, dict[str, float]], dispatch_ns: dict[str, int]
) -> None:
    """Raises UserError if a lane is unknown or a value is out of range."""
    for lane, others in contention.items():
        refuse_unknown(f"{where}: contention", lane, LANES)
        for other, rate in others.items():
            alone = tuple(name for name in LANES if name != lane)
            refuse_unknown(
                f"{where}: contention.{lane}",
                other,
                (*alone, *([DRAM_LANES[lane]] if lane in DRAM_LANES else [])),
            )
            if not 0.001 <= rate <= 1:
                raise UserError(
                    f"{where}: contention.{lane}.{other}",
                    found=rate,
                    allowed="a rate from 0.001 to 1",
                    fix="give the share of its speed that the lane keeps",
                )
    for lane, latency in dispatch_ns.items():
        refuse_unknown(f"{where}: dispatch_ns", lane, LANES)
        at_least(f"{where}: dispatch_ns.{lane}", latency, 0)
