"""Tests of the bias of a router's scores: a buffer of the model that training does not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import config_of as tiny_config

from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.checkpoint.manifest import RunState
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_router_s_bias_is_that_of_the_model_folder_also_after_a_resume(
    executable: Callable[..., Plan], session: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    """A checkpoint does not store a router's bias, because training does not change it.

    A resumed run has the right bias, because the model's folder is loaded before every restore.
    """
    model = ModelSpec.from_config(
        tiny_config(family, num_hidden_layers=3, num_key_value_heads=8).to_dict(), family, family
    )
    limits = {"device_limit_bytes": 2**30, "host_limit_bytes": 2**30, "chunk_bytes": 2**20}
    plan = executable("overlapped", model=model, **limits)
    drawn = random_weights(0)

    def weights(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        return (
            torch.arange(8.0).sin()
            if tensor.endswith("e_score_correction_bias")
            else drawn(layer, tensor, shape)
        )

    with session(plan, weights=weights) as running:
        for step in (1, 2):
            running.step(step)
        save(
            running.executor,
            RunState(step=2, loss=None, settings={}, progress={}),
            tmp_path / "saved",
        )
        expected = (running.step(3).loss, running.bits(0))
        (bias,) = running.state.buffers(model.stack["2"]).values()
        assert torch.equal(bias, torch.arange(8.0).sin())
    with session(plan, weights=weights) as running:
        restore(running.executor, tmp_path / "saved", {})
        assert (running.step(3).loss, running.bits(0)) == expected
    with session(plan) as running:  # another bias gives another loss from the same checkpoint
        restore(running.executor, tmp_path / "saved", {})
        assert running.step(3).loss != expected[0]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_router_s_bias_is_fp32_in_a_bf16_model(family: str) -> None:
    whole = meta_model(tiny_config(family), torch.bfloat16, torch.device("cpu"))
    biases = [buffer for name, buffer in whole.named_buffers() if "correction_bias" in name]
    assert {bias.dtype for bias in biases} == {torch.float32}
