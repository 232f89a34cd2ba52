"""Tests of model tensors that a transformers folder stores in several parts.

Such a tensor is put together once, when its first part is written. All other tensors are streamed
from their place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_families import config_of as tiny_config

from megatrain.runtime.files.checkpoint_names import CheckpointNames, hub_name
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import ModelSpec

IN_PARTS = {
    "deepseek_v3",
    "glm4_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
} | {
    "deepseek_v2",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe_lite",
    "mellum",
    "minimax_m2",
    "qwen3_5_moe_text",
    "solar_open",
    "axk1",
    "cohere2_moe",
    "hy_v3",
    "minimax",
    "phimoe",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "laguna",
    "mimo_v2_flash",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_tensors_in_parts_are_put_together_one_at_a_time(family: str) -> None:
    config = tiny_config(family, num_hidden_layers=2)
    names, layer = (
        CheckpointNames(config),
        ModelSpec.from_config(config.to_dict(), family, family).stack["1"],
    )
    log: list[tuple[str, str]] = []

    def source(name: str, shape: tuple[int, ...]) -> TensorSource:
        def pieces() -> Iterator[torch.Tensor]:
            log.append(("read", name))
            yield from torch.arange(torch.Size(shape).numel(), dtype=torch.float32).split(1000)

        return TensorSource(torch.float32, shape, pieces)

    sources = {
        hub_name("1", tensor.name, names.stack): source(tensor.name, tensor.shape)
        for tensor in layer.tensors
    }
    saved = names.saved(sources)
    assert not log, "a tensor was read before it was written"
    streamed = [
        key for key, found in saved.items() if any(found is source for source in sources.values())
    ]
    for key, found in saved.items():
        assert sum(piece.numel() for piece in found.pieces()) == torch.Size(found.shape).numel()
        log.append(("written", key))
    reads = [name for what, name in log if what == "read"]
    assert sorted(reads) == sorted(tensor.name for tensor in layer.tensors), (
        "a tensor was not read exactly once"
    )
    assert sum(found.bytes for found in saved.values()) == sum(
        found.bytes for found in sources.values()
    )
    parts = [key for key in saved if key not in streamed]
    assert bool(parts) == (family in IN_PARTS)
    assert all("experts" in key for key in parts)
