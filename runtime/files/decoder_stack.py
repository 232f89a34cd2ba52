"""DecoderStack: where in transformers' model its stack of decoder layers is, whatever the family calls it."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch


class DecoderStack(NamedTuple):
    """`model.layers` in most families; GPT-2's is `transformer.h`, OPT's `model.decoder.layers`, that of Gemma 3 with images `model.language_model.layers`."""

    decoder: str = "model"
    """the path of the module that embeds tokens, runs the layers and normalises"""
    layers: str = "layers"
    """the name of the list in it"""
    head: str = "lm_head"
    """the path of the output projection"""

    @classmethod
    def of(cls, whole: Any) -> Self:
        """Of a model with a head, also of a multimodal one: the decoder is the module that has the embedding table, and a list with as many modules as the
        language model's config has layers. Raises ValueError where there is none.
        """
        count, table, head = whole.config.get_text_config().num_hidden_layers, whole.get_input_embeddings(), whole.get_output_embeddings()
        paths = {id(module): path for path, module in whole.named_modules()}
        decoder = paths[id(table)].rpartition(".")[0]
        lists = whole.get_submodule(decoder).named_children()
        layers = next((name for name, module in lists if isinstance(module, torch.nn.ModuleList) and len(module) == count), None)
        if layers is None:
            raise ValueError(f"{type(whole).__name__} has no list of {count} layers")
        return cls(decoder, layers, paths[id(head)])

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
