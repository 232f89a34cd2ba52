"""DecoderStack: where in transformers' model its stack of decoder layers is, whatever the family calls it."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch


class DecoderStack(NamedTuple):
    """`model.layers` in most families; GPT-2's is `transformer.h`, OPT's `model.decoder.layers`."""

    decoder: str = "model"
    """the path of the module that embeds tokens, runs the layers and normalises"""
    layers: str = "layers"
    """the name of the list in it"""

    @classmethod
    def of(cls, whole: Any) -> Self:
        """Of a model with a head: the shortest path of a list with as many modules as the config has layers. Raises ValueError where there is none."""
        count = whole.config.get_text_config().num_hidden_layers
        found = [path for path, module in whole.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
        if not found:
            raise ValueError(f"{type(whole).__name__} has no list of {count} layers")
        decoder, _, layers = min(found, key=lambda path: path.count(".")).rpartition(".")
        return cls(decoder, layers)

    def decoder_of(self, whole: Any) -> Any:
        """The module at `decoder`."""
        return whole.get_submodule(self.decoder)

    def layers_of(self, whole: Any) -> Any:
        """The list of decoder layers."""
        return getattr(self.decoder_of(whole), self.layers)


def settle(whole: Any, dtype: torch.dtype) -> None:
    """Gives a model that was made by `from_config` the parameters that it has where `from_pretrained` loads it in `dtype`.

    Those without gradient, such as the bias by which a router chooses, become buffers: a model folder has them, and no step changes them. Those that the
    model's code makes in fp32 stay so only where the model says that they are kept in fp32.
    """
    kept = {*whole._keep_in_fp32_modules_strict, *(whole._keep_in_fp32_modules or ())}
    for path, module in whole.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if not parameter.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, parameter.data)
            elif parameter.dtype != dtype and not any(key in f"{path}.{name}" for key in kept):
                module._parameters[name] = torch.nn.Parameter(parameter.data.to(dtype))
