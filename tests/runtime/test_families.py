"""Tests of every family: the executor's loss and gradients are those of transformers' whole model.

The whole model uses plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from family_sample import others_nightly
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from whole_models import (
    LEFT,
    PACKED,
    RIGHT,
    SEQUENCE,
    as_loaded,
    bound,
    compare,
    drawn,
    labelled,
    model_of,
    packed_bound,
    scale_of,
    token_losses,
    weights,
    whole_model,
    with_documents,
    with_our_draws,
)

from megatrain.runtime.calibration import calibrate as calibration
from megatrain.runtime.calibration.contention import Contention
from megatrain.runtime.calibration.link import LinkRates
from megatrain.runtime.calibration.microbenchmarks import MeasuredRates
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.model_files import export, folder_weights
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.layers.meta_model import kind_of, meta_model
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.cost_table import FixedCosts
from megatrain.simulator.model.attention_masks import documents_obstacle
from megatrain.simulator.model.families import CANNOT_SEPARATE_DOCUMENTS, FAMILIES
from megatrain.simulator.model.op_work import projected_rows
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

KINDS = {
    "gemma2": 2,
    "gemma3_text": 2,
    "gemma3n_text": 4,
    "gemma4_text": 2,
    "olmo3": 2,
    "glm4_moe": 2,
    "cohere2": 2,
    "smollm3": 2,
    "gpt_oss": 2,
    "qwen2": 2,
    "qwen3": 2,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
    "qwen3_next": 3,
    "deepseek_v3": 2,
    "cwm": 2,
    "exaone4": 2,
    "ministral": 2,
    "vaultgemma": 2,
    "deepseek_v2": 2,
    "dots1": 3,
    "exaone_moe": 3,
    "glm4_moe_lite": 2,
    "llama4_text": 3,
    "mellum": 2,
    "qwen3_5_moe_text": 2,
    "qwen3_5_text": 2,
    "axk1": 2,
    "bloom": 2,
    "nanochat": 2,
    "ernie4_5_moe": 2,
    "laguna": 3,
    "minimax": 2,
    "granite_swa": 2,
    "granitemoe_swa": 2,
    "mimo_v2_flash": 3,
    "cohere2_moe": 3,
    "hy_v3": 2,
}
COMPILED = ("llama", "qwen3_moe", "deepseek_v3", "mistral", "qwen2", "qwen3", "nanochat")
"""families for which compiled graphs are counted"""
ROUTED = (
    "granitemoe",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "olmoe",
    "flex_olmo",
    "granitemoeshared",
    "mellum",
    "minimax_m2",
    "qwen3_5_moe_text",
    "granitemoe_swa",
    "ernie4_5_moe",
    "laguna",
    "minimax",
    "phimoe",
)
"""Families that can be trained with a router loss."""
PIECED = tuple(family for family in ROUTED if not model_of(family).pieces_obstacle())
"""Those whose experts can compute pieces of tokens."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *others_nightly(FAMILIES, "fp32"),
        # The test of saved models trains the sample in bf16.
        *others_nightly(FAMILIES, "bf16", among=("llama", "gpt_oss")),
    ],
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    run: Callable[..., Any], family: str, dtype: str
) -> None:
    """Loss and gradients match those of the whole model.

    The plan has accumulation, a head in chunks, and recomputed blocks of three layers.
    """
    with run(model_of(family), dtype=dtype, accumulation=2) as running:
        model, batches = (
            whole_model(running.plan, config_of(running.plan.model)),
            drawn(running.plan),
        )
        loss = sum(
            token_losses(model(batch.ids).logits, batch.labels) for batch in batches
        ) * scale_of(batches)
        compare(running, batches, loss, model, bound(family, dtype))
        # A parameter without a gradient would decay here but not in PyTorch. No family has one.
        assert all(
            parameter.grad is not None
            for parameter in model.parameters()
            if parameter.requires_grad
        )


# ---- padding


def test_linear_attention_needs_no_mask_for_padding_at_the_end(run: Callable[..., Any]) -> None:
    with run(model_of("qwen3_next")) as running:
        model, batch = (
            whole_model(running.plan, config_of(running.plan.model)),
            labelled(with_documents(running.plan, RIGHT)),
        )
        logits = model(batch.ids, attention_mask=(RIGHT >= 0).long()).logits
        compare(
            running,
            [batch._replace(documents=None)],
            token_losses(logits, batch.labels) * scale_of([batch]),
            model,
            1e-5,
        )


# ---- routers


@pytest.mark.parametrize(
    ("family", "padded", "piece"),
    [
        *others_nightly(ROUTED, False, None),
        *others_nightly(ROUTED, True, None, among=("gpt_oss", "mixtral")),
        *others_nightly(PIECED, False, 7, among=("mixtral", "qwen2_moe")),
        *others_nightly(PIECED, True, 7, among=("gpt_oss",)),
    ],
)
def test_the_routers_loss_is_part_of_a_step_s_loss(
    run: Callable[..., Any], family: str, padded: bool, piece: int | None
) -> None:
    """The routers' loss is the mean over the micro-batches of that of the whole model.

    One layer keeps its graph from the forward pass, and the other layers do not. Experts may
    compute pieces of tokens, while the loss is that of all tokens.
    """
    if padded and family in CANNOT_SEPARATE_DOCUMENTS:
        pytest.skip("this family cannot separate documents")
    model_spec = model_of(family, output_router_logits=True, router_aux_loss_coef=0.7)
    with run(
        model_spec,
        accumulation=2,
        documents=padded,
        token_piece=piece,
        placement=Placement(saved_activations="1", weights="all", gradients="all"),
        policy="overlapped",
    ) as running:
        config = config_of(running.plan.model)
        assert config.output_router_logits
        model, batches = whole_model(running.plan, config), drawn(running.plan)
        mask = None
        if padded:
            batches, mask = (
                [batch._replace(documents=RIGHT) for batch in batches],
                (RIGHT >= 0).long(),
            )
        trained = [labelled(batch) if padded else batch for batch in batches]
        outputs = [model(batch.ids, attention_mask=mask) for batch in batches]
        loss = sum(
            token_losses(output.logits, batch.labels)
            for output, batch in zip(outputs, trained, strict=True)
        ) * scale_of(trained)
        routed = 0.7 * sum(output.aux_loss for output in outputs) / len(outputs)
        assert float(routed.detach()) > 0.1
        linear_too = padded or piece
        compare(
            running, batches, loss + routed, model, packed_bound(family) if linear_too else 1e-5
        )


def test_every_family_with_a_routers_loss_is_among_them() -> None:
    assert {
        family
        for family in FAMILIES
        if hasattr(config_of(model_of(family)), "router_aux_loss_coef")
    } == {*ROUTED, "llama4_text"}


def test_llama_4_has_a_coefficient_and_no_such_loss(run: Callable[..., Any]) -> None:
    with run(
        model_of("llama4_text", output_router_logits=True, router_aux_loss_coef=0.7)
    ) as running:
        model, batches = (
            whole_model(running.plan, config_of(running.plan.model)),
            drawn(running.plan),
        )
        output = model(batches[0].ids)
        assert getattr(output, "aux_loss", None) is None
        compare(
            running,
            batches,
            token_losses(output.logits, batches[0].labels) * scale_of(batches),
            model,
            1e-5,
        )


# ---- checkpoints


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*others_nightly(FAMILIES, "bf16"), *others_nightly(FAMILIES, "fp32", among=())],
)
def test_a_saved_model_is_loaded_trained_and_saved_again(
    run: Callable[..., Any], tmp_path: Path, family: str, dtype: str
) -> None:
    """A model that transformers saved is loaded and exported with the same names and bits.

    After a step and an export, transformers' model has the same loss and gradients.
    """
    model_spec = model_of(family)
    with run(model_spec, dtype=dtype) as running:
        plan, config = running.plan, config_of(model_spec)
        model = whole_model(plan, config)
        model.save_pretrained(tmp_path / "theirs")
        with folder_weights(tmp_path / "theirs") as read:
            running.state.load(read)
        export(running.state, plan, config, tmp_path / "ours")
        theirs, ours = (
            load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours")
        )
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype
            for name in theirs
        )
        batches = drawn(plan)
        running.executor.step(batches, rate=1e-2, number=1)
        export(running.state, plan, config, tmp_path / "trained")
        reloaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "trained", attn_implementation=config._attn_implementation
        ).train()
        with_our_draws(reloaded)
        loss = token_losses(reloaded(batches[0].ids).logits, batches[0].labels) * scale_of(batches)
        compare(running, batches, loss, reloaded, bound(family, dtype))


# ---- what a layer is


@pytest.mark.parametrize("family", ["codegen", "falcon", "falcon_h1", "gptj", "llama", "mpt"])
def test_layers_of_a_deep_model_get_their_arguments(family: str) -> None:
    """The layers of a model with more layers than hidden states have dimensions get their
    arguments. Some models use only the first element of what a layer returns.
    """
    model, work = (
        model_of(family, num_hidden_layers=9),
        Workload(batch=2, sequence=SEQUENCE, dtype="fp32"),
    )
    templates = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    assert templates._embedding_and_head._recording[-1].rows.shape == (2, SEQUENCE, model.hidden)
    assert len(templates._causal_arguments) == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_one_template_for_each_kind_of_layer(family: str) -> None:
    model = model_of(family)
    whole = meta_model(config_of(model), torch.bfloat16, torch.device("cpu"))
    kinds = [kind_of(layer) for layer in DecoderStack.of(whole).layers_of(whole)]
    assert len(set(kinds)) == KINDS.get(family, 1)
    for layer, kind in zip(model.decoders, kinds, strict=True):
        same = [
            other.signature for other, its in zip(model.decoders, kinds, strict=True) if its == kind
        ]
        assert set(same) == {layer.signature}, (
            "layers that compute the same must have the same cost"
        )


@pytest.mark.parametrize("family", others_nightly(FAMILIES))
def test_a_meta_model_has_the_buffers_of_the_loaded_model(family: str) -> None:
    config = config_of(model_of(family))
    whole, real = (
        meta_model(config, torch.bfloat16, torch.device("cpu")),
        as_loaded(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)),
    )
    expected = dict(real.named_buffers())
    found = dict(whole.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize(
    ("family", "documents"),
    [
        *others_nightly(COMPILED, False, among=("deepseek_v3",)),
        *others_nightly(COMPILED, True, among=("qwen3_moe",)),
    ],
)
def test_compiled_layers_have_one_graph_for_each_kind(
    monkeypatch: pytest.MonkeyPatch, family: str, documents: bool
) -> None:
    """A compiled model has one graph for each kind of layer and one for the head.

    No graph is broken. Another layer, another micro-batch or other documents need no other graph.
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
    torch._dynamo.reset()
    model, work = (
        model_of(family),
        Workload(
            batch=2,
            sequence=SEQUENCE,
            dtype="fp32",
            compiled=True,
            loss_chunk=SEQUENCE,
            documents=documents,
        ),
    )
    templates = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    x = torch.randn(2, SEQUENCE, model.hidden)
    for micro, packed in enumerate((PACKED, LEFT)):
        templates.begin(micro, packed if documents else None)
        for layer in model.decoders:
            x = templates.forward(
                layer.name,
                {
                    tensor.name: weights(layer.name, tensor.name, tensor.shape)
                    for tensor in layer.tensors
                },
                x,
                micro,
            )
        assert len(graphs) == KINDS.get(family, 1)
    head = {
        tensor.name: weights("h", tensor.name, tensor.shape)
        for tensor in model.stack[model.head].tensors
    }
    templates.head(head, x, torch.zeros(2, SEQUENCE, dtype=torch.int64), 1.0, torch.empty_like(x))
    assert len(graphs) == KINDS.get(family, 1) + 1


@pytest.mark.parametrize("family", others_nightly(FAMILIES))
def test_a_padded_vocabulary_gives_the_same_head(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """This holds for every treatment of logits, with tied and untied embeddings."""
    model = model_of(family, vocab_size=251)
    work = Workload(batch=2, sequence=SEQUENCE, loss_chunk=20)
    assert (model.vocabulary, projected_rows(model, work)) == (251, 256)
    layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    layers.begin(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, SEQUENCE, model.carried, generator=generator).bfloat16()
    labels = torch.randint(251, (2, SEQUENCE), generator=generator)

    def head() -> tuple[torch.Tensor, ...]:
        tensors = {
            tensor.name: weights("h", tensor.name, tensor.shape).bfloat16()
            for tensor in model.stack[model.head].tensors
        }
        dx = torch.empty_like(x)
        loss, gradients = layers.head(tensors, x, labels, 1 / labels.numel(), dx)
        return loss, dx, *(gradient for gradient in gradients if gradient is not None)

    padded = head()
    used = layers._padded({model.projection: torch.empty(251, model.hidden)})
    assert used[model.projection].shape == (256, model.hidden)
    monkeypatch.setattr(layers, "_padded", lambda named: named)
    plain = head()
    torch.testing.assert_close(padded[0], plain[0], rtol=1e-3, atol=0)
    for got, want in zip(padded[1:], plain[1:], strict=True):
        assert got.shape == want.shape
        most = float(want.abs().max())
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02 * most)


@pytest.mark.usefixtures("fast_calibration")
def test_each_kind_of_layer_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_STEPS", 2)
    copies = {kind: [(2**16, 1000), (2**20, 16_000)] for kind in ("load_weights", "save_gradients")}
    monkeypatch.setattr(
        calibration,
        "measure_rates",
        lambda *_: MeasuredRates(
            LinkRates(copies, [], [], {}),
            Contention({}, None, {}),
            1e11,
            1e10,
            1e10,
            1e10,
            1e8,
            fixed,
            {},
            0.0,
        ),
    )
    fixed = FixedCosts(launch_ns=1, event_ns=0, first_touch_gb_per_s=1.0, registration_gb_per_s=0.0)
    model, work = (
        model_of("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[0, 1, 2, 3]),
        Workload(batch=1, sequence=SEQUENCE),
    )
    hardware = calibration.calibrate(
        "here",
        model,
        work,
        config_of(model),
        torch.device("cpu"),
        host_bytes=2**33,
        device_bytes=2**32,
    )
    assert hardware.costs is not None
    signatures = {f"{layer.signature}/{work.shape}" for layer in model.decoders}
    assert len(signatures) == 2
    for kind in ("forward", "recompute", "backward"):
        assert hardware.costs.compute[kind].keys() == signatures


# ---- what is refused


def test_a_family_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(
        UserError,
        match=(
            r"model_type: found 'mamba', layers with a state-space, .*; allowed: one of \d+"
            r" families, .*; fix: use"
        ),
    ):
        ModelSpec.from_config({"model_type": "mamba", "hidden_size": 64}, "config.json")


def test_queries_that_are_scaled_by_their_place_in_a_row_are_refused_over_documents(
    make_plan: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """A Llama 4 model that scales queries by their position in a row is refused with documents.

    It is accepted with shorter rows, with positions in all layers, or without the scaling.
    """
    plan = make_plan("resident", model=model_of("llama4_text", floor_scale=4), documents=True)
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    reason = "llama4_text, which scales queries by their place in a row of 4 tokens or more"
    with pytest.raises(
        UserError,
        match=(
            rf"found {reason}; allowed: rows of one document; fix: make the plan with"
            r" --plain-packing"
        ),
    ):
        session(plan)
    assert documents_obstacle(plan.model, 4) == reason
    assert documents_obstacle(plan.model, 3) is None
    for changes in ({"attn_temperature_tuning": False}, {"no_rope_layers": [1] * 4}):
        assert documents_obstacle(model_of("llama4_text", floor_scale=4, **changes), 24) is None
    others = {
        family: documents_obstacle(model_of(family), 2**20)
        for family in FAMILIES
        if family != "llama4_text"
    }
    assert {family for family, obstacle in others.items() if obstacle} == set(
        CANNOT_SEPARATE_DOCUMENTS
    )
