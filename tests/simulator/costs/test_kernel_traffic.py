"""Tests of the memory traffic of compute ops without a calibration."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest
import torch
from tiny_families import config_of as tiny_config
from transformers import AutoModelForCausalLM

from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.costs.kernel_traffic import products_slowdown, traffic_share
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.attention_masks import added_mask_bytes, mask_bytes
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.op_work import computed_pairs, op_work, share_of_row
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

H200 = HardwareSpec.load("h200")
WORK = Workload(batch=2, sequence=4096, loss_chunk=2048)
COMPILED = msgspec.structs.replace(WORK, compiled=True)


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward", "head", "loss"])
def test_compiled_layers_move_less(kind: str) -> None:
    model = ModelSpec.load("qwen2.5-7b")
    assert traffic_share(model, COMPILED, kind, "0") < traffic_share(model, WORK, kind, "0")
    assert traffic_share(model, COMPILED, "embed", "0") == 1


def test_layers_with_experts_have_shares_of_their_own() -> None:
    """The first layers of DeepSeek-V3 have no experts."""
    model = ModelSpec.load("deepseek-v3")
    dense, sparse = (traffic_share(model, WORK, "forward", layer) for layer in ("0", "3"))
    assert dense == 1 < sparse
    assert [layer.experts for layer in model.decoders[:4]] == [False, False, False, True]


def test_experts_that_clamp_have_shares_of_their_own() -> None:
    clamped, others = ModelSpec.load("gpt-oss-20b"), ModelSpec.load("qwen3-30b-a3b")
    assert all(clamped.part(layer.name).clamped for layer in clamped.decoders)
    assert not any(others.part(layer.name).clamped for layer in others.decoders)
    for work in (WORK, COMPILED):
        for kind in ("forward", "recompute", "backward"):
            more, less = (traffic_share(model, work, kind, "0") for model in (clamped, others))
            assert more > less


def test_layers_with_linear_attention_are_eager_in_every_workload() -> None:
    model = ModelSpec.load("qwen3-next-80b-a3b").with_layers(4)
    assert [layer.compilable for layer in model.decoders] == [False, False, False, True]
    for kind in ("forward", "backward"):
        eager, compiled = (traffic_share(model, work, kind, "0") for work in (WORK, COMPILED))
        assert eager == compiled > traffic_share(model, WORK, kind, "3")
        full = traffic_share(model, COMPILED, kind, "3")
        assert full < traffic_share(model, WORK, kind, "3")


def test_bytes_that_are_counted_for_compiled_layers_have_no_share() -> None:
    """Casts to fp8, weights and their gradients take the same time with any share of traffic."""
    model, fp8 = ModelSpec.load("qwen2.5-7b"), msgspec.structs.replace(COMPILED, fp8="rowwise")
    sheet, work = Datasheet(H200, model, fp8), op_work(model, "backward", "0", fp8)
    plain = op_work(model, "backward", "0", COMPILED)
    weights = 2 * 2 * model.stack["0"].parameters
    assert plain.unfused_bytes == weights
    assert work.unfused_bytes == work.moved_bytes - plain.moved_bytes + weights > weights
    share = traffic_share(model, fp8, "backward", "0")
    moved = share * (plain.moved_bytes - weights) + work.unfused_bytes
    products = sheet.products_of_layers_ns(work) * products_slowdown(model, fp8, "backward", "0")
    expected = products + sheet.attention_ns("backward", "0")
    assert sheet._compute_ns("backward", "0") == pytest.approx(
        expected + moved / H200.device_gb_per_s, abs=1
    )


def test_products_of_compiled_backward_passes_without_experts_take_longer() -> None:
    dense, sparse = ModelSpec.load("qwen2.5-7b"), ModelSpec.load("qwen3-30b-a3b")
    assert products_slowdown(dense, COMPILED, "backward", "0") > 1
    for model, work, kind, layer in (
        (dense, COMPILED, "forward", "0"),
        (dense, COMPILED, "recompute", "0"),
        (dense, WORK, "backward", "0"),
        (sparse, COMPILED, "backward", "0"),
        (dense, COMPILED, "head", "h"),
    ):
        assert products_slowdown(model, work, kind, layer) == 1


def test_rates_of_a_calibration_include_that_whole_models_compute_without_pauses() -> None:
    """Its `linear_efficiency` was measured without pauses, so backward passes are not slowed again.
    The rates of the library were measured with pauses.
    """
    model = ModelSpec.load("qwen2.5-7b")
    measured = msgspec.structs.replace(
        H200, costs=CostTable(measured_on="", date="", curves={}, compute={})
    )
    library, calibrated = (Datasheet(each, model, COMPILED) for each in (H200, measured))
    work = op_work(model, "backward", "0", COMPILED)
    slower = products_slowdown(model, COMPILED, "backward", "0") - 1
    extra = library._compute_ns("backward", "0") - calibrated._compute_ns("backward", "0")
    assert extra == pytest.approx(slower * library.products_of_layers_ns(work), abs=1)
    assert library._compute_ns("forward", "0") == calibrated._compute_ns("forward", "0")


def test_a_recompute_without_the_mlp_moves_a_positive_number_of_bytes() -> None:
    """The bytes of the MLP are subtracted with the same share of traffic as they were added."""
    model = ModelSpec.load("qwen2.5-7b")
    work = Workload(batch=1, sequence=64, loss_chunk=64, compiled=True, token_piece=32)
    left = op_work(model, "recompute", "0", work)
    whole = op_work(model, "recompute", "0", msgspec.structs.replace(work, token_piece=None))
    assert model.skips_mlp("0")
    assert 0 <= left.unfused_bytes <= left.moved_bytes < whole.moved_bytes
    sheet = Datasheet(H200, model, work)
    assert sheet._compute_ns("recompute", "0") > sheet.products_of_layers_ns(left)


def test_a_mask_makes_a_kernel_compute_all_pairs() -> None:
    """A window W of a sequence S leaves W (S - W / 2) of S^2 pairs unmasked."""
    windowed, plain = ModelSpec.load("gemma-3-4b"), ModelSpec.load("qwen2.5-7b")
    window = windowed.window("0")
    assert 0 < window < WORK.sequence
    assert computed_pairs(plain, "0", WORK) == 1
    assert computed_pairs(windowed, "0", WORK) == pytest.approx(
        WORK.sequence**2 / (window * (WORK.sequence - window / 2))
    )
    shorter = msgspec.structs.replace(WORK, sequence=window - 1)
    assert computed_pairs(windowed, "0", shorter) == 1
    equal = msgspec.structs.replace(WORK, sequence=window)
    assert computed_pairs(windowed, "0", equal) == 2, "no pair is hidden by the window"
    full = next(layer.name for layer in windowed.decoders if layer.attention == "full_attention")
    assert computed_pairs(windowed, full, WORK) == 1
    gemma = ModelSpec.load("gemma-2-9b")
    assert computed_pairs(gemma, "0", WORK) == 1, "written-out scores count all pairs"


@pytest.mark.parametrize("length", [15, 16, 40])
@pytest.mark.parametrize(
    ("family", "key"), [("mistral", "sliding_window"), ("llama4_text", "attention_chunk_size")]
)
def test_masks_and_their_pairs_are_those_of_transformers(
    family: str, key: str, length: int
) -> None:
    """A window has one mask for all rows. Chunked attention has one for each row."""
    config = tiny_config(family, num_hidden_layers=1, **{key: 16})
    model = ModelSpec.from_config(config.to_dict(), "config.json")
    work = Workload(batch=3, sequence=length)
    layers = FunctionalLayers(model, work, config_of(model), torch.device("cpu"))
    mask = layers._causal_arguments[0]["attention_mask"]
    shared = mask_bytes(model, work) - added_mask_bytes(model, work)
    assert shared == (0 if mask is None else mask.untyped_storage().nbytes())
    if mask is None:
        assert computed_pairs(model, "0", work) == 1
        return
    pairs = share_of_row(model, "0", work) / 3 * length**2 / 2
    assert 0 <= int(mask[0].sum()) - pairs <= length / 2, (
        "the pair of a token with itself counts as one half"
    )
    assert computed_pairs(model, "0", work) == pytest.approx(length**2 / pairs)


def test_a_soft_cap_moves_the_logits_thirteen_times() -> None:
    """The logits move six times in the forward pass and seven times in the backward pass."""
    model = ModelSpec.load("gemma-2-9b")
    plain = ModelSpec.from_config(
        {**model.config, "final_logit_softcapping": None}, "without", "without"
    )
    logits = WORK.tokens * model.vocabulary * 2
    for kind, times in (("head", 13), ("loss", 6)):
        more = (
            op_work(model, kind, "", WORK).moved_bytes - op_work(plain, kind, "", WORK).moved_bytes
        )
        assert more == times * logits


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "gemma3n_text", "nanochat", "vaultgemma"]
)
def test_a_soft_cap_missing_in_config_json_is_that_of_transformers(family: str) -> None:
    config = tiny_config(family).to_dict()
    usual = config.pop("final_logit_softcapping")
    assert ModelSpec.from_config(config, "config.json").caps_logits == (usual is not None)
    without = ModelSpec.from_config({**config, "final_logit_softcapping": None}, "config.json")
    assert not without.caps_logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_scaled_where_the_source_of_transformers_scales_them(family: str) -> None:
    """This includes a scale of 1, and a config.json without the number."""
    config = tiny_config(family)
    try:
        model_class = type(AutoModelForCausalLM.from_config(config))
    except ValueError:
        pytest.skip("transformers has no model of this family")
    source = inspect.getsource(model_class)
    scales = r"logits = (logits [*/] self\.(config\.)?logit|self\.lm_head\(.*\) \*)"
    model = ModelSpec.from_config(config.to_dict(), "config.json")
    assert model.scales_logits == bool(re.search(scales, source))
