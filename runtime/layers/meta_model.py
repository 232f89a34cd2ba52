"""meta_model: builds transformers' model with parameters on the meta device, without memory.

Buffers (frequencies, scales, biases) have their real values.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.activations import XIELUActivation

from megatrain.runtime.files.decoder_stack import DecoderStack, match_from_pretrained
from megatrain.runtime.layers import gemma3n, grouped_experts
from megatrain.simulator.model.families import FAMILIES


def meta_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the model of `config` in training mode. Its parameters have the dtype `dtype` and are
    on the meta device. Its buffers are on `device` and have the initial values of transformers.
    """
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    grouped_experts.install(whole)
    match_from_pretrained(whole, dtype)
    holders = [module for module in whole.modules() if next(module.buffers(), None) is not None]
    for module in holders:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    # Inner modules first, because an outer module may fill their buffers, as in Falcon-H1.
    for module in reversed(holders):
        if isinstance(module, XIELUActivation):  # `_init_weights` does not set these
            module.beta.fill_(module._beta_scalar)
            module.eps.fill_(module._eps_scalar)
        # This also initializes parameters, which has no effect on the meta device.
        (module if isinstance(module, PreTrainedModel) else whole)._init_weights(module)
    widen_buffers(whole)
    if embedding_norm := FAMILIES[config.model_type].embedding_norm:
        move_into_first_layer(whole, embedding_norm)
    if gemma3n.carries(config.model_type):
        gemma3n.install(whole)
    return whole.train()


def move_into_first_layer(whole: Any, embedding_norm: str) -> None:
    """Moves the norm `embedding_norm`, which follows the embedding, into the first decoder layer.
    This layer then applies the norm to its input.
    """
    stack = DecoderStack.of(whole)
    first = stack.layers_of(whole)[0]
    first.add_module(embedding_norm, stack.decoder_of(whole).get_submodule(embedding_norm))
    first.register_forward_pre_hook(
        lambda layer, inputs: (layer.get_submodule(embedding_norm)(inputs[0]), *inputs[1:])
    )


def widen_buffers(whole: Any) -> None:
    """Converts to fp32 the buffers that `from_pretrained` keeps in fp32. `from_config` does not."""
    for module in whole.modules():
        for name in module._buffers.keys() & whole._keep_in_fp32_modules_strict:
            module._buffers[name] = module._buffers[name].float()


def kind_of(layer: torch.nn.Module) -> tuple[object, ...]:
    """Returns a key of the function that a decoder layer computes. Layers with equal keys compute
    the same function of weights, buffers, input and arguments.

    For each module in the layer, the key contains the name, the class, plain attributes (such as
    sizes, window, scaling and attention type), and the shapes and dtypes of parameters and buffers.
    Only `layer_idx` is not included, because it is an index into a cache. Other attributes are
    compared by identity. So layers that compute the same function may get different keys, but
    layers that compute different functions never get equal keys.
    """

    def described(value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(described(entry) for entry in value)
        if isinstance(value, functools.partial):
            return (
                id(value.func),
                described(value.args),
                described(tuple(sorted(value.keywords.items()))),
            )
        return (
            (type(value), value)
            if isinstance(value, bool | int | float | str | None | type | torch.dtype)
            else id(value)
        )

    def tensors(values: dict[str, Any]) -> tuple[object, ...]:
        return tuple(
            (name, None if value is None else (tuple(value.shape), value.dtype))
            for name, value in values.items()
        )

    parts = []
    for name, module in layer.named_modules():
        plain = {
            key: described(value)
            for key, value in vars(module).items()
            if not key.startswith("_") and key != "layer_idx"
        }
        parts.append(
            (
                name,
                type(module),
                tuple(sorted(plain.items())),
                tensors(module._parameters),
                tensors(module._buffers),
            )
        )
    return tuple(parts)
