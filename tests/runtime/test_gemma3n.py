"""Tests of Gemma 3n in the runtime.

They cover weights that transformers changes in place, compiled layers, and a folder whose vision
tower cannot be built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_multimodal
import torch
from transformers import AutoModel
from whole_models import SEQUENCE, drawn, model_of, weights

from megatrain.runtime.files.checkpoint_names import CheckpointNames
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.layers.table_gradient import TableGradient
from megatrain.simulator.model.workload import Workload


def test_a_step_clamps_coefficients_without_changing_the_weights(run: Callable[..., Any]) -> None:
    """transformers clamps the coefficients in place, and the runtime must not.

    The weights are resident here, so a clamp in place would change the masters. Another clip value
    gives another loss.
    """
    losses = []
    for clip in (0.01, 100.0):
        with run(model_of("gemma3n_text", altup_coef_clip=clip)) as running:
            before = running.masters()
            losses.append(running.executor.step(drawn(running.plan), rate=0.0, number=1).loss)
            assert running.masters() == before
    assert losses[0] != losses[1]


def test_a_sparse_mlp_is_cut_off_as_in_transformers() -> None:
    """The cutoff in standard deviations is a constant with the bits of transformers."""
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    for dtype in ("fp32", "bf16"):
        model = model_of("gemma3n_text")
        work = Workload(batch=2, sequence=SEQUENCE, dtype=dtype)
        layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
        mlp: Any = layers._kinds[0]._module.mlp
        gate = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)).to(layers.dtype)
        ours, theirs = mlp._gaussian_topk(gate), Gemma3nTextMLP._gaussian_topk(mlp, gate)
        assert torch.equal(ours, theirs)
        assert 0.4 < float((ours == 0).float().mean()) < 0.6


def test_compiled_layers_of_a_kind_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers between the first and the last are compiled to one unbroken graph for each kind.

    They give the bits of eager layers.
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
    model = model_of(
        "gemma3n_text",
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.5, 0.5, 0.5, 0.0],
        intermediate_size=64,
        num_kv_shared_layers=0,
    )
    x = torch.randn(2, SEQUENCE, model.carried, generator=torch.Generator().manual_seed(0))
    outputs = []
    for on in (False, True):
        work = Workload(batch=2, sequence=SEQUENCE, dtype="fp32", compiled=on)
        layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
        y = x
        for layer in model.decoders[1:3]:
            owned = {
                tensor.name: weights(layer.name, tensor.name, tensor.shape)
                for tensor in layer.tensors
            }
            y = layers.forward(layer.name, owned, y)
        outputs.append(y)
    assert torch.equal(*outputs)
    assert len(graphs) == 1


def test_a_folder_s_names_need_no_vision_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision tower requires a package that text does not need.

    Its tensors do not belong to the model, so an export copies them.
    """
    config = tiny_multimodal.config_of("gemma3n")
    own = AutoModel._model_mapping._extra_content
    monkeypatch.setattr(AutoModel._model_mapping, "_extra_content", dict(own))
    AutoModel._model_mapping._extra_content.pop(type(config.vision_config))
    names = CheckpointNames(config)
    seen = "model.vision_tower.seen.weight"
    text = "model.language_model.embed_tokens_per_layer.weight"
    stored = names.stored([seen, text], lambda _: torch.empty(0))
    assert stored.foreign == [seen]
    assert names.other_keys([seen, text]) == [seen]


def test_the_first_token_has_a_gradient_whatever_the_padding_token() -> None:
    """Rows are looked up by their place in the batch, and the padding token is 0 as well."""
    model = model_of("gemma3n_text", pad_token_id=0)
    work = Workload(batch=2, sequence=SEQUENCE, dtype="fp32")
    layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    ids = torch.full((2, SEQUENCE), 5)
    ids[0, 0], ids[1, 3] = 7, 0
    gradients = layers.embed_backward(torch.ones(2, SEQUENCE, model.carried), ids, 0)
    shapes = [tensor.shape for tensor in model.stack["e"].tensors]
    for gradient, shape in zip(gradients, shapes, strict=False):
        assert isinstance(gradient, TableGradient)
        table = torch.full(shape, 9.0)
        gradient.store(table, torch.float32, adding=False)
        assert table[7].all()
        assert not table[0].any()
