"""LearningRate: the learning rate as a function of the step's number.

The learning rate of step n is `rate` times a factor. Steps count from 1, w is the number of warm-up
steps, T the number of all steps, d the number of decay steps, and f the floor:

    n <= w    n / w
    constant  1
    linear    f + (1 - f) (1 - p)               p = (n - 1 - w) / (T - w)
    cosine    f + (1 - f) (1 + cos(pi p)) / 2   p as for linear
    wsd       f + (1 - f) (1 - p)               p = max(n - 1 - (T - d), 0) / d

`wsd` means warm-up, stable, decay (Hu et al., arXiv 2404.06395).

The decay would reach the floor in step T + 1. In the last step, p is 1 - 1 / (T - w), or 1 - 1 / d
for `wsd`.

After the warm-up, the factors equal those of transformers' `get_scheduler` for the same step:
`linear`, `cosine`, `cosine_with_min_lr`, and `warmup_stable_decay` with a linear decay. During the
warm-up, the factor in transformers is (n - 1) / w, so its first step changes nothing.

The defaults of peak and warm-up depend on the run. A `Config` sets them with `settled`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatrain.simulator.base.errors import UserError

PRETRAINED_RATE, RANDOM_RATE = 1e-5, 3e-4
"""The default peak learning rates for pretrained and for random initial weights."""
HIGHEST_PRETRAINED_RATE = 1e-4
"""The peak learning rate above which a run with pretrained weights prints a warning."""
_WARM_UP_FRACTION = 0.03
"""The default of the warm-up, as a share of all steps."""


class LearningRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning-rate schedule: a linear warm-up, then a constant or decaying rate."""

    kind: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        Meta(
            description=(
                "shape of the learning rate after the warm-up; wsd: constant, then a linear decay"
            )
        ),
    ] = "cosine"
    rate: Annotated[
        Annotated[float, Meta(ge=0, le=1e38)] | None,
        Meta(
            description=(
                "peak learning rate, at the end of the warm-up (default 1e-5 for pretrained and"
                " 3e-4 for random initial weights)"
            )
        ),
    ] = None
    warm_up_steps: Annotated[
        Annotated[int, Meta(ge=0, le=2**40)] | None,
        Meta(description="optimizer steps of linear warm-up from 0 (default 3% of all steps)"),
    ] = None
    decay_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=2**40,
            description="optimizer steps of decay at the end of wsd; 0: a tenth of all steps",
        ),
    ] = 0
    floor: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "learning rate to which linear, cosine and wsd decay, as a fraction of the peak;"
                " the last step is one step short of it"
            ),
        ),
    ] = 0.0

    def at(self, number: int, steps: int) -> float:
        """Returns the learning rate of step `number`, counted from 1, in a run of `steps` steps.

        The peak and the warm-up must be set (`settled`).
        """
        assert self.rate is not None
        assert self.warm_up_steps is not None
        if number <= self.warm_up_steps:
            return self.rate * (number / self.warm_up_steps)
        start = steps - self._decay(steps) if self.kind == "wsd" else self.warm_up_steps
        progress = min(max(number - 1 - start, 0) / max(steps - start, 1), 1.0)
        falling = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * progress)) / 2}.get(
            self.kind, 1 - progress
        )
        return self.rate * (self.floor + (1 - self.floor) * falling)

    def _decay(self, steps: int) -> int:
        """Returns the number of decay steps of `wsd`."""
        return self.decay_steps or -(-steps // 10)

    def settled(self, steps: int, *, pretrained: bool) -> LearningRate:
        """Returns the schedule with peak and warm-up set, for a run of `steps` steps.

        Raises UserError if warm-up and decay do not fit in the run. A constant rate has no decay,
        so its warm-up may be longer than the run.
        """
        least = {"constant": 0, "wsd": self._decay(steps)}.get(self.kind, 1)
        warm_up = self.warm_up_steps
        if warm_up is None:
            warm_up = max(0, min(round(_WARM_UP_FRACTION * steps), steps - least))
        if self.kind != "constant" and warm_up + least > steps:
            raise UserError(
                "schedule: warm_up_steps",
                found=f"{warm_up}, and {least} of decay, in a training of {steps}",
                allowed=f"at most {max(steps - least, 0)} with kind {self.kind}",
                fix="set fewer warm_up_steps or decay_steps, or more steps",
            )
        rate = self.rate
        if rate is None:
            rate = PRETRAINED_RATE if pretrained else RANDOM_RATE
        return msgspec.structs.replace(self, rate=rate, warm_up_steps=warm_up)

    def __str__(self) -> str:
        """Returns peak, shape and warm-up as one line of text. They must be set (`settled`)."""
        steps = f"{self.warm_up_steps} warm-up step{'' if self.warm_up_steps == 1 else 's'}"
        return f"{format_rate(self.rate or 0)}, {self.kind}, {steps}"


def format_rate(rate: float) -> str:
    """Returns a learning rate as text with at most three significant digits.

    >>> format_rate(1e-5), format_rate(0.00025), format_rate(0.01)
    ('1e-5', '2.5e-4', '0.01')
    """
    if 0 < rate < 1e-2:
        digits, _, power = f"{rate:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{rate:.3g}"
