"""RouterLoss: the load-balancing loss of a mixture of experts, computed layer by layer.

The loss is that of Switch Transformer (arXiv 2101.03961, equations 4 to 6). With E experts and the
R rows of all layers together, it is

    E x sum over experts of (times the expert was chosen / R) x (sum of its probabilities / R)

The choices have no gradient. So the sums are collected layer by layer in the forward pass, and are
complete in the backward pass, where each layer adds the gradient of its own probabilities. Value
and gradient are the same as for transformers' `load_balancing_loss_func` over all layers at once.

Each micro-batch has a loss. The router loss of a step is the mean over its micro-batches, times
`router_aux_loss_coef`. transformers' Trainer also uses the mean, unless it normalizes by
`num_items_in_batch`. In this case it uses the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Self

import torch
from transformers import PretrainedConfig

_SWITCH = "output_router_logits"
"""Key of the config, and argument of the model's forward if the model has this loss."""


@dataclass
class _Sums:
    """The sums of a micro-batch over all layers so far."""

    choices: torch.Tensor
    """Number of times that each expert was chosen, [experts] fp32."""
    probabilities: torch.Tensor
    """Sum of the probabilities of each expert, [experts] fp32."""
    rows: torch.Tensor | float
    """Number of rows without padding, 0-dimensional fp32 or a float."""
    real: torch.Tensor | None
    """1 for tokens and 0 for padding, [tokens] fp32; None without padding"""


class RouterLoss:
    """Computes the load-balancing loss of routers that choose `chosen` of `experts` experts."""

    def __init__(
        self,
        *,
        coefficient: float,
        experts: int,
        chosen: int,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self._weight, self._experts, self._chosen, self._device = (
            coefficient / micro_batches,
            experts,
            chosen,
            device,
        )
        self._sums: dict[int, _Sums] = {}

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        model: torch.nn.Module,
        micro_batches: int,
        device: torch.device,
    ) -> Self | None:
        """Returns the loss of `model`, or None if the model has no such loss or the config switches
        it off.

        Llama 4 has no such loss: its config has a coefficient, but its text model does not compute
        the loss.
        """
        if (
            not getattr(config, _SWITCH, False)
            or not hasattr(config, "router_aux_loss_coef")
            or _SWITCH not in signature(model.forward).parameters
        ):
            return None
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        return cls(
            coefficient=config.router_aux_loss_coef,
            experts=experts,
            chosen=config.num_experts_per_tok,
            micro_batches=micro_batches,
            device=device,
        )

    def begin(self, micro: int, documents: torch.Tensor | None) -> None:
        """Starts the sums of a micro-batch. Must be called before its forward pass. `documents`
        [batch, sequence] int64 is -1 for padding, which is not counted; None: no padding.
        """
        zeros = torch.zeros(self._experts, dtype=torch.float32, device=self._device)
        real = None if documents is None else (documents >= 0).flatten().float()
        self._sums[micro] = _Sums(zeros, zeros, 0.0, real)

    def end(self, micro: int) -> None:
        """Frees the sums of a micro-batch. Must be called after its backward pass."""
        del self._sums[micro]

    @torch.no_grad()
    def add(self, micro: int, logits: torch.Tensor) -> None:
        """Adds the router logits of a layer, [tokens, experts], to the sums. Must be called once
        for each layer and micro-batch.
        """
        sums = self._sums[micro]
        probabilities = logits.softmax(-1)
        best = probabilities.topk(self._chosen, dim=-1).indices
        counted = (
            torch.ones_like(best, dtype=torch.float32)
            if sums.real is None
            else sums.real[:, None].expand_as(best)
        )
        per_token = torch.zeros(
            probabilities.shape, dtype=torch.float32, device=self._device
        ).scatter_(1, best, counted)
        sums.choices = sums.choices + per_token.sum(0)
        sums.probabilities = sums.probabilities + self._summed(probabilities, sums)
        sums.rows = sums.rows + (probabilities.shape[0] if sums.real is None else sums.real.sum())

    @staticmethod
    def _summed(probabilities: torch.Tensor, sums: _Sums) -> torch.Tensor:
        wide = probabilities.float()
        return (wide if sums.real is None else wide * sums.real[:, None]).sum(0)

    def _of(self, micro: int, probabilities: torch.Tensor) -> torch.Tensor:
        sums = self._sums[micro]
        return self._weight * (
            self._experts * ((sums.choices / sums.rows) * (probabilities / sums.rows)).sum()
        )

    def value(self, micro: int) -> torch.Tensor:
        """Returns the part of the step's router loss from a micro-batch, 0-dimensional fp32. Must
        be called after the forward pass of every layer.
        """
        return self._of(micro, self._sums[micro].probabilities)

    def share(self, micro: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns one layer's part of `value`, differentiable with respect to its `logits`."""
        return self._of(micro, self._summed(logits.softmax(-1), self._sums[micro]))
