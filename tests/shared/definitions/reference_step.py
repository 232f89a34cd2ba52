"""Reference: the training step in plain PyTorch that tests compare the executor with.

The whole transformers model is resident, with one autograd graph and fp32 masters, without slots
and lanes. The arithmetic is that of the runtime: the loss chunk, gradients that are rounded to the
compute dtype and summed in fp32, the order in which the norm is summed, and the rounding of the
master. No code is shared that schedules work or stores tensors.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pieces_definition import in_pieces
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.execution.param_groups import ParamGroup, param_group
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.documents import masks, positions
from megatrain.runtime.layers.meta_model import widen_buffers
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.adamw import (
    clip_coefficient,
    join,
    round_to_bf16,
    rounded_sqrt,
    split,
    sum_of_squares,
)
from megatrain.runtime.optimizer.blockwise import (
    decoded_first,
    decoded_second,
    encode_first,
    encode_second,
    records,
    round_randomly,
    rounding_keys,
    split_randomly,
)
from megatrain.runtime.optimizer.coded_gradients import decoded, encode
from megatrain.runtime.optimizer.outside import settings_of
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.model.optimizer import ADAMW, MUON, find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import BLOCK, EXACT, FORMATS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.arithmetic import RATIO_ROW

Masters = Mapping[str, Mapping[str, torch.Tensor]]
"""fp32 weights by layer and tensor name."""


_MASKED_WITHOUT_POSITIONS = ("gpt_oss",)
"""Families whose models ignore positions in their masks, so documents need a mask of ours."""


def _sum_by_rows(values: torch.Tensor) -> torch.Tensor:
    """Returns the 0-dimensional sum of fp32 `values`, with the order of additions of `ratio_sums`
    and `update_scales`.
    """
    padded = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % RATIO_ROW))
    return optimizer._sum(
        optimizer._fold(padded.view(-1, RATIO_ROW)).contiguous(), optimizer.ALONE, square=False
    )


class _PassThrough(torch.nn.Module):
    """A decoder that returns the hidden states it receives."""

    def forward(
        self, _ids: None = None, *, inputs_embeds: torch.Tensor, **_: Any
    ) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _within(whole: Any, path: str, part: torch.nn.Module) -> Any:
    """Returns a shallow copy of `whole` with the module `part` at `path`."""
    name, _, below = path.partition(".")
    other = copy.copy(whole)
    other._modules = {
        **whole._modules,
        name: _within(whole._modules[name], below, part) if below else part,
    }
    return other


class Reference:
    """Trains a transformers model. `masters` holds its fp32 weights by layer and tensor name."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        config: PretrainedConfig,
        settings: AdamW,
        masters: Masters,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        """`seed` is the run's seed, for stochastic rounding."""
        self.spec, self.work, self.settings, self._seed = model, workload, settings, seed
        self._format = FORMATS[workload.state]
        self.dtype = TORCH_DTYPE[workload.dtype]
        self.model: Any = (
            AutoModelForCausalLM.from_config(config, dtype=self.dtype).to(device).train()
        )
        widen_buffers(self.model)
        self._stack = DecoderStack.of(self.model)
        self._logits: list[torch.Tensor] = []
        """The router's logits of each layer that computes pieces of tokens."""
        if workload.piece:
            recorded = getattr(self.model, "_can_record_outputs", None) or {}
            routers = (
                recorded.get("router_logits") if hasattr(config, "router_aux_loss_coef") else None
            )
            routers = routers if getattr(config, "output_router_logits", False) else None
            for layer, module in zip(
                model.decoders, self._stack.layers_of(self.model), strict=True
            ):
                pieces = model.layer_pieces(layer.name)
                assert pieces is not None
                in_pieces(
                    module,
                    pieces.modules,
                    workload.piece,
                    (routers.target_class, routers.index) if routers else None,
                    self._logits,
                )
        self._top = _within(self.model, self._stack.decoder, _PassThrough())
        self.masters = {
            layer: {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
            for layer, tensors in masters.items()
        }
        self._optimizer = find(workload.optimizer)
        self.moments = {
            layer: {
                name: torch.zeros(self._kept(layer, name, t), *t.shape, device=device)
                for name, t in tensors.items()
            }
            for layer, tensors in self.masters.items()
        }
        """[moments, *shape] by layer and tensor name, fp32 in every state format. One moment marks
        the matrices that Muon updates."""
        first = 0
        self._index: dict[str, dict[str, int]] = {}
        """The index in the model of the first element of each tensor, by layer and tensor name."""
        for layer in model.stack.values():
            self._index[layer.name] = {
                tensor.name: first + offset
                for tensor, offset in zip(layer.tensors, layer.offsets, strict=True)
            }
            first += layer.elements
            for master in self.masters[layer.name].values():
                self._round_master(master, 0, None)
        self._parameters = {
            layer.name: {t.name: self._find(layer.name, t.name) for t in layer.tensors}
            for layer in model.stack.values()
        }
        self.scales: list[float] = []
        """With clipping by `update`: the factors on the learning rate, one for each tensor and
        step."""
        self.moving: dict[tuple[str, str], torch.Tensor] = {}
        """With clipping by `adagc`: (layer, tensor) -> its moving norm, 0-dimensional fp32, if it
        has had a gradient."""
        self.clip_factor: float | None = None
        """With clipping by `adagc`: the least factor of the last step."""
        self._write_back()

    def _kept(self, layer: str, name: str, tensor: torch.Tensor) -> int:
        """Returns the number of moments of a tensor: 1 for the matrices that Muon updates."""
        matrix = (
            self.work.optimizer == MUON
            and layer.isdigit()
            and tensor.dim() > 1
            and min(tensor.shape[-2:]) > 1
            and not name.endswith("bias")
        )
        return 1 if matrix else self._optimizer.moments

    def _find(self, layer: str, tensor: str) -> torch.nn.Parameter:
        found: torch.nn.Parameter = self.model.get_parameter(hub_name(layer, tensor, self._stack))
        return found

    @torch.no_grad()
    def _write_back(self) -> None:
        for layer, tensors in self._parameters.items():
            for name, parameter in tensors.items():
                master = self.masters[layer][name]
                parameter.copy_(round_to_bf16(master) if self.dtype == torch.bfloat16 else master)

    def step(
        self, batches: Sequence[Batch], *, rate: float, number: int
    ) -> tuple[float, float | None]:
        """Runs one optimizer step over the micro-batches.

        Returns the mean loss and the gradient norm. The norm is None unless the workload clips by
        `global`, `layer` or `adagc`.
        """
        batches = [batch._replace(labels=batch.trained_labels) for batch in batches]
        scale = 1 / max(sum(int((batch.labels != IGNORED).sum()) for batch in batches), 1)
        total: dict[str, list[dict[str, torch.Tensor]]] = {layer: [] for layer in self._parameters}
        losses = [self._micro_batch(batch, scale, total) for batch in batches]
        gradients = {
            layer: self._sum(self.spec.stack[layer], parts) for layer, parts in total.items()
        }
        for spec in self.spec.stack.values():
            frozen = [
                tensor.name
                for tensor in spec.tensors
                if param_group(self.settings, spec, tensor).frozen
            ]
            gradients[spec.name] |= {
                name: torch.zeros_like(gradients[spec.name][name]) for name in frozen
            }
        factors: dict[str, torch.Tensor] = {}
        norm = None
        if self.work.clipping in ("global", "layer"):
            sums = {
                name: sum_of_squares(self._flat(layer, gradients[name]))
                for name, layer in self.spec.stack.items()
            }
            factor, norm = clip_coefficient(list(sums.values()), self.settings.max_norm)
            by_layer = self.work.clipping == "layer"
            factors = {
                name: clip_coefficient([part], self.settings.max_norm)[0] if by_layer else factor
                for name, part in sums.items()
            }
        if self.work.clipping == "adagc":
            gradients, norm = self._clipped_by_moving_norms(gradients, number)
        if self.work.gradients == "8bit":
            gradients = self._stored(gradients, number)
        for layer, tensors in gradients.items():
            groups = {
                tensor.name: param_group(self.settings, self.spec.stack[layer], tensor)
                for tensor in self.spec.stack[layer].tensors
            }
            for name, gradient in tensors.items():
                g = gradient.float() * factors[layer] if layer in factors else gradient.float()
                self._update(
                    self.masters[layer][name],
                    self.moments[layer][name],
                    g,
                    groups[name],
                    rate,
                    number,
                )
                self._store(layer, name, number)
        self._write_back()
        return float(torch.stack(losses).double().sum()), None if norm is None else float(norm)

    def _stored(
        self, gradients: dict[str, dict[str, torch.Tensor]], number: int
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the gradients encoded in 8 bits and decoded again, as an update reads them."""
        read: dict[str, dict[str, torch.Tensor]] = {}
        for layer, tensors in gradients.items():
            read[layer] = {}
            for name, gradient in tensors.items():
                flat = _padded(gradient)
                stored = torch.empty(records(len(flat)), dtype=torch.uint8, device=flat.device)
                encode(flat, stored, self._seed, number, self._index[layer][name])
                read[layer][name] = decoded(stored)[: gradient.numel()].view(gradient.shape)
        return read

    def _clipped_by_moving_norms(
        self, gradients: dict[str, dict[str, torch.Tensor]], number: int
    ) -> tuple[dict[str, dict[str, torch.Tensor]], float]:
        """Updates the moving norms, and returns the clipped gradients in fp32 and the norm of all
        gradients.
        """
        settings, squares, factors = self.settings, [], []
        clipped = dict[str, dict[str, torch.Tensor]]()
        for layer, tensors in gradients.items():
            clipped[layer] = {}
            for name, gradient in tensors.items():
                squares.append(sum_of_squares(gradient.flatten()))
                size, factor = rounded_sqrt(squares[-1]), torch.ones_like(squares[-1])
                before = self.moving.get((layer, name))
                first = before is None or number <= settings.adagc_warm_up
                limit = torch.full_like(size, settings.max_norm)
                if before is not None and not first:
                    limit = before * settings.adagc_factor
                if size > limit:
                    size, factor = limit, limit / size
                if before is not None and first:
                    self.moving[layer, name] = min(before, size) if size else before
                elif before is not None and size:
                    self.moving[layer, name] = before * settings.adagc_decay + size * (
                        1 - settings.adagc_decay
                    )
                elif size:
                    self.moving[layer, name] = size
                factors.append(float(factor))
                clipped[layer][name] = gradient.float() * factor
        self.clip_factor = min(factors)
        return clipped, math.sqrt(math.fsum(float(square) for square in squares))

    def _micro_batch(
        self, batch: Batch, scale: float, total: dict[str, list[dict[str, torch.Tensor]]]
    ) -> torch.Tensor:
        base = self._stack.decoder_of(self.model)
        inputs: dict[str, Any] = self._embedded(batch.ids)
        if batch.documents is not None:
            inputs["position_ids"] = positions(batch.documents)
            if self.spec.family in _MASKED_WITHOUT_POSITIONS:
                inputs["attention_mask"] = masks(base.config, **inputs)
        tops: list[torch.Tensor] = []
        norm = getattr(base, FAMILIES[self.spec.family].norm_name)
        hook = norm.register_forward_pre_hook(lambda _norm, rows: tops.append(rows[0]))
        self._logits.clear()
        outputs = base(**inputs)
        hook.remove()
        ends = tops[-1:]  # The norm may also have been called after the embedding.
        top = ends[0].detach().requires_grad_()
        loss, head = self._head(top, batch.labels, scale)
        seeds = [top.grad]
        if getattr(outputs, "router_logits", None) and hasattr(self.model, "router_aux_loss_coef"):
            logits = tuple(self._logits) or outputs.router_logits
            ends, seeds = [*ends, self._router_loss(logits, batch)], [*seeds, None]
            loss = loss + ends[-1].detach()
        names = [(layer, name) for layer, tensors in self._parameters.items() for name in tensors]
        below = torch.autograd.grad(
            ends, [self._parameters[layer][name] for layer, name in names], seeds, allow_unused=True
        )
        total[self.spec.head].append(head)
        for layer, parameters in self._parameters.items():
            parts = {
                name: gradient
                for (owner, name), gradient in zip(names, below, strict=True)
                if owner == layer and gradient is not None
            }
            # in a decoder layer, a tensor without a gradient gets zeros
            if self.spec.stack[layer].kind == "decoder":
                parts = {
                    name: parts.get(name, torch.zeros_like(parameter))
                    for name, parameter in parameters.items()
                }
            if parts:
                total[layer].append(parts)
        return loss

    def _embedded(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the decoder's arguments that the model's embedding computes from `ids`.

        They are rows [batch, sequence, hidden] and, with a second table, the inputs of each layer.
        """
        made = {"inputs_embeds": self._looked_up(self.model.get_input_embeddings(), ids)}
        for name in self.spec.tables[1:]:
            table = self._stack.decoder_of(self.model).get_submodule(name.rpartition(".")[0])
            known = torch.where(ids < table.num_embeddings, ids, 0)
            made["per_layer_inputs"] = self._looked_up(table, known).unflatten(
                -1, (self.spec.layers, -1)
            )
        return made

    def _looked_up(self, module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Returns the output of an embedding whose gradient is summed over tokens in fp32."""
        embedding: Any = copy.copy(module)
        rows = torch.nn.functional.embedding(
            ids, embedding.weight.float(), embedding.padding_idx
        ).to(self.dtype)
        embedding.padding_idx = None
        numbers = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        embedded: torch.Tensor = functional_call(
            embedding, {"weight": rows.flatten(0, 1)}, (numbers,)
        )
        return embedded

    def _router_loss(self, logits: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        """Returns transformers' load-balancing loss of a micro-batch, divided by the number of
        micro-batches.
        """
        balance = sys.modules[type(self.model).__module__].load_balancing_loss_func
        mask = None if batch.documents is None else (batch.documents >= 0).long()
        loss: torch.Tensor = balance(
            logits, self.model.num_experts, self.model.num_experts_per_tok, mask
        )
        return loss * (self.model.router_aux_loss_coef / self.work.accumulation)

    def _head(
        self, x: torch.Tensor, labels: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss and the gradients of the head's weights.

        The gradient of `x` is written to `x.grad`. The head computes chunks of tokens, and the
        gradients of weights are summed over them in fp32.
        """
        norm = getattr(self._stack.decoder_of(self.model), FAMILIES[self.spec.family].norm_name)
        # a tied head shares its layer with tensors that only the embedding uses
        only_embedded = (*self.spec.tables[1:], *self.spec.positions) if self.spec.tied else ()
        weights = {
            name: parameter
            for name, parameter in self._parameters[self.spec.head].items()
            if name not in only_embedded
        }
        parameters = list(weights.values())
        flat, targets, loss = (
            x.detach().flatten(0, 1),
            labels.flatten(),
            torch.zeros((), device=x.device),
        )
        sums, pieces = (
            [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters],
            [],
        )
        for rows, target in zip(
            flat.split(self.work.loss_chunk), targets.split(self.work.loss_chunk), strict=True
        ):
            rows = rows.detach().requires_grad_()
            logits = self._top(inputs_embeds=norm(rows)[None]).logits[0]
            part = (
                torch.nn.functional.cross_entropy(
                    logits.float(), target, ignore_index=IGNORED, reduction="sum"
                )
                * scale
            )
            piece, *gradients = torch.autograd.grad(part, [rows, *parameters])
            pieces.append(piece)
            sums = [
                so_far + gradient.float() for so_far, gradient in zip(sums, gradients, strict=True)
            ]
            loss = loss + part.detach()
        x.grad = torch.cat(pieces).view_as(x)
        return loss, {name: total.to(self.dtype) for name, total in zip(weights, sums, strict=True)}

    def _sum(
        self, layer: LayerSpec, parts: list[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Returns the fp32 sums of the micro-batches' gradients.

        They are added in order, or first within each group of `sum_group` micro-batches. A single
        gradient stays in the compute dtype.
        """
        if len(parts) == 1:
            return parts[0]
        group = self.work.sum_group
        if 1 < group < len(parts):
            parts = [
                self._sum(layer, parts[first : first + group])
                for first in range(0, len(parts), group)
            ]
        summed: dict[str, torch.Tensor] = {}
        for part in parts:
            for name, gradient in part.items():
                summed[name] = (
                    summed[name] + gradient.float() if name in summed else gradient.float()
                )
        return summed

    def _flat(self, layer: LayerSpec, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the layer's gradient as one vector. Tensors are padded as in the LayerSpec."""
        return torch.cat(
            [
                torch.nn.functional.pad(gradients[t.name].flatten(), (0, t.padded - t.elements))
                for t in layer.tensors
            ]
        )

    def _update(
        self,
        master: torch.Tensor,
        moments: torch.Tensor,
        g: torch.Tensor,
        group: ParamGroup,
        rate: float,
        number: int,
    ) -> None:
        rate *= group.rate_factor
        if self.work.optimizer == MUON and len(moments) == 1:
            _muon(master, moments[0], g, rate, group.weight_decay)
            return
        if self.work.optimizer not in (ADAMW, MUON):
            given = settings_of(self._optimizer, self.settings, group.weight_decay)
            flat = (master.view(-1), moments.flatten(1), g.flatten())
            self._optimizer.update(*flat, rate=rate, number=number, **given)
            return
        (first, second), (beta1, beta2) = moments, self.settings.betas
        first.copy_(first * beta1 + g * (1 - beta1))
        second.copy_(second * beta2 + g * g * (1 - beta2))
        step = first * (rate / (1 - beta1**number))
        if self.work.clipping == "update":
            ratios = (
                g * g / (second * (1 / (1 - beta2**number))).clamp(min=self.settings.epsilon**2)
            )
            scale = 1 / rounded_sqrt(_sum_by_rows(ratios) / torch.tensor(float(g.numel()))).clamp(
                min=1
            )
            master *= 1 - scale * (rate * group.weight_decay)
            step *= scale
            self.scales.append(float(scale))
        elif group.weight_decay:
            master *= 1 - rate * group.weight_decay
        master -= step / (
            rounded_sqrt(second) * (1 - beta2**number) ** -0.5 + self.settings.epsilon
        )

    def _store(self, layer: str, name: str, number: int) -> None:
        """Rounds the master and moments of a tensor to the values of the state format."""
        if self._format.moments == "block8":
            first, *second = self.moments[layer][name]
            flat = _padded(first)
            stored = torch.empty(records(len(flat)), dtype=torch.uint8, device=flat.device)
            encode_first(flat, stored)
            first.view(-1).copy_(decoded_first(stored)[: first.numel()])
            key = rounding_keys(self._seed, number)[1]
            for values in second:
                encode_second(_padded(values), stored, key, self._index[layer][name])
                values.view(-1).copy_(decoded_second(stored)[: values.numel()])
        self._round_master(self.masters[layer][name], number, self._index[layer][name])

    def _round_master(self, master: torch.Tensor, number: int, index: int | None) -> None:
        """Rounds a master to the values of the state format.

        Rounding is to the nearest value, or stochastic if `index` is given, as after an update.
        """
        if self.work.state == EXACT:
            return
        flat = _padded(master)
        key = rounding_keys(self._seed, number)[0]
        if self._format.low is None:
            high = round_to_bf16(flat) if index is None else round_randomly(flat, key, index)
            stored = high.float()
        else:
            high = torch.empty_like(flat, dtype=torch.bfloat16)
            low = torch.empty_like(flat, dtype=TORCH_DTYPE[self._format.low])
            if index is None:
                split(flat, high, low)
            else:
                split_randomly(flat, high, low, key, index)
            stored = join(high, low)
        master.view(-1).copy_(stored[: master.numel()])


def _muon(
    master: torch.Tensor, momentum: torch.Tensor, g: torch.Tensor, rate: float, decay: float
) -> None:
    """Does one step of Muon on a matrix, or on each matrix of [experts, rows, columns]."""
    new = g * (1 - 0.95)
    momentum.copy_(momentum * 0.95 + new)
    rows, columns = master.shape[-2:]
    made = _orthogonalised((momentum * 0.95 + new).view(-1, rows, columns).bfloat16())
    if decay:
        master *= 1 - rate * decay
    master -= made.view_as(master).float() * (0.2 * max(rows, columns) ** 0.5 * rate)


def _orthogonalised(x: torch.Tensor) -> torch.Tensor:
    """Returns matrices with nearly the singular vectors of `x` [matrices, rows, columns] bf16, and
    with singular values near 1. All matrices are multiplied at once, because some processors round
    a product of single matrices differently. For the same reason the products are `bmm`: `@`
    multiplies a batch of one matrix as a single matrix.
    """
    norms = [rounded_sqrt(sum_of_squares(matrix.reshape(-1))).clamp(min=1e-7) for matrix in x]
    x = x / torch.stack(norms).bfloat16()[:, None, None]
    for _ in range(5):
        if x.shape[1] <= x.shape[2]:
            a = torch.bmm(x, x.mT)
            b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, b, x, beta=3.4445)
        else:
            a = torch.bmm(x.mT, x)
            b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, x, b, beta=3.4445)
    return x


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Returns `values` as one vector of whole blocks, padded with zeros."""
    return torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK))
