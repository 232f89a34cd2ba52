"""Tests that every policy lowers any knobs to a valid schedule that does all work of a step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.workload import BY_LAYER, Clipping
from megatrain.simulator.schedule import Schedule, base_buffer
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.vector_clocks import VectorClocks

GOLDEN = Path(__file__).parents[2] / "golden"
FIXED_SLOTS = {"sequential": 1, "double_buffer": 2}

Make = Callable[..., Plan]


def loaded_bytes(schedule: Schedule) -> int:
    return sum(op.bytes for op in schedule.ops if op.kind == "load_weights")


def layers_of(schedule: Schedule, kind: str) -> Counter[str]:
    return Counter(op.layer for op in schedule.ops if op.kind == kind)


def verify_step(plan: Plan, schedule: Schedule) -> None:
    """Asserts that the schedule is valid and does each part of an optimizer step exactly once."""
    schedule.check()
    micros, model = plan.workload.accumulation, plan.model
    decoders = {str(index): micros for index in range(model.layers)}
    for kind in ("forward", "recompute", "backward"):
        assert layers_of(schedule, kind) == decoders
    for kind in ("embed", "head", "embed_backward"):
        assert layers_of(schedule, kind) == {"": micros}
    clipping, every = plan.workload.clipping, dict.fromkeys(model.stack, 1)
    assert layers_of(schedule, "norm") == (
        every if clipping in ("global", "layer", "adagc") else {}
    )
    assert layers_of(schedule, "clip") == (every if clipping in BY_LAYER else {"": 1})
    updated, summed, clipped = Counter[str](), Counter[str](), Counter[str]()
    for op in schedule.ops:
        clipped[op.layer] += op.kind == "clip"
        if op.kind == "update_ratios":
            assert (op.offset, clipped[op.layer]) == (summed[op.layer], 0), (
                f"{op.id} leaves a gap or runs after the clip"
            )
            summed[op.layer] += op.parameters
        if op.kind in ("update", "cpu_update"):
            assert clipping in ("global", "none") or clipped[op.layer], (
                f"{op.id} runs before its clip"
            )
            assert op.offset == updated[op.layer], f"{op.id} leaves a gap"
            updated[op.layer] += op.parameters
        elif op.kind not in (
            "load_state",
            "save_state",
            "load_second_moment",
            "update_ratios",
        ):  # all other copies stay inside their buffers
            assert all(
                op.offset + op.bytes <= schedule.buffer[base_buffer(name)].bytes
                for name in op.buffers
            ), op
    assert updated == {layer.name: layer.elements for layer in model.stack.values()}
    assert +summed == (updated if clipping == "update" else {})
    used = {base_buffer(name) for op in schedule.ops for name in op.buffers}
    assert used <= set(schedule.buffer)


@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_lowers_a_grid_of_plans(make_plan: Make, policy: str) -> None:
    for interval, slots, micros, tied, clipping in itertools.product(
        (1, 3, 9), (1, 2, 6), (1, 3), (False, True), get_args(Clipping)
    ):
        if slots != FIXED_SLOTS.get(policy, slots):
            continue
        plan = make_plan(
            policy,
            checkpoint_interval=interval,
            weight_slots=slots,
            accumulation=micros,
            tied=tied,
            clipping=clipping,
        )
        verify_step(plan, policies.lower(plan))


@settings(max_examples=60)
@given(data=st.data())
def test_every_policy_lowers_any_plan(make_plan: Make, data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(policies.names()))
    changes: dict[str, Any] = {
        "checkpoint_interval": data.draw(st.integers(1, 8)),
        "gradient_slots": data.draw(st.integers(1, 4)),
        "gradient_staging": data.draw(st.integers(1, 4)),
        "chunk_bytes": data.draw(st.sampled_from([4096, 5000, 2**14, 2**26])),
        "layers": data.draw(st.integers(1, 7)),
        "accumulation": data.draw(st.integers(1, 4)),
        "tied": data.draw(st.booleans()),
        "clipping": data.draw(st.sampled_from(get_args(Clipping))),
        "dtype": data.draw(st.sampled_from(["bf16", "fp32"])),
        "family": data.draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        "weight_slots": FIXED_SLOTS.get(policy) or data.draw(st.integers(1, 9)),
    }
    plan = make_plan(policy, **changes)
    schedule = policies.lower(plan)
    verify_step(plan, schedule)
    assert policies.lower(plan).digest == schedule.digest


@pytest.mark.parametrize("policy", ["sequential", "double_buffer", "k_buffer"])
def test_the_chunks_of_a_copy_cover_its_layer_once(make_plan: Make, policy: str) -> None:
    plan = make_plan(policy, chunk_bytes=5000, tied=True)
    schedule = policies.lower(plan)
    for kind in ("load_weights", "save_gradients"):
        copies: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for op in schedule.ops:
            if op.kind == kind:
                copies.setdefault((op.layer, op.id.partition(".c")[0]), []).append(
                    (op.offset, op.bytes)
                )
        assert {layer for layer, _ in copies} == set(plan.model.stack)
        for (layer, _), chunks in copies.items():
            assert [offset for offset, _ in chunks] == list(
                itertools.accumulate((size for _, size in chunks[:-1]), initial=0)
            )
            assert (
                sum(size for _, size in chunks)
                == DTYPE_BYTES[plan.workload.dtype] * plan.model.stack[layer].elements
            )
            assert max(size for _, size in chunks) <= 5000


@pytest.mark.parametrize("policy", ["sequential", "double_buffer", "k_buffer"])
def test_every_gradient_reaches_the_host(make_plan: Make, policy: str) -> None:
    plan = make_plan(policy, accumulation=2, chunk_bytes=2**26)
    assert layers_of(policies.lower(plan), "save_gradients") == dict.fromkeys(plan.model.stack, 2)
    assert layers_of(policies.lower(plan), "accumulate_gradients") == dict.fromkeys(
        plan.model.stack, 2
    )


@pytest.mark.parametrize("policy", [*policies.names(), *policies.peers()])
def test_an_outline_has_the_buffers_of_the_schedule(make_plan: Make, policy: str) -> None:
    for changes in (
        {},
        {"accumulation": 2, "tied": True},
        {"clipping": "update", "checkpoint_interval": 2},
        {"accumulation": 4, "micro_batch_group": 2},
    ):
        plan = make_plan(policy, **changes)
        assert policies.outline(plan).buffers == policies.lower(plan).buffers


@pytest.mark.parametrize(
    ("knobs", "around"),
    [
        ({"weights_ahead": 0}, ("B2.m0", "W1r.m0.c0")),
        ({"weights_ahead": 1}, ("W1r.m0.c0", "R1.m0")),
        ({"weights_ahead": 1, "weight_slots": 1}, ("B2.m0", "W1r.m0.c0")),
    ],
)
def test_an_update_comes_before_the_next_weights_or_right_after_them(
    make_plan: Make, knobs: dict[str, int], around: tuple[str, str]
) -> None:
    """With `weights_ahead`, the next layer's weights are loaded before an update.

    Then the recompute does not wait for the copies of the update's state. With one slot, weights
    are loaded after the update, because the update reads the old weights from that slot.
    """
    schedule = policies.lower(make_plan("overlapped", clipping="layer", chunk_bytes=2**20, **knobs))
    place = {op.id: index for index, op in enumerate(schedule.ops)}
    assert place[around[0]] < place["L2.c0"] < place["U2.c0"] < place["S2.c0"] < place[around[1]]


def test_a_group_of_micro_batches_loads_and_saves_a_layer_once(make_plan: Make) -> None:
    """The bytes of weights and gradients that move follow from the number of groups.

    Layer inputs that are offloaded move for each micro-batch.
    """
    inputs = ("save_activations", "load_activations")
    moved: dict[int, Counter[str]] = {}
    for group in (1, 2, 4):
        plan = make_plan(
            "overlapped",
            accumulation=4,
            micro_batch_group=group,
            placement=Placement(offloaded_inputs="all"),
        )
        schedule = policies.lower(plan)
        schedule.check()
        moved[group] = Counter()
        for op in schedule.ops:
            moved[group][op.kind] += op.bytes
    assert moved[1]["save_gradients"] == 2 * moved[2]["save_gradients"]
    assert moved[2]["save_gradients"] == 2 * moved[4]["save_gradients"] > 0
    assert moved[1]["load_weights"] > moved[2]["load_weights"] > moved[4]["load_weights"] > 0
    assert moved[4]["load_gradients"] == 0
    assert all(moved[1][kind] == moved[2][kind] == moved[4][kind] > 0 for kind in inputs)


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({"clipping": "layer", "micro_batch_group": 4}, True),
        ({"clipping": "layer", "micro_batch_group": 4, "checkpoint_interval": 2}, False),
        ({"clipping": "layer", "micro_batch_group": 2}, False),
        ({"clipping": "global", "micro_batch_group": 4}, False),
    ],
)
def test_gradients_that_one_group_completes_take_no_host_memory(
    make_plan: Make, changes: dict[str, Any], stays: bool
) -> None:
    """A gradient that is updated when its group ends needs no copy on the host."""
    schedule = policies.lower(make_plan("overlapped", accumulation=4, **changes))
    schedule.check()
    gradients = [buffer for buffer in schedule.buffers if buffer.data == "gradients"]
    assert any(buffer.place == "host" for buffer in gradients) is not stays
    assert any(op.kind == "save_gradients" for op in schedule.ops) is not stays


def test_sums_of_groups_take_two_slots(make_plan: Make) -> None:
    """One slot holds the sum of a group, and the other the sum of earlier groups."""
    groups: dict[str, Any] = {"sum_group": 2, "micro_batch_group": 2}
    for slots, changes in ((1, {}), (2, groups)):
        plan = make_plan("overlapped", accumulation=4, gradient_slots=1, **changes)
        pools = Counter(buffer.pool for buffer in policies.lower(plan).buffers)
        assert pools["device.streamed_sums"] == slots
        assert pools["device.streamed_sums_vocabulary"] == slots


def test_resident_copies_nothing(make_plan: Make) -> None:
    assert set(policies.lower(make_plan("resident", accumulation=2)).lanes) == {"compute", "update"}


def test_sequential_is_totally_ordered(make_plan: Make) -> None:
    for changes in (
        {},
        {"accumulation": 3, "tied": True},
        {"checkpoint_interval": 2, "clipping": "none"},
    ):
        schedule, order = policies.lower(make_plan("sequential", **changes)), VectorClocks()
        place = {op.id: index for index, op in enumerate(schedule.ops)}
        for op in schedule.ops:
            order.add(op.lane, [place[name] for name in op.after])
        assert all(order.precedes(*pair) for pair in itertools.pairwise(range(len(schedule.ops))))


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_more_slots_never_load_more(make_plan: Make, interval: int) -> None:
    for micros, tied in itertools.product((1, 2), (False, True)):
        loads = [
            loaded_bytes(
                policies.lower(
                    make_plan(
                        "k_buffer",
                        layers=6,
                        weight_slots=slots,
                        checkpoint_interval=interval,
                        accumulation=micros,
                        tied=tied,
                    )
                )
            )
            for slots in range(1, 9)
        ]
        assert loads == sorted(loads, reverse=True), loads


def test_with_a_slot_for_every_layer_each_is_loaded_once(make_plan: Make) -> None:
    plan = make_plan("k_buffer", layers=5, weight_slots=5, tied=True, accumulation=3)
    assert loaded_bytes(policies.lower(plan)) == sum(
        DTYPE_BYTES[plan.workload.dtype] * layer.elements for layer in plan.model.stack.values()
    )


def test_two_slots_give_the_paper_s_double_buffer(make_plan: Make) -> None:
    double, general = (
        policies.lower(make_plan("double_buffer")),
        policies.lower(make_plan("k_buffer", weight_slots=2)),
    )
    assert double.ops == general.ops
    assert double.buffers == general.buffers


@pytest.mark.parametrize(
    ("policy", "changes", "words"),
    [
        (
            "double_buffers",
            {},
            ["policy", "'double_buffers'", "`megatrain list policies`", "did you mean"],
        ),
        ("_builder", {}, ["policy", "'_builder'", "allowed: "]),
        ("../plan", {}, ["policy", "'../plan'", "allowed: "]),
        ("", {}, ["policy", "''", "allowed: "]),
        (
            "double_buffer",
            {"weight_slots": 3},
            ["weight_slots", "found 3", "allowed: 2", "k_buffer"],
        ),
        ("sequential", {"weight_slots": 2}, ["weight_slots", "found 2", "allowed: 1", "k_buffer"]),
        (
            "k_buffer",
            {"gradient_staging": 0, "accumulation": 2},
            ["gradient_staging", "found 0", "allowed: >= 1", "fix: set gradient_staging = 2"],
        ),
        (
            "double_buffer",
            {"gradient_staging": 0, "tied": True},
            ["gradient_staging", "found 0", "allowed: >= 1", "fix: set gradient_staging = 2"],
        ),
    ],
)
def test_plans_that_a_policy_cannot_execute_give_one_line_errors(
    make_plan: Make, policy: str, changes: dict[str, Any], words: list[str]
) -> None:
    plan = msgspec.structs.replace(make_plan(**changes), policy=policy)
    with pytest.raises(UserError) as caught:
        policies.lower(plan)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_plan_whose_schedule_has_a_race_is_refused(
    make_plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan whose schedule has a race is refused, even if the plan has that schedule's digest."""
    plan = make_plan("k_buffer")
    schedule = policies.lower(plan)
    policies.verified(msgspec.structs.replace(plan, digest=schedule.digest))
    first = next(
        index for index, op in enumerate(schedule.ops) if op.kind == "forward" and op.after
    )
    ops = (
        *schedule.ops[:first],
        msgspec.structs.replace(schedule.ops[first], after=()),
        *schedule.ops[first + 1 :],
    )
    broken = msgspec.structs.replace(schedule, ops=ops)
    monkeypatch.setattr(policies, "lower", lambda _: broken)
    with pytest.raises(
        UserError, match=r"^policy k_buffer: found race on .* before forward F0.m0;"
    ):
        policies.verified(msgspec.structs.replace(plan, digest=broken.digest))


def test_a_small_schedule_has_not_changed(make_plan: Make) -> None:
    """A small schedule is the stored one.

    If a schedule changes, so does its digest, and every plan that was made before is refused.
    """
    plan = make_plan(
        "double_buffer",
        layers=2,
        hidden=16,
        intermediate=32,
        heads=2,
        kv_heads=1,
        vocabulary=64,
        checkpoint_interval=2,
    )
    assert policies.lower(plan).to_text() == (GOLDEN / "double_buffer.txt").read_text()
