"""Checks that a ModelSpec matches transformers' model, and that the model runs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers import gemma3n, grouped_experts
from megatrain.runtime.layers.ends import embedding_and_head
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.runtime.layers.model_config import first_lines, full_config
from megatrain.runtime.layers.supported import dropout_keys
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec

_TOKENS = 4
"""Number of tokens in the trial run."""
_FIX = "correct config.json, or use another model"


@functools.lru_cache(maxsize=64)
def refuse_unlike_transformers(model: ModelSpec) -> None:
    """Raises UserError if transformers cannot build or run `model`, or if the name or shape of a
    tensor differs from the spec.

    Compares all tensors. Then runs a layer of each kind on the meta device, and the parts before
    and after the layers on a few tokens. Allocates no memory for parameters. Takes one or two
    seconds, once for each model.
    """
    try:
        whole = _build(model)
        stack = DecoderStack.of(whole)
    except Exception as error:  # unchecked values may cause any exception
        raise _cannot_run(model, error) from None
    # Parameters without gradients count as buffers.
    theirs = {
        name: tuple(parameter.shape)
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad
    }
    ours = {
        hub_name(layer.name, tensor.name, stack): tensor.shape
        for layer in model.stack.values()
        for tensor in layer.tensors
    }
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            found, allowed = (
                f"shape {shapes[name]}" if name in shapes else "no such tensor"
                for shapes in (ours, theirs)
            )
            raise UserError(
                f"model {model.name}: tensor {name}",
                found=f"{found} in the plan",
                allowed=f"{allowed}, as in transformers' model",
                fix=_FIX,
            )
    try:
        _run_layers(model.shortest(1))
        _run_ends(model)
    except Exception as error:  # the forward pass may also raise any exception
        raise _cannot_run(model, error) from None


def _config_without_dropout(model: ModelSpec) -> PretrainedConfig:
    config = full_config(model)
    # `supported.py` refuses dropout if the workload does not switch it off.
    for key in dropout_keys(model.family):
        if getattr(config, key, None):
            setattr(config, key, 0.0)
    config.use_cache = config.output_router_logits = False
    return config


def _build(model: ModelSpec) -> Any:
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(
            _config_without_dropout(model), dtype=torch.bfloat16
        )
    grouped_experts.install(whole)
    if gemma3n.carries(model.family):
        gemma3n.cut_off_without_waiting(whole)
    return whole


def _run_layers(model: ModelSpec) -> None:
    """Runs a forward pass of a few tokens on the meta device."""
    # Tensors on the meta device have no values, so nothing may depend on values: the mask has four
    # dimensions, so transformers builds no mask, and positions are not scaled by a length.
    whole = _build(model).eval()
    for module in whole.modules():
        if (kinds := getattr(module, "rope_type", None)) is not None:
            module.rope_type = (
                dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            )
            # Phi-3.5-MoE reads the type from the config.
            rope: Any = module.config.rope_parameters
            for parameters in rope.values() if isinstance(kinds, dict) else (rope,):
                parameters["rope_type"] = "default"
    with torch.device("meta"), torch.no_grad():
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
        # ALiBi slopes require a mask with two dimensions, or no mask.
        slopes = hasattr(DecoderStack.of(whole).decoder_of(whole), "build_alibi_tensor")
        whole(
            input_ids=ids,
            position_ids=ids,
            attention_mask=None if slopes else torch.ones(1, 1, 1, 1, dtype=torch.bool),
        )


def _run_ends(model: ModelSpec) -> None:
    """Runs the parts before and after the layers, and makes the arguments of every layer. Only
    these depend on the number of layers.
    """
    cpu = torch.device("cpu")
    whole = meta_model(_config_without_dropout(model), torch.float32, cpu)
    embedding_and_head(whole, model, torch.float32, cpu).arguments(1, _TOKENS, None)


def _cannot_run(model: ModelSpec, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(
        f"model {model.name}: config",
        found=first_lines(error),
        allowed="a model that transformers can build and run",
        fix=_FIX,
    )
