"""Calls optimizers from outside the package (`simulator/model/optimizer.py`) on a layer's state.

They receive only fp32 tensors. This module joins the halves of masters before an update and splits
the masters after it.
"""

from __future__ import annotations

from typing import Any

import torch

from megatrain.runtime.optimizer.adamw import ALONE, Share, Workers, join, on_device, split
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import ADAMW, MUON, SETTINGS, Optimizer, find
from megatrain.simulator.schedule.plan import Plan

_BLOCK = 2**20  # elements that are updated at a time: 4 MiB for each temporary
_TRIAL = 192  # elements of a trial update in `refuse_optimizer`
_MOST_UPDATES = 100  # trial updates of which one must change weights


def update(
    optimizer: Optimizer,
    weights: torch.Tensor,
    low: torch.Tensor | None,
    moments: torch.Tensor,
    gradient: torch.Tensor,
    *,
    settings: AdamW,
    rate: float,
    number: int,
    clip: torch.Tensor | None,
    workers: Workers = ALONE,
    scale: torch.Tensor | None = None,
    weight_decay: float,
    copy_to: torch.Tensor | None = None,
) -> None:
    """Updates a layer's state in place with `optimizer`.

    The arguments are those of `adamw.update`. `moments` is [moments, n] fp32. `scale` must be None:
    only AdamW supports clipping by `update`.
    """
    assert scale is None
    arguments = settings_of(optimizer, settings, weight_decay)
    # a NaN stops the update; a tensor, because reading its value would wait for the GPU
    stop = None if clip is None else clip.isnan()

    def in_blocks(share: Share) -> None:
        for start in range(share[0], share[1], _BLOCK):
            part = slice(start, min(start + _BLOCK, share[1]))
            planes = [tensor[part] for tensor in (weights, low) if tensor is not None]
            state = [*planes, moments[:, part]]
            before = [] if stop is None else [tensor.clone() for tensor in state]
            master = planes[0] if low is None else join(planes[0], planes[1])
            # a copy, because the optimizer may overwrite it
            g = gradient[part].to(torch.float32, copy=True)
            if clip is not None:
                g.mul_(clip)
            optimizer.update(master, moments[:, part], g, rate=rate, number=number, **arguments)
            if low is not None:
                split(master, planes[0], planes[1])
            for tensor, old in zip(state, before, strict=False):
                assert stop is not None
                tensor.copy_(torch.where(stop, old, tensor))

    on_device(weights.device, workers)(in_blocks, weights.numel(), _BLOCK)
    if copy_to is not None:
        copy_to.copy_(weights)


def settings_of(optimizer: Optimizer, settings: AdamW, weight_decay: float) -> dict[str, Any]:
    """Returns the settings that `optimizer` reads, by name, for tensors with `weight_decay`."""
    values = {**{name: getattr(settings, name) for name in SETTINGS}, "weight_decay": weight_decay}
    return {name: values[name] for name in optimizer.settings}


def refuse_optimizer(plan: Plan, settings: AdamW) -> None:
    """Raises UserError if the plan's optimizer cannot be used with `settings`.

    This is the case if `settings` has a value that the optimizer does not read, if a trial update
    raises an error, if no trial update changes weights, if the result depends on how a tensor is
    cut into chunks, or if frozen weights change.
    """
    name = plan.workload.optimizer
    optimizer = find(name)
    if name in (ADAMW, MUON):
        return
    default = AdamW()
    decays = [settings.weight_decay, *(group.weight_decay for group in settings.groups)]
    for field in SETTINGS:
        value = (
            next(filter(None, decays), 0.0) if field == "weight_decay" else getattr(settings, field)
        )
        if field not in optimizer.settings and value != getattr(default, field):
            raise UserError(
                f"optimizer: {field}",
                found=f"{value} with optimizer {name}",
                allowed=", ".join((*optimizer.settings, "max_norm", "groups")),
                fix="leave it out, or use an optimizer that reads it",
            )
    try:
        problem = _unchanged(optimizer, settings)
        whole, parts = (_trial(optimizer, settings, size) for size in (_TRIAL, _TRIAL // 3))
        frozen = _keeps_frozen_weights(optimizer, settings)
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"optimizer {name}",
            found=f"{type(error).__name__} in update: {text}",
            allowed="an update of fp32 tensors in place",
            fix="correct the optimizer",
        ) from error
    if problem:
        raise UserError(
            f"optimizer {name}",
            found=problem,
            allowed="an update that changes its weights in place",
            fix="change `weights` with methods such as `sub_` or `copy_`",
        )
    if not torch.equal(whole, parts):
        raise UserError(
            f"optimizer {name}",
            found="an update that depends on how a tensor is cut",
            allowed="one in which each element depends on no other",
            fix="use only operations on single elements, see docs/adding.md",
        )
    if not frozen:
        raise UserError(
            f"optimizer {name}",
            found="an update that changes frozen weights",
            allowed="none where rate and gradient are 0",
            fix="multiply whatever is subtracted by `rate`",
        )


def _unchanged(optimizer: Optimizer, settings: AdamW) -> str:
    """Returns what updates did that have changed no weights, or an empty text if one has."""
    weights, *gradients = _random_state()
    before, moments = weights.clone(), torch.zeros(optimizer.moments, _TRIAL)
    arguments = settings_of(optimizer, settings, settings.weight_decay)
    returned = ""
    for number in range(1, _MOST_UPDATES + 1):
        gradient = gradients[number % len(gradients)]
        # an outside update may return something, whatever its annotation says
        result: object = optimizer.update(  # type: ignore[func-returns-value]
            weights, moments, gradient, rate=1e-3, number=number, **arguments
        )
        if not torch.equal(weights, before):
            return ""
        if result is not None:
            returned = f", and each returned {type(result).__name__}"
    return f"{_MOST_UPDATES} updates that changed no weights{returned}"


def _trial(optimizer: Optimizer, settings: AdamW, size: int) -> torch.Tensor:
    """Returns the bits of weights and moments after three updates in parts of `size` elements."""
    weights, *gradients = _random_state()
    moments = torch.zeros(optimizer.moments, _TRIAL)
    arguments = settings_of(optimizer, settings, settings.weight_decay)
    for number, gradient in enumerate(gradients, 1):
        for start in range(0, _TRIAL, size):
            part = slice(start, start + size)
            state = (weights[part], moments[:, part], gradient[part])
            optimizer.update(*state, rate=1e-3, number=number, **arguments)
    return torch.cat([weights, moments.flatten()]).view(torch.int32)


def _keeps_frozen_weights(optimizer: Optimizer, settings: AdamW) -> bool:
    """Returns whether an update with a rate and gradients of 0 leaves the weights unchanged."""
    weights, *_ = _random_state()
    before, moments = weights.clone(), torch.zeros(optimizer.moments, _TRIAL)
    arguments = settings_of(optimizer, settings, settings.weight_decay)
    optimizer.update(weights, moments, torch.zeros(_TRIAL), rate=0.0, number=1, **arguments)
    return torch.equal(weights, before)


def _random_state() -> torch.Tensor:
    """Returns random weights and three gradients, [4, n] fp32."""
    return torch.randn(4, _TRIAL, generator=torch.Generator().manual_seed(0))
