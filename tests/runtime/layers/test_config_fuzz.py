"""Fuzz tests of model configs: each test changes one key of one family's config.

A tiny model with the changed config trains like that of transformers, or is refused with a
UserError before anything is allocated. Another loss, another exception or a failure in the first
step is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from config_changes import Change, changes_of
from transformers import CONFIG_MAPPING, AutoConfig
from whole_models import (
    difference,
    drawn,
    gradients_of,
    scale_of,
    their_gradients,
    token_losses,
    whole_model,
)

from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.training.opening import exported_config
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import ModelSpec

BOUND = 1e-5
SAMPLE = 16
"""number of changes that an ordinary test run tries"""


def outcome(change: Change, folder: Path, run: Callable[..., Any]) -> str:
    """Returns `refused`, `equal`, or a description of what is wrong."""
    (folder / "config.json").write_text(json.dumps(change.config()))
    try:
        model = ModelSpec.load(str(folder))
        exported_config(folder, model, init="model")  # the trainer does this before it allocates
        running = run(model, batch=2, device_limit_bytes=2**28)
    except UserError as error:
        return "" if "\n" in str(error) else f"refused: {error}"
    except Exception as error:
        return f"{change}: before the first step {type(error).__name__}: {str(error)[:200]}"
    with running:
        batches = drawn(running.plan)
        try:
            found = running.executor.step(batches, rate=0.0, number=1).loss
            ours = gradients_of(running)
        except Exception as error:
            return f"{change}: in the first step {type(error).__name__}: {str(error)[:200]}"
        try:
            config = AutoConfig.from_pretrained(folder)
            config._attn_implementation = config_of(model)._attn_implementation
            whole = whole_model(running.plan, config)
            outputs = [whole(batch.ids, use_cache=False) for batch in batches]
            loss = sum(
                token_losses(output.logits, batch.labels)
                for output, batch in zip(outputs, batches, strict=True)
            ) * scale_of(batches)
            if (
                routed := [
                    output.aux_loss
                    for output in outputs
                    if getattr(output, "aux_loss", None) is not None
                ]
            ) and config.output_router_logits:
                loss = loss + config.router_aux_loss_coef * sum(routed) / len(routed)
            loss.backward()
        except Exception as error:
            return (
                f"{change}: trained, where transformers has {type(error).__name__}:"
                f" {str(error)[:200]}"
            )
        theirs = their_gradients(running.plan, whole)
    expected = float(loss.detach())
    if not torch.isfinite(loss):
        return (
            "equal"
            if found != found or found == expected
            else f"{change}: loss {found}, transformers' {expected}"
        )
    if abs(found - expected) > BOUND * abs(expected):
        return f"{change}: loss {found}, transformers' {expected}"
    off = difference(ours, theirs)
    return "equal" if off < BOUND else f"{change}: gradients {off:.1e} off"


# Another version of transformers may lack a family.
KNOWN = [family for family in FAMILIES if family in CONFIG_MAPPING]
ALL = [change for family in KNOWN for change in changes_of(family)]


@pytest.mark.parametrize("change", sorted(ALL, key=lambda change: change.number)[:SAMPLE], ids=str)
def test_a_changed_key_trains_like_transformers_or_is_refused(
    change: Change, run: Callable[..., Any], tmp_path: Path
) -> None:
    found = outcome(change, tmp_path, run)
    assert found == "equal" or found.startswith("refused"), found


@pytest.mark.nightly
@pytest.mark.parametrize("family", KNOWN)
def test_every_changed_key_trains_like_transformers_or_is_refused(
    family: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    found = {
        str(change): outcome(change, tmp_path, run) for change in ALL if change.family == family
    }
    wrong = [text for text in found.values() if text != "equal" and not text.startswith("refused")]
    assert not wrong, "\n".join(wrong)
    assert sum(text == "equal" for text in found.values()) > len(found) // 3, (
        "too few of the changed configs still train"
    )
