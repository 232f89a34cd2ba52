"""Skeleton: transformers' whole model whose parameters have no memory and whose buffers (frequencies, scales, biases) have their values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.activations import XIELUActivation

from megatrain.runtime.files.decoder_stack import DecoderStack, settle
from megatrain.simulator.families import FAMILIES


def skeleton(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of `config`, in training mode: parameters of `dtype` on the meta device, buffers on `device` with what transformers starts them with."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    settle(whole, dtype)
    holders = [module for module in whole.modules() if next(module.buffers(), None) is not None]
    for module in holders:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for module in reversed(holders):  # a module inside before the one around it, which may fill its buffers, as Falcon-H1's does
        if isinstance(module, XIELUActivation):  # its constants, which `_init_weights` leaves out
            module.beta.fill_(module._beta_scalar)
            module.eps.fill_(module._eps_scalar)
        whole._init_weights(module)  # it also draws the module's parameters, which on the meta device is nothing
    widen_buffers(whole)
    if entrance := FAMILIES[config.model_type].entrance:
        enter_first_layer(whole, entrance)
    return whole.train()


def enter_first_layer(whole: Any, entrance: str) -> None:
    """Makes the decoder's norm `entrance`, which follows the embedding, part of the first decoder layer, which then applies it to its input."""
    stack = DecoderStack.of(whole)
    first = stack.layers_of(whole)[0]
    first.add_module(entrance, stack.decoder_of(whole).get_submodule(entrance))
    first.register_forward_pre_hook(lambda layer, inputs: (layer.get_submodule(entrance)(inputs[0]), *inputs[1:]))


def widen_buffers(whole: Any) -> None:
    """Makes fp32 of the buffers that transformers keeps in fp32 when it loads a model (`from_config` does not)."""
    for module in whole.modules():
        for name in module._buffers.keys() & whole._keep_in_fp32_modules_strict:
            module._buffers[name] = module._buffers[name].float()


def kind_of(layer: torch.nn.Module) -> tuple[object, ...]:
    """What a decoder layer really is: layers with the same value compute the same function of weights, buffers, input and arguments.

    For each module inside: its name, its class, its plain attributes (sizes, window, scaling, rope or none, the attention's type), its
    parameters and its buffers. Only `layer_idx` is left out, which addresses a cache. An attribute that is not plain counts by identity, so
    that a doubt makes one kind more, never one too few.
    """

    def described(value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(described(entry) for entry in value)
        if isinstance(value, functools.partial):
            return (id(value.func), described(value.args), described(tuple(sorted(value.keywords.items()))))
        return (type(value), value) if isinstance(value, bool | int | float | str | None | type | torch.dtype) else id(value)

    def tensors(values: dict[str, Any]) -> tuple[object, ...]:
        return tuple((name, None if value is None else (tuple(value.shape), value.dtype)) for name, value in values.items())

    parts = []
    for name, module in layer.named_modules():
        plain = {key: described(value) for key, value in vars(module).items() if not key.startswith("_") and key != "layer_idx"}
        parts.append((name, type(module), tuple(sorted(plain.items())), tensors(module._parameters), tensors(module._buffers)))
    return tuple(parts)
