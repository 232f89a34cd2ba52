"""The yardstick: the same training step in plain PyTorch. Whole model resident, one autograd graph, fp32 masters, no slots, no lanes.

It shares with the runtime what *defines* the arithmetic (the loss chunk, gradients rounded to the compute dtype and summed in fp32, the
order of the norm's additions, the rounding of the master) and nothing of how the work is scheduled or stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.runtime.arenas import TORCH_DTYPE
from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.groups import Treatment, treatment
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.optimizer import clip_coefficient, round_to_bf16, rounded_sqrt, sum_by_rows, sum_of_squares
from megatrain.simulator.specs import EMBEDDING, HEAD, LayerSpec, ModelSpec, Workload

Masters = Mapping[str, Mapping[str, torch.Tensor]]
"""fp32 weights by layer and tensor name"""


class Reference:
    """Trains a transformers model; `masters` holds its fp32 weights by layer and tensor name."""

    def __init__(self, model: ModelSpec, workload: Workload, config: PretrainedConfig, settings: AdamW, masters: Masters, device: torch.device) -> None:
        self.spec, self.work, self.settings = model, workload, settings
        self.dtype = TORCH_DTYPE[workload.dtype]
        self.model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).to(device).train()
        self.masters = {layer: {name: tensor.to(device, copy=True) for name, tensor in tensors.items()} for layer, tensors in masters.items()}
        self.moments = {layer: {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in tensors.items()} for layer, tensors in self.masters.items()}
        self._parameters = {layer.name: {t.name: self._find(layer.name, t.name) for t in layer.tensors} for layer in model.stack.values()}
        self.scales: list[float] = []
        """with clipping by `update`, what the learning rates were multiplied with, one a tensor and step"""
        self._write_back()

    def _find(self, layer: str, tensor: str) -> torch.nn.Parameter:
        if tensor == "lm_head.weight":
            return self.model.get_parameter(tensor)
        return self.model.get_parameter(f"model.{tensor}" if layer in (EMBEDDING, HEAD) else f"model.layers.{layer}.{tensor}")

    @torch.no_grad()
    def _write_back(self) -> None:
        for layer, tensors in self._parameters.items():
            for name, parameter in tensors.items():
                master = self.masters[layer][name]
                parameter.copy_(round_to_bf16(master) if self.dtype == torch.bfloat16 else master)

    def step(self, batches: Sequence[Batch], *, rate: float, number: int) -> tuple[float, float | None]:
        """One optimizer step over the micro-batches (ids and labels [batch, sequence] int64): mean loss, and gradient norm with clipping by it or by
        layers' norms, else None.
        """
        scale = 1 / max(sum(int((batch.labels != IGNORED).sum()) for batch in batches), 1)
        total: dict[str, list[dict[str, torch.Tensor]]] = {layer: [] for layer in self._parameters}
        losses = [self._micro_batch(ids, labels, scale, total) for ids, labels, _ in batches]
        gradients = {layer: self._sum(self.spec.stack[layer], parts) for layer, parts in total.items()}
        factors: dict[str, torch.Tensor] = {}
        norm = None
        if self.work.clipping in ("global", "layer"):
            sums = {name: sum_of_squares(self._flat(layer, gradients[name])) for name, layer in self.spec.stack.items()}
            factor, norm = clip_coefficient(list(sums.values()), self.settings.max_norm)
            by_layer = self.work.clipping == "layer"
            factors = {name: clip_coefficient([part], self.settings.max_norm)[0] if by_layer else factor for name, part in sums.items()}
        for layer, tensors in gradients.items():
            treated = {tensor.name: treatment(self.settings, self.spec.stack[layer], tensor) for tensor in self.spec.stack[layer].tensors}
            for name, gradient in tensors.items():
                g = gradient.float() * factors[layer] if layer in factors else gradient.float()
                self._adamw(self.masters[layer][name], *self.moments[layer][name], g, treated[name], rate, number)
        self._write_back()
        return float(torch.stack(losses).double().sum()), None if norm is None else float(norm)

    def _micro_batch(self, ids: torch.Tensor, labels: torch.Tensor, scale: float, total: dict[str, list[dict[str, torch.Tensor]]]) -> torch.Tensor:
        inner = self.model.model
        x = torch.nn.functional.embedding(ids, inner.embed_tokens.weight.float(), inner.embed_tokens.padding_idx).to(self.dtype)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = inner.rotary_emb(x, positions)
        for layer in inner.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        top = x.detach().requires_grad_()
        loss, head = self._head(top, labels, scale)
        names = [(layer, name) for layer, tensors in self._parameters.items() for name in tensors]
        below = torch.autograd.grad(x, [self._parameters[layer][name] for layer, name in names], top.grad, allow_unused=True)
        if self.spec.tied:
            total[EMBEDDING].append(head)
        else:
            total[HEAD].append(head)
        for layer in self._parameters:
            parts = {name: gradient for (owner, name), gradient in zip(names, below, strict=True) if owner == layer and gradient is not None}
            if parts:
                total[layer].append(parts)
        return loss

    def _head(self, x: torch.Tensor, labels: torch.Tensor, scale: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, its gradient left in `x.grad`, and the gradients of norm and projection, chunk by chunk summed in fp32."""
        parameters = [self.model.model.norm.weight, self.model.lm_head.weight]
        flat, targets, loss = x.detach().flatten(0, 1), labels.flatten(), torch.zeros((), device=x.device)
        sums, pieces = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters], []
        for rows, target in zip(flat.split(self.work.loss_chunk), targets.split(self.work.loss_chunk), strict=True):
            rows = rows.detach().requires_grad_()
            logits = self.model.lm_head(self.model.model.norm(rows))
            part = torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=IGNORED, reduction="sum") * scale
            piece, *gradients = torch.autograd.grad(part, [rows, *parameters])
            pieces.append(piece)
            sums = [so_far + gradient.float() for so_far, gradient in zip(sums, gradients, strict=True)]
            loss = loss + part.detach()
        x.grad = torch.cat(pieces).view_as(x)
        projection = "embed_tokens.weight" if self.spec.tied else "lm_head.weight"
        return loss, {"norm.weight": sums[0].to(self.dtype), projection: sums[1].to(self.dtype)}

    def _sum(self, layer: LayerSpec, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """fp32 sums in the order of arrival; a single gradient stays in the compute dtype."""
        if len(parts) == 1:
            return parts[0]
        summed: dict[str, torch.Tensor] = {}
        for part in parts:
            for name, gradient in part.items():
                summed[name] = summed[name] + gradient.float() if name in summed else gradient.float()
        return summed

    def _flat(self, layer: LayerSpec, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """The layer's gradient as one vector, tensors padded as in the LayerSpec."""
        return torch.cat([torch.nn.functional.pad(gradients[t.name].flatten(), (0, t.padded - t.elements)) for t in layer.tensors])

    def _adamw(self, master: torch.Tensor, first: torch.Tensor, second: torch.Tensor, g: torch.Tensor, treated: Treatment, rate: float, number: int) -> None:
        beta1, beta2 = self.settings.betas
        rate *= treated.rate_factor
        first.copy_(first * beta1 + g * (1 - beta1))
        second.copy_(second * beta2 + g * g * (1 - beta2))
        step = first * (rate / (1 - beta1**number))
        if self.work.clipping == "update":
            ratios = g * g / (second * (1 / (1 - beta2**number))).clamp(min=self.settings.epsilon**2)
            scale = 1 / rounded_sqrt(sum_by_rows(ratios) / torch.tensor(float(g.numel()))).clamp(min=1)
            master *= 1 - scale * (rate * treated.weight_decay)
            step *= scale
            self.scales.append(float(scale))
        elif treated.weight_decay:
            master *= 1 - rate * treated.weight_decay
        master -= step / (rounded_sqrt(second) * (1 - beta2**number) ** -0.5 + self.settings.epsilon)
