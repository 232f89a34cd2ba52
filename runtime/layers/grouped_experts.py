"""Grouped products for experts that transformers runs one after another.

JetMoE's router copies the number of each expert's tokens to the host, which would wait for the GPU
twice in each layer. Here the numbers stay on the device, and all experts are one grouped product,
as in transformers' other families. The results are the same but for rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import _grouped_linear
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts, JetMoeTopKGating


class _Router(JetMoeTopKGating):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what the superclass returns. In place of the list with the number of each
        expert's rows, it returns where these rows end, [experts] int32.

        Args:
            hidden_states: [tokens, hidden].
        """
        logits = self.layer(hidden_states).float()
        best, chosen = logits.topk(self.top_k, dim=1)
        weights = best.softmax(1).type_as(hidden_states)
        experts, order = chosen.flatten().sort(0)
        every = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        tokens = order.div(self.top_k, rounding_mode="trunc")
        return order, tokens, weights.flatten()[order], ends, logits


class _Experts(JetMoeParallelExperts):
    def forward(self, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
        """Returns the product of each row with its expert's weight, [rows, out].

        Args:
            inputs: rows in the order of their experts, [rows, in].
            expert_size: where each expert's rows end, [experts] int32.
        """
        made: torch.Tensor = _grouped_linear(inputs, self.weight, expert_size)
        return made


_GROUPED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    JetMoeTopKGating: _Router,
    JetMoeParallelExperts: _Experts,
}


def install(whole: Any) -> None:
    """Changes the experts of transformers' model `whole` to grouped ones, if it has such."""
    for module in whole.modules():
        if grouped := _GROUPED.get(type(module)):
            module.__class__ = grouped
