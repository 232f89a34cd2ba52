"""Tests that the predicted numbers of every family are those that were compared with PyTorch.

Nightly tests compare them for every family (`test_family_bytes.py`, `test_counted_memory.py`,
`test_compiled_memory.py`), which takes long. `family_numbers.toml` has the numbers themselves, so
that any test run notices a change. After a deliberate one, run the nightly tests of the families
that it names, and write the file again:

`PYTHONPATH=typings:tests/shared/models python tests/simulator/model/test_family_numbers.py`
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from decoder_layers import different_layers
from tiny_families import OWN, SMALL

from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.model.layer_memory import backward_bytes, saved_bytes
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

FILE = Path(__file__).with_name("family_numbers.toml")
STORED = tomllib.loads(FILE.read_text()) if FILE.exists() else {}
MODES = {
    "layers": Workload(batch=2, sequence=512),
    "compiled": Workload(batch=2, sequence=512, compiled=True),
    "pieces": Workload(batch=2, sequence=512, token_piece=64),
    "compiled_pieces": Workload(batch=2, sequence=512, token_piece=64, compiled=True),
}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 16}),
    "no-caps": ("gemma2", {"attn_logit_softcapping": None}),
    "experts-beside": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 96,
        },
    ),
    "sparse": (
        "gemma3n_text",
        {"activation_sparsity_pattern": [0.5] * 6, "altup_correct_scale": False},
    ),
    "shared-keys": (
        "gemma3n_text",
        {"num_kv_shared_layers": 2, "layer_types": ["full_attention", "sliding_attention"] * 3},
    ),
    "groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "many-heads": ("falcon", {"multi_query": False}),
    "clipped": ("mpt", {"attn_config": {"clip_qkv": 6.0}}),
    "head-norms": ("stablelm", {"qk_layernorm": True}),
    "parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "serial": ("gpt_neox", {"use_parallel_residual": False}),
    "query-norms": ("phi", {"qk_layernorm": True}),
    "mixer-norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True}),
    "jitter": ("phimoe", {"input_jitter_noise": 0.01}),
    "shared-experts": ("cohere2_moe", {"num_shared_experts": 2}),
    "gates": ("laguna", {"gating": "per-element"}),
    "no-ranks": ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}),
}
"""Models that differ from the tiny one of their family: the family and the changed keys."""
CASES = {**{family: (family, {}) for family in FAMILIES}, **FURTHER}
SHORT = 8
"""So few tokens that weights and their gradients are the largest part of a peak."""


def tiny_spec(family: str, changes: dict[str, Any]) -> ModelSpec:
    """Returns a small model whose config.json leaves out every key that it can."""
    given = {"model_type": family, **SMALL, **OWN.get(family, {})}
    content = {key: value for key, value in given.items() if value is not None}
    return ModelSpec.from_config({**content, **changes}, "config.json")


def numbers(spec: ModelSpec, layer: LayerSpec, work: Workload) -> list[int]:
    """Returns what kernels move forward and backward, the FLOPs forward, what is saved, and the
    peak of the backward pass, with the tokens of `work` and with few tokens.
    """
    forward, backward = (op_work(spec, kind, layer.name, work) for kind in ("forward", "backward"))
    piece = SHORT // 2 if work.piece else None
    few = msgspec.structs.replace(work, batch=1, sequence=SHORT, token_piece=piece)
    return [
        forward.moved_bytes,
        backward.moved_bytes,
        forward.flops,
        saved_bytes(spec, layer.name, work),
        backward_bytes(spec, layer, work),
        backward_bytes(spec, layer, few),
    ]


def of_case(name: str) -> dict[str, list[list[int]]]:
    """Returns `numbers` of each kind of layer, in each mode that the model has."""
    spec = tiny_spec(*CASES[name])
    return {
        mode: [numbers(spec, layer, work) for layer in different_layers(spec)]
        for mode, work in MODES.items()
        if not (work.piece and spec.pieces_obstacle(compiled=work.compiled))
    }


@pytest.mark.parametrize("name", CASES)
def test_predicted_numbers_are_those_compared_with_pytorch(name: str) -> None:
    assert of_case(name) == STORED[name]


if __name__ == "__main__":
    head = (
        "# Of each kind of layer of a tiny model of each family: bytes moved forward and backward,"
        " FLOPs\n# forward, bytes saved, and the peak of the backward pass with many and with few"
        " tokens."
    )
    lines = [head]
    for name in CASES:
        lines += [f"\n[{name}]", *(f"{mode} = {rows}" for mode, rows in of_case(name).items())]
    FILE.write_text("\n".join(lines) + "\n")
