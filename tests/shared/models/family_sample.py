"""The families that normal tests use. Nightly tests use all families."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

SAMPLE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "deepseek_v3",
    "llama4_text",
    "minimax",
    "falcon_h1",
    "hunyuan_v1_moe",
    "bloom",
    "nanochat",
    "gpt2",
    "opt",
    "mpt",
    "phi3",
    "cohere2",
    "granitemoe",
    "stablelm",
)
"""At least one family for each way in which layers differ: norms, windows, sinks, soft caps,
biases, positions, parallel blocks, experts, latent and linear attention, state-space mixers, and
scores without a fused kernel."""

FEW = (
    "llama",
    "gemma2",
    "gemma3n_text",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v3",
    "llama4_text",
    "falcon_h1",
    "opt",
    "mpt",
    "bloom",
    "gpt2",
    "nanochat",
    "hunyuan_v1_moe",
)
"""Families with which the runtime runs all lines that it runs with those of `SAMPLE`.

They are for tests of what other tests show for each family of `SAMPLE` in another way.
"""


def others_nightly(
    families: Iterable[str], *values: Any, among: Container[str] = SAMPLE
) -> list[Any]:
    """Returns the parameters of a test, with families outside of `among` marked as nightly.

    Each parameter is a family, or (family, *values).
    """
    return [
        pytest.param(family, *values, marks=[] if family in among else [pytest.mark.nightly])
        for family in families
    ]
