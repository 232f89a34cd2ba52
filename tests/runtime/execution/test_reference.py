"""Tests that the reference of other tests trains like plain PyTorch.

Plain PyTorch is transformers' own loss, torch.optim.AdamW and clip_grad_norm_.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_step import Reference
from transformers import AutoModelForCausalLM

from megatrain.experiments.paper_data import table3
from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")


def both(plan: Plan, settings: AdamW) -> tuple[Reference, Any]:
    """Returns the reference and an ordinary model with the same random weights."""
    weights, config = random_weights(0), config_of(plan.model)
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in plan.model.stack.values()
    }
    reference = Reference(plan.model, plan.workload, config, settings, masters, CPU)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.load_state_dict(reference.model.state_dict())
    return reference, model


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("family", "tied", "clipping"),
    [
        ("llama", False, "global"),
        ("qwen2", True, "global"),
        ("qwen3", False, "none"),
        ("mistral", True, "none"),
        ("llama", True, "layer"),
        ("qwen2", False, "layer"),
        ("llama", False, "adagc"),
    ],
)
def test_the_reference_trains_as_plain_pytorch(
    make_plan: Callable[..., Plan], family: str, tied: bool, clipping: str, accumulation: int
) -> None:
    """Five steps in fp32 match plain PyTorch.

    The tolerance is 1e-5 for losses and norms, and 4e-6 for weights, which move by at least 5e-4.
    Epsilon is as large as the elements of a clipped gradient. With 1e-8, AdamW would turn a
    gradient of rounding errors into a full update.
    """
    plan = make_plan(
        family=family,
        tied=tied,
        clipping=clipping,
        accumulation=accumulation,
        dtype="fp32",
        loss_chunk=13,
    )
    settings = AdamW(max_norm=0.05, weight_decay=0.1, epsilon=1e-4, adagc_warm_up=2)
    reference, model = both(plan, settings)
    moving: dict[str, float] = {}
    plain = [
        p for name, p in model.named_parameters() if p.dim() == 1 or "embed_tokens" in name
    ]  # a tied head is the embedding's parameter
    decayed = [p for p in model.parameters() if not any(p is other for other in plain)]
    groups = [
        {"params": plain, "weight_decay": 0.0},
        {"params": decayed, "weight_decay": settings.weight_decay},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=settings.betas, eps=settings.epsilon)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    for number in range(1, 6):
        shape = (accumulation, 2, plan.workload.batch, plan.workload.sequence)
        drawn = torch.randint(plan.model.vocabulary, shape, generator=generator)
        drawn[:, 1, 0, :5] = IGNORED
        loss, norm = reference.step(
            [Batch(ids, labels) for ids, labels in drawn], rate=1e-2, number=number
        )
        labels = drawn[:, 1]
        logits = torch.stack([model(ids).logits for ids in drawn[:, 0]])
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 2), labels.flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        if clipping == "global":
            theirs = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm))
            assert theirs > 2 * settings.max_norm
            assert norm == pytest.approx(theirs, rel=1e-5)
        elif clipping == "layer":
            names = {id(parameter): name for name, parameter in reference.model.named_parameters()}
            layers = [
                [
                    model.get_parameter(names[id(own)])
                    for own in reference._parameters[layer].values()
                ]
                for layer in plan.model.stack
            ]
            theirs = [
                float(torch.nn.utils.clip_grad_norm_(layer, settings.max_norm)) for layer in layers
            ]
            assert min(theirs) > settings.max_norm
            assert norm == pytest.approx(sum(value**2 for value in theirs) ** 0.5, rel=1e-5)
        elif clipping == "adagc":
            theirs = clip_by_moving_norms(model, moving, settings, number)
            assert norm == pytest.approx(sum(value**2 for value in theirs) ** 0.5, rel=1e-5)
            assert reference.clip_factor is not None
            assert reference.clip_factor < 0.95
        else:
            assert norm is None
        optimizer.step()
    for name, parameter in reference.model.named_parameters():
        torch.testing.assert_close(
            parameter, model.get_parameter(name), rtol=0, atol=4e-6
        )  # 0.04 % of the rate: near zero, AdamW divides rounding errors by each other
        assert float((parameter - start[name]).detach().abs().max()) > 5e-4, (
            f"{name} has hardly moved"
        )


def clip_by_moving_norms(
    model: torch.nn.Module, moving: dict[str, float], settings: AdamW, number: int
) -> list[float]:
    """Clips the gradients of `model` by AdaGC in its authors' order of operations.

    Updates the moving norms in `moving`, and returns the norms before clipping.
    """
    norms = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        norm = float(parameter.grad.norm())
        norms.append(norm)
        limit = settings.max_norm
        if number > settings.adagc_warm_up:
            limit = settings.adagc_factor * moving[name]
        if norm > limit:
            parameter.grad.mul_(limit / norm)
        norm = float(parameter.grad.norm())
        if number <= settings.adagc_warm_up:
            moving[name] = min(moving.get(name, norm), norm)
        else:
            decay = settings.adagc_decay
            moving[name] = decay * moving[name] + (1 - decay) * norm
    return norms


def test_the_step_of_table_3_has_the_bits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's table 3 says that plain PyTorch and this runtime have the same bits.

    Every step is clipped here, so the order in which squares are summed affects the weights.
    """
    monkeypatch.setattr(table3, "SETTINGS", AdamW(max_norm=0.01))
    torch.manual_seed(2)  # another order of sums changes the weights within eight steps
    model, work = table3.MODEL, table3.WORK
    weights = random_weights(2)
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in model.stack.values()
    }
    reference = Reference(model, work, config_of(model), table3.SETTINGS, masters, CPU)
    plain = table3.Plain(masters)
    with table3.one_thread():
        for number in range(1, 9):
            ids, labels = torch.randint(256, (2, work.batch, work.sequence))
            batch = Batch(ids, labels)
            loss, _ = reference.step([batch], rate=1e-3, number=number)
            assert plain.step(batch, 1e-3, number) == loss
    for layer, tensors in reference.masters.items():
        for name, tensor in tensors.items():
            assert torch.equal(plain.masters[layer][name], tensor), name
