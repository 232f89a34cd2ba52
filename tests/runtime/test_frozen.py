"""Tests of parameters without a gradient: frozen ones, and those that do not affect the loss.

Frozen parameters train as with PyTorch's `requires_grad = False`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama
from whole_models import (
    compare,
    drawn,
    gradients_of,
    model_of,
    scale_of,
    token_losses,
    weights,
    whole_model,
)

from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.checkpoint.manifest import RunState
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.simulator.schedule.plan import Placement, Plan

FROZEN = ("*q_proj*", "*embed_tokens*", "*layers.2.*", "*model.norm*")
SETTINGS = AdamW(
    max_norm=0.5,
    weight_decay=0.1,
    groups=tuple(GroupSettings(match=pattern, rate_factor=0.0) for pattern in FROZEN),
)
RATE = 1e-3
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("resident", {}),
    ("double_buffer", {"gradient_slots": 1}),
    ("k_buffer", {"gradient_staging": 2}),
    ("overlapped", {}),
    ("overlapped", {"placement": Placement(moments="0-1", saved_activations="2", gradients="e,3")}),
]


def is_frozen(layer: str, tensor: str) -> bool:
    return "q_proj" in tensor or layer in ("e", "2") or (layer, tensor) == ("h", "norm.weight")


def in_pytorch(plan: Plan, steps: int) -> tuple[list[tuple[float, float]], Any]:
    """Trains transformers' model with PyTorch's AdamW and `requires_grad = False`.

    Returns losses and norms, and the model.
    """
    model = whole_model(plan, config_of(plan.model))
    groups: dict[float, list[torch.nn.Parameter]] = {0.0: [], SETTINGS.weight_decay: []}
    for layer in plan.model.stack.values():
        for tensor in layer.tensors:
            parameter = model.get_parameter(
                hub_name(layer.name, tensor.name, DecoderStack.of(model))
            )
            if is_frozen(layer.name, tensor.name):
                parameter.requires_grad_(False)
            else:
                groups[SETTINGS.weight_decay if len(tensor.shape) > 1 else 0.0].append(parameter)
    trained = [parameter for parameters in groups.values() for parameter in parameters]
    adamw = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        lr=RATE,
        betas=SETTINGS.betas,
        eps=SETTINGS.epsilon,
    )
    results = []
    for number in range(1, steps + 1):
        batches = drawn(plan, number)
        loss = torch.stack(
            [token_losses(model(batch.ids).logits, batch.labels) for batch in batches]
        ).sum() * scale_of(batches)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, SETTINGS.max_norm)
        adamw.step()
        results.append((float(loss.detach()), float(norm)))
    return results, model


@pytest.mark.parametrize(("policy", "knobs"), PLANS)
def test_frozen_tensors_are_as_in_pytorch(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    tmp_path: Path,
    policy: str,
    knobs: dict[str, Any],
) -> None:
    """Frozen tensors do not change, even with decay, and are not part of the norm.

    All other tensors train as in PyTorch, even after a resume from a checkpoint.
    """
    sizes = {
        "dtype": "fp32",
        "accumulation": 2,
        "loss_chunk": 13,
        "device_limit_bytes": 2**30,
        "host_limit_bytes": 2**30,
    }
    plan = executable(policy, model=model_of("llama"), **sizes, **knobs)
    expected, model = in_pytorch(plan, 4)
    with session(plan, weights=weights, settings=SETTINGS) as running:
        results = [
            running.executor.step(drawn(plan, number), rate=RATE, number=number)
            for number in (1, 2)
        ]
        save(
            running.executor,
            RunState(step=2, loss=None, settings={}, progress={}),
            tmp_path / "saved",
        )
    with session(
        plan, settings=SETTINGS
    ) as running:  # The checkpoint replaces these other weights.
        restore(running.executor, tmp_path / "saved", {})
        results += [
            running.executor.step(drawn(plan, number), rate=RATE, number=number)
            for number in (3, 4)
        ]
        running.executor.flush_update()
        assert [(result.loss, result.gradient_norm) for result in results] == [
            pytest.approx(pair, rel=1e-5) for pair in expected
        ]
        for layer in plan.model.stack.values():
            for name, master in running.state.masters(layer).items():
                theirs = model.get_parameter(
                    hub_name(layer.name, name, DecoderStack.of(model))
                ).detach()
                if is_frozen(layer.name, name):
                    assert torch.equal(master, weights(layer.name, name, tuple(master.shape))), (
                        layer.name,
                        name,
                    )
                else:
                    assert not torch.equal(
                        master, weights(layer.name, name, tuple(master.shape))
                    ), (layer.name, name)
                    torch.testing.assert_close(master, theirs, rtol=1e-4, atol=RATE * 1e-2)


def test_frozen_tensors_have_no_moments(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    plan = executable(
        "resident",
        model=model_of("llama"),
        dtype="fp32",
        device_limit_bytes=2**30,
        host_limit_bytes=2**30,
    )
    with session(plan, weights=weights, settings=SETTINGS) as running:
        running.executor.step(drawn(plan), rate=RATE, number=1)
        for layer in plan.model.stack.values():
            first, second = running.executor.memory().tensor(
                f"device.moments:{layer.name}", torch.float32, (2, layer.elements)
            )
            offset = 0
            for tensor in layer.tensors:
                here = slice(offset, offset + tensor.elements)
                assert bool(first[here].any() or second[here].any()) is not is_frozen(
                    layer.name, tensor.name
                ), (layer.name, tensor.name)
                offset += tensor.padded


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the up projections of Llama not affect the loss."""
    monkeypatch.setattr(
        modeling_llama.LlamaMLP,
        "forward",
        lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x))),
    )


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("dtype_bound", [("fp32", 1e-5), ("bf16", 0.02)])
def test_tensors_that_do_not_affect_the_loss_have_no_gradient(
    run: Callable[..., Any], dtype_bound: tuple[str, float]
) -> None:
    """A tensor that does not affect the loss has a gradient of zeros, where PyTorch has None.

    This holds with two micro-batches, and in slots that held another layer before.
    """
    dtype, bound = dtype_bound
    with run(model_of("llama"), dtype=dtype, accumulation=2) as running:
        for number in (1, 2):
            running.executor.step(drawn(running.plan), rate=0.0, number=number)
        model, batches = (
            whole_model(running.plan, config_of(running.plan.model)),
            drawn(running.plan),
        )
        loss = sum(
            token_losses(model(batch.ids).logits, batch.labels) for batch in batches
        ) * scale_of(batches)
        compare(running, batches, loss, model, bound)
        assert model.get_parameter("model.layers.0.mlp.up_proj.weight").grad is None
        assert not gradients_of(running)["0", "mlp.up_proj.weight"].any()


@pytest.mark.usefixtures("unused")
def test_tensors_that_do_not_affect_the_loss_are_not_trained_under_any_plan(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """Without decay, a tensor that does not affect the loss is unchanged under every plan.

    With decay it shrinks. PyTorch skips tensors whose gradient is None.
    """
    found = []
    for policy, knobs in PLANS:
        plan = executable(
            policy,
            model=model_of("llama"),
            dtype="fp32",
            device_limit_bytes=2**30,
            host_limit_bytes=2**30,
            **knobs,
        )
        with session(plan, weights=weights, settings=AdamW(max_norm=0.5)) as running:
            found.append(running.bits(3))
            for layer in plan.model.decoders:
                masters = running.state.masters(layer)
                for name, master in masters.items():
                    same = torch.equal(master, weights(layer.name, name, tuple(master.shape)))
                    assert same is (name == "mlp.up_proj.weight"), (policy, layer.name, name)
    assert all(each == found[0] for each in found[1:])
