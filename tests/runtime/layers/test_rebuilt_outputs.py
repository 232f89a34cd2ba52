"""Tests of compiled layers that rebuild outputs in the backward pass (`Knobs.rebuild_outputs`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from family_sample import others_nightly
from transformers import CONFIG_MAPPING
from whole_models import SEQUENCE, drawn, gradients_of, model_of

from megatrain.runtime.layers import functional_layers
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.schedule.plan import Placement

REBUILDING = [
    family
    for family in FAMILIES
    if family in CONFIG_MAPPING and model_of(family)._can_rebuild  # older versions lack some
]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list of the bytes that autograd saves, one entry for each layer and pass. Tensors
    in slots are not counted.
    """
    found: list[int] = []
    hooks = functional_layers.slot_hooks

    def counting(*args: Any) -> Any:
        pack, unpack = hooks(*args)
        found.append(0)

        def packed(tensor: torch.Tensor) -> object:
            kept = pack(tensor)
            if isinstance(kept, torch.Tensor):
                found[-1] += kept.nbytes
            return kept

        return packed, unpack

    monkeypatch.setattr(functional_layers, "slot_hooks", counting)
    return found


def steps(
    run: Callable[..., Any], saved: list[int], family: str, **changes: Any
) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
    """Yields the results of a step, and the bytes that its layers save, without and with rebuilt
    outputs.
    """
    for rebuild in (0, 1):
        saved.clear()
        with run(
            model_of(family),
            dtype="bf16",
            compiled=True,
            loss_chunk=2 * SEQUENCE,  # one chunk, so the head is compiled once
            rebuild_outputs=rebuild,
            **changes,
        ) as running:
            result = running.executor.step(drawn(running.plan), rate=0.0, number=1)
            yield (result.loss, result.gradient_norm, gradients_of(running)), list(saved)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", others_nightly(REBUILDING, among=("llama",)))
def test_gradients_have_the_same_bits(
    run: Callable[..., Any], saved: list[int], family: str
) -> None:
    """Some layers are recomputed, and the others save their activations."""
    changes = {"checkpoint_interval": 1, "placement": Placement(saved_activations="1")}
    (before, full), (after, less) = steps(run, saved, family, **changes)
    assert before[:2] == after[:2]
    assert before[2].keys() == after[2].keys()
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert len(full) == len(less)
    assert all(now < then for now, then in zip(less, full, strict=True))


@pytest.mark.nightly
def test_gradients_are_almost_the_same_without_deterministic_mode(
    run: Callable[..., Any], saved: list[int]
) -> None:
    (before, _), (after, _) = steps(run, saved, "llama", checkpoint_interval=1)
    for name, gradient in before[2].items():
        assert (gradient - after[2][name]).abs().max() <= 0.02 * gradient.abs().max()
