"""Every family: loss and gradients of the executor are those of transformers' whole model under plain autograd."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_families import config_of as tiny_config
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.checkpoint_names import hub_name
from megatrain.runtime.model_files import export, folder_weights
from megatrain.runtime.skeleton import kind_of, skeleton, widen_buffers
from megatrain.runtime.templates import config_of
from megatrain.simulator.errors import UserError
from megatrain.simulator.families import FAMILIES
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import lower
from megatrain.simulator.specs import ModelSpec

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SEQUENCE = 24
SLIDING = ["sliding_attention", "full_attention"] * 2
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": {**QWEN_WINDOW, "max_window_layers": 2},
    "qwen3": {**QWEN_WINDOW, "max_window_layers": 1, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "olmo3": {"sliding_window": 8, "layer_types": SLIDING},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granitemoe": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
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
    "gpt_neox": {"rotary_pct": 0.5},
}
"""on top of tiny_families: layers of several kinds, windows shorter than a row, caps and multipliers that matter"""
KINDS = {"gemma2": 2, "gemma3_text": 2, "olmo3": 2, "glm4_moe": 2, "cohere2": 2, "smollm3": 2, "gpt_oss": 2, "qwen2": 2, "qwen3": 2, "qwen2_moe": 2,
         "qwen3_moe": 2, "qwen3_next": 3, "deepseek_v3": 2}  # fmt: skip
ROUTED = ("granitemoe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe")
ZERO_IN_TRUTH = 0.01
"""a tensor whose gradient is that much smaller than its layer's largest is measured by that: a bias of keys moves no attention"""
BF16_BOUND = 0.06
"""of the largest element: a tensor's gradient is rounded to 8 bits, ours in other places than theirs (head in chunks, embedding summed in fp32)"""


def model_of(family: str, **changes: Any) -> ModelSpec:
    config = tiny_config(family, **{**TINY, **CHANGES.get(family, {}), **changes})
    return ModelSpec.from_config(config.to_dict(), family, family)


def weights(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every tensor another one, norms around one half and biases not zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer} {tensor}".encode()))
    if tensor.endswith("e_score_correction_bias"):
        return torch.randn(shape, generator=generator) * 0.1
    return torch.randn(shape, generator=generator) * 0.1 + (0.5 if len(shape) == 1 else 0)


def whole_model(plan: Plan, config: PretrainedConfig) -> Any:
    """transformers' model with the same weights."""
    dtype = torch.float32 if plan.workload.dtype == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    widen_buffers(model)
    prefix = model.base_model_prefix
    with torch.no_grad():
        for layer in plan.model.stack.values():
            for tensor in layer.tensors:
                model.get_parameter(hub_name(layer.name, tensor.name, prefix)).copy_(weights(layer.name, tensor.name, tensor.shape))
        for index, layer in enumerate(model.base_model.layers):
            for name, buffer in layer.named_buffers():
                buffer.copy_(weights(str(index), name, tuple(buffer.shape)))
    return model


Tensors = dict[tuple[str, str], torch.Tensor]


def gradients_of(running: Any) -> Tensors:
    """What the last step left, fp32."""
    found: Tensors = {}
    for layer in running.plan.model.stack.values():
        buffer, offset = f"device.gradients:{layer.name}", 0
        flat = running.executor.arenas.flat(buffer, running.executor._binder._gradient_dtype(buffer, layer.name), layer.elements)
        for tensor in layer.tensors:
            found[layer.name, tensor.name] = flat[offset : offset + tensor.elements].float().view(tensor.shape).clone()
            offset += tensor.padded
    return found


def their_gradients(plan: Plan, model: Any) -> Tensors:
    found: Tensors = {}
    for layer in plan.model.stack.values():
        for tensor in layer.tensors:
            gradient = model.get_parameter(hub_name(layer.name, tensor.name, model.base_model_prefix)).grad
            found[layer.name, tensor.name] = torch.zeros(tensor.shape) if gradient is None else gradient.float()
    return found


def difference(ours: Tensors, theirs: Tensors, floor: float = 0.0) -> float:
    """The largest over the tensors of the largest difference, relative to the tensor's largest element, or to `floor` x its layer's if that is larger."""
    assert ours.keys() == theirs.keys()
    largest = {name: float(tensor.abs().max()) for name, tensor in theirs.items()}
    of_layer = {layer: max(value for (other, _), value in largest.items() if other == layer) for layer, _ in theirs}
    return max(float((ours[name] - theirs[name]).abs().max()) / max(largest[name], floor * of_layer[name[0]], 1e-30) for name in theirs)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def drawn(plan: Plan, seed: int = 0) -> list[Batch]:
    """Micro-batches of random tokens, of which each has another number of labels."""
    work, generator = plan.workload, torch.Generator().manual_seed(seed)
    batches = []
    for micro in range(work.accumulation):
        ids, labels = torch.randint(plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator)
        labels[0, : 3 + micro] = IGNORED
        batches.append(Batch(ids, labels))
    return batches


def scale_of(batches: Sequence[Batch]) -> float:
    return 1 / sum(int((batch.labels != IGNORED).sum()) for batch in batches)


@pytest.fixture
def run(make_plan: Callable[..., Plan], session: Callable[..., Any]) -> Callable[..., Any]:
    """A session of one resident model with the weights of this file; `run(model, ...)`."""

    def make(model: ModelSpec, **changes: Any) -> Any:
        plan = make_plan("resident", **{"model": model, "sequence": SEQUENCE, "dtype": "fp32", "loss_chunk": 13, "checkpoint_interval": 3, **changes})
        return session(msgspec.structs.replace(plan, digest=lower(plan).digest), weights=changes.get("weights", weights))

    return make


def compare(running: Any, batches: list[Batch], loss: torch.Tensor, model: Any, bound: float) -> None:
    """A step of ours against `loss` of theirs, whose backward is still to come."""
    result = running.executor.step(batches, rate=0.0, number=1)
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=bound)
    found = difference(gradients_of(running), their_gradients(running.plan, model), ZERO_IN_TRUTH if bound == BF16_BOUND else 0.0)
    print("MEASURED", running.plan.model.family, running.plan.workload.dtype, float(abs(result.loss / loss.detach() - 1)), found)
    assert found < bound


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", BF16_BOUND)])
def test_loss_and_gradients_are_those_of_the_whole_model(run: Callable[..., Any], family: str, dtype: str, bound: float) -> None:
    """With accumulation, a head in chunks, and recomputed blocks of three layers."""
    with run(model_of(family), dtype=dtype, accumulation=2) as running:
        model, batches = whole_model(running.plan, config_of(running.plan.model)), drawn(running.plan)
        loss = sum(token_losses(model(batch.ids).logits, batch.labels) for batch in batches) * scale_of(batches)
        compare(running, batches, loss, model, bound)
