"""Tests on a GPU: every family trains in bf16 as close to fp32 as transformers' model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from whole_models import (
    SEQUENCE,
    TINY,
    Tensors,
    drawn,
    gradients_of,
    model_of,
    scale_of,
    their_gradients,
    token_losses,
    weights,
    whole_model,
    without_draws,
)

from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.transformers_model import refuse_unlike_transformers
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
DESCRIBED = "5.23.0"
"""the version of transformers that `constraints.txt` pins; another version may name a family's
tensors differently, which is refused by name"""
BATCH = 2


def theirs(plan: Plan, model: Any, device: str) -> tuple[float, Tensors]:
    """Returns the loss and gradients of transformers' whole model, in the model's dtype."""
    model = model.to(device)
    batches = drawn(plan)
    loss = sum(
        token_losses(model(batch.ids.to(device)).logits, batch.labels.to(device))
        for batch in batches
    ) * scale_of(batches)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return float(loss.detach()), {
        name: gradient.cpu() for name, gradient in their_gradients(plan, model).items()
    }


def off(found: Tensors, exact: Tensors) -> float:
    """Returns the norm of the error of all gradients, relative to their norm."""
    error = sum(float((found[name].cpu() - exact[name]).square().sum()) for name in exact)
    return float((error / sum(float(each.square().sum()) for each in exact.values())) ** 0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_transformers_is(
    make_plan: Callable[..., Plan], family: str
) -> None:
    is_near(make_plan, family)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "granitemoe_swa"])
def test_flash_attention_with_sinks_is_as_near_to_fp32_as_transformers_is(
    make_plan: Callable[..., Plan], family: str, compiled: bool
) -> None:
    is_near(make_plan, family, attention="flash", compiled=compiled)


def is_near(make_plan: Callable[..., Plan], family: str, **work: Any) -> None:
    """Asserts that the gradients in bf16 are about as close to fp32 as those of transformers.

    Rounding may make a router choose another expert, so the bounds allow for one such token. `work`
    are further fields of the workload.
    """
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    limits = {"device_limit_bytes": 2**38, "host_limit_bytes": 2**38}
    sizes = {
        "sequence": SEQUENCE,
        "batch": BATCH,
        "accumulation": 2,
        "dtype": "bf16",
        "loss_chunk": 13,
        "checkpoint_interval": 3,
    }
    # A CPU draws other random numbers than a GPU.
    changes = without_draws(family)
    if family == "gemma3n_text" and transformers.__version__ != DESCRIBED:
        # transformers 5.17 fails on tokens outside of the second table.
        changes["vocab_size_per_layer_input"] = TINY["vocab_size"]
    model = model_of(family, **changes)
    plan = make_plan("resident", model=model, **sizes, **limits, **work)
    try:
        refuse_unlike_transformers(plan.model)
        config = config_of(plan.model)
    except UserError as refused:
        if transformers.__version__ == DESCRIBED:
            raise
        pytest.skip(f"families are described for transformers {DESCRIBED}: {refused}")
    rounded = whole_model(plan, config)
    exact_loss, exact = theirs(plan, copy.deepcopy(rounded).float(), "cpu")
    their_loss, their = theirs(plan, rounded, DEVICE)
    with Executor(
        plan, config, AdamW(max_norm=0.5), torch.device(DEVICE), schedule=lower(plan)
    ) as executor:
        executor.state.load(weights)
        loss = executor.step(drawn(plan), rate=0.0, number=1).loss
        ours = gradients_of(SimpleNamespace(plan=plan, executor=executor))
    error, their_error = off(ours, exact), off(their, exact)
    assert error < max(2 * their_error, 0.02), (
        f"the error is {error:.4f} of the norm, and {their_error:.4f} in transformers"
    )
    assert abs(loss - exact_loss) < max(3 * abs(their_loss - exact_loss), 5e-3 * exact_loss)
