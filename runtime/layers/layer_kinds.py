"""LayerKinds: one template for all decoder layers that are computed alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.edges import Arguments
from megatrain.runtime.layers.skeleton import kind_of

_ROUTERS = "router_logits"
"""what transformers' models call the output of their routers"""


class LayerKind:
    """The decoder layers of one kind: a module without memory."""

    def __init__(self, module: torch.nn.Module, router: type | None, output: int, compiled: bool) -> None:
        self._module = module.to("meta")  # its buffers too: they come with each layer, and one that is its own would be another graph
        narrow = {parameter.dtype for parameter in module.parameters()} - {torch.float32}
        self._wide = [name for name, parameter in module.named_parameters() if narrow and parameter.dtype == torch.float32]
        self._routed: list[torch.Tensor] = []
        for part in module.modules() if router else ():
            if isinstance(part, router or ()):
                part.register_forward_hook(lambda _module, _input, outputs: self._routed.append(outputs[output]))
        self.run = torch.compile(self.eager, dynamic=False) if compiled else self.eager
        """`eager`, compiled where the workload is"""
        self.attend = torch.compile(self._attend, dynamic=False) if compiled else self._attend
        """the same, and what the layer's attention leaves"""

    def eager(self, tensors: dict[str, torch.Tensor], x: torch.Tensor, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's output and its router's logits. `tensors`: its parameters and buffers."""
        self._routed.clear()
        if self._wide:  # fp32 beside bf16 weights: multiplied in fp32, with what the slot has of them
            tensors = {**tensors, **{name: tensors[name].float() for name in self._wide}}
        output = functional_call(self._module, tensors, (x,), arguments)
        return output[0] if isinstance(output, tuple) else output, self._routed.pop() if self._routed else None

    def _attend(
        self, tensors: dict[str, torch.Tensor], x: torch.Tensor, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:  # fmt: skip
        taken: list[torch.Tensor] = []
        output, logits = self.eager(tensors, x, arguments | {"taken": taken})
        return output, logits, taken


def layer_kinds(whole: Any, *, routed: bool, compiled: bool) -> list[LayerKind]:
    """Of each decoder layer of a `skeleton`, whose layers are on the meta device after it. `routed`: their routers' logits are wanted."""
    recorder = whole._can_record_outputs[_ROUTERS] if routed else None
    kinds: dict[object, LayerKind] = {}
    found = []
    for layer in DecoderStack.of(whole).layers_of(whole):
        kind = kind_of(layer)
        if kind not in kinds:
            kinds[kind] = LayerKind(layer, recorder and recorder.target_class, recorder.index if recorder else 0, compiled)
        found.append(kinds[kind])
    return found
