"""Grouped products for experts that transformers runs one after another.

In transformers, JetMoE's router copies the number of tokens of each expert to the host, which waits
for the GPU twice in each layer. DBRX reads the chosen experts on the host. Here these numbers stay
on the device, and one grouped product computes all experts, as in transformers' other families.
Results differ only by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import _grouped_linear
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts, JetMoeTopKGating


class _Router(JetMoeTopKGating):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the values of the superclass, except that the list of the number of rows of each
        expert is replaced by the end of each expert's rows, [experts] int32.

        Args:
            hidden_states: hidden states, [tokens, hidden].
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
            expert_size: end of each expert's rows, [experts] int32.
        """
        products: torch.Tensor = _grouped_linear(inputs, self.weight, expert_size)
        return products


class _GatedExperts(DbrxExperts):
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts' outputs, [batch, sequence, hidden].

        Args:
            hidden_states: hidden states, [batch, sequence, hidden].
            top_k_index: the experts of each token, [tokens, chosen].
            top_k_weights: the weights of these experts, [tokens, chosen].
        """
        tokens, chosen = top_k_index.shape
        experts, order = top_k_index.flatten().sort()
        every = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        rows = hidden_states.reshape(tokens, -1)[order.div(chosen, rounding_mode="trunc")]
        w1, v1, w2 = (
            weight.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
            for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        )
        gate = self.mlp.activation_fn(_grouped_linear(rows, w1, ends))
        up = _grouped_linear(rows, v1, ends)
        down = _grouped_linear(gate * up, w2, ends, is_transposed=True)
        weighted = down * top_k_weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        summed = weighted[back].view(tokens, chosen, -1).sum(1)
        return summed.view_as(hidden_states)


_GROUPED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    JetMoeTopKGating: _Router,
    JetMoeParallelExperts: _Experts,
    DbrxExperts: _GatedExperts,
}


def install(whole: Any) -> None:
    """Changes the experts of transformers' model `whole` to grouped products, if it has such
    experts.
    """
    for module in whole.modules():
        if grouped := _GROUPED.get(type(module)):
            module.__class__ = grouped
