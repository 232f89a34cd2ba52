"""Tests of Muon on a GPU: every plan gives the same bits, and updates fit in their memory.

They are skipped on machines without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch
from reference_step import Reference
from tiny_families import config_of as tiny_config

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer import blockwise, muon
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator import policies
from megatrain.simulator.model.muon import LIBRARY_BYTES, Matrices
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import UPDATE_COSTS
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
log = logging.getLogger(__name__)
DEVICE = torch.device("cuda", 0)
SETTINGS = AdamW(max_norm=0.5, weight_decay=0.1)
STEPS = 4
PLACEMENTS = [
    Placement(),
    Placement(weights="all", master_low="all", moments="all", gradients="all"),
    Placement(weights="all", moments="e,0-1", gradients="all", saved_activations="2"),
    Placement(saved_activations="all"),
    Placement(weights="1-2,e", gradients="0", offloaded_inputs="all"),
    Placement(master_low="e", moments="e,2", saved_activations="0", offloaded_inputs="1-2"),
    Placement(weights="0", host_updated="e"),
]
EVERY: list[tuple[str, dict[str, Any]]] = [
    ("resident", {}),
    ("resident", {"checkpoint_interval": 2}),
    *(
        (
            "overlapped",
            {
                "placement": placement,
                "state_slots": 1 + index % 3,
                "chunk_bytes": 2 ** (14 + index),
                "weights_ahead": index % 2,
            },
        )
        for index, placement in enumerate(PLACEMENTS)
    ),
]
"""nine plans: (policy, knobs)"""


def mixture() -> ModelSpec:
    """Returns a model of three layers, each with eight experts."""
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 304,
        "num_experts": 8,
    }
    return ModelSpec.from_config(tiny_config("qwen3_moe", **sizes).to_dict(), "mixture", "mixture")


def trained(
    plan: Plan, steps: list[list[Batch]]
) -> tuple[list[tuple[float, float | None]], dict[tuple[str, str], torch.Tensor]]:
    """Returns losses and norms, and the masters after the steps on the CPU."""
    with Executor(
        plan, config_of(plan.model), SETTINGS, DEVICE, schedule=policies.lower(plan)
    ) as running:
        running.state.load(random_weights(0))
        made = [running.step(step, rate=1e-2, number=at) for at, step in enumerate(steps, 1)]
        running.flush_update()
        masters = {
            (layer.name, name): master.cpu()
            for layer in plan.model.stack.values()
            for name, master in running.state.masters(layer).items()
        }
    return [(step.loss, step.gradient_norm) for step in made], masters


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("kind", "dtype", "accumulation", "clipping", "state"),
    [
        ("dense", "bf16", 1, "global", "exact"),
        ("dense", "fp32", 2, "layer", "exact"),
        ("mixture", "bf16", 1, "layer", "exact"),
        ("dense", "bf16", 2, "global", "master24"),
        ("mixture", "bf16", 1, "layer", "master24"),
    ],
)
def test_every_plan_gives_the_same_bits_near_the_reference_s(
    make_plan: Callable[..., Plan],
    kind: str,
    dtype: str,
    accumulation: int,
    clipping: str,
    state: str,
) -> None:
    common: dict[str, Any] = {
        "state": state,
        "dtype": dtype,
        "accumulation": accumulation,
        "clipping": clipping,
        "optimizer": "muon",
        "batch": 4,
        "sequence": 64,
        "loss_chunk": 100,
        "device_limit_bytes": 2**32,
        "host_limit_bytes": 2**32,
    }
    common |= (
        {"model": mixture()}
        if kind == "mixture"
        else {"hidden": 256, "intermediate": 512, "head_dim": 64, "vocabulary": 1000, "layers": 3}
    )
    plans = [
        make_plan(policy, **{"chunk_bytes": 2**18, **common, **knobs}) for policy, knobs in EVERY
    ]
    model, work, draw = plans[0].model, plans[0].workload, random_weights(0)
    generator = torch.Generator().manual_seed(1)
    shape = (2, work.batch, work.sequence)
    steps = [
        [
            Batch(*torch.randint(model.vocabulary, shape, generator=generator))
            for _ in range(accumulation)
        ]
        for _ in range(STEPS)
    ]
    first = {
        layer.name: {t.name: draw(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in model.stack.values()
    }
    reference = Reference(model, work, config_of(model), SETTINGS, first, DEVICE)
    wanted = [
        reference.step(
            [Batch(ids.to(DEVICE), labels.to(DEVICE)) for ids, labels, _ in step],
            rate=1e-2,
            number=number,
        )
        for number, step in enumerate(steps, 1)
    ]
    results, masters = trained(plans[0], steps)
    for plan in plans[1:]:
        found, others = trained(plan, steps)
        assert found == results, plan.knobs
        changed = [name for name, bits in masters.items() if not torch.equal(bits, others[name])]
        assert not changed, plan.knobs
    worst = max(
        float((master - reference.masters[layer][name].cpu()).norm())
        / max(float((master - first[layer][name]).norm()), 1e-30)
        for (layer, name), master in masters.items()
    )
    log.info("%s %s: losses %s, reference %s, worst error %s", kind, dtype, results, wanted, worst)
    # The reference multiplies one matrix at a time, which may use another kernel.
    assert all(abs(one[0] - other[0]) < 2e-2 for one, other in zip(results, wanted, strict=True))
    assert worst < 0.15


@pytest.mark.parametrize("coded", [False, True])
def test_an_update_needs_no_memory_but_the_workspace_and_the_library_s(coded: bool) -> None:
    """With an 8-bit momentum, an update also needs the temporaries of every update of codes."""
    found = Matrices(1, 2048, 3072)
    count, size = found.size, sum(found.workspace)
    stream = torch.cuda.Stream(DEVICE)
    given: Mapping[str, Any] = {"matrices": found, "rate": 1e-3, "weight_decay": 0.1}
    weights, gradient = torch.zeros(2, count, dtype=torch.bfloat16, device=DEVICE)
    gradient.normal_()
    low = torch.zeros(count, dtype=torch.int8 if coded else torch.int16, device=DEVICE)
    momentum = torch.zeros(count, device=DEVICE)
    if coded:
        momentum = torch.zeros(blockwise.records(count), dtype=torch.uint8, device=DEVICE)
    room = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    clip = torch.ones((), device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    with torch.cuda.stream(stream):
        muon.update(weights, low, momentum, gradient, clip=clip, workspace=room, **given)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated(DEVICE) - before
    log.info("%s parameters: %s bytes, and a workspace of %s", count, used, size)
    coding = UPDATE_COSTS["block8"].gpu_temporary_bytes if coded else 0
    assert used <= LIBRARY_BYTES + 2**20 + coding
    kept = weights.clone(), low.clone(), momentum.clone()
    clip.fill_(float("nan"))
    muon.update(weights, low, momentum, gradient, clip=clip, workspace=room, **given)
    assert all(map(torch.equal, kept, (weights, low, momentum)))


def test_a_step_s_memory_is_within_the_prediction(make_plan: Callable[..., Plan]) -> None:
    sizes = {"hidden": 1024, "intermediate": 4096, "head_dim": 64, "vocabulary": 1000}
    plan = make_plan("overlapped", optimizer="muon", batch=1, sequence=128, dtype="bf16", **sizes)
    limits = {"device_limit_bytes": 2**34, "host_limit_bytes": 2**34}
    plan = msgspec.structs.replace(plan, **limits)
    schedule = policies.lower(plan)
    with Executor(plan, config_of(plan.model), SETTINGS, DEVICE, schedule=schedule) as running:
        pools = {pool: size for pool, size in running.pool_bytes.items() if "workspace" in pool}
    expected = sum(b.allocated for b in schedule.buffers if b.pool == "device.update_workspace")
    assert pools == {"device.update_workspace": expected}
