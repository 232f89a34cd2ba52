"""Parses and formats sizes, counts and durations such as `24GiB`, `300M` and `8.430 s`."""

from __future__ import annotations

import math
import re

from megatrain.simulator.base.errors import UserError

_FACTORS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    **{"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40},
}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MOST_GIB = 10_000
"""No machine has so much memory in GiB, so such a number without a unit means bytes."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, where: str = "size") -> int:
    """Returns the bytes of a size such as `24GiB`, `24G`, `1.5TB` or `4096B`. Raises UserError if
    `text` is not a size, or has no unit. `where` names the input in the error.

    A letter alone is the binary unit: G is GiB, which is 2^30 bytes, and GB is 10^9 bytes.

    >>> parse_bytes("24GiB"), parse_bytes("24g"), parse_bytes("1.5 kB")
    (25769803776, 25769803776, 1500)
    """
    match = _SIZE.fullmatch(text)
    size = _rounded_product(match, _FACTORS)
    if not 0 < size < 2**60:
        bare = match is not None and not match[2] and 0 < float(match[1]) < 2**60
        raise UserError(
            where,
            found=f"{text.strip()}, a number without a unit" if bare else repr(text),
            allowed="a positive size with B, kB, MB, GB, TB, KiB (K), MiB (M), GiB (G) or TiB (T)",
            fix=f"write {_with_unit(text.strip())}" if bare else "write it like 24GiB",
        )
    return size


def _rounded_product(match: re.Match[str] | None, factors: dict[str, int]) -> int:
    """Returns the number of a match of `_SIZE` times the factor of its unit, rounded. 0 if there is
    no match, no such unit, or the product is infinite.
    """
    factor = factors.get(match[2].lower(), 0) if match else 0
    product = float(match[1]) * factor if match else 0.0
    return round(product) if math.isfinite(product) else 0


def _with_unit(number: str) -> str:
    """Returns the size that a number without a unit probably means: GiB below 10,000, and bytes
    from there on.

    >>> _with_unit("24"), _with_unit("25769803776"), _with_unit("400000"), _with_unit("123456")
    ('24GiB', '24GiB', '400kB', '123456B')
    """
    count = round(float(number))
    if count < _MOST_GIB:
        return f"{number}GiB"
    if count % 2**10 == 0:
        return exact_size(count)
    return next(
        f"{count // factor}{unit}"
        for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
        if count % factor == 0
    )


def parse_count(text: str, where: str = "count") -> int:
    """Returns the value of a count such as `1B`, `300M`, `2.5T` or `4096`. Raises UserError if
    `text` is not a count. `where` names the input in the error.

    >>> parse_count("2.5T"), parse_count("300 M"), parse_count("4096")
    (2500000000000, 300000000, 4096)
    """
    count = _rounded_product(_SIZE.fullmatch(text), _COUNTS)
    if not 0 < count < 2**60:
        raise UserError(
            where,
            found=repr(text),
            allowed="a positive number with k, M, B or T",
            fix="write it like 1B",
        )
    return count


def format_count(count: float) -> str:
    """Returns a count with at most four significant digits and a unit.

    >>> format_count(7_615_616_512), format_count(2.5e12), format_count(999)
    ('7.616 G', '2.5 T', '999')
    """
    unit, factor = next(
        (unit, factor)
        for unit, factor in ((" T", 1e12), (" G", 1e9), (" M", 1e6), (" k", 1e3), ("", 1.0))
        if count >= factor or factor == 1
    )
    return f"{count / factor:.4g}{unit}"


def exact_size(count: int) -> str:
    """Returns a size as the value of an option, without rounding it.

    >>> exact_size(60 * 2**30), exact_size(25 * 2**20), exact_size(1500), exact_size(64 * 10**9)
    ('60GiB', '25MiB', '1500B', '64GB')
    """
    units = (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10), ("B", 1))
    return next(f"{count // factor}{unit}" for unit, factor in units if count % factor == 0)


def rounded_up(count: int) -> int:
    """Returns a size in bytes, rounded up to whole GiB, or to whole MiB below 8 GiB.

    >>> exact_size(rounded_up(25 * 2**20 - 1)), exact_size(rounded_up(9 * 2**30 + 1))
    ('25MiB', '10GiB')
    """
    unit = 2**30 if count >= 2**33 else 2**20
    return -(-count // unit) * unit


def format_bytes(count: float) -> str:
    """Returns a size with a binary unit and two decimals.

    >>> format_bytes(25769803776), format_bytes(1500)
    ('24.00 GiB', '1.46 KiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_at_least(count: int) -> str:
    """Returns a size like `format_bytes`, but rounded up, for memory that must be enough.

    >>> format_at_least(25769803777), format_at_least(25769803776)
    ('24.01 GiB', '24.00 GiB')
    """
    unit = 1
    while count >= 1024 * unit and unit < 2**40:
        unit *= 1024
    hundredths = -(-100 * count // unit)
    return format_bytes(unit * hundredths / 100)


def format_seconds(seconds: float) -> str:
    """Returns a duration in s, ms or us.

    >>> format_seconds(8.43), format_seconds(0.0123), format_seconds(5e-6)
    ('8.430 s', '12.300 ms', '5.0 us')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.1f} us"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which gets an `s` unless the number is 1.

    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
