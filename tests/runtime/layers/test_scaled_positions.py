"""Tests of rotary positions that are scaled by the length of a document.

Each document of a packed row has the frequencies of its own length, as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import reference_lengths
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from whole_models import (
    LEFT,
    PACKED,
    compare,
    drawn,
    labelled,
    model_of,
    scale_of,
    token_losses,
    whole_model,
    without_draws,
)

from megatrain.runtime.batch import Batch
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.scaled_positions import ScaledPositions, document_lengths
from megatrain.runtime.layers.transformers_model import refuse_unlike_transformers

LIMIT = 8
"""number of tokens up to which positions are not scaled; the documents of `PACKED` have 9, 1, 14,
12 and 7 tokens"""
LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": LIMIT}
HALF = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0]
LONGROPE = {
    "max_position_embeddings": 64,
    "rope_parameters": {**LONG, "short_factor": [1.0] * 8, "long_factor": HALF},
}
DYNAMIC = {
    "max_position_embeddings": LIMIT,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
}
BY_LAYER = {
    "max_position_embeddings": LIMIT,
    "rope_parameters": {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
LATENT = {
    "rope_parameters": {**LONG, "short_factor": [1.0] * 4, "long_factor": HALF[:4]},
    "max_position_embeddings": 64,
}
MSCALED = {
    "rope_parameters": {**LONGROPE["rope_parameters"], "short_mscale": 1.1, "long_mscale": 1.3}
}
YARN = {
    "max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": LIMIT,
    },
}
LLAMA3 = {
    "max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LIMIT,
    },
}
SCALED = [
    ("llama", LONGROPE),
    ("phi3", {**LONGROPE, "original_max_position_embeddings": LIMIT}),
    ("phimoe", {**LONGROPE, **MSCALED, **without_draws("phimoe")}),
    ("minicpm3", LATENT),
    ("llama", DYNAMIC),
    ("qwen2", DYNAMIC),
    ("gemma3_text", BY_LAYER),
    ("qwen3_moe", DYNAMIC),
    ("gpt_oss", YARN),
    ("llama", YARN),
    ("llama", LLAMA3),
]


def alone(model: Any, batches: list[Batch]) -> torch.Tensor:
    """Returns the loss of transformers' model with each document alone.

    A single token before each document resets the scaling by the previous document.
    """
    trained, loss = [labelled(batch) for batch in batches], torch.zeros(())
    for batch in trained:
        assert batch.documents is not None
        for ids, labels, documents in zip(*batch, strict=True):
            for document in range(int(documents.max()) + 1):
                here = documents == document
                with torch.no_grad():
                    model(ids[None, :1])
                loss = loss + token_losses(model(ids[None, here]).logits, labels[None, here])
    return loss * scale_of(trained)


@pytest.fixture(params=[None, 5], ids=["whole", "pieces"])
def piece(request: pytest.FixtureRequest) -> int | None:
    """Returns the tokens of a piece. Pieces do not end where documents end."""
    if request.param and request.getfixturevalue("family") == "phimoe":
        pytest.skip("refused, since its experts draw random numbers")
    found: int | None = request.param
    return found


@pytest.mark.parametrize(
    ("way", "piece"),
    [
        ("lengths", 5),
        ("mask", None),
        pytest.param("lengths", None, marks=pytest.mark.nightly),
        pytest.param("mask", 5, marks=pytest.mark.nightly),
    ],
    indirect=["piece"],
)
@pytest.mark.parametrize(("family", "changes"), SCALED)
def test_packed_documents_have_the_frequencies_of_their_own_length(
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    way: str,
    piece: int | None,
) -> None:
    """The normal tests have each way with or without pieces, for each kind of scaling."""
    if way == "lengths":
        reference_lengths.install(monkeypatch)
    model_spec = model_of(family, **changes)
    with run(model_spec, documents=True, accumulation=2, token_piece=piece) as running:
        batches = [
            batch._replace(documents=documents)
            for batch, documents in zip(drawn(running.plan), (PACKED, LEFT), strict=True)
        ]
        model = whole_model(running.plan, config_of(running.plan.model))
        compare(running, batches, alone(model, batches), model, 1e-5)


@pytest.mark.parametrize(("family", "changes"), SCALED)
def test_whole_rows_are_scaled_as_transformers_does(
    run: Callable[..., Any], family: str, changes: dict[str, Any], piece: int | None
) -> None:
    with run(model_of(family, **changes), token_piece=piece) as running:
        model, batches = (
            whole_model(running.plan, config_of(running.plan.model)),
            drawn(running.plan),
        )
        compare(
            running,
            batches,
            token_losses(model(batches[0].ids).logits, batches[0].labels) * scale_of(batches),
            model,
            1e-5,
        )


@pytest.mark.parametrize("changes", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_each_length_has_its_own_frequencies_whatever_came_before(changes: dict[str, Any]) -> None:
    """A document has the frequencies of its length, whatever other documents there are.

    One document has exactly the original length.
    """
    config, x = config_of(model_of("llama", **changes)), torch.zeros(1, 1, 1)
    scaled = ScaledPositions.around(LlamaRotaryEmbedding(config))
    assert isinstance(scaled, ScaledPositions)
    for row in ((LIMIT, 2 * LIMIT, LIMIT + 1), (LIMIT,), (LIMIT - 1, LIMIT), (LIMIT + 1, LIMIT, 1)):
        counted = [torch.arange(length)[None] for length in row]
        alone = [LlamaRotaryEmbedding(config)(x, each) for each in counted]
        for found, *expected in zip(scaled(x, torch.cat(counted, 1)), *alone, strict=True):
            assert torch.equal(found, torch.cat(expected, 1))


def test_each_token_has_the_length_of_its_document() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    assert document_lengths(positions).tolist() == [[3, 3, 3, 1, 2, 2], [6] * 6]


@pytest.mark.parametrize(("family", "changes"), SCALED)
def test_a_trial_run_leaves_the_model_s_config_as_it_is(
    family: str, changes: dict[str, Any]
) -> None:
    model = model_of(family, **changes)
    before = copy.deepcopy(model.config)
    refuse_unlike_transformers(model)
    assert model.config == before
