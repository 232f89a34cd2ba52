"""Tests of the parts that the searches are made of, each against a statement of what it returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.simulator import policies
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import with_knobs
from megatrain.simulator.planner.batch_splits import splits
from megatrain.simulator.planner.capacity import _enough, _merged, _most, resized
from megatrain.simulator.planner.filling import host_updating, last, ranges, updated_like
from megatrain.simulator.schedule import Buffer
from megatrain.simulator.schedule.plan import Placement, Plan

MakePlan = Callable[..., Plan]


def placed(plan: Plan, **fields: str) -> Plan:
    return with_knobs(plan, placement=Placement(**fields))


# ---- placements


@settings(max_examples=40)
@given(data=st.data())
def test_a_text_of_layers_names_the_chosen_ones(make_plan: MakePlan, data: st.DataObject) -> None:
    """The text of a placement names the chosen layers, in as few parts as possible."""
    plan = make_plan(layers=data.draw(st.integers(1, 9)))
    layers = list(plan.model.stack)
    chosen = data.draw(st.sets(st.sampled_from(layers)))
    text = ranges(layers, chosen)
    assert placed(plan, weights=text).placed("weights") == chosen
    numbers = sorted(int(layer) for layer in chosen if layer.isdigit())
    runs = sum(number - 1 not in numbers for number in numbers)
    parts = runs + len(chosen) - len(numbers)
    assert text == "all" if len(chosen) == len(layers) else len(text.split(",")) == max(parts, 1)


@settings(max_examples=40)
@given(data=st.data())
def test_the_last_layers_are_named(make_plan: MakePlan, data: st.DataObject) -> None:
    decoders = data.draw(st.integers(1, 9))
    count = data.draw(st.integers(0, decoders))
    plan = placed(make_plan(layers=decoders), saved_activations=last(decoders, count))
    assert plan.placed("saved_activations") == {
        str(index) for index in range(decoders - count, decoders)
    }


@settings(max_examples=40)
@given(data=st.data())
def test_the_host_updates_all_or_every_second_of_the_streamed_layers(
    make_plan: MakePlan, data: st.DataObject
) -> None:
    """It updates no layer whose weights stay on the device, and nothing else is changed."""
    plan = make_plan(layers=data.draw(st.integers(1, 6)))
    layers = list(plan.model.stack)
    resident = data.draw(st.sets(st.sampled_from(layers)))
    plan = placed(plan, weights=ranges(layers, resident), moments="0")
    streamed = [layer for layer in layers if layer not in resident]
    for every in (1, 2):
        found = host_updating(plan, every=every)
        assert found.placed("host_updated") == set(streamed[::every])
        assert (
            updated_like(plan, found).knobs
            == (found if len(streamed) > 1 else host_updating(plan)).knobs
        )
        for field in ("weights", "moments"):
            assert found.placed(field) == plan.placed(field)
    assert updated_like(host_updating(plan), plan).knobs == plan.knobs


# ---- capacity


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(-5, 200))
def test_no_more_state_moves_than_is_needed(sizes: list[int], excess: int) -> None:
    """The buffers that move are the first ones. The last of them is the smallest of the rest that
    is large enough.
    """
    order = [
        Buffer(id=f"device.weights:{index}", bytes=256 * size, data="weights", dtype="bf16")
        for index, size in enumerate(sizes)
    ]
    moved = _enough(order, 256 * excess)
    found = [buffer.allocated // 256 for buffer in moved]
    if excess <= 0:
        assert not found
    elif sum(sizes) < excess:
        assert moved == order
    else:
        *before, final = found
        assert before == sizes[: len(before)]
        assert sum(before) < excess <= sum(found)
        assert final == min(size for size in sizes[len(before) :] if sum(before) + size >= excess)


@given(st.integers(0, 100), st.integers(1, 70))
def test_the_most_is_found_by_bisection(limit: int, most: int) -> None:
    assert _most(lambda count: count <= limit, most) == min(limit, most)


@pytest.mark.parametrize("policy", policies.names())
def test_merged_buffers_are_as_large_as_their_pools(make_plan: MakePlan, policy: str) -> None:
    """There is one buffer for each pool, and each that the framework allocates stays."""
    buffers = policies.lower(make_plan(policy, layers=3)).buffers
    merged = _merged(buffers)
    sizes: list[dict[str, int]] = []
    for each in (buffers, merged):
        pools: dict[str, int] = defaultdict(int)
        for buffer in each:
            pools[buffer.pool] += buffer.allocated
        sizes.append(pools)
    assert sizes[0] == sizes[1]
    fixed = [buffer.pool for buffer in merged if not buffer.dynamic]
    assert len(fixed) == len(set(fixed))
    dynamic = [[buffer for buffer in each if buffer.dynamic] for each in (buffers, merged)]
    assert dynamic[0] == dynamic[1]


@given(st.integers(1, 10**6), st.sampled_from([0.25, 1 / 3, 1.0, 1.5, 7.0]), st.booleans())
def test_a_buffer_grows_with_the_tokens_and_is_rounded_up(
    size: int, factor: float, scales: bool
) -> None:
    buffer = Buffer(
        id="device.hidden:0", bytes=size, data="hidden", dtype="bf16", scales_with_tokens=scales
    )
    found = resized(buffer, factor)
    if scales:
        assert size * factor <= found.bytes < size * factor + 1
    else:
        assert found == buffer


# ---- splits and shortened plans


@pytest.mark.parametrize("rows", [1, 2, 12, 97, 128, 2**21])
def test_splits_are_all_that_make_up_the_tokens(rows: int) -> None:
    """A step has at most 64 micro-batches, and a micro-batch at most 2**20 sequences."""
    work = Workload(batch=3, sequence=32, accumulation=5)
    found = [(split.batch, split.accumulation) for split in splits(work, 32 * rows)]
    assert found == [
        (rows // count, count)
        for count in range(1, 65)
        if rows % count == 0 and rows // count <= 2**20
    ]
    for split in splits(work, 32 * rows):
        assert msgspec.structs.replace(split, batch=3, accumulation=5) == work


@pytest.mark.parametrize("layers", [None, 2, 9])
@pytest.mark.parametrize("accumulation", [None, 2, 9])
def test_a_plan_is_shortened_and_never_made_longer(
    make_plan: MakePlan, layers: Any, accumulation: Any
) -> None:
    plan = make_plan("k_buffer", layers=4, accumulation=3)
    found = with_knobs(plan, layers=layers, accumulation=accumulation, weight_slots=7)
    assert found.model.layers == min(layers or 4, 4)
    assert found.workload.accumulation == min(accumulation or 3, 3)
    assert found.knobs == msgspec.structs.replace(plan.knobs, weight_slots=7)
