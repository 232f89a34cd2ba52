"""LayerKind: one module that computes all decoder layers of the same kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.func import functional_call

from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers import compiling
from megatrain.runtime.layers.embedding_and_head import Arguments
from megatrain.runtime.layers.fp8_linear import Fp8Linear
from megatrain.runtime.layers.last_products import leave_out, put_in_order
from megatrain.runtime.layers.meta_model import kind_of
from megatrain.runtime.layers.token_pieces import Router, install, without_mlp
from megatrain.simulator.model.families import LayerPieces

_ROUTERS = "router_logits"
"""Name of the routers' output in transformers' models."""


class LayerKind:
    """A decoder layer's module on the meta device. It computes all decoder layers of its kind."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        router: Router | None,
        pieces: LayerPieces | None,
        piece: int,
        hidden: int,
        compiled: bool,
        draws: bool,
        last: Iterable[str],
        ordered: Iterable[str],
    ) -> None:
        """Moves `module` to the meta device. The arguments are those of `layer_kinds`."""
        # Also moves buffers, because each call passes the buffers like the parameters.
        self._module = module.to("meta")
        narrow = {parameter.dtype for parameter in module.parameters()} - {torch.float32}
        self._wide = [
            name
            for name, parameter in module.named_parameters()
            if narrow and parameter.dtype == torch.float32
        ]
        self._changed: tuple[str, ...] = getattr(module, "_changed_in_place", ())
        self._routed: list[torch.Tensor] = []
        put_in_order(module, ordered)
        self._short = module
        if last and not pieces:
            self._short = copy.deepcopy(module)
            leave_out(self._short, last)
        if pieces:  # copies modules, so it comes before the hooks
            install(
                module,
                pieces,
                piece,
                hidden=hidden,
                compiled=compiled,
                router=router,
                logits=self._routed,
                last=last,
            )
        if router:
            for each in {module, self._short}:
                router.record(each, self._routed)
        options: dict[str, Any] = {}
        if draws:  # so compiled layers draw the same random numbers as eager layers
            options["fallback_random"] = True
        fp8 = any(isinstance(part, Fp8Linear) for part in module.modules())
        if fp8 or torch.are_deterministic_algorithms_enabled():
            # Rounds each result to bf16 as an eager layer does, even if the next op is fused with
            # it. Otherwise a difference of one bit in bf16 could become a difference between two
            # fp8 values. And an output that the backward pass rebuilds from a rounded input would
            # differ from the one of the forward pass, whose input was not rounded yet.
            options["emulate_precision_casts"] = True

        settings: dict[str, Any] = (
            {"backend": compiling.rebuilding_backend(options)}
            if ordered
            else {"options": options or None}
        )

        def program(function: Callable[..., Any]) -> Callable[..., Any]:
            return compiling.compiled(function, **settings) if compiled else function

        self.run = program(self.eager)
        """`eager`, compiled if the layer is compiled."""
        self.run_short = program(self.eager_short)
        """Like `run`, but leaves out the layer's last products. The output is NaN if it has any."""
        self.attend = program(self._attend)
        """Like `run`, but also returns the attention output and log-sum-exp of the layer."""

    def without_mlp(self) -> AbstractContextManager[None]:
        """Returns a context in which `run` skips an MLP that is computed in token pieces. The
        output of the layer is then NaN.
        """
        return without_mlp(self._module)

    def train(self, mode: bool) -> None:
        """Sets whether `run` draws random numbers. If not, a router chooses the best experts.
        `run_short` always does, because only a training step leaves out products.
        """
        if self._module.training != mode:
            self._module.train(mode)

    def eager(
        self, tensors: dict[str, torch.Tensor], x: torch.Tensor, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the layer's output and the logits of its router, or None without a router.

        Args:
            tensors: parameters and buffers of the layer by name.
            x: input of the layer, [batch, sequence, hidden].
            arguments: keyword arguments of the layer.
        """
        return self._called(self._module, tensors, x, arguments)

    def eager_short(
        self, tensors: dict[str, torch.Tensor], x: torch.Tensor, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._called(self._short, tensors, x, arguments)

    def _called(
        self,
        module: torch.nn.Module,
        tensors: dict[str, torch.Tensor],
        x: torch.Tensor,
        arguments: Arguments,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns what `eager` returns, computed by `module`."""
        self._routed.clear()
        # Slots hold these parameters in bf16, and transformers computes with them in fp32.
        if self._wide:
            tensors = {**tensors, **{name: tensors[name].float() for name in self._wide}}
        # The module changes these parameters in place. With copies, the slot keeps the weights.
        if self._changed:
            tensors = {**tensors, **{name: tensors[name].clone() for name in self._changed}}
        output = functional_call(module, tensors, (x,), arguments)
        return output[0] if isinstance(output, tuple) else output, (
            self._routed.pop() if self._routed else None
        )

    def _attend(
        self, tensors: dict[str, torch.Tensor], x: torch.Tensor, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
        results: list[torch.Tensor] = []
        output, logits = self.eager(tensors, x, arguments | {"results": results})
        return output, logits, results


def layer_kinds(
    whole: Any,
    *,
    routed: bool,
    compiled: Sequence[bool],
    draws: bool,
    pieces: Sequence[LayerPieces | None],
    piece: int,
    last: Sequence[Iterable[str]],
    ordered: Sequence[Iterable[str]],
) -> list[LayerKind]:
    """Returns the LayerKind of each decoder layer. Layers of the same kind share a LayerKind.

    Args:
        whole: a model of `meta_model`. Its decoder layers are moved to the meta device.
        routed: whether to record the logits of the routers.
        compiled: whether to compile each decoder layer that is used. Layers of a kind must have the
            same value. The model may have more layers than this.
        draws: whether the layers draw random numbers in training.
        pieces: the parts of each decoder layer that is used, if they are computed in pieces of
            tokens, otherwise None. Layers of a kind must have the same modules in them.
        piece: number of tokens in a piece.
        last: names of the weights of each decoder layer that is used, whose products `run_short`
            leaves out, or with pieces, the backward pass.
        ordered: names of the weights of each decoder layer that is used, whose gradients are
            computed before those of their inputs (`ModelSpec.rebuilding_products`). Empty if the
            layer saves its outputs instead of rebuilding them.
    """
    recorder = whole._can_record_outputs[_ROUTERS] if routed else None
    router = Router(recorder.target_class, recorder.index) if recorder else None
    kinds: dict[object, LayerKind] = {}
    result = []
    layers = DecoderStack.of(whole).layers_of(whole)[: len(compiled)]
    for layer, compile_it, in_pieces, unread, first in zip(
        layers, compiled, pieces, last, ordered, strict=True
    ):
        kind = kind_of(layer)
        if kind not in kinds:
            kinds[kind] = LayerKind(
                layer,
                router=router,
                pieces=in_pieces,
                piece=piece,
                hidden=whole.config.hidden_size,
                compiled=compile_it,
                draws=draws,
                last=unread,
                ordered=first,
            )
        result.append(kinds[kind])
    return result
