"""Tests of speed: tokens/s, TFLOPS by 6N and MFU, against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatrain.simulator.model.metrics import mfu, tflops_6n, tokens_per_second
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

HIDDEN, LAYERS, VOCABULARY, SEQUENCE = 64, 4, 256, 16
DECODER = HIDDEN * (64 + 32 + 32) + 64 * HIDDEN + 3 * HIDDEN * 96
"""Elements of a decoder layer's matrices.

These are the projections of 4 query, 2 key and 2 value heads of 16, the output projection, and an
MLP of 96.
"""
NORMS = HIDDEN * (2 * LAYERS + 1)


@pytest.fixture
def workload() -> Workload:
    return Workload(batch=3, sequence=SEQUENCE, accumulation=5)


def test_speed_counts_the_tokens_of_all_micro_batches(workload: Workload) -> None:
    assert tokens_per_second(workload, 2.0) == 3 * SEQUENCE * 5 / 2


@pytest.mark.parametrize(("tied", "embeddings"), [(False, 2), (True, 1)])
def test_tflops_count_every_parameter_six_times(
    make_model: Callable[..., ModelSpec], workload: Workload, tied: bool, embeddings: int
) -> None:
    parameters = LAYERS * DECODER + NORMS + embeddings * VOCABULARY * HIDDEN
    assert tflops_6n(make_model(tied=tied), workload, 0.5) == pytest.approx(
        6 * parameters * workload.step_tokens / 0.5 / 1e12, rel=1e-12
    )


@pytest.mark.parametrize("tied", [False, True])
def test_mfu_counts_the_head_and_the_seen_half_of_attention(
    make_model: Callable[..., ModelSpec], workload: Workload, tied: bool
) -> None:
    """MFU counts the head, tied or not, but neither the embedding lookup nor norms."""
    multiplying = LAYERS * DECODER + VOCABULARY * HIDDEN
    attention = (
        LAYERS * 2 * (2 * 64) * SEQUENCE / 2
    )  # two products with 4 heads of 16, over half of the sequence on average
    flops = (6 * multiplying + 3 * attention) * workload.step_tokens
    assert mfu(make_model(tied=tied), workload, 0.5, peak_tflops=0.25) == pytest.approx(
        flops / 0.5 / 0.25e12, rel=1e-12
    )
