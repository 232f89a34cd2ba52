"""Tests of stateless layers: they compute what transformers computes, and slots may be reused.

The head in chunks and the embedding have autograd's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.runtime.batch import IGNORED
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of, layer_tensors
from megatrain.runtime.layers.table_gradient import TableGradient
from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.model.op_work import projected_rows
from megatrain.simulator.schedule import Buffer, Schedule, arithmetic
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SLOTS = ("device.weights:0", "device.weights:1")


@pytest.fixture
def slots() -> Iterator[Arenas]:
    """Returns arenas with two slots of 1 MiB."""
    buffers = tuple(Buffer(id=slot, bytes=2**20, data="weights", dtype="bf16") for slot in SLOTS)
    arenas = Arenas(
        Schedule(policy="test", buffers=buffers, ops=()),
        CPU,
        device_limit_bytes=2**22,
        host_limit_bytes=1,
    )
    yield arenas
    arenas.close()


def made(plan: Plan) -> FunctionalLayers:
    return FunctionalLayers(plan.model, plan.workload, config_of(plan.model), CPU)


def decoder(
    templates: FunctionalLayers, weights: dict[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Returns the output of layer 0 with autograd. Its weights are not in a slot."""
    tensors = weights | templates.buffers["0"]
    return templates._kinds[0].eager(tensors, x, templates._layer_arguments("0", 0))[0]


def whole_model(plan: Plan, dtype: torch.dtype = torch.float32) -> Any:
    """Returns transformers' model. No two of its tensors are equal, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(plan.model), dtype=dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1).add_(1 if parameter.dim() == 1 else 0)
    return model


def hidden(plan: Plan, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        plan.workload.batch,
        plan.workload.sequence,
        plan.model.hidden,
        generator=torch.Generator().manual_seed(seed),
    )


def fill(
    arenas: Arenas, plan: Plan, slot: str, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    layer, weights = plan.model.stack["0"], random_weights(seed)
    for name, tensor in layer_tensors(arenas, layer, slot, dtype).items():
        tensor.copy_(weights(layer.name, name, tuple(tensor.shape)) + seed * 0.01)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_layer_computes_what_transformers_computes(
    make_plan: Callable[..., Plan], family: str, dtype: torch.dtype
) -> None:
    plan = make_plan(family=family, dtype="fp32" if dtype == torch.float32 else "bf16")
    model, templates, x = whole_model(plan, dtype), made(plan), hidden(plan).to(dtype)
    positions = torch.arange(plan.workload.sequence)[None]
    for layer in model.model.layers:
        weights = dict(layer.named_parameters())
        assert list(weights) == [tensor.name for tensor in plan.model.stack["0"].tensors]
        assert [tuple(weight.shape) for weight in weights.values()] == [
            tensor.shape for tensor in plan.model.stack["0"].tensors
        ]
        theirs = layer(
            x,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(x, positions),
        )
        assert torch.equal(
            decoder(templates, {name: weight.detach() for name, weight in weights.items()}, x),
            theirs,
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_together_are_the_model(make_plan: Callable[..., Plan], family: str) -> None:
    """Embedding, layers and head together give the loss of the whole model.

    This checks causal attention, positions and the shift of the labels.
    """
    plan = make_plan(family=family, dtype="fp32")
    model, templates = whole_model(plan), made(plan)
    ids = torch.randint(
        plan.model.vocabulary,
        (plan.workload.batch, plan.workload.sequence + 1),
        generator=torch.Generator().manual_seed(1),
    )
    x = torch.empty(plan.workload.batch, plan.workload.sequence, plan.model.hidden)
    with torch.no_grad():
        weights = {"embed_tokens.weight": model.model.embed_tokens.weight}
        templates.embed(weights, ids[:, :-1], 0, x)
        for layer in model.model.layers:
            x = decoder(templates, dict(layer.named_parameters()), x)
    weights = {
        "norm.weight": model.model.norm.weight.detach(),
        "lm_head.weight": model.lm_head.weight.detach(),
    }
    labels = ids[:, 1:].contiguous()
    loss, _ = templates.head(weights, x, labels, 1 / labels.numel(), torch.empty_like(x))
    logits = model(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk", [1, 5, 16, 31, 32, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_in_chunks_has_the_gradients_of_the_whole_head(
    make_plan: Callable[..., Plan], chunk: int, dtype: torch.dtype
) -> None:
    """The head in chunks has the gradients of the whole head.

    The tolerance is 1e-5 in fp32, and 2e-2 of the largest value in bf16, because the gradient of a
    chunk is rounded to 8 bits.
    """
    plan = make_plan(dtype="fp32" if dtype == torch.float32 else "bf16", loss_chunk=chunk)
    model, x = whole_model(plan, dtype), hidden(plan).to(dtype)
    labels = torch.randint(
        plan.model.vocabulary, x.shape[:2], generator=torch.Generator().manual_seed(1)
    )
    labels[0, 3:9] = IGNORED
    scale = 1 / int((labels != IGNORED).sum())
    dx = torch.full_like(x, float("nan"))
    weights = {
        "norm.weight": model.model.norm.weight.detach().clone(),
        "lm_head.weight": model.lm_head.weight.detach().clone(),
    }
    loss, gradients = made(plan).head(weights, x, labels, scale, dx)

    top = x.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        model.lm_head(model.model.norm(top)).float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
    )
    wanted = torch.autograd.grad(expected, (top, model.model.norm.weight, model.lm_head.weight))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for got, want in zip((dx, *gradients), wanted, strict=True):
        relative = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            got.float(), want.float(), rtol=relative, atol=relative * float(want.abs().max())
        )
    assert not dx[0, 3:9].count_nonzero(), "an ignored label has a gradient"
    summed = torch.float32 if plan.workload.tokens > chunk else dtype
    assert all(gradient is not None and gradient.dtype == summed for gradient in gradients)


@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 256), ("fp32", 251)])
def test_a_vocabulary_that_is_not_aligned_is_padded_in_bf16_products(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, dtype: str, rows: int
) -> None:
    """The head multiplies with a multiple of 8 rows.

    The loss and the gradients are those without padding, and an evaluation has the bits of a step.
    """
    plan = make_plan(dtype=dtype, vocabulary=251, loss_chunk=5)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    model, x = whole_model(plan, kind), hidden(plan).to(kind)
    labels = torch.randint(251, x.shape[:2], generator=torch.Generator().manual_seed(1))
    weights = {
        "norm.weight": model.model.norm.weight.detach().clone(),
        "lm_head.weight": model.lm_head.weight.detach().clone(),
    }
    used = []
    leave = type(made(plan)._embedding_and_head).leave

    def seen(self: object, named: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        used.append(len(named["lm_head.weight"]))
        return leave(self, named, row)  # type: ignore[arg-type]

    monkeypatch.setattr(type(made(plan)._embedding_and_head), "leave", seen)
    head, scale = made(plan), 1 / labels.numel()
    dx, plain_dx = torch.empty_like(x), torch.empty_like(x)
    loss, gradients = head.head(weights, x, labels, scale, dx)
    assert {*used} == {rows} == {projected_rows(plan.model, plan.workload)}
    assert torch.equal(head.loss(weights, x, labels, scale), loss)
    monkeypatch.setattr(head, "_padded", lambda named: named)
    plain_loss, plain = head.head(weights, x, labels, scale, plain_dx)
    assert {*used} == {rows, 251}
    torch.testing.assert_close(loss, plain_loss)
    for got, want in zip((dx, *gradients), (plain_dx, *plain), strict=True):
        assert got is not None
        assert want is not None
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("columns", [8, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_s_gradient_is_autograd_s_summed_in_fp32(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    columns: int,
) -> None:
    """The number of columns that are summed at one time does not change the bits."""
    monkeypatch.setattr(arithmetic, "_COLUMNS", columns)
    monkeypatch.setattr(arithmetic, "_SUMMED_AT_ONCE", 1)
    plan = make_plan(dtype="fp32" if dtype == torch.float32 else "bf16", batch=4, sequence=256)
    ids = torch.randint(
        3, (4, 256), generator=torch.Generator().manual_seed(0)
    )  # each token occurs about 340 times, so bf16 sums would be wrong
    gradient = hidden(plan).to(dtype)
    table = torch.zeros(plan.model.vocabulary, plan.model.hidden, requires_grad=True)
    torch.nn.functional.embedding(ids, table).backward(gradient.float())
    (found,) = made(plan).embed_backward(gradient, ids, 0)
    assert isinstance(found, TableGradient)
    got = torch.full_like(table, 7)
    found.store(got, torch.float32, adding=False)
    torch.testing.assert_close(got, table.grad, rtol=0, atol=0)
    found.store(got, dtype, adding=True)
    assert table.grad is not None
    torch.testing.assert_close(got, table.grad + table.grad.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slot_of_backward", SLOTS)
def test_a_slot_may_be_reused_between_recompute_and_backward(
    make_plan: Callable[..., Plan],
    slots: Arenas,
    family: str,
    dtype: torch.dtype,
    slot_of_backward: str,
) -> None:
    """Gradients have the same bits if the slot is overwritten between recompute and backward.

    The layer is loaded again into the same or the other slot.
    """
    plan = make_plan(family=family, dtype="fp32" if dtype == torch.float32 else "bf16")
    templates, layer, x, upper = (
        made(plan),
        plan.model.stack["0"],
        hidden(plan).to(dtype),
        hidden(plan, 1).to(dtype),
    )
    fill(slots, plan, SLOTS[0], 1, dtype)
    weights = {
        name: tensor.clone().requires_grad_()
        for name, tensor in layer_tensors(slots, layer, SLOTS[0], dtype).items()
    }
    inputs = (x.clone().requires_grad_(), *weights.values())
    wanted_output = decoder(templates, weights, inputs[0])
    wanted = torch.autograd.grad(wanted_output, inputs, upper)

    saved = templates.recompute(slots, layer, SLOTS[0], x)
    assert torch.equal(saved.output, wanted_output)
    fill(slots, plan, SLOTS[0], 2, dtype)
    fill(slots, plan, slot_of_backward, 1, dtype)
    got = templates.backward(saved, slot_of_backward, upper)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_backward_reads_the_slot_that_it_is_given(
    make_plan: Callable[..., Plan], slots: Arenas
) -> None:
    """The backward pass uses the weights in its slot and not those of recompute.

    With another layer in the slot, the gradients differ.
    """
    plan = make_plan(dtype="fp32")
    templates, layer, x = made(plan), plan.model.stack["0"], hidden(plan)
    gradients = []
    for seed_at_backward in (1, 2):
        fill(slots, plan, SLOTS[0], 1)
        saved = templates.recompute(slots, layer, SLOTS[0], x.detach().clone())
        fill(slots, plan, SLOTS[1], seed_at_backward)
        gradients.append(templates.backward(saved, SLOTS[1], hidden(plan, 1))[0])
    assert not torch.equal(*gradients)
