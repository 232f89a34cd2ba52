"""Tests of packed documents: they train as they would alone.

The kernel gets their lengths or a mask. On the CPU, a replacement of the kernel takes the lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import reference_lengths
import torch
from family_sample import FEW, others_nightly
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from whole_models import (
    BF16_BOUND,
    DOCUMENTED,
    LEFT,
    LINEAR,
    PACKED,
    RIGHT,
    SEQUENCE,
    compare,
    drawn,
    labelled,
    loss_of_each_alone,
    model_of,
    packed_bound,
    scale_of,
    token_losses,
    weights,
    whole_model,
    with_documents,
    without_draws,
)

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import OpFailed
from megatrain.runtime.files.model_files import export
from megatrain.runtime.layers import lengths
from megatrain.runtime.layers.documents import masks
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.attention_masks import document_attention
from megatrain.simulator.model.families import CAN_SAVE_ATTENTION, UNFUSED_ATTENTION, WIDE_HEADS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

HELPED = ("gpt_oss", "opt", "llama4_text")
"""families whose models do not pass the positions to their masks, or count chunks from the start of
a row"""
IN_BF16 = ("llama", "gemma3_text", "mixtral", *HELPED)
"""families for which normal tests also train packed rows in bf16"""
RELOADED = ("llama", "gemma3_text", "qwen3_next", "gpt_oss")
"""families for which normal tests also train packed rows after an export, and compare padding with
transformers' mask. Packed rows have padding on both sides for the whole sample."""
ROWS = torch.tensor([[0] * 24, [0] * 24])
ALL_HERE = {"weights": "all", "gradients": "all"}


@pytest.fixture(params=["lengths", "mask"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns how documents are separated: by `lengths` or by a `mask`.

    Families that write out their attention scores use a mask in both cases.
    """
    if request.param == "lengths":
        reference_lengths.install(monkeypatch)
    return str(request.param)


def batches_of(plan: Plan, *packings: torch.Tensor) -> list[Batch]:
    return [
        batch._replace(documents=documents)
        for batch, documents in zip(drawn(plan), packings, strict=True)
    ]


# ---- loss and gradients


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("family", "way"),
    [
        *others_nightly(DOCUMENTED, "mask"),
        *others_nightly(
            (each for each in DOCUMENTED if each not in UNFUSED_ATTENTION), "lengths", among=FEW
        ),
    ],
    indirect=["way"],
)
def test_packed_rows_train_as_their_documents_alone(run: Callable[..., Any], family: str) -> None:
    """Packed rows have the loss and gradients of their documents alone.

    Blocks of three layers are recomputed, and the two micro-batches are packed differently.
    """
    model_spec = model_of(family, **without_draws(family))
    with run(model_spec, documents=True, accumulation=2) as running:
        batches = batches_of(running.plan, PACKED, LEFT)
        model = whole_model(running.plan, config_of(running.plan.model))
        compare(running, batches, loss_of_each_alone(model, batches), model, packed_bound(family))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_bigcode", "mixtral", "qwen3_next", "llama4_text"]
)
def test_packed_rows_in_pieces_of_tokens(run: Callable[..., Any], family: str) -> None:
    """With pieces that cut documents, packed rows train as their documents alone.

    The families have windows, a table of positions, experts, linear attention and chunks.
    """
    with run(model_of(family), documents=True, accumulation=2, token_piece=5) as running:
        batches = batches_of(running.plan, PACKED, LEFT)
        model = whole_model(running.plan, config_of(running.plan.model))
        compare(running, batches, loss_of_each_alone(model, batches), model, packed_bound(family))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("family", CAN_SAVE_ATTENTION)
def test_packed_rows_with_attention_that_is_kept(run: Callable[..., Any], family: str) -> None:
    """With kept attention, packed rows train as their documents alone.

    Layer 0 is recomputed whole, layers 1 and 2 keep their attention, and layer 3 saves its
    activations.
    """
    model_spec = model_of(family, sliding_window=0, use_sliding_window=False)
    placement = Placement(saved_attention="1-2", saved_activations="3", **ALL_HERE)
    with run(
        model_spec, documents=True, accumulation=2, policy="overlapped", placement=placement
    ) as running:
        batches = batches_of(running.plan, PACKED, RIGHT)
        model = whole_model(running.plan, config_of(running.plan.model))
        compare(running, batches, loss_of_each_alone(model, batches), model, 1e-5)


@pytest.mark.usefixtures("way")
def test_fewer_layers_than_the_config_has_take_documents(make_plan: Callable[..., Plan]) -> None:
    """A shortened model with the config of the whole model accepts documents.

    Calibration builds such models.
    """
    model = model_of("qwen2")
    plan = make_plan(
        "resident",
        model=model.shortest(1),
        sequence=SEQUENCE,
        documents=True,
        dtype="fp32",
        loss_chunk=13,
    )
    with Executor(
        plan, config_of(model), AdamW(), torch.device("cpu"), schedule=lower(plan)
    ) as executor:
        executor.state.load(weights)
        assert plan.model.layers < model.layers
        assert executor.step(batches_of(plan, PACKED), rate=0.0, number=1).loss > 0


@pytest.mark.parametrize("family", others_nightly(DOCUMENTED, among=RELOADED))
def test_packed_rows_after_saving_and_loading(
    run: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    """After a step on packed rows and an export, the loss and gradients are transformers'."""
    with run(model_of(family, **without_draws(family)), documents=True) as running:
        plan, config = running.plan, config_of(running.plan.model)
        batches = [with_documents(plan, PACKED)]
        running.executor.step(batches, rate=1e-4, number=1)
        export(running.state, plan, config, tmp_path / "trained")
        reloaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "trained", attn_implementation=config._attn_implementation
        ).train()
        compare(
            running, batches, loss_of_each_alone(reloaded, batches), reloaded, packed_bound(family)
        )


@pytest.mark.parametrize(
    "family",
    others_nightly((family for family in DOCUMENTED if family not in LINEAR), among=IN_BF16),
)
def test_a_packed_row_in_bf16_trains_as_transformers_packs_it(
    run: Callable[..., Any], family: str
) -> None:
    """A packed row in bf16 has the loss and gradients that transformers computes for packed rows.

    Matrix products of single documents would round differently in bf16.
    """
    with run(model_of(family), dtype="bf16", documents=True) as running:
        model, batch = (
            whole_model(running.plan, config_of(running.plan.model)),
            with_documents(running.plan, PACKED),
        )
        position_ids = torch.cat([torch.arange(length) for length in (9, 1, 14, 12, 7, 5)]).view(
            2, SEQUENCE
        )
        inputs = {
            "inputs_embeds": torch.empty(2, SEQUENCE, 1, dtype=torch.bfloat16),
            "position_ids": position_ids,
        }
        prepared = masks(model.config, **inputs) if family in HELPED else None
        logits = model(batch.ids, position_ids=position_ids, attention_mask=prepared).logits
        compare(
            running,
            [batch],
            token_losses(logits, labelled(batch).labels) * scale_of([labelled(batch)]),
            model,
            BF16_BOUND,
        )


@pytest.mark.parametrize(
    ("family", "documents"),
    [
        *others_nightly(DOCUMENTED, LEFT, among=RELOADED),
        *others_nightly(DOCUMENTED, RIGHT, among=RELOADED),
    ],
)
def test_padding_is_transformers_attention_mask(
    run: Callable[..., Any], family: str, documents: torch.Tensor
) -> None:
    with run(model_of(family), documents=True) as running:
        model, batch = (
            whole_model(running.plan, config_of(running.plan.model)),
            with_documents(running.plan, documents),
        )
        mask = (documents >= 0).long()
        logits = model(
            batch.ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
        compare(
            running,
            [batch],
            token_losses(logits, labelled(batch).labels) * scale_of([labelled(batch)]),
            model,
            packed_bound(family),
        )


# ---- the same bits under every plan


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_plan_gives_the_same_bits(
    way: str, executable: Callable[..., Plan], session: Callable[..., Any], dtype: str
) -> None:
    """Plans with other policies, slots and placements of activations have the same bits.

    One micro-batch has documents and one has none.
    """
    found = []
    changes = {
        "documents": True,
        "accumulation": 2,
        "dtype": dtype,
        "sequence": SEQUENCE,
        "family": "qwen2",
        "device_limit_bytes": 2**30,
        "host_limit_bytes": 2**30,
        "chunk_bytes": 2**20,
    }
    for policy, knobs in (
        ("resident", {}),
        ("double_buffer", {}),
        ("overlapped", {"placement": Placement(saved_attention="0-1", saved_activations="2")}),
        ("overlapped", {"placement": Placement(saved_attention="all", offloaded_inputs="all")}),
        ("overlapped", {"checkpoint_interval": 2}),
    ):
        with session(executable(policy, **changes, **knobs)) as running:
            packed = [
                [
                    batch._replace(documents=documents)
                    for batch, documents in zip(
                        running.batches(number), (PACKED, None), strict=True
                    )
                ]
                for number in (1, 2)
            ]
            results = [
                running.executor.step(batches, rate=1e-2, number=number)
                for number, batches in enumerate(packed, 1)
            ]
            running.executor.flush_update()
            found.append(
                ([(result.loss, result.gradient_norm) for result in results], running.masters())
            )
    assert all(each == found[0] for each in found[1:]), way


def test_rows_of_one_document_have_the_causal_kernel(
    monkeypatch: pytest.MonkeyPatch, executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """Rows without documents use no lengths and no mask, and have the bits of such a plan."""
    called, bits = reference_lengths.install(monkeypatch), []
    for documents in (False, True):
        with session(executable(documents=documents)) as running:
            bits.append(running.bits())
    assert bits[0] == bits[1]
    assert not called


@pytest.mark.usefixtures("way")
def test_rows_of_one_document_are_not_separated_like_those_of_the_step_before(
    run: Callable[..., Any],
) -> None:
    with run(model_of("llama"), documents=True) as running:
        (batch,) = drawn(running.plan)
        losses = [
            running.executor.step(
                [batch._replace(documents=documents)], rate=0.0, number=number
            ).loss
            for number, documents in enumerate((None, PACKED, None), 1)
        ]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.usefixtures("way")
def test_rows_of_one_document_are_not_separated_like_those_of_a_failed_step(
    run: Callable[..., Any],
) -> None:
    losses = []
    with run(model_of("llama"), documents=True) as running:
        (batch,) = drawn(running.plan)
        losses.append(running.executor.step([batch], rate=0.0, number=1).loss)
        task = running.tasks["H.m0"]
        works, task.run = task.run, lambda: torch.ones(2) @ torch.ones(3)
        with pytest.raises(OpFailed):
            running.executor.step([batch._replace(documents=PACKED)], rate=0.0, number=2)
        task.run = works
        losses.append(running.executor.step([batch], rate=0.0, number=2).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kept", ["", "all"])
def test_documents_given_by_lengths_have_no_mask(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Documents that are given by lengths have no mask, even with windows.

    The number of lengths is rounded up.
    """
    called = reference_lengths.install(monkeypatch)
    model = model_of("qwen2") if not kept else model_of("qwen2", use_sliding_window=False)
    with run(
        model,
        documents=True,
        policy="overlapped",
        placement=Placement(saved_attention=kept, **ALL_HERE),
    ) as running:
        functional_layers = running.executor.functional_layers
        masked = [handed["attention_mask"] for handed in functional_layers._causal_arguments]
        assert all(mask is None for mask in masked)
        running.executor.step([with_documents(running.plan, PACKED)], rate=0.0, number=1)
        assert set(called) == {9}, "6 documents in 2 rows need room for 8"
        running.executor.step([with_documents(running.plan, ROWS)], rate=0.0, number=2)
        assert set(called) == {9, 3}
        assert len(called) == 2 * (4 if kept else 8), (
            "attention must run once in a layer that keeps it, and otherwise twice"
        )


def test_without_documents_each_row_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without documents, each row is one document, as in the timing of a layer.

    Layers with windows get the lengths of the rows instead of a mask. Other layers use the causal
    kernel, which needs neither.
    """
    reference_lengths.install(monkeypatch)
    for family, spared in (("qwen2", True), ("llama", False)):
        model, work = (
            model_of(family),
            Workload(batch=2, sequence=SEQUENCE, dtype="fp32", documents=True),
        )
        functional_layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
        functional_layers.begin(0)
        given = functional_layers._layer_arguments("3", 0)["attention_mask"]
        assert given.starts.tolist() == [0, 24, 48] if spared else given is None


# ---- lengths


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4), st.data()
)
def test_bounds_are_the_starts_of_documents_and_the_rest_is_empty(
    rows: list[list[int]], data: st.DataObject
) -> None:
    """The bounds are the starts of the documents, and unused entries are empty documents.

    Documents are numbered from 0 in each row, and the last of a row may be padding.
    """
    sequence = max(map(sum, rows))
    filled = [[*row, sequence - sum(row)] if sum(row) < sequence else row for row in rows]
    numbers = [
        torch.cat([torch.full((length,), number) for number, length in enumerate(row)])
        for row in filled
    ]
    if data.draw(st.booleans()):
        numbers = [torch.where(row == row[-1], -1, row) for row in numbers]
    documents, count = torch.stack(numbers), sum(map(len, filled))
    places, most = room = lengths.room(documents)
    assert count <= places < max(2 * count, len(rows) + 1)
    assert places % len(rows) == 0
    longest = max(length for row in filled for length in row)
    assert longest <= most <= min(max(2 * longest - 1, 2), sequence)
    assert most == sequence or most & (most - 1) == 0, "there are few different values"
    found = lengths.bounds(documents, room)
    starts = [0, *torch.tensor([length for row in filled for length in row]).cumsum(0).tolist()]
    assert found.starts.tolist() == starts + [documents.numel()] * (places - count)
    assert (found.starts.dtype, found.extent.shape) == (torch.int32, (most, 0))


def test_documents_of_one_token_have_room_for_two() -> None:
    """A compiled graph serves all sizes but 1."""
    assert lengths.room(torch.arange(16).expand(2, 16)) == (32, 2)
    assert lengths.room(torch.zeros(3, 1)) == (3, 1), "a row cannot be longer"


@pytest.mark.parametrize("family", DOCUMENTED)
def test_the_simulator_knows_which_families_write_out_scores(family: str) -> None:
    model = model_of(family)
    assert (config_of(model)._attn_implementation == "eager") == (family in UNFUSED_ATTENTION)
    work = Workload(batch=1, sequence=SEQUENCE)
    assert document_attention(model, msgspec.structs.replace(work, dtype="fp32")) == "mask"
    assert document_attention(model, work) == (
        "mask" if family in (*UNFUSED_ATTENTION, *WIDE_HEADS) else "lengths"
    )


@pytest.mark.parametrize("family", DOCUMENTED)
def test_every_family_is_asked_whether_a_gpu_takes_lengths(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The check of the GPU's kernel gets every family's head sizes.

    A config.json may have other keys for them, or none.
    """
    asked: list[tuple[int, ...]] = []
    make = torch.empty
    monkeypatch.setattr(
        lengths.torch,
        "empty",
        lambda *shape, **options: make(*shape, **{**options, "device": "meta"}),
    )
    monkeypatch.setattr(
        lengths.sdp,
        "SDPAParams",
        lambda query, key, *_: asked.append((query.shape[1], key.shape[1], query.shape[3])),
    )
    monkeypatch.setattr(lengths.sdp, "can_use_flash_attention", lambda _: True)
    model, work = (
        model_of(family),
        Workload(batch=2, sequence=SEQUENCE, dtype="bf16", documents=True),
    )
    assert (
        lengths.takes_lengths(model, work, torch.device("cuda"))
        == (document_attention(model, work) == "lengths")
        == bool(asked)
    )
    assert all(
        heads == 4 and heads % pairs == 0 and size in (8, 16, 24) for heads, pairs, size in asked
    )


@pytest.mark.parametrize(
    "family",
    others_nightly(
        ("qwen2", "gemma3_text", "deepseek_v3", "qwen3_5_text", "llama4_text"),
        among=("gemma3_text", "qwen3_5_text"),
    ),
)
def test_one_graph_serves_any_number_of_documents(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A compiled model has one graph for each kind of layer.

    Another layer, another micro-batch or more documents need no other graph.
    """
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        return compiled(
            function,
            fullgraph=True,
            backend=lambda graph, _: graphs.append(graph) or graph.forward,
            **options,
        )

    monkeypatch.setattr(torch, "compile", counted)
    reference_lengths.install(monkeypatch)
    torch._dynamo.reset()
    model, work = (
        model_of(family),
        Workload(
            batch=2,
            sequence=SEQUENCE,
            dtype="fp32",
            compiled=True,
            loss_chunk=SEQUENCE,
            documents=True,
        ),
    )
    functional_layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    x, counts = torch.randn(2, SEQUENCE, model.hidden), []
    for micro, packed in enumerate((PACKED, ROWS, torch.arange(SEQUENCE).expand(2, -1))):
        functional_layers.begin(micro, packed)
        for layer in model.decoders:
            x = functional_layers.forward(
                layer.name,
                {
                    tensor.name: weights(layer.name, tensor.name, tensor.shape)
                    for tensor in layer.tensors
                },
                x,
                micro,
            )
        counts.append(len(graphs))
    kinds = zip(functional_layers._kinds, model.decoders, strict=True)
    assert counts == [len({kind for kind, layer in kinds if layer.compilable})] * 3


@pytest.mark.parametrize("left", [-1, 127])
@pytest.mark.parametrize("pairs", [4, 8])
@pytest.mark.parametrize("kernel", ["flash", "flash4"])
def test_the_kernel_accepts_the_arguments(kernel: Any, left: int, pairs: int) -> None:
    """The forward and backward ops exist and return tensors of the stated shapes.

    The tensors have no memory here.
    """
    query, key, value = (
        torch.empty(2048, count, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for count in (8, pairs, pairs)
    )
    starts = torch.empty(9, dtype=torch.int32, device="meta")
    how = lengths.Call(kernel, starts, 1024, left, 0.125)
    output, log_sum_exp = lengths.forward(how, query, key, value)
    assert (output.shape, output.dtype, log_sum_exp.shape, log_sum_exp.dtype) == (
        query.shape,
        torch.bfloat16,
        (8, 2048),
        torch.float32,
    )
    output.sum().backward()
    assert query.grad is not None
    gradients = lengths.backward(how, output.detach(), query, key, value, output, log_sum_exp)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_a_plan_s_schedule_differs_by_its_tokens_alone(executable: Callable[..., Plan]) -> None:
    plain, packed = (lower(executable(documents=documents)) for documents in (False, True))
    sizes = [
        {buffer.id: buffer.bytes for buffer in schedule.buffers if buffer.pool != "device.tokens"}
        for schedule in (plain, packed)
    ]
    assert sizes[0] == sizes[1]
    assert [
        msgspec.structs.replace(op, shape=op.shape.removesuffix("-documents")) for op in packed.ops
    ] == list(plain.ops)
