"""Tests of parameter groups: matrices decay, and other tensors only if a pattern matches them.

A chunk of a layer is split into the fewest ranges with one group each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.runtime.execution.param_groups import (
    ParamGroup,
    group_slices,
    param_group,
    refuse_unmatched,
)
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import ALIGNMENT, LayerSpec, TensorSpec
from megatrain.simulator.schedule.plan import Plan

LAYER = LayerSpec(
    name="3",
    kind="decoder",
    tensors=tuple(
        TensorSpec(name, shape)
        for name, shape in (
            ("q.weight", (9, 30)),
            ("q.bias", (9,)),
            ("up.weight", (70, 30)),
            ("norm.weight", (30,)),
        )
    ),
)
PATTERNS = st.sampled_from(["*", "*.bias", "model.layers.3.up.*", "*norm*", "nothing"])
SETTINGS = st.builds(
    AdamW,
    weight_decay=st.sampled_from([0.0, 0.1]),
    groups=st.lists(
        st.builds(
            GroupSettings,
            match=PATTERNS,
            weight_decay=st.sampled_from([None, 0.0, 0.1, 0.2]),
            rate_factor=st.sampled_from([1.0, 0.5]),
        )
    ).map(tuple),
)


def by_element(settings: AdamW) -> list[ParamGroup]:
    return [
        wanted
        for tensor in LAYER.tensors
        for wanted in [param_group(settings, LAYER, tensor)] * tensor.padded
    ]


@given(SETTINGS, st.data())
def test_ranges_cover_a_chunk_once_and_no_two_could_be_joined(
    settings: AdamW, data: st.DataObject
) -> None:
    units = LAYER.elements // ALIGNMENT
    first, last = (
        ALIGNMENT * unit
        for unit in sorted(
            data.draw(st.lists(st.integers(0, units), min_size=2, max_size=2, unique=True))
        )
    )
    cut = group_slices(settings, LAYER, first, last - first)
    assert [wanted for part, wanted in cut for _ in range(part.start, part.stop)] == by_element(
        settings
    )[first:last]
    assert [part.start for part, _ in cut] == [0, *(part.stop for part, _ in cut[:-1])]
    assert all(before[1] != after[1] for before, after in itertools.pairwise(cut))


def test_without_decay_a_layer_is_one_range() -> None:
    assert group_slices(AdamW(), LAYER, 0, LAYER.elements) == [
        (slice(0, LAYER.elements), ParamGroup(0.0, 1.0))
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_norms_biases_and_embeddings_do_not_decay(
    make_plan: Callable[..., Plan], tied: bool
) -> None:
    model = make_plan(family="qwen2", tied=tied).model
    decayed = {
        tensor.name
        for layer in model.stack.values()
        for tensor in layer.tensors
        if param_group(AdamW(weight_decay=0.1), layer, tensor).weight_decay
    }
    attention, mlp = (
        (f"self_attn.{name}_proj.weight" for name in "qkvo"),
        (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    )
    assert decayed == {*attention, *mlp} | (set() if tied else {"lm_head.weight"})


def test_a_qwen2_layer_takes_few_launches(make_plan: Callable[..., Plan]) -> None:
    """The twelve tensors of a Qwen2 layer need eight launches.

    Three projections alternate with their biases, which needs six. The other matrices need one, and
    the two norms need one.
    """
    layer = make_plan(family="qwen2").model.stack["0"]
    assert len(layer.tensors) == 12
    assert len(group_slices(AdamW(weight_decay=0.1), layer, 0, layer.elements)) == 8


def test_the_first_group_that_matches_counts() -> None:
    settings = AdamW(
        weight_decay=0.1,
        groups=(
            GroupSettings(match="*norm*", rate_factor=2.0),
            GroupSettings(match="*", weight_decay=0.3),
        ),
    )
    assert [param_group(settings, LAYER, tensor) for tensor in LAYER.tensors] == [
        (0.3, 1.0),
        (0.3, 1.0),
        (0.3, 1.0),
        (0.0, 2.0),
    ]


def test_a_pattern_without_a_tensor_is_refused(make_plan: Callable[..., Plan]) -> None:
    model = make_plan().model
    refuse_unmatched(AdamW(groups=(GroupSettings(match="model.layers.1.*norm*"),)), model)
    shown = r"model\.embed_tokens\.weight, (model\.layers\.0\.[\w.]+, ){3}\.\.\., lm_head\.weight"
    with pytest.raises(
        UserError,
        match=(
            r"^optimizer: groups: match: found '\*nrom\*'; allowed: a pattern of the model's"
            rf" tensors: {shown}; fix: correct the pattern$"
        ),
    ):
        refuse_unmatched(AdamW(groups=(GroupSettings(match="*nrom*"),)), model)
