"""Suggestion: one change with which a model would fit or train faster, and its effect."""

from __future__ import annotations

import msgspec


def as_options(options: dict[str, str]) -> str:
    """Returns options as they are written on the command line.

    >>> as_options({"plain-packing": "", "attention": "cudnn"})
    '--plain-packing --attention cudnn'
    """
    return " ".join(f"--{name} {value}".rstrip() for name, value in options.items())


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the input and its effect."""

    change: str
    """The change as options of `megatrain check`, or in words if there is no option for it."""
    options: dict[str, str] = {}
    """Option without dashes -> its new value, which is empty for an option without a value. No
    entries if the command has no option for the change."""
    compressed: bool = False
    """Whether the change stores optimizer state in fewer bits, so training is not exact AdamW."""
    fits: bool
    """Whether the model fits with the change."""
    bytes_missing: int = 0
    """Bytes by which memory still exceeds the limits, added up for device and host."""
    bytes_saved: int = 0
    """Bytes of device and host memory that the change saves. Negative if it needs more."""
    tokens_per_second: float | None = None
    """Approximate tokens per second with the change. None if the step time was not predicted."""
    gain: float | None = None
    """Approximate relative gain in tokens/s: 0.1 is 10 % more. None if it is not known."""
    model: str = ""
    """The library's model to train instead. Empty if the model stays the same."""
    note: str = ""
    """What the change costs the user, in words. Empty if there is nothing to say."""
