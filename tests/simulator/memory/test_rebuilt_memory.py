"""Tests of the predicted memory of compiled layers that rebuild outputs (`Knobs.rebuild_outputs`).

`rebuilt_memory.toml` has the counts of `compiled_memory.toml` for such layers: the saved
activations with the output, and the highest peak, for each kind of layer of a family. The families
in its table `others` do not rebuild outputs. Its table `many_tokens` has the counts of those that
do with 32 x 1,024 tokens. This command counts all of these families again, in fifteen minutes, or
only the given ones:

`PYTHONPATH=typings:tests/shared python tests/simulator/memory/test_rebuilt_memory.py [FAMILY ...]`
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from counted_compiled import counted_compiled
from decoder_layers import different_layers
from family_sample import others_nightly
from wide_models import wide_model

from megatrain.runtime.layers import layer_kinds
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.formulas import (
    activations_estimate,
    rebuilt_estimate,
    workspace_estimate,
)
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import activations_bytes, plan_account
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

FILE = Path(__file__).with_name("rebuilt_memory.toml")
WORKLOAD = Workload(batch=2, sequence=2048, compiled=True)
MEASURED = Workload(batch=32, sequence=1024, compiled=True)
SHORT = msgspec.structs.replace(MEASURED, short_recompute=True)
GIB = 2**30
TABLES = tomllib.loads(FILE.read_text())
REBUILDING: dict[str, list[list[int]]] = TABLES["rebuilding"]
OTHERS: dict[str, list[list[int]]] = TABLES["others"]
MANY_TOKENS: dict[str, list[list[int]]] = TABLES["many_tokens"]
SAVING: dict[str, list[list[int]]] = tomllib.loads(
    FILE.with_name("compiled_memory.toml").read_text()
)
"""The counts of layers that save their outputs."""
SAVING_MANY: dict[str, list[list[int]]] = tomllib.loads(
    FILE.with_name("many_tokens_memory.toml").read_text()
)
LARGER = {"exaone4", "hunyuan_v1_dense", "olmo", "olmo2", "olmo3", "stablelm"}
"""Families that rebuild more than predicted: norms of queries and keys, or before a residual."""


def count(family: str, work: Workload = WORKLOAD) -> list[list[int]]:
    """Returns [saved, peak] of each kind of layer, as if it could rebuild outputs."""
    spec = wide_model(family)
    with mock.patch.object(ModelSpec, "_can_rebuild", True):
        found = [
            counted_compiled(spec, layer, work, rebuild=True) for layer in different_layers(spec)
        ]
    return [[each.saved, each.all] for each in found]


def test_the_families_that_rebuild_outputs_are_counted() -> None:
    able = {family for family in FAMILIES if rebuilt_estimate(wide_model(family), WORKLOAD)}
    assert able == set(REBUILDING)


@pytest.mark.parametrize("family", REBUILDING)
def test_saved_bytes_and_peaks_are_predicted(family: str) -> None:
    """The peak is at most that of a layer that saves its outputs, for which the formula is."""
    spec = wide_model(family)
    rebuilt = rebuilt_estimate(spec, WORKLOAD)
    saved = activations_estimate(spec, WORKLOAD)
    peak = saved + workspace_estimate(spec, WORKLOAD).layer
    for counts, before in zip(REBUILDING[family], SAVING[family], strict=True):
        if family in LARGER:
            assert before[0] - counts[0] > rebuilt
        else:
            assert before[0] - counts[0] == rebuilt
        assert counts[0] <= saved - rebuilt <= (1.25 if family in LARGER else 1.1) * counts[0]
        assert counts[1] <= peak <= 1.4 * counts[1]


@pytest.mark.parametrize("family", REBUILDING)
def test_peaks_with_many_tokens_are_predicted(family: str) -> None:
    spec = wide_model(family)
    saved = activations_estimate(spec, SHORT)
    peak = saved + workspace_estimate(spec, SHORT).layer
    for counts in MANY_TOKENS[family]:
        assert counts[0] <= saved - rebuilt_estimate(spec, SHORT) <= 1.25 * counts[0]
        assert counts[1] <= peak <= 1.2 * counts[1]


@pytest.mark.parametrize("family", OTHERS)
def test_the_peak_of_other_families_would_be_higher(family: str) -> None:
    assert rebuilt_estimate(wide_model(family), WORKLOAD) == 0
    peaks, before = (max(peak for _, peak in counts[family]) for counts in (OTHERS, SAVING))
    assert peaks > 1.01 * before


@pytest.mark.parametrize(
    "changes", [{"compiled": False}, {"fp8": "rowwise"}, {"token_piece": 1024}]
)
def test_layers_that_have_nothing_to_rebuild(changes: dict[str, object]) -> None:
    work = msgspec.structs.replace(MEASURED, **changes)
    assert rebuilt_estimate(ModelSpec.load("qwen2.5-7b"), work) == 0
    assert rebuilt_estimate(ModelSpec.load("qwen2.5-7b"), MEASURED) > 0


def test_models_in_which_some_layers_cannot_rebuild_outputs() -> None:
    """The first layers of DeepSeek-V3 are dense. Layers with experts need the most memory."""
    spec = wide_model("deepseek_v3")
    assert {layer.experts for layer in spec.decoders} == {False, True}
    assert not any(spec.rebuilding_products(layer.name, WORKLOAD) for layer in spec.decoders)


def test_the_memory_of_a_layer_of_7b() -> None:
    model = ModelSpec.load("qwen2.5-7b").shortest(1)
    found = counted_compiled(model, model.decoders[0], MEASURED, rebuild=True)
    saved = activations_estimate(model, MEASURED) - rebuilt_estimate(model, MEASURED)
    peak = activations_estimate(model, MEASURED) + workspace_estimate(model, MEASURED).layer
    assert found.saved == pytest.approx(3.2537 * GIB, rel=1e-4)
    assert found.saved <= saved <= 1.001 * found.saved
    assert found.all <= peak <= 1.1 * found.all


@pytest.mark.nightly
def test_a_layer_of_7b_needs_more_memory_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `put_in_order`, the compiler computes the gradients of all weights of an MLP at
    last.
    """
    model = ModelSpec.load("qwen2.5-7b").shortest(1)
    found = counted_compiled(model, model.decoders[0], MEASURED, rebuild=True)
    monkeypatch.setattr(layer_kinds, "put_in_order", lambda *_: None)
    unordered = counted_compiled(model, model.decoders[0], MEASURED, rebuild=True)
    assert unordered.saved == found.saved
    assert unordered.all - found.backward == pytest.approx(2.186 * GIB, rel=0.01)


@pytest.mark.parametrize(("batch", "layers"), [(32, 4), (256, 3)])
def test_the_memory_of_a_plan(batch: int, layers: int) -> None:
    """Each of the four layers saves less. With many tokens, the backward pass of a layer has the
    highest peak, and the outputs of this layer exist again. With fewer, the head has the highest.
    """
    model, machine = ModelSpec.load("qwen2.5-7b").with_layers(4), HardwareSpec.load("h200")
    work = msgspec.structs.replace(MEASURED, batch=batch)
    costs, peaks, sizes = cost_model(machine, model, work), [], []
    for rebuild in (0, 1):
        plan = Plan(
            policy="resident",
            hardware="h200",
            source="",
            device_limit_bytes=2**40,
            host_limit_bytes=2**42,
            model=model,
            workload=work,
            knobs=Knobs(rebuild_outputs=rebuild, placement=Placement(saved_activations="all")),
        )
        peaks.append(plan_account(plan, lower(plan), costs).device_peak_bytes)
        sizes.append(activations_bytes(plan, costs))
    rebuilt = rebuilt_estimate(model, work)
    assert sizes[0] - sizes[1] == rebuilt == (18944 + 2 * 3584) * batch * 1024 * 2
    assert peaks[0] - peaks[1] == layers * rebuilt


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*REBUILDING, *OTHERS])
def test_the_counts_have_not_changed(family: str) -> None:
    before = REBUILDING.get(family) or OTHERS[family]
    for now, then in zip(count(family), before, strict=True):
        assert now == pytest.approx(then, rel=0.004)


@pytest.mark.parametrize("family", others_nightly(MANY_TOKENS, among=()))
def test_the_counts_with_many_tokens_have_not_changed(family: str) -> None:
    for now, then in zip(count(family, SHORT), MANY_TOKENS[family], strict=True):
        assert now == pytest.approx(then, rel=0.004)


@pytest.mark.parametrize("family", REBUILDING)
def test_the_peak_with_many_tokens(family: str) -> None:
    """The peak is at most that of a layer that saves its outputs."""
    for rebuilding, saving in zip(MANY_TOKENS[family], SAVING_MANY[family], strict=True):
        assert saving[0] - rebuilding[0] >= rebuilt_estimate(wide_model(family), SHORT)
        assert rebuilding[1] <= 1.001 * saving[1]


if __name__ == "__main__":
    for name in sys.argv[1:] or (*REBUILDING, *OTHERS):
        (OTHERS if name in OTHERS else REBUILDING)[name] = count(name)
        if name not in OTHERS:
            MANY_TOKENS[name] = count(name, SHORT)
        rebuilding, others, many = (
            [f"{each} = {table[each]}" for each in sorted(table)]
            for table in (REBUILDING, OTHERS, MANY_TOKENS)
        )
        FILE.write_text(
            "\n".join(
                [
                    "# Counted bytes of each kind of compiled layer that rebuilds outputs: [saved"
                    " with the output, peak],",
                    "# with 2 x 2,048 tokens and the default widths of transformers.",
                    "",
                    "[rebuilding]",
                    *rebuilding,
                    "",
                    "# Families that do not rebuild outputs, because the peak would be higher.",
                    "[others]",
                    *others,
                    "",
                    "# Families that rebuild outputs, with 32 x 1,024 tokens and short recomputes.",
                    "[many_tokens]",
                    *many,
                ]
            )
            + "\n"
        )
