"""ModelSpec against transformers itself: the same tensors in the same order, and the bytes that autograd really keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatrain.simulator.errors import UserError
from megatrain.simulator.specs import ALIGNMENT, DTYPE_BYTES, Dtype, ModelSpec, Workload

CONFIGS = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def config_of(family: str, **changes: Any) -> transformers.PretrainedConfig:
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 224,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        **changes,
    }
    if family == "mistral":
        sizes["sliding_window"] = None
    return CONFIGS[family](**sizes, attn_implementation="sdpa")


def skeleton(config: transformers.PretrainedConfig) -> torch.nn.Module:
    """The model, shapes only."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("family", CONFIGS)
def test_tensors_are_those_of_transformers_in_its_order(family: str, head_dim: int, tied: bool) -> None:
    if family == "qwen2" and head_dim != 16:
        pytest.skip("qwen2 derives its head_dim from hidden_size")
    config = config_of(family, tie_word_embeddings=tied, **({} if family == "qwen2" else {"head_dim": head_dim}))
    model, spec = skeleton(config), ModelSpec.from_config(config.to_dict(), "config.json")

    assert spec.tied is tied
    assert spec.head_dim == head_dim
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for layer in model.model.layers:
        found = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
        assert [(tensor.name, tensor.shape) for tensor in spec.decoder] == found
    outside = {name.removeprefix("model."): tuple(parameter.shape) for name, parameter in model.named_parameters() if ".layers." not in name}
    ours = [tensor for layer in spec.stack.values() if layer.kind != "decoder" for tensor in layer.tensors]
    assert {tensor.name: tensor.shape for tensor in ours} == outside
    assert len(ours) == len(outside)


def test_a_real_model_s_size() -> None:
    """Qwen2.5-3B has 3.09 billion parameters, 2.77 billion of them outside the embedding, says its model card."""
    spec = ModelSpec(
        name="Qwen2.5-3B", family="qwen2", layers=36, hidden=2048, intermediate=11008, heads=16, kv_heads=2, head_dim=128, vocabulary=151936, tied=True
    )
    assert round(spec.parameters / 1e9, 2) == 3.09
    assert round((spec.parameters - spec.vocabulary * spec.hidden) / 1e9, 2) == 2.77


def test_layers_pad_each_tensor() -> None:
    spec = ModelSpec.from_config(config_of("qwen2", hidden_size=60).to_dict(), "config.json")
    for layer in spec.stack.values():
        assert layer.elements % ALIGNMENT == 0
        assert 0 <= layer.elements - layer.parameters < ALIGNMENT * len(layer.tensors)
    assert any(layer.elements > layer.parameters for layer in spec.stack.values())


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"hidden_size": 64, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 1},
    ],
    ids=["grouped", "every head its own", "one key"],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_saved_bytes_is_what_autograd_keeps(family: str, dtype: Dtype, sizes: dict[str, int]) -> None:
    config = config_of(family, num_hidden_layers=1, **sizes)
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    model = transformers.AutoModelForCausalLM.from_config(config).to(TORCH_DTYPE[dtype])
    layer, batch, sequence = model.model.layers[0], 2, 40
    x_BSH = torch.randn(batch, sequence, spec.hidden, dtype=TORCH_DTYPE[dtype], requires_grad=True)
    positions = model.model.rotary_emb(x_BSH, torch.arange(sequence)[None])
    given = {tensor.untyped_storage().data_ptr() for tensor in (x_BSH, *positions, *layer.parameters())}
    kept: dict[int, torch.Tensor] = {}  # by storage; the tensors stay alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x_BSH, position_embeddings=positions, attention_mask=None)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert spec.saved_bytes(batch * sequence, dtype) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("family", CONFIGS)
def test_layer_flops_are_those_that_torch_counts(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config, batch, sequence = config_of(family, num_hidden_layers=1), 2, 40
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    model = skeleton(config)
    with torch.device("meta"):
        x_BSH = torch.empty(batch, sequence, spec.hidden)
        positions = (torch.empty(1, sequence, spec.head_dim), torch.empty(1, sequence, spec.head_dim))
    with FlopCounterMode(display=False) as counter:
        model.model.layers[0](x_BSH, position_embeddings=positions, attention_mask=None)
        model.lm_head(x_BSH)
    tokens = batch * sequence
    masked_half = 2 * tokens * sequence * spec.heads * spec.head_dim  # torch counts the whole square of the attention
    assert spec.layer_flops(tokens, sequence) + spec.head_flops(tokens) == pytest.approx(counter.get_total_flops() - masked_half, rel=0.01)


# ---- refused

GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([GOOD], ["found a JSON list", "config.json"]),
        (None, ["found a JSON NoneType"]),
        ({}, ["model_type", "found None", "llama, mistral, qwen2, qwen3"]),
        ({**GOOD, "model_type": "gpt2"}, ["model_type", "found 'gpt2'", "llama, mistral, qwen2, qwen3"]),
        ({**GOOD, "model_type": ["llama"]}, ["model_type", "found ['llama']"]),
        ({key: value for key, value in GOOD.items() if key != "vocab_size"}, ["vocab_size", "found nothing", "a whole number"]),
        ({**GOOD, "hidden_size": "64"}, ["hidden_size", "found '64'", "a whole number"]),
        ({**GOOD, "hidden_size": True}, ["hidden_size", "found True", "a whole number"]),
        ({**GOOD, "hidden_size": 0}, ["hidden", "found 0", "1 to 16777216"]),
        ({**GOOD, "num_hidden_layers": -3}, ["layers", "found -3", "1 to 16777216"]),
        ({**GOOD, "num_hidden_layers": 10**30}, ["layers", "found 1000", "1 to 16777216"]),
        ({**GOOD, "num_attention_heads": 0}, ["heads", "found 0", "1 to 16777216"]),
        ({**GOOD, "num_attention_heads": 5}, ["hidden_size", "found 64", "a multiple of num_attention_heads = 5"]),
        ({**GOOD, "num_key_value_heads": 3}, ["kv_heads", "found 3", "a divisor of the 4 attention heads"]),
        ({**GOOD, "num_key_value_heads": 0}, ["kv_heads", "found 0", "1 to 16777216"]),
        ({**GOOD, "hidden_act": "gelu"}, ["hidden_act", "found 'gelu'", "'silu'"]),
        ({**GOOD, "attention_bias": True}, ["attention_bias", "found True", "False"]),
        ({**GOOD, "attention_dropout": 0.1}, ["attention_dropout", "found 0.1", "allowed: 0"]),
        ({**GOOD, "layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window", "full attention"]),
        ({**GOOD, "layer_types": 7}, ["layer_types", "found 7", "a list"]),
        ({**GOOD, "model_type": "mistral", "sliding_window": 4096}, ["sliding_window", "found 4096", "full attention"]),
    ],
)  # fmt: skip
def test_a_config_that_is_not_supported_is_one_line(config: object, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        ModelSpec.from_config(config, "here/config.json")
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "fix: " in message
    assert "\n" not in message


@pytest.mark.parametrize("source", ["no-such-model", "no/such/folder", "no/such.json", "", ".", "config.json/", "\0", "a" * 5000])
def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        ModelSpec.load(source)
    assert "allowed: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["batch", "sequence", "accumulation", "loss_chunk"])
@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_a_workload_out_of_range_is_one_line(field: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"workload: {field}: found {value}; allowed: .*; fix: set {field} "):
        Workload(**{"batch": 1, "sequence": 8, field: value})


def test_dtypes_have_a_width() -> None:
    assert {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in TORCH_DTYPE.items()} == DTYPE_BYTES
