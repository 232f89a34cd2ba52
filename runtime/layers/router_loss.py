"""RouterLoss: the load-balancing loss of a mixture of experts (Switch Transformer, arXiv 2101.03961, equations 4 to 6), layer by layer.

Over all layers' rows, R of them: E x the sum over experts of (choices of the expert / R) x (sum of its probabilities / R). The choices have no
gradient. So the sums are collected layer by layer in the forward pass, and when they are complete each layer adds its own probabilities' share to
its backward pass: value and gradient are those of transformers' `load_balancing_loss_func` over all layers at once.

Each micro-batch has its own loss. The step's is their mean, times `router_aux_loss_coef`: as transformers' Trainer divides by the micro-batches.
(Where the Trainer normalises by `num_items_in_batch`, it leaves this loss undivided, which makes of it the sum.)
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Self

import torch
from transformers import PretrainedConfig

_ASKED = "output_router_logits"
"""the config's key, and the argument of a model's forward where the model has the loss"""


@dataclass
class _Sums:
    """Of one micro-batch, fp32."""

    choices: torch.Tensor
    """[experts]"""
    probabilities: torch.Tensor
    """[experts]"""
    rows: torch.Tensor | float
    real: torch.Tensor | None
    """[tokens] fp32, 0 for padding; None: no padding"""


class RouterLoss:
    """`coefficient` x the loss, for routers that choose `chosen` of `experts`."""

    def __init__(self, *, coefficient: float, experts: int, chosen: int, micro_batches: int, device: torch.device) -> None:
        self._weight, self._experts, self._chosen, self._device = coefficient / micro_batches, experts, chosen, device
        self._sums: dict[int, _Sums] = {}

    @classmethod
    def of(cls, config: PretrainedConfig, model: torch.nn.Module, micro_batches: int, device: torch.device) -> Self | None:
        """Where the config asks for it and transformers' `model` has one: Llama 4's config has a coefficient, and its text model no such loss."""
        if not getattr(config, _ASKED, False) or not hasattr(config, "router_aux_loss_coef") or _ASKED not in signature(model.forward).parameters:
            return None
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        return cls(coefficient=config.router_aux_loss_coef, experts=experts, chosen=config.num_experts_per_tok, micro_batches=micro_batches, device=device)

    def begin(self, micro: int, documents: torch.Tensor | None) -> None:
        """A micro-batch's forward begins. `documents` [batch, sequence], -1 for padding, which does not count."""
        zeros = torch.zeros(self._experts, dtype=torch.float32, device=self._device)
        real = None if documents is None else (documents >= 0).flatten().float()
        self._sums[micro] = _Sums(zeros, zeros, 0.0, real)

    def end(self, micro: int) -> None:
        """The micro-batch's backward is done."""
        del self._sums[micro]

    @torch.no_grad()
    def add(self, micro: int, logits: torch.Tensor) -> None:
        """A layer's router has given its `logits` [tokens, experts], once a micro-batch."""
        sums = self._sums[micro]
        probabilities = logits.softmax(-1)
        best = probabilities.topk(self._chosen, dim=-1).indices
        counted = torch.ones_like(best, dtype=torch.float32) if sums.real is None else sums.real[:, None].expand_as(best)
        per_token = torch.zeros(probabilities.shape, dtype=torch.float32, device=self._device).scatter_(1, best, counted)
        sums.choices = sums.choices + per_token.sum(0)
        sums.probabilities = sums.probabilities + self._summed(probabilities, sums)
        sums.rows = sums.rows + (probabilities.shape[0] if sums.real is None else sums.real.sum())

    @staticmethod
    def _summed(probabilities: torch.Tensor, sums: _Sums) -> torch.Tensor:
        wide = probabilities.float()
        return (wide if sums.real is None else wide * sums.real[:, None]).sum(0)

    def _of(self, micro: int, probabilities: torch.Tensor) -> torch.Tensor:
        sums = self._sums[micro]
        return self._weight * (self._experts * ((sums.choices / sums.rows) * (probabilities / sums.rows)).sum())

    def value(self, micro: int) -> torch.Tensor:
        """The micro-batch's part of the step's loss, 0-dimensional fp32, when every layer has run."""
        return self._of(micro, self._sums[micro].probabilities)

    def share(self, micro: int, logits: torch.Tensor) -> torch.Tensor:
        """One layer's part of `value`, differentiable in its `logits`."""
        return self._of(micro, self._summed(logits.softmax(-1), self._sums[micro]))
