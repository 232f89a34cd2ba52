"""Tests of the library's models: the published number of parameters, and transformers' tensors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.simulator.model import specs
from megatrain.simulator.model.families import with_nulls
from megatrain.simulator.model.specs import ModelSpec

LIBRARY = Path(specs.__file__).parents[1] / "library" / "models"

# Totals of the checkpoints' safetensors, from the models' pages on huggingface.co. A tied head that
# is stored twice (qwen3 0.6b, 1.7b) counts once. Numbers of gemma-3 4b and larger are for the
# language model: the whole model (4,300,079,472; 12,187,325,040; 27,432,406,640) minus the vision
# tower (416,866,032) and the projector. The number of deepseek-v3 has no multi-token head, but the
# router's bias, which is not a parameter.
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-large-2407": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "glm-4-9b": 9_399_951_360,
    "granite-3.1-8b": 8_170_848_256,
    "granite-3.1-2b": 2_533_531_648,
    "command-r7b": 8_028_033_024,
    "smollm3-3b": 3_075_098_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200,
    "phi-2": 2_779_683_840,
    "olmoe-1b-7b": 6_919_161_856,
    "starcoder2-7b": 7_173_923_840,
    "pythia-6.9b": 6_857_302_016,
}
BUFFERS = {"deepseek-v3": 58 * 256}
"""A bias for each expert of each sparse layer, which is a buffer in transformers."""
ABOUT = {
    "qwen3-next-80b-a3b": (80e9, 3e9),
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen3-235b-a22b": (235e9, 22e9),
    "gpt-oss-120b": (116.8e9, 5.1e9),
    "deepseek-v3": (671e9, 37e9),
}
"""Total and active parameters as rounded on the model cards.

The active parameters of gpt-oss do not include its embedding.
"""
NAMES = sorted(file.stem for file in LIBRARY.glob("*.json"))


def test_every_shape_is_checked_against_something() -> None:
    assert len(NAMES) >= 28
    assert set(NAMES) == PUBLISHED.keys() | ABOUT.keys()


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, parameters: int) -> None:
    assert ModelSpec.load(name).parameters + BUFFERS.get(name, 0) == parameters


@pytest.mark.parametrize(("name", "rounded"), ABOUT.items())
def test_active_parameters_are_those_published(name: str, rounded: tuple[float, float]) -> None:
    spec = ModelSpec.load(name)
    embedding = spec.vocabulary * spec.hidden if name.startswith("gpt-oss") else 0
    assert spec.parameters == pytest.approx(rounded[0], rel=0.005)
    assert spec.active_parameters - embedding == pytest.approx(
        rounded[1], rel=0.3 if name.startswith("qwen3-next") else 0.02
    )


@pytest.mark.parametrize("name", NAMES)
def test_real_shapes_are_transformers_own(name: str) -> None:
    spec = ModelSpec.load(name)
    config = AutoConfig.for_model(**{**with_nulls(spec.config), "pad_token_id": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for layer, module in zip(spec.decoders, model.base_model.layers, strict=True):
        assert {tensor.name: tensor.shape for tensor in layer.tensors} == {
            name: tuple(parameter.shape) for name, parameter in module.named_parameters()
        }
    types = getattr(config, "layer_types", None)
    assert not types or types == [layer.attention for layer in spec.decoders]


@pytest.mark.parametrize("name", NAMES)
def test_a_library_file_is_compact_and_complete(name: str) -> None:
    content = msgspec.json.decode((LIBRARY / f"{name}.json").read_bytes())
    kept = ModelSpec.load(name).config
    assert {key: value for key, value in content.items() if value is not None} == {
        key: value for key, value in kept.items() if content[key] is not None
    }
    assert content["model_type"] in transformers.CONFIG_MAPPING


@pytest.mark.parametrize("name", NAMES)
def test_the_shortest_model_has_every_kind_of_layer(name: str) -> None:
    spec = ModelSpec.load(name)
    for least in (1, 3):
        short = spec.shortest(least)
        assert short.shape == spec.shape
        assert least <= short.layers <= spec.layers
        assert short.decoders == spec.decoders[: short.layers]
        assert short.layers == least or spec.with_layers(short.layers - 1).shape != spec.shape


def test_every_model_of_the_library_has_its_own_limit_of_a_row() -> None:
    """Without the limit, `check` would name context lengths that the model cannot use."""
    assert [name for name in specs.library() if not ModelSpec.load(name).longest_row] == []
