"""Every family: loss and gradients of the executor are those of transformers' whole model under plain autograd."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tiny_families import config_of as tiny_config
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.runtime import calibrate as calibration
from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.model_files import export, folder_weights
from megatrain.runtime.layers.documents import masks
from megatrain.runtime.layers.skeleton import kind_of, skeleton, widen_buffers
from megatrain.runtime.layers.templates import Templates, config_of
from megatrain.runtime.optimizer import round_to_bf16
from megatrain.runtime.rates import Rates
from megatrain.simulator.errors import UserError
from megatrain.simulator.families import FAMILIES
from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.policies import lower
from megatrain.simulator.specs import ModelSpec, Workload

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SEQUENCE = 24
SLIDING = ["sliding_attention", "full_attention"] * 2
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "qwen2": {**QWEN_WINDOW, "max_window_layers": 2},
    "qwen3": {**QWEN_WINDOW, "max_window_layers": 1, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "olmo3": {"sliding_window": 8, "layer_types": SLIDING},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granitemoe": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 8, "layer_types": SLIDING},
    "smollm3": {**QWEN_WINDOW, "no_rope_layer_interval": 2},
    "gpt_oss": {"head_dim": 16, "sliding_window": 8, "layer_types": SLIDING},
    "mixtral": {"sliding_window": 8},
    "qwen2_moe": {"mlp_only_layers": [1]},
    "qwen3_moe": {"mlp_only_layers": [1], "head_dim": 16},
    "qwen3_next": {"head_dim": 16, "full_attention_interval": 2, "mlp_only_layers": [2]},
    "phi3": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "deepseek_v3": {"num_key_value_heads": 4},  # it has as many as heads, whatever its config says
    "gpt_neox": {"rotary_pct": 0.5},
    "deepseek_v2": {"num_key_value_heads": 4},
    "dots1": {"sliding_window": 8, "max_window_layers": 2},
    "exaone_moe": {"sliding_window": 8, "layer_types": SLIDING},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "granitemoeshared": {"shared_intermediate_size": 32, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "llama4_text": {"attention_chunk_size": 8, "no_rope_layer_interval": 4, "floor_scale": 4},
    "mellum": {"sliding_window": 8, "layer_types": SLIDING},
    "minicpm3": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "youtu": {"num_key_value_heads": 4},
    "cwm": {"sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2},
    "exaone4": {"sliding_window": 8, "layer_types": SLIDING},
    "helium": {"head_dim": 16},
    "hyperclovax": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "ministral": {"sliding_window": 8, "layer_types": SLIDING},
    "ministral3": {"sliding_window": 8},
    "stablelm": {"use_parallel_residual": True},
    "vaultgemma": {"sliding_window": 8, "layer_types": SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
}
"""on top of tiny_families: layers of several kinds, windows shorter than a row, caps and multipliers that matter"""
KINDS = {"gemma2": 2, "gemma3_text": 2, "olmo3": 2, "glm4_moe": 2, "cohere2": 2, "smollm3": 2, "gpt_oss": 2, "qwen2": 2, "qwen3": 2, "qwen2_moe": 2,
         "qwen3_moe": 2, "qwen3_next": 3, "deepseek_v3": 2, "cwm": 2, "exaone4": 2, "ministral": 2, "vaultgemma": 2, "deepseek_v2": 2,
         "dots1": 3, "exaone_moe": 3, "glm4_moe_lite": 2, "llama4_text": 3, "mellum": 2, "qwen3_5_moe_text": 2, "qwen3_5_text": 2}  # fmt: skip
ROUTED = ("granitemoe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe")
BF16_BOUND = 0.02
"""of a gradient's largest element: three units of its 8 bits. Ours is rounded in other places: the head's summed chunk by chunk in fp32, so are
the embedding's rows and the micro-batches
"""


def model_of(family: str, **changes: Any) -> ModelSpec:
    config = tiny_config(family, **{**TINY, **CHANGES.get(family, {}), **changes})
    return ModelSpec.from_config(config.to_dict(), family, family)


def weights(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every tensor another one, norms around one half and biases not zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{layer} {tensor}".encode()))
    if tensor.endswith("e_score_correction_bias"):
        return torch.randn(shape, generator=generator) * 0.1
    return torch.randn(shape, generator=generator) * 0.1 + (0.5 if len(shape) == 1 else 0)


def whole_model(plan: Plan, config: PretrainedConfig) -> Any:
    """transformers' model with the same weights."""
    dtype = torch.float32 if plan.workload.dtype == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    widen_buffers(model)
    stack = DecoderStack.of(model)
    with torch.no_grad():
        for layer in plan.model.stack.values():
            for tensor in layer.tensors:
                master = weights(layer.name, tensor.name, tensor.shape)  # its high plane is rounded with ties away from zero
                model.get_parameter(hub_name(layer.name, tensor.name, stack)).copy_(master if dtype == torch.float32 else round_to_bf16(master))
        for index, layer in enumerate(stack.layers_of(model)):
            for name, buffer in layer.named_buffers():
                buffer.copy_(weights(str(index), name, tuple(buffer.shape)))
    return model


Tensors = dict[tuple[str, str], torch.Tensor]


def gradients_of(running: Any) -> Tensors:
    """What the last step left, fp32."""
    found: Tensors = {}
    for layer in running.plan.model.stack.values():
        buffer, offset = f"device.gradients:{layer.name}", 0
        flat = running.executor.arenas.flat(buffer, running.executor._binder._gradient_dtype(buffer, layer.name), layer.elements)
        for tensor in layer.tensors:
            found[layer.name, tensor.name] = flat[offset : offset + tensor.elements].float().view(tensor.shape).clone()
            offset += tensor.padded
    return found


def their_gradients(plan: Plan, model: Any) -> Tensors:
    found: Tensors = {}
    for layer in plan.model.stack.values():
        for tensor in layer.tensors:
            gradient = model.get_parameter(hub_name(layer.name, tensor.name, DecoderStack.of(model))).grad
            found[layer.name, tensor.name] = torch.zeros(tensor.shape) if gradient is None else gradient.float()
    return found


def difference(ours: Tensors, theirs: Tensors) -> float:
    """The largest over the tensors of the largest difference, relative to the tensor's largest element."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30)) for name in theirs)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def drawn(plan: Plan, seed: int = 0) -> list[Batch]:
    """Micro-batches of random tokens, of which each has another number of labels."""
    work, generator = plan.workload, torch.Generator().manual_seed(seed)
    batches = []
    for micro in range(work.accumulation):
        ids, labels = torch.randint(plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator)
        labels[0, : 3 + micro] = IGNORED
        batches.append(Batch(ids, labels))
    return batches


def scale_of(batches: Sequence[Batch]) -> float:
    return 1 / sum(int((batch.labels != IGNORED).sum()) for batch in batches)


@pytest.fixture
def run(make_plan: Callable[..., Plan], session: Callable[..., Any]) -> Callable[..., Any]:
    """A session of one resident model with the weights of this file; `run(model, ...)`."""

    def make(model: ModelSpec, **changes: Any) -> Any:
        plan = make_plan(
            changes.pop("policy", "resident"), **{"model": model, "sequence": SEQUENCE, "dtype": "fp32", "loss_chunk": 13, "checkpoint_interval": 3, **changes}
        )
        return session(msgspec.structs.replace(plan, digest=lower(plan).digest), weights=weights)

    return make


def compare(running: Any, batches: list[Batch], loss: torch.Tensor, model: Any, bound: float) -> None:
    """A step of ours against `loss` of theirs, whose backward is still to come."""
    result = running.executor.step(batches, rate=0.0, number=1)
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=bound)
    found = difference(gradients_of(running), their_gradients(running.plan, model))
    logging.getLogger(__name__).info("%s: loss %.1e, gradients %.1e", running.plan.model.family, abs(result.loss / float(loss.detach()) - 1), found)
    assert found < bound


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-5), ("bf16", BF16_BOUND)])
def test_loss_and_gradients_are_those_of_the_whole_model(run: Callable[..., Any], family: str, dtype: str, bound: float) -> None:
    """With accumulation, a head in chunks, and recomputed blocks of three layers."""
    with run(model_of(family), dtype=dtype, accumulation=2) as running:
        model, batches = whole_model(running.plan, config_of(running.plan.model)), drawn(running.plan)
        loss = sum(token_losses(model(batch.ids).logits, batch.labels) for batch in batches) * scale_of(batches)
        compare(running, batches, loss, model, bound)


# ---- documents and padding

PACKED = torch.tensor([[0] * 9 + [1] * 1 + [2] * 14, [0] * 12 + [1] * 7 + [-1] * 5])
LEFT = torch.tensor([[-1] * 6 + [0] * 18, [0] * 24])
RIGHT = torch.tensor([[0] * 17 + [-1] * 7, [0] * 24])
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DOCUMENTED = [family for family in FAMILIES if family not in (*LINEAR, "llama4_text", "opt")]


def with_documents(plan: Plan, documents: torch.Tensor) -> Batch:
    """Labels stand at padding too, and at a document's end: the first must not count."""
    ids, labels, _ = drawn(plan)[0]
    return Batch(ids, labels, documents)


def labelled(batch: Batch) -> Batch:
    assert batch.documents is not None
    return batch._replace(labels=batch.labels.masked_fill(batch.documents < 0, IGNORED))


@pytest.mark.parametrize("family", DOCUMENTED)
def test_a_packed_row_trains_as_its_documents_alone(run: Callable[..., Any], family: str) -> None:
    """Theirs sees each document by itself, without a mask, positions or padding."""
    with run(model_of(family), documents=True) as running:
        model, batch = whole_model(running.plan, config_of(running.plan.model)), with_documents(running.plan, PACKED)
        loss = torch.zeros(())
        for ids, labels, documents in zip(*labelled(batch), strict=True):
            for document in range(int(documents.max()) + 1):
                here = documents == document
                loss = loss + token_losses(model(ids[None, here]).logits, labels[None, here])
        compare(running, [batch], loss * scale_of([labelled(batch)]), model, 1e-5)


@pytest.mark.parametrize("family", DOCUMENTED)
def test_a_packed_row_in_bf16_trains_as_transformers_packs_it(run: Callable[..., Any], family: str) -> None:
    """By its position ids: documents alone are other matrix products, which in bf16 round differently."""
    with run(model_of(family), dtype="bf16", documents=True) as running:
        model, batch = whole_model(running.plan, config_of(running.plan.model)), with_documents(running.plan, PACKED)
        position_ids = torch.cat([torch.arange(length) for length in (9, 1, 14, 12, 7, 5)]).view(2, SEQUENCE)
        inputs = {"inputs_embeds": torch.empty(2, SEQUENCE, 1, dtype=torch.bfloat16), "position_ids": position_ids}
        prepared = masks(model.config, **inputs) if family == "gpt_oss" else None  # its model does not show the positions to its masks
        logits = model(batch.ids, position_ids=position_ids, attention_mask=prepared).logits
        compare(running, [batch], token_losses(logits, labelled(batch).labels) * scale_of([labelled(batch)]), model, BF16_BOUND)


@pytest.mark.parametrize("family", DOCUMENTED)
@pytest.mark.parametrize("documents", [LEFT, RIGHT], ids=["left", "right"])
def test_padding_is_transformers_attention_mask(run: Callable[..., Any], family: str, documents: torch.Tensor) -> None:
    with run(model_of(family), documents=True) as running:
        model, batch = whole_model(running.plan, config_of(running.plan.model)), with_documents(running.plan, documents)
        mask = (documents >= 0).long()
        logits = model(batch.ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        compare(running, [batch], token_losses(logits, labelled(batch).labels) * scale_of([labelled(batch)]), model, 1e-5)


def test_linear_attention_needs_no_mask_for_padding_at_the_end(run: Callable[..., Any]) -> None:
    with run(model_of("qwen3_next")) as running:
        model, batch = whole_model(running.plan, config_of(running.plan.model)), labelled(with_documents(running.plan, RIGHT))
        logits = model(batch.ids, attention_mask=(RIGHT >= 0).long()).logits
        compare(running, [batch._replace(documents=None)], token_losses(logits, batch.labels) * scale_of([batch]), model, 1e-5)


# ---- routers


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ROUTED)
def test_the_routers_loss_counts(run: Callable[..., Any], family: str, padded: bool) -> None:
    """The mean of the micro-batches' own, with theirs taken from the whole model; one layer's graph is kept from the forward, the others' are not."""
    if padded and family not in DOCUMENTED:
        pytest.skip("linear attention has no documents")
    model_spec = model_of(family, output_router_logits=True, router_aux_loss_coef=0.7)
    with run(model_spec, accumulation=2, documents=padded, placement=Placement(stored="1", weights="all", gradients="all"), policy="overlapped") as running:
        config = config_of(running.plan.model)
        assert config.output_router_logits
        model, batches = whole_model(running.plan, config), drawn(running.plan)
        mask = None
        if padded:
            batches, mask = [batch._replace(documents=RIGHT) for batch in batches], (RIGHT >= 0).long()
        trained = [labelled(batch) if padded else batch for batch in batches]
        outputs = [model(batch.ids, attention_mask=mask) for batch in batches]
        loss = sum(token_losses(output.logits, batch.labels) for output, batch in zip(outputs, trained, strict=True)) * scale_of(trained)
        routed = 0.7 * sum(output.aux_loss for output in outputs) / len(outputs)
        assert float(routed.detach()) > 0.1
        compare(running, batches, loss + routed, model, 1e-5)


# ---- checkpoints


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_trained_and_saved_again(run: Callable[..., Any], tmp_path: Path, family: str, dtype: str) -> None:
    """In transformers' folder and out: tensors of the same names and bits; what is reloaded from ours has the loss and gradients that we have."""
    model_spec = model_of(family)
    with run(model_spec, dtype=dtype) as running:
        plan, config = running.plan, config_of(model_spec)
        model = whole_model(plan, config)
        model.save_pretrained(tmp_path / "theirs")
        with folder_weights(tmp_path / "theirs") as read:
            running.state.load(read)
        export(running.state, plan, config, tmp_path / "ours")
        theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
        batches = drawn(plan)
        running.executor.step(batches, rate=1e-2, number=1)
        export(running.state, plan, config, tmp_path / "trained")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", attn_implementation=config._attn_implementation).train()
        loss = token_losses(reloaded(batches[0].ids).logits, batches[0].labels) * scale_of(batches)
        compare(running, batches, loss, reloaded, 1e-5 if dtype == "fp32" else BF16_BOUND)


# ---- what a layer is


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_one_template_for_each_kind_of_layer(family: str) -> None:
    model = model_of(family)
    whole = skeleton(config_of(model), torch.bfloat16, torch.device("cpu"))
    kinds = [kind_of(layer) for layer in DecoderStack.of(whole).layers_of(whole)]
    assert len(set(kinds)) == KINDS.get(family, 1)
    for layer, kind in zip(model.decoders, kinds, strict=True):
        same = [other.signature for other, its in zip(model.decoders, kinds, strict=True) if its == kind]
        assert set(same) == {layer.signature}, "what is computed alike costs alike"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_s_buffers_are_the_model_s(family: str) -> None:
    config = config_of(model_of(family))
    whole, real = skeleton(config, torch.bfloat16, torch.device("cpu")), AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    widen_buffers(real)
    expected = dict(real.named_buffers())
    found = dict(whole.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        assert torch.equal(found[name], buffer), name


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_compiled_there_is_one_graph_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch, family: str, documents: bool) -> None:
    """And one for the head; none of them broken, and none made anew for another layer, another micro-batch, or other documents."""
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        return compiled(function, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward, **options)

    monkeypatch.setattr(torch, "compile", counted)
    torch._dynamo.reset()
    model, work = model_of(family), Workload(batch=2, sequence=SEQUENCE, dtype="fp32", compiled=True, loss_chunk=SEQUENCE, documents=documents)
    templates = Templates(model, work, config_of(model), torch.device("cpu"))
    x = torch.randn(2, SEQUENCE, model.hidden)
    for micro, packed in enumerate((PACKED, LEFT)):
        templates.begin(micro, packed if documents else None)
        for layer in model.decoders:
            x = templates.forward(layer.name, {tensor.name: weights(layer.name, tensor.name, tensor.shape) for tensor in layer.tensors}, x, micro)
        assert len(graphs) == KINDS.get(family, 1)
    head = {tensor.name: weights("h", tensor.name, tensor.shape) for tensor in model.stack[model.head].tensors}
    templates.head(head, x, torch.zeros(2, SEQUENCE, dtype=torch.int64), 1.0, torch.empty_like(x))
    assert len(graphs) == KINDS.get(family, 1) + 1


def test_layers_of_several_kinds_are_calibrated_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.05)
    monkeypatch.setattr(calibration, "_STEPS", 2)
    copies = {kind: [(2**16, 1000), (2**20, 16_000)] for kind in ("load_weights", "save_gradients")}
    monkeypatch.setattr(calibration, "measure_rates", lambda *_: Rates(copies, {}, None, None, 1e11, 1e10, 1e10, 1e10, 1e8))
    model, work = model_of("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[0, 1, 2, 3]), Workload(batch=1, sequence=SEQUENCE)
    hardware = calibration.calibrate("here", model, work, config_of(model), torch.device("cpu"), host_bytes=2**33, device_bytes=2**32)
    assert hardware.costs is not None
    signatures = {f"{layer.signature}/{work.shape}" for layer in model.decoders}
    assert len(signatures) == 2
    for kind in ("forward", "recompute", "backward"):
        assert hardware.costs.compute[kind].keys() == signatures


# ---- what is refused


def test_a_family_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"model_type: found 'mamba', layers with a state-space, .*; allowed: llama, .*gpt_neox.*; fix: "):
        ModelSpec.from_config({"model_type": "mamba", "hidden_size": 64}, "config.json")


def test_linear_attention_over_documents_is_refused_by_name(make_plan: Callable[..., Plan], session: Callable[..., Any]) -> None:
    plan = make_plan("resident", model=model_of("qwen3_next"), documents=True)
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    with pytest.raises(
        UserError, match=r"model qwen3_next: layer 0: found linear_attention, which .*; allowed: rows of one document; fix: make a plan without"
    ):
        session(plan)
