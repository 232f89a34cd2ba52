"""RouterLoss: the load-balancing loss of a mixture of experts, computed layer by layer.

The loss is that of Switch Transformer (arXiv 2101.03961, equations 4 to 6). With E experts and the
R rows of all layers together, it is

    E x sum over experts of (times the expert was chosen / R) x (sum of its probabilities / R)

The choices have no gradient. So the sums are collected layer by layer in the forward pass. In the
backward pass, when the sums are complete, each layer adds the gradient of its own probabilities.
Value and gradient equal those of transformers' `load_balancing_loss_func` over all layers at once.

Each micro-batch has its own loss. The loss of a step is their mean, times `router_aux_loss_coef`.
transformers' Trainer also divides by the number of micro-batches, except if it normalizes by
`num_items_in_batch`. Then it uses the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Self

import torch
from transformers import PretrainedConfig

_ASKED = "output_router_logits"
"""the config's key, and the argument of the model's forward if the model has the loss"""


@dataclass
class _Sums:
    """The sums of one micro-batch over all layers so far, in fp32."""

    choices: torch.Tensor
    """how often each expert was chosen, [experts]"""
    probabilities: torch.Tensor
    """sum of each expert's probabilities, [experts]"""
    rows: torch.Tensor | float
    """number of rows, without padding"""
    real: torch.Tensor | None
    """1 for tokens and 0 for padding, [tokens] fp32; None without padding"""


class RouterLoss:
    """Computes `coefficient` times the loss, for routers that choose `chosen` of `experts`."""

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
        """Returns the loss of `model`, or None if it has none or the config switches it off.

        Llama 4 has none: its config has a coefficient, but its text model does not compute the
        loss.
        """
        if (
            not getattr(config, _ASKED, False)
            or not hasattr(config, "router_aux_loss_coef")
            or _ASKED not in signature(model.forward).parameters
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
        """Starts the sums of a micro-batch before its forward.

        Padding is not counted. `documents` [batch, sequence] is -1 for padding, or None.
        """
        zeros = torch.zeros(self._experts, dtype=torch.float32, device=self._device)
        real = None if documents is None else (documents >= 0).flatten().float()
        self._sums[micro] = _Sums(zeros, zeros, 0.0, real)

    def end(self, micro: int) -> None:
        """Frees the sums of a micro-batch after its backward."""
        del self._sums[micro]

    @torch.no_grad()
    def add(self, micro: int, logits: torch.Tensor) -> None:
        """Adds the router `logits` [tokens, experts] of one layer to the sums.

        Called once for each layer and micro-batch.
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
        """Returns the micro-batch's part of the step's loss, 0-dimensional fp32.

        Called after every layer has run its forward.
        """
        return self._of(micro, self._sums[micro].probabilities)

    def share(self, micro: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns one layer's part of `value`, differentiable with respect to its `logits`."""
        return self._of(micro, self._summed(logits.softmax(-1), self._sums[micro]))
