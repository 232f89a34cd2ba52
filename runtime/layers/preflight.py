"""preflight: whether transformers' model has just the tensors that a ModelSpec says, and whether it runs, tried without memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.edges import Edges
from megatrain.runtime.layers.model_config import completed, first_lines
from megatrain.runtime.layers.skeleton import skeleton
from megatrain.runtime.layers.supported import DROPOUT
from megatrain.simulator.errors import UserError
from megatrain.simulator.families import FAMILIES
from megatrain.simulator.specs import ModelSpec

_TOKENS = 4
_FIX = "correct config.json, or use another model"


@functools.lru_cache(maxsize=64)
def preflight(model: ModelSpec) -> None:
    """Compares the names and shapes of all of the model's tensors with those of transformers' model, runs one layer of each kind on the meta device, and
    what comes before and after the layers on a few tokens of zeros: no parameter is allocated. Costs a second or two, once a model.

    Raises UserError, which names the tensor or says what transformers cannot do.
    """
    try:
        whole = _whole(model)
        stack = DecoderStack.of(whole)
    except Exception as error:  # a model's constructor computes on values that nobody has checked
        raise _unable(model, error) from None
    theirs = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters() if parameter.requires_grad}  # others count as buffers
    ours = {hub_name(layer.name, tensor.name, stack): tensor.shape for layer in model.stack.values() for tensor in layer.tensors}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            found, allowed = (f"shape {shapes[name]}" if name in shapes else "no such tensor" for shapes in (ours, theirs))
            raise UserError(f"model {model.name}: tensor {name}", found=f"{found} in the plan", allowed=f"{allowed}, as in transformers' model", fix=_FIX)
    try:
        _run(model.shortest(1))
        _hand_out(model)
    except Exception as error:  # so does its forward
        raise _unable(model, error) from None


def _quiet(model: ModelSpec) -> PretrainedConfig:
    config = completed(model)
    for key in DROPOUT:  # a run without dropout is looked at; `supported.py` says whether there is one
        if getattr(config, key, None):
            setattr(config, key, 0.0)
    config.use_cache = config.output_router_logits = False
    return config


def _whole(model: ModelSpec) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_quiet(model), dtype=torch.bfloat16)


def _run(model: ModelSpec) -> None:
    """A forward of a few tokens, in which nothing depends on values, which there are not: the mask has four dimensions, so that none is built, and positions
    are not scaled by the length of the row.
    """
    whole = _whole(model).eval()
    for module in whole.modules():
        if (kinds := getattr(module, "rope_type", None)) is not None:
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    with torch.device("meta"), torch.no_grad():
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
        slopes = hasattr(DecoderStack.of(whole).decoder_of(whole), "build_alibi_tensor")  # made of a mask of two dimensions, or of none
        whole(input_ids=ids, position_ids=ids, attention_mask=None if slopes else torch.ones(1, 1, 1, 1, dtype=torch.bool))


def _hand_out(model: ModelSpec) -> None:
    """What comes before and after the layers, and what every layer is handed, of a few tokens of zeros: nothing else depends on the number of layers."""
    family, cpu = FAMILIES[model.family], torch.device("cpu")
    whole = skeleton(_quiet(model), torch.float32, cpu)
    Edges(whole, model.hidden, torch.float32, cpu, model.positions, family.norm_name, family.entrance).arguments(1, _TOKENS, None)


def _unable(model: ModelSpec, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(f"model {model.name}: config", found=first_lines(error), allowed="a model that transformers can build and run", fix=_FIX)
