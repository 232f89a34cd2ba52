"""LearningRate: the rate of every step, a pure function of the step's number.

With w warm-up steps, T steps in all, the step's number n from 1 and f = floor, the rate is `rate` times

    n <= w    n / w
    constant  1
    linear    f + (1 - f) (1 - p)                     p = (n - 1 - w) / (T - w)
    cosine    f + (1 - f) (1 + cos(pi p)) / 2         the same p
    wsd       1 until T - d, then as linear with      p = (n - 1 - (T - d)) / d, d decay steps   (Hu et al., arXiv 2404.06395)

After the warm-up these are transformers' `get_scheduler` values of the same step (it counts from 0): `linear`, `cosine`,
`cosine_with_min_lr` and `warmup_stable_decay` with a linear decay. Its warm-up is one step behind, (n - 1) / w, so that its first step changes nothing.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatrain.simulator.errors import UserError


class LearningRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the learning rate goes over the steps."""

    kind: Annotated[Literal["constant", "linear", "cosine", "wsd"], Meta(description="what follows the warm-up; wsd: stable, then a linear decay")] = "constant"
    rate: Annotated[float, Meta(ge=0, le=1e38, description="learning rate at the end of the warm-up")] = 1e-3
    warm_up_steps: Annotated[int, Meta(ge=0, le=2**40, description="steps of linear warm-up from 0")] = 10
    decay_steps: Annotated[int, Meta(ge=0, le=2**40, description="last steps, in which wsd decays; 0: a tenth of all")] = 0
    floor: Annotated[float, Meta(ge=0, le=1, description="what linear, cosine and wsd end at, as a share of the rate")] = 0.0

    def at(self, number: int, steps: int) -> float:
        """Rate of step `number`, from 1, of `steps`."""
        if number <= self.warm_up_steps:
            return self.rate * (number / self.warm_up_steps)
        start = steps - self._decay(steps) if self.kind == "wsd" else self.warm_up_steps
        progress = min(max(number - 1 - start, 0) / max(steps - start, 1), 1.0)
        falling = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * progress)) / 2}.get(self.kind, 1 - progress)
        return self.rate * (self.floor + (1 - self.floor) * falling)

    def _decay(self, steps: int) -> int:
        return self.decay_steps or -(-steps // 10)

    def refuse_impossible(self, steps: int) -> None:
        """Raises UserError where the warm-up leaves a decay no room in `steps`; a constant rate may still be warming up at the end."""
        least = {"constant": 0, "wsd": self._decay(steps)}.get(self.kind, 1)
        if self.kind != "constant" and self.warm_up_steps + least > steps:
            raise UserError(
                "schedule: warm_up_steps", found=f"{self.warm_up_steps}, and {least} of decay, in a training of {steps}",
                allowed=f"at most {max(steps - least, 0)} with kind {self.kind}", fix="set fewer warm_up_steps or decay_steps, or more steps",
            )  # fmt: skip
