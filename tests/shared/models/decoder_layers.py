"""Single decoder layers of transformers' models, their arguments, and attention as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.model.specs import ModelSpec

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer_of(model: Any, name: str) -> Any:
    """Returns a decoder layer of transformers' model."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers
    ]
    return lists[0][int(name)]


def turns_of(
    model: Any, x: torch.Tensor, positions: torch.Tensor, attention: str
) -> dict[str, Any]:
    """Returns what the model passes to its layers about positions, such as rotary embeddings."""
    rotary = next(
        (module for name, module in model.named_modules() if name.endswith("rotary_emb")), None
    )
    if rotary is None and model.config.model_type == "bloom":
        return {
            "alibi": model.transformer.build_alibi_tensor(
                torch.ones(x.shape[:2]), model.config.n_head, x.dtype
            )
        }
    if rotary is None:
        return (
            {
                "position_bias": model.transformer.build_mpt_alibi_tensor(
                    model.config.n_heads, x.shape[1]
                )
            }
            if model.config.model_type == "mpt"
            else {}
        )
    if model.config.model_type == "falcon":
        return {"position_embeddings": rotary(x, positions), "alibi": None}
    try:
        return {"position_embeddings": rotary(x, positions, attention)}
    except TypeError:
        return {"position_embeddings": rotary(x, positions)}


def different_layers(spec: ModelSpec) -> list[LayerSpec]:
    """Returns one decoder layer of each kind."""
    return [
        layer
        for index, layer in enumerate(spec.decoders)
        if layer.signature not in {other.signature for other in spec.decoders[:index]}
    ]


def register_one_kernel() -> None:
    """Registers the attention `one_kernel` in transformers: one kernel for every family.

    Softcaps and sinks are ignored, because they change the kernel and not the memory.
    """

    def attend(
        _module: object,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        _mask: object,
        scaling: float | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        grouped = k.shape[1] != q.shape[1]
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("one_kernel", attend)


def kept_bytes(forward: Callable[[], object], given: set[int]) -> int:
    """Returns the bytes that autograd saves in `forward`, without the storages in `given`."""
    kept: dict[int, torch.Tensor] = {}  # by storage; tensors that stay alive keep their address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
