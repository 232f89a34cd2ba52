"""Tests on a GPU: pieces of tokens, groups of heads, short recomputes and rebuilt outputs give one
set of bits whatever the schedule.

The tests are skipped on machines without a GPU.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from whole_models import model_of

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WORK = Workload(batch=2, sequence=96, accumulation=2, loss_chunk=64)
PLANS = (
    ("resident", Knobs(weight_slots=2)),
    ("sequential", Knobs(weight_slots=1)),
    ("overlapped", Knobs(weight_slots=2, chunk_bytes=2**18)),
    (
        "overlapped",
        Knobs(
            weight_slots=2,
            chunk_bytes=2**18,
            placement=Placement(weights="0", saved_activations="1", offloaded_inputs="all"),
        ),
    ),
)
"""(policy, knobs)"""
Trained = tuple[list[float], list[torch.Tensor]]
"""Losses, and the fp32 masters on the CPU."""


def trained(model: ModelSpec, work: Workload, policy: str, knobs: Knobs) -> Trained:
    """Returns the result of three steps."""
    plan = Plan(
        policy=policy,
        hardware="",
        source="",
        model=model,
        workload=work,
        knobs=knobs,
        device_limit_bytes=2**32,
        host_limit_bytes=2**32,
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    with Executor(
        plan, config_of(model), AdamW(max_norm=0.1), DEVICE, schedule=policies.lower(plan)
    ) as executor:
        executor.state.load(random_weights(0))
        for number in range(1, 4):
            batches = [
                Batch(
                    *torch.randint(
                        model.vocabulary, (2, work.batch, work.sequence), generator=generator
                    )
                )
                for _ in range(work.accumulation)
            ]
            losses.append(executor.step(batches, rate=1e-2, number=number).loss)
        executor.flush_update()
        masters = [
            master.cpu()
            for layer in model.stack.values()
            for master in executor.state.masters(layer).values()
        ]
    return losses, masters


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"token_piece": 40}),
        ("llama", {"token_piece": 40, "head_groups": 2}),
        ("qwen3_moe", {"token_piece": 40}),
        ("mixtral", {"token_piece": 40}),
        ("llama", {"short_recompute": True}),
        ("llama", {"short_recompute": True, "token_piece": 40}),
        ("llama", {"short_recompute": True, "compiled": True}),
        ("llama", {"short_recompute": True, "fp8": "rowwise"}),
    ],
)
def test_every_schedule_gives_the_same_bits(family: str, changes: dict[str, Any]) -> None:
    """The last piece of a micro-batch of 192 tokens is shorter."""
    model, work = model_of(family, **SIZES), msgspec.structs.replace(WORK, **changes)
    (losses, masters), *others = (trained(model, work, *plan) for plan in PLANS)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    for plan, (other_losses, other_masters) in zip(PLANS[1:], others, strict=True):
        assert other_losses == losses, plan
        assert all(map(torch.equal, other_masters, masters)), plan


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["llama", "phi", "falcon", "deepseek_v3"])
@pytest.mark.parametrize("changes", [{}, {"fp8": "tensorwise"}, {"token_piece": 40}])
def test_a_short_recompute_changes_no_bit(family: str, changes: dict[str, Any]) -> None:
    """Its gradients come from the same products as those of PyTorch's linear layer."""
    sizes = SIZES if family == "llama" else {}
    model, work = model_of(family, **sizes), msgspec.structs.replace(WORK, **changes)
    if "token_piece" in changes and model.pieces_obstacle():
        pytest.skip("this family has no pieces")
    (losses, masters), (other_losses, other_masters) = (
        trained(model, msgspec.structs.replace(work, short_recompute=short), *PLANS[2])
        for short in (False, True)
    )
    assert other_losses == losses
    assert all(map(torch.equal, other_masters, masters))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["llama", "qwen3", "cohere2", "olmo2"])
def test_rebuilt_outputs_change_no_bit(family: str) -> None:
    """Layer 1 saves its activations, and the others are recomputed."""
    model = model_of(family, **SIZES)
    work = msgspec.structs.replace(WORK, compiled=True, short_recompute=True)
    assert model.rebuilding_products("0", work)
    policy, knobs = PLANS[3]
    (losses, masters), (other_losses, other_masters) = (
        trained(model, work, policy, msgspec.structs.replace(knobs, rebuild_outputs=rebuild))
        for rebuild in (0, 1)
    )
    assert other_losses == losses
    assert all(map(torch.equal, other_masters, masters))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_pieces_and_groups_change_the_loss_by_rounding_only(family: str) -> None:
    model = model_of(family, **SIZES)
    changes = {"token_piece": 40} | ({"head_groups": 2} if family == "llama" else {})
    whole, pieces = (
        trained(model, work, *PLANS[2])[0]
        for work in (WORK, msgspec.structs.replace(WORK, **changes))
    )
    assert pieces[0] == pytest.approx(whole[0], rel=2e-3)
    assert pieces == pytest.approx(whole, rel=2e-2)
