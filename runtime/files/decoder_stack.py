"""DecoderStack: finds the decoder layers in transformers' model of any family."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch


class DecoderStack(NamedTuple):
    """Paths of the decoder, its list of layers, and the output projection.

    The list of layers is `model.layers` in most families, `transformer.h` in GPT-2,
    `model.decoder.layers` in OPT, and `model.language_model.layers` in Gemma 3 with images.
    """

    decoder: str = "model"
    """Path of the module that embeds tokens, runs the layers and applies the final norm."""
    layers: str = "layers"
    """Name of the list of layers in the decoder."""
    head: str = "lm_head"
    """Path of the output projection."""

    @classmethod
    def of(cls, whole: Any) -> Self:
        """Returns the decoder stack of a model with a head. The model may be multimodal.

        The decoder is the module that contains the embedding table. Its list of layers is the
        module list whose length is the number of layers in the language model's config. Raises
        ValueError if there is no such list.
        """
        count, table, head = (
            whole.config.get_text_config().num_hidden_layers,
            whole.get_input_embeddings(),
            whole.get_output_embeddings(),
        )
        paths = {id(module): path for path, module in whole.named_modules()}
        decoder = paths[id(table)].rpartition(".")[0]
        lists = whole.get_submodule(decoder).named_children()
        layers = next(
            (
                name
                for name, module in lists
                if isinstance(module, torch.nn.ModuleList) and len(module) == count
            ),
            None,
        )
        if layers is None:
            raise ValueError(f"{type(whole).__name__} has no list of {count} layers")
        return cls(decoder, layers, paths[id(head)])

    def decoder_of(self, whole: Any) -> Any:
        """Returns the module at `decoder`."""
        return whole.get_submodule(self.decoder)

    def layers_of(self, whole: Any) -> Any:
        """Returns the list of decoder layers."""
        return getattr(self.decoder_of(whole), self.layers)


def match_from_pretrained(whole: Any, dtype: torch.dtype) -> None:
    """Changes a model from `from_config` to have the same parameters as a model from
    `from_pretrained` in `dtype`.

    Parameters without gradients, such as the bias for a router's choice, become buffers: a model
    folder contains them, but no step changes them. Parameters that the model's code creates in fp32
    are converted to `dtype`, unless the model lists them as kept in fp32.
    """
    kept = {*whole._keep_in_fp32_modules_strict, *(whole._keep_in_fp32_modules or ())}
    for path, module in whole.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, parameter.data)
            elif parameter.dtype != dtype and not any(key in f"{path}.{name}" for key in kept):
                module._parameters[name] = torch.nn.Parameter(parameter.data.to(dtype))
