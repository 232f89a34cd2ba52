"""LearningRate: the learning rate as a function of the step's number.

The learning rate of step n is `rate` times a factor. Steps count from 1, w is the number of warm-up
steps, T the number of all steps, d the number of decay steps, and f the floor:

    n <= w    n / w
    constant  1
    linear    f + (1 - f) (1 - p)               p = (n - 1 - w) / (T - w)
    cosine    f + (1 - f) (1 + cos(pi p)) / 2   p as for linear
    wsd       f + (1 - f) (1 - p)               p = max(n - 1 - (T - d), 0) / d

`wsd` means warm-up, stable, decay (Hu et al., arXiv 2404.06395).

After the warm-up, the factors equal those of transformers' `get_scheduler` for the same step:
`linear`, `cosine`, `cosine_with_min_lr`, and `warmup_stable_decay` with a linear decay. During the
warm-up, the factor in transformers is (n - 1) / w, so its first step changes nothing.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatrain.simulator.base.errors import UserError


class LearningRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning-rate schedule: a linear warm-up, then a constant or decaying rate."""

    kind: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        Meta(
            description=(
                "shape of the learning rate after the warm-up; wsd: constant, then a linear decay"
            )
        ),
    ] = "constant"
    rate: Annotated[
        float, Meta(ge=0, le=1e38, description="peak learning rate, at the end of the warm-up")
    ] = 1e-3
    warm_up_steps: Annotated[
        int, Meta(ge=0, le=2**40, description="optimizer steps of linear warm-up from 0")
    ] = 10
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
            description="final learning rate of linear, cosine and wsd, as a fraction of the peak",
        ),
    ] = 0.0

    def at(self, number: int, steps: int) -> float:
        """Returns the learning rate of step `number` in a run of `steps` steps, counted from 1."""
        if number <= self.warm_up_steps:
            return self.rate * (number / self.warm_up_steps)
        start = steps - self._decay(steps) if self.kind == "wsd" else self.warm_up_steps
        progress = min(max(number - 1 - start, 0) / max(steps - start, 1), 1.0)
        falling = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * progress)) / 2}.get(
            self.kind, 1 - progress
        )
        return self.rate * (self.floor + (1 - self.floor) * falling)

    def _decay(self, steps: int) -> int:
        return self.decay_steps or -(-steps // 10)

    def refuse_impossible(self, steps: int) -> None:
        """Raises UserError if warm-up and decay do not fit in a run of `steps` steps.

        A constant rate has no decay, so its warm-up may be longer than the run.
        """
        least = {"constant": 0, "wsd": self._decay(steps)}.get(self.kind, 1)
        if self.kind != "constant" and self.warm_up_steps + least > steps:
            raise UserError(
                "schedule: warm_up_steps",
                found=f"{self.warm_up_steps}, and {least} of decay, in a training of {steps}",
                allowed=f"at most {max(steps - least, 0)} with kind {self.kind}",
                fix="set fewer warm_up_steps or decay_steps, or more steps",
            )
