"""Tests of Gemma 3n: what travels between layers, models with fewer layers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_families import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import with_nulls
from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

E4B = {"model_type": "gemma3n_text"}
"""transformers' defaults are the sizes of E4B."""


def model_of(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(config_of("gemma3n_text", **changes).to_dict(), "config.json")


def test_a_token_carries_streams_inputs_and_shared_keys_and_values() -> None:
    model = ModelSpec.from_config(E4B, "config.json")
    assert model.carried == 4 * 2048 + 35 * 256 + 2 * 2 * 2 * 256 == 19_200
    without = ModelSpec.from_config({**E4B, "num_kv_shared_layers": 0}, "config.json")
    assert without.carried == 4 * 2048 + 35 * 256


def test_most_models_carry_the_hidden_states_alone() -> None:
    model = ModelSpec.load("gemma-3-4b")
    assert model.carried == model.hidden == 2560


def test_layers_that_carry_more_have_other_costs() -> None:
    """In a deeper model, each layer reads and writes more, so its costs are different."""
    longer = ModelSpec.from_config(E4B, "config.json")
    shorter = {**E4B, "num_hidden_layers": 30, "num_kv_shared_layers": 10}
    signatures = [
        {layer.signature for layer in model.decoders}
        for model in (longer, ModelSpec.from_config(shorter, "config.json"))
    ]
    assert not signatures[0] & signatures[1]


def test_every_buffer_of_a_layer_s_input_has_room_for_what_is_carried(
    make_plan: Callable[..., Plan],
) -> None:
    """Copies of a layer's input to host memory and back move as many bytes."""
    model = model_of()
    placement = Placement(offloaded_inputs="all")
    plan = make_plan("overlapped", model=model, checkpoint_interval=1, placement=placement)
    schedule, size = lower(plan), plan.workload.tokens * model.carried * 2
    assert model.carried > 4 * model.hidden
    assert {buffer.bytes for buffer in schedule.buffers if buffer.data == "hidden"} == {size}
    copies = {
        op.bytes for op in schedule.ops if op.kind in ("save_activations", "load_activations")
    }
    assert copies == {size}


def test_the_embedding_reads_and_sums_rows_of_both_tables() -> None:
    """A token reads a row of both tables and writes all that it carries. The backward pass writes
    zeros to both gradients, and sums, rounds and stores the rows of the tokens.
    """
    model, work = model_of(), Workload(batch=2, sequence=64)
    row = 128 + 6 * 24
    tables = sum(tensor.elements for tensor in model.stack[EMBEDDING].tensors[:2])
    assert tables == 320 * 128 + 300 * 6 * 24
    assert op_work(model, "embed", "", work).moved_bytes == 128 * 2 * (row + model.carried)
    assert op_work(model, "embed_backward", "", work).moved_bytes == 128 * row * 44 + 2 * tables


def test_layers_that_share_keys_and_values_have_no_tensors_for_them() -> None:
    model = ModelSpec.from_config(E4B, "config.json")
    own = [
        any(tensor.name == "self_attn.k_proj.weight" for tensor in layer.tensors)
        for layer in model.decoders
    ]
    assert own == [True] * 20 + [False] * 15


@pytest.mark.parametrize("layers", range(1, 7))
def test_a_model_with_fewer_layers_is_that_of_transformers(layers: int) -> None:
    """The layers that share keys and values are the last ones, so they are left out first."""
    whole = model_of(num_kv_shared_layers=1)
    spec = whole.with_layers(layers)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**with_nulls(spec.config)))
    assert spec.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert spec.config["num_kv_shared_layers"] == (1 if layers == 6 else 0)


def test_the_shortest_model_with_every_kind_of_layer_is_the_whole() -> None:
    """The last layer is of a kind of its own: it makes one row of the streams."""
    model = model_of()
    assert model.shortest(1) == model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: found 2; allowed: fewer, so that"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers: found 7; allowed: 0 to 6"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern: found 0.5; allowed: "),
        (
            {"activation_sparsity_pattern": [1.0] * 6},
            r"activation_sparsity_pattern: found \[.*\]; allowed: numbers of at least 0",
        ),
        ({"intermediate_size": [64] * 5}, "intermediate_size: found 5 entries; allowed: "),
        ({"intermediate_size": [64] * 5 + [0]}, r"intermediate_size: found \[.*\]; allowed: sizes"),
        ({"head_dim": 15}, "head_dim: found 15; allowed: an even number"),
        ({"altup_active_idx": 4}, "altup_active_idx: found 4; allowed: below altup_num_inputs = 4"),
    ],
)
def test_inconsistent_sizes_are_refused_by_their_key(changes: dict[str, Any], message: str) -> None:
    config = {**config_of("gemma3n_text").to_dict(), **changes}
    with pytest.raises(UserError, match=f"config.json: {message}") as error:
        ModelSpec.from_config(config, "config.json")
    assert "\n" not in str(error.value)


def test_layers_of_two_widths_or_sparsities_have_costs_of_their_own() -> None:
    for changes in (
        {"intermediate_size": [64, 64, 96, 96, 96, 96]},
        {"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]},
    ):
        _, second, third, *_ = model_of(**changes).decoders
        assert second.signature != third.signature
