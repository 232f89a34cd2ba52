"""Compares a step of the runtime with one of transformers, on a tiny model of every family.

This module makes weights and batches, computes the gradients of both, and their difference.
"""

from __future__ import annotations

import functools
import itertools
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_families import config_of as tiny_config
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack, match_from_pretrained
from megatrain.runtime.layers.layer_draws import seed_of
from megatrain.runtime.layers.meta_model import widen_buffers
from megatrain.runtime.optimizer.adamw import round_to_bf16
from megatrain.simulator.model.families import CANNOT_SEPARATE_DOCUMENTS, FAMILIES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
SEQUENCE = 24
SLIDING = ["sliding_attention", "full_attention"] * 2
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": {**QWEN_WINDOW, "max_window_layers": 2},
    "qwen3": {**QWEN_WINDOW, "max_window_layers": 1, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": SLIDING,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": {
        "sliding_window": 8,
        "layer_types": SLIDING,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0},
    },
    "gemma3n_text": {
        "sliding_window": 8,
        "layer_types": SLIDING,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64, 96, 64, 64],
        "activation_sparsity_pattern": [0.5, 0.25, 0.0, 0.0],
        "vocab_size_per_layer_input": 80,
        "altup_coef_clip": 0.15,
        "altup_num_inputs": 3,
        "final_logit_softcapping": 3.0,
    },
    "olmo3": {"sliding_window": 8, "layer_types": SLIDING},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 8, "layer_types": SLIDING},
    "smollm3": {**QWEN_WINDOW, "no_rope_layer_interval": 2},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING},
    "mixtral": {"sliding_window": 8},
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1], "head_dim": 16},
    "qwen3_next": {"head_dim": 16, "full_attention_interval": 2, "mlp_only_layers": [2]},
    "phi3": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "deepseek_v3": {"num_key_value_heads": 4},  # the model ignores another number
    "gpt_neox": {"rotary_pct": 0.5},
    "deepseek_v2": {"num_key_value_heads": 4},
    "dots1": {"sliding_window": 8, "max_window_layers": 2},
    "exaone_moe": {"sliding_window": 8, "layer_types": SLIDING},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "granitemoeshared": {
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "no_rope_layer_interval": 4,
        "floor_scale": SEQUENCE + 1,
    },
    "mellum": {"sliding_window": 8, "layer_types": SLIDING},
    "phimoe": {"sliding_window": 8, "router_jitter_noise": 0.5, "input_jitter_noise": 0.1},
    "minicpm3": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "youtu": {"num_key_value_heads": 4},
    "axk1": {"num_key_value_heads": 4},
    "cohere2_moe": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": SLIDING,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "granite_swa": {
        "sliding_window": 8,
        "layer_rope_theta": [0.0, 10000.0] * 2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "granitemoe_swa": {
        "sliding_window": 8,
        "shared_intermediate_size": 32,
        "layer_rope_theta": [0.0, 10000.0] * 2,
        "residual_multiplier": 0.5,
    },
    "mimo_v2_flash": {"sliding_window": 8, "layer_types": SLIDING},
    "ernie4_5_moe": {"head_dim": 16},
    "laguna": {
        "sliding_window": 8,
        "layer_types": SLIDING,
        "moe_router_logit_softcapping": 3.0,
        "moe_routed_scaling_factor": 2.0,
    },
    "minimax": {"block_size": 16, "mlp_alpha_factor": 1.5, "linear_attn_beta_factor": 0.5},
    "falcon": {"bias": True},
    "falcon_h1": {
        "mamba_chunk_size": 8,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.5,
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7],
    },
    "cwm": {"sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2},
    "exaone4": {"sliding_window": 8, "layer_types": SLIDING},
    "helium": {"head_dim": 16},
    "hyperclovax": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "ministral": {"sliding_window": 8, "layer_types": SLIDING},
    "ministral3": {"sliding_window": 8},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "vaultgemma": {
        "sliding_window": 8,
        "layer_types": SLIDING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
}
"""Changes of the configs in tiny_families that make every feature matter.

Models have layers of several kinds, windows shorter than a row, softcaps and multipliers.
"""
BF16_BOUND = 0.02
"""Bound of the difference relative to a gradient's largest element: a few units of bf16's 8 bits.

The runtime rounds in other places than transformers. It sums the gradients of the head's chunks, of
the embedding's rows and of the micro-batches in fp32.
"""


ROUNDED = {"codegen": 0.03, "gptj": 0.03, "hunyuan_v1_moe": 0.04, "stablelm": 0.03}
"""Bounds in bf16 of families whose norms have a bias.

Its gradient is a sum over all tokens and is rounded more often.
"""
CANCELLED = {"apertus": 2e-5, "jais2": 2e-5, "opt": 2e-5, "persimmon": 5e-5, "stablelm": 2e-5}
"""Bounds in fp32 of families whose gradients of query and key norms nearly cancel.

They are 1e-4 at most, and their error is 3e-9.
"""


def bound(family: str, dtype: str) -> float:
    """Returns the bound of a family's gradients, relative to the largest element of a tensor."""
    if dtype == "fp32":
        return CANCELLED.get(family, 1e-5)
    return ROUNDED.get(family, BF16_BOUND)


def model_of(family: str, **changes: Any) -> ModelSpec:
    config = tiny_config(family, **{**TINY, **CHANGES.get(family, {}), **changes})
    return ModelSpec.from_config(config.to_dict(), family, family)


def weights(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns random weights for a tensor.

    Each tensor gets other values. Weights of norms are around one half, and biases are not zero.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer} {tensor}".encode()))
    if tensor.endswith("e_score_correction_bias"):
        return torch.randn(shape, generator=generator) * 0.1
    return torch.randn(shape, generator=generator) * 0.1 + (0.5 if len(shape) == 1 else 0)


def as_loaded(model: Any) -> Any:
    """Gives the model the buffers that `from_pretrained` would compute.

    It computes buffers in fp32, while `from_config` computes some in the model's dtype.
    """
    match_from_pretrained(model, model.dtype)
    for module in model.modules():
        if any(buffer is not None for buffer in module._buffers.values()):
            (module if isinstance(module, PreTrainedModel) else model)._init_weights(module)
    widen_buffers(model)
    return model


def whole_model(plan: Plan, config: PretrainedConfig) -> Any:
    """Returns transformers' model with the same weights."""
    dtype = torch.float32 if plan.workload.dtype == "fp32" else torch.bfloat16
    model = as_loaded(AutoModelForCausalLM.from_config(config, dtype=dtype).train())
    stack, saved = DecoderStack.of(model), model.state_dict().keys()
    with torch.no_grad():
        for layer in plan.model.stack.values():
            for tensor in layer.tensors:
                master = weights(layer.name, tensor.name, tensor.shape)
                model.get_parameter(hub_name(layer.name, tensor.name, stack)).copy_(
                    master if dtype == torch.float32 else round_to_bf16(master)
                )
        for index, layer in enumerate(stack.layers_of(model)):
            for name, buffer in layer.named_buffers():
                if hub_name(str(index), name, stack) not in saved:
                    continue  # transformers computes these tables
                buffer.copy_(weights(str(index), name, tuple(buffer.shape)))
    return with_our_draws(model)


def without_draws(family: str) -> dict[str, Any]:
    """Returns config changes with which the family's layers draw no random numbers."""
    return dict.fromkeys(FAMILIES[family].draws, 0.0)


def with_our_draws(model: Any, step: int = 1) -> Any:
    """Makes the model's layers draw the random numbers that the runtime's layers draw in this step.

    Each call of a layer counts as the next micro-batch.
    """
    if FAMILIES[model.config.model_type].draws:
        for index, layer in enumerate(DecoderStack.of(model).layers_of(model)):
            micro_batches = itertools.count()

            def seed(
                _layer: object, _input: object, name: str, micro_batches: Iterator[int]
            ) -> None:
                torch.manual_seed(seed_of(0, step, next(micro_batches), name))

            layer.register_forward_pre_hook(
                functools.partial(seed, name=str(index), micro_batches=micro_batches)
            )
    return model


Tensors = dict[tuple[str, str], torch.Tensor]


def gradients_of(running: Any) -> Tensors:
    """Returns the gradients of the last step in fp32."""
    found: Tensors = {}
    for layer in running.plan.model.stack.values():
        buffer, offset = running.executor.schedule.state["gradients", layer.name], 0
        flat = running.executor._arenas.flat(
            buffer, running.executor._binder._dtype(buffer, layer.name), layer.elements
        )
        for tensor in layer.tensors:
            found[layer.name, tensor.name] = (
                flat[offset : offset + tensor.elements].float().view(tensor.shape).clone()
            )
            offset += tensor.padded
    return found


def their_gradients(plan: Plan, model: Any) -> Tensors:
    found: Tensors = {}
    stack = DecoderStack.of(model)
    for layer in plan.model.stack.values():
        for tensor in layer.tensors:
            gradient = model.get_parameter(hub_name(layer.name, tensor.name, stack)).grad
            found[layer.name, tensor.name] = (
                torch.zeros(tensor.shape) if gradient is None else gradient.float()
            )
    return found


def difference(ours: Tensors, theirs: Tensors) -> float:
    """Returns the largest relative difference of any tensor.

    A difference is relative to the tensor's largest element, but at least to 1e-4. Smaller
    gradients are rounding errors of terms that cancel, such as the gradient of a key's bias without
    rotary positions. Differences of up to 1e-8 are ignored for the same reason: with a sliding
    window of one token, the gradients of queries and keys are no larger.
    """
    assert ours.keys() == theirs.keys()
    return max(
        float(
            ((ours[name] - theirs[name]).abs().max() - 1e-8).clamp(min=0)
            / theirs[name].abs().max().clamp(min=1e-4)
        )
        for name in theirs
    )


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def drawn(plan: Plan, seed: int = 0) -> list[Batch]:
    """Returns micro-batches of random tokens with different numbers of labels."""
    work, generator = plan.workload, torch.Generator().manual_seed(seed)
    batches = []
    for micro in range(work.accumulation):
        ids, labels = torch.randint(
            plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator
        )
        labels[0, : 3 + micro] = IGNORED
        batches.append(Batch(ids, labels))
    return batches


def scale_of(batches: Sequence[Batch]) -> float:
    return 1 / sum(int((batch.labels != IGNORED).sum()) for batch in batches)


def compare(
    running: Any, batches: list[Batch], loss: torch.Tensor, model: Any, bound: float
) -> None:
    """Asserts that a step of the runtime has the loss and the gradients of transformers' model.

    `loss` is transformers' loss before its backward pass.
    """
    result = running.executor.step(batches, rate=0.0, number=1)
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=bound)
    found = difference(gradients_of(running), their_gradients(running.plan, model))
    logging.getLogger(__name__).info(
        "%s: loss %.1e, gradients %.1e",
        running.plan.model.family,
        abs(result.loss / float(loss.detach()) - 1),
        found,
    )
    assert found < bound


PACKED = torch.tensor([[0] * 9 + [1] * 1 + [2] * 14, [0] * 12 + [1] * 7 + [-1] * 5])
LEFT = torch.tensor([[-1] * 6 + [0] * 18, [0] * 24])
RIGHT = torch.tensor([[0] * 17 + [-1] * 7, [0] * 24])
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "falcon_h1")
"""Families with linear attention or a state-space mixer.

If transformers packs documents, the state passes from document to document.
"""
DOCUMENTED = [family for family in FAMILIES if family not in CANNOT_SEPARATE_DOCUMENTS]


def packed_bound(family: str) -> float:
    """Returns the bound of a gradient's error in fp32 with documents.

    Linear attention and state-space mixers chunk a packed row differently from a single document,
    so sums round differently: by up to 7e-5 on a processor with AVX2, and less with AVX-512.
    """
    return 1.5e-4 if family in LINEAR else CANCELLED.get(family, 1e-5)


def with_documents(plan: Plan, documents: torch.Tensor) -> Batch:
    """Returns `batch` with `documents`. Padding has labels, which must be ignored."""
    ids, labels, _ = drawn(plan)[0]
    return Batch(ids, labels, documents)


def labelled(batch: Batch) -> Batch:
    assert batch.documents is not None
    return batch._replace(labels=batch.labels.masked_fill(batch.documents < 0, IGNORED))


def loss_of_each_alone(model: Any, batches: list[Batch]) -> torch.Tensor:
    """Returns transformers' loss of each document alone, without masks, positions or padding."""
    trained = [labelled(batch) for batch in batches]
    loss = torch.zeros(())
    for batch in trained:
        assert batch.documents is not None
        for ids, labels, documents in zip(*batch, strict=True):
            for document in range(int(documents.max()) + 1):
                here = documents == document
                loss = loss + token_losses(model(ids[None, here]).logits, labels[None, here])
    return loss * scale_of(trained)
