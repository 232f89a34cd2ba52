"""Tests of attention with sinks by a flash kernel: its gradients, and the steps of whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference_lengths
import torch
from sinks_definition import written_out
from whole_models import (
    PACKED,
    RIGHT,
    SEQUENCE,
    compare,
    drawn,
    gradients_of,
    loss_of_each_alone,
    model_of,
    scale_of,
    token_losses,
    whole_model,
)

from megatrain.runtime.layers import attention
from megatrain.runtime.layers.attention import Attention, attend, with_kernel_for_sinks
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.lengths import LengthBounds
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Placement

SUNK = ("gpt_oss", "granite_swa", "granitemoe_swa")
STREAMED = Placement(weights="all", gradients="all")
KEPT = Placement(saved_attention="1-2", saved_activations="3", weights="all", gradients="all")
NIGHTLY = pytest.mark.nightly
WAYS = ("mask", "lengths")
"""How the kernel learns of windows and documents: by a mask as on a CPU, or by lengths as on a
GPU."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "lengths":
        reference_lengths.install(monkeypatch)
    return str(request.param)


# ---- the kernel


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [0, 5])
def test_outputs_and_gradients_are_those_of_a_softmax_with_a_column_of_sinks(
    way: str, window: int, groups: int
) -> None:
    """The gradients of queries, keys, values and sinks are exact, also from a saved output."""
    torch.manual_seed(0)
    batch, heads, pairs, length, size = 2, 4, 2, 19, 8
    inputs = [torch.randn(batch, length, count, size) for count in (heads, pairs, pairs)]
    inputs = [tensor.transpose(1, 2) for tensor in inputs]
    inputs.append(torch.randn(heads) * 2)
    gradient = torch.randn(batch, length, heads, size)
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    exact = written_out(*wide, seen)
    right = [exact, *torch.autograd.grad(exact, wide, gradient.double())]
    bounds: Any = None
    if way == "lengths":
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
        bounds = LengthBounds(starts, torch.empty(length, 0), window)
    elif window:
        bounds = seen.expand(batch, 1, length, length)
    results: list[torch.Tensor] = []

    def computed(**options: Any) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        *others, sinks = leaves
        output, _ = attend(
            torch.nn.Module(), *others, bounds, kernel="cpu", groups=groups, s_aux=sinks, **options
        )
        return [output, *torch.autograd.grad(output, leaves, gradient)]

    found = computed(results=results)
    again = computed(kept=Attention(*(tensor.detach() for tensor in results)))
    for ours, theirs, from_kept in zip(found, right, again, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours, from_kept)


# ---- whole models


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", SUNK)
def test_a_step_is_that_of_transformers_own_attention(run: Callable[..., Any], family: str) -> None:
    """Loss and all gradients in fp32, with windows, recomputed blocks and two micro-batches.

    transformers' model writes out the scores.
    """
    with run(model_of(family), accumulation=2, attention="flash") as running:
        assert config_of(running.plan.model)._attn_implementation == "eager"
        model, batches = (
            whole_model(running.plan, config_of(running.plan.model)),
            drawn(running.plan),
        )
        loss = sum(
            token_losses(model(batch.ids).logits, batch.labels) for batch in batches
        ) * scale_of(batches)
        compare(running, batches, loss, model, 1e-5)
        gradients = gradients_of(running)
        sinks = [found for (_, name), found in gradients.items() if name.endswith("sinks")]
        assert len(sinks) == running.plan.model.layers
        assert all(found.abs().min() > 0 for found in sinks)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", SUNK)
def test_packed_rows_train_as_their_documents_alone(run: Callable[..., Any], family: str) -> None:
    with run(model_of(family), documents=True, accumulation=2, attention="flash") as running:
        batches = [
            batch._replace(documents=documents)
            for batch, documents in zip(drawn(running.plan), (PACKED, RIGHT), strict=True)
        ]
        model = whole_model(running.plan, config_of(running.plan.model))
        compare(running, batches, loss_of_each_alone(model, batches), model, 1e-5)


@pytest.mark.usefixtures("way")
def test_rows_of_one_document_have_the_bits_of_plain_rows(run: Callable[..., Any]) -> None:
    found = []
    for documents in (False, True):
        with run(model_of("gpt_oss"), documents=documents, attention="flash") as running:
            result = running.executor.step(drawn(running.plan), rate=0.0, number=1)
            found.append((result.loss, gradients_of(running)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_results_change_no_bit(
    run: Callable[..., Any], way: str, dtype: str, documents: bool
) -> None:
    """Layers recompute attention, keep it, or save their activations. On a CPU, attention in groups
    of heads has the same bits, too.
    """
    found = []
    for changes in ({}, {"placement": KEPT}, {"placement": KEPT, "head_groups": 2}):
        with run(
            model_of("gpt_oss"),
            dtype=dtype,
            documents=documents,
            accumulation=2,
            attention="flash",
            policy="overlapped",
            **changes,
        ) as running:
            batches = drawn(running.plan)
            if documents:
                batches = [batch._replace(documents=PACKED) for batch in batches]
            result = running.executor.step(batches, rate=0.0, number=1)
            found.append((result.loss, gradients_of(running)))
    for loss, gradients in found[1:]:
        assert loss == found[0][0]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, found[0][1][name]), (way, name)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("way", "placement", "kinds"),
    [
        ("lengths", KEPT, ["sliding_attention"]),
        pytest.param("mask", STREAMED, ["full_attention"], marks=NIGHTLY),
        *(
            pytest.param(way, placement, ["sliding_attention", "full_attention"], marks=NIGHTLY)
            for way in WAYS
            for placement in (KEPT, STREAMED)
        ),
    ],
    indirect=["way"],
)
def test_a_compiled_layer_has_sinks(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, placement: Placement, kinds: list[str]
) -> None:
    """A layer is one graph, and its gradients are those of an eager layer.

    The normal tests have each way, each placement and each kind of layer once, since compiling
    takes long.
    """
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **_: compiled(function, fullgraph=True, backend="aot_eager"),
    )
    torch._dynamo.reset()
    found = []
    for compile_it in (False, True):
        with run(
            model_of("gpt_oss", layer_types=kinds * (4 // len(kinds))),
            compiled=compile_it,
            loss_chunk=2 * SEQUENCE,  # one chunk, so the head is compiled once
            attention="flash",
            policy="overlapped",
            placement=placement,
        ) as running:
            result = running.executor.step(drawn(running.plan), rate=0.0, number=1)
            found.append((result.loss, gradients_of(running)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-6)


# ---- which models


def test_models_with_sinks_or_windows_only_use_a_kernel_if_the_plan_names_it(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that name no kernel, as all older ones, have transformers' own attention."""
    monkeypatch.setattr(attention, "attend", None)
    with run(model_of("gpt_oss")) as running:
        assert running.executor.step(drawn(running.plan), rate=0.0, number=1).loss > 0


def test_the_families_with_sinks_are_these() -> None:
    assert tuple(sorted(family for family in FAMILIES if model_of(family).has_sinks)) == SUNK


def test_no_other_kernel_and_no_saved_attention_without_the_kernel(run: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="found cudnn for a gpt_oss model"):
        run(model_of("gpt_oss"), attention="cudnn").__enter__()
    with pytest.raises(UserError, match="or attention with sinks and the kernel flash"):
        run(model_of("gpt_oss"), policy="overlapped", placement=KEPT).__enter__()
    with pytest.raises(UserError, match="head_groups: found 2 for a gpt_oss model"):
        run(model_of("gpt_oss"), head_groups=2).__enter__()


def test_a_calibration_on_a_gpu_measures_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the planner would know only the costs of written-out scores."""
    oss, work = model_of("gpt_oss"), Workload(batch=1, sequence=8)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(attention, "kernel_of", lambda *_: "flash")
    assert with_kernel_for_sinks(work, [oss], gpu).attention == "flash"
    assert with_kernel_for_sinks(work, [oss], cpu) == work
    assert with_kernel_for_sinks(work, [oss, model_of("gemma2")], gpu) == work
    fp32 = Workload(batch=1, sequence=8, dtype="fp32")
    assert with_kernel_for_sinks(fp32, [oss], gpu) == fp32

    def refuses(*_: object) -> None:
        raise UserError("workload: attention", found="none", allowed="one", fix="none")

    monkeypatch.setattr(attention, "kernel_of", refuses)
    assert with_kernel_for_sinks(work, [oss], gpu) == work
