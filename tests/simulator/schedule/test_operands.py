"""Tests that `Schedule.check` verifies the class of data, the dtype and the size of operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.schedule import Buffer, Op, Schedule, ScheduleError
from megatrain.simulator.schedule.operands import OPERANDS
from megatrain.simulator.schedule.plan import Placement, Plan

OFFLOADED = Placement(
    offloaded_inputs="0-2", saved_attention="0", offloaded_attention="0", host_updated="1"
)


def with_pool(schedule: Schedule, pool: str, **changes: Any) -> Schedule:
    """Returns `schedule` with changed fields of the buffers of `pool`."""
    assert any(buffer.pool == pool for buffer in schedule.buffers)
    return msgspec.structs.replace(
        schedule,
        buffers=tuple(
            [
                msgspec.structs.replace(buffer, **changes) if buffer.pool == pool else buffer
                for buffer in schedule.buffers
            ]
        ),
    )


def with_op(schedule: Schedule, name: str, **changes: Any) -> Schedule:
    assert name in schedule.by_id
    return msgspec.structs.replace(
        schedule,
        ops=tuple(
            [msgspec.structs.replace(op, **changes) if op.id == name else op for op in schedule.ops]
        ),
    )


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        schedule.check()
    error = caught.value
    assert "simulator/" not in error.allowed + error.fix, "not every user has the source"
    return f"{error}; allowed: {error.allowed}; fix: {error.fix}"


@pytest.mark.parametrize(
    ("policy", "changes", "pool", "fields", "complaint"),
    [
        (
            "k_buffer",
            {},
            "device.weights",
            {"dtype": "fp32"},
            "W0f.m0.c0: host.weights:0 bf16, device.weights:0 fp32: the dtypes differ",
        ),
        (
            "k_buffer",
            {},
            "device.gradients",
            {"dtype": "fp32"},
            "host.gradient_staging:0 bf16: the dtypes differ",
        ),
        (
            "k_buffer",
            {},
            "device.weights",
            {"data": "gradients"},
            "W0f.m0.c0: writes gradients (device.weights:0); allowed: load_weights writes weights;",
        ),
        (
            "k_buffer",
            {},
            "host.moments",
            {"dtype": "bf16"},
            "e: moments in bf16; allowed: fp32 or block8; fix: pass this dtype to Builder.pers",
        ),
        (
            "k_buffer",
            {},
            "host.weights",
            {"dtype": "int16"},
            "host.weights:e: weights in int16; allowed: bf16 or fp32; fix: pass this dtype to ",
        ),
        (
            "k_buffer",
            {"accumulation": 2},
            "host.gradients",
            {"dtype": "bf16"},
            "in bf16; allowed: fp32, in which sums are kept; fix: pass fp32 to Builder.persist",
        ),
        (
            "overlapped",
            {"accumulation": 2},
            "device.streamed_sums",
            {"dtype": "bf16"},
            "the dtypes differ",
        ),
        (
            "overlapped",
            {},
            "device.moments_chunks",
            {"chunk": False},
            " bytes; allowed: 32,768 bytes or more, for the size of this op; fix: pass a large",
        ),
        ("overlapped", {}, "device.hidden", {"dtype": "fp32"}, "the dtypes differ"),
        (
            "overlapped",
            {"gradients": "8bit"},
            "device.coded_gradients",
            {"dtype": "bf16"},
            "writes codes to device.coded_gradients:0, in bf16; allowed: block8; fix: pass thi",
        ),
        (
            "overlapped",
            {},
            "device.streamed_gradients",
            {"dtype": "block8"},
            "device.streamed_gradients:0 is in codes, which only updates read",
        ),
        (
            "overlapped",
            {},
            "device.hidden",
            {"dtype": "home"},
            "0: dtype home in a buffer that is no chunk; allowed: a chunk, which takes its dty",
        ),
        (
            "resident",
            {},
            "device.master_low",
            {"data": "moments", "dtype": "fp32"},
            "two persistent buffers hold the same data",
        ),
    ],
)
def test_a_buffer_of_another_kind_is_found(
    make_plan: Callable[..., Plan],
    policy: str,
    changes: dict[str, Any],
    pool: str,
    fields: dict[str, Any],
    complaint: str,
) -> None:
    schedule = policies.lower(make_plan(policy, **changes))
    schedule.check()
    assert complaint in refusal(with_pool(schedule, pool, **fields))


@pytest.mark.parametrize(
    ("policy", "changes", "pool"),
    [
        ("k_buffer", {"accumulation": 2}, "host.gradients"),
        ("k_buffer", {}, "device.weights"),
        ("overlapped", {}, "host.moments"),
        ("overlapped", {}, "device.gradients_chunks"),
        ("resident", {}, "device.master_low"),
    ],
)
def test_a_buffer_that_is_too_small_is_found(
    make_plan: Callable[..., Plan], policy: str, changes: dict[str, Any], pool: str
) -> None:
    schedule = policies.lower(make_plan(policy, **changes))
    assert re.search(
        r"has 64 bytes; allowed: [\d,]+ bytes or more", refusal(with_pool(schedule, pool, bytes=64))
    )


def test_an_op_with_an_operand_too_many_is_found(make_plan: Callable[..., Plan]) -> None:
    schedule = policies.lower(make_plan("resident"))
    norm = schedule.by_id["N0"]
    more = with_op(schedule, "N0", reads=(*norm.reads, "device.tokens:0"))
    assert (
        "N0: reads gradients tokens (device.gradients:0, device.tokens:0); allowed: norm reads"
        " gradients; fix: " in refusal(more)
    )
    low = schedule.by_id["U0"]
    less = with_op(
        schedule, "U0", writes=tuple(name for name in low.writes if ".master_low:" not in name)
    )
    assert (
        "U0: weights in bf16 without low halves and fp32 moments: no state format has these;"
        in refusal(less)
    )


def test_a_pool_holds_one_class_of_data(make_plan: Callable[..., Plan]) -> None:
    schedule = policies.lower(make_plan("resident"))
    odd = Buffer(id="device.tokens:9", bytes=64, data="losses", dtype="fp32", persistent=True)
    wrong = msgspec.structs.replace(schedule, buffers=(*schedule.buffers, odd))
    assert refusal(wrong).startswith(
        "device.tokens:9 holds losses and device.tokens:0 tokens; allowed: one class of data in all"
    )


def test_chunks_of_layers_with_different_dtypes_take_the_dtype_of_the_layer(
    make_plan: Callable[..., Plan],
) -> None:
    """A chunk has the dtype of the layer that it belongs to.

    A tied embedding's gradient is an fp32 sum and a decoder layer's is bf16, and both stream
    through the same slots.
    """
    schedule = policies.lower(make_plan("overlapped", tied=True))
    chunk = next(
        buffer.id for buffer in schedule.buffers if buffer.pool == "device.gradients_chunks"
    )
    assert schedule.buffer[chunk].dtype == "home"
    assert schedule.dtype_of(chunk, "e") == "fp32"
    assert schedule.dtype_of(chunk, "0") == "bf16"
    assert schedule.dtype_of("host.gradients:e#3", "e") == "fp32"


def test_every_kind_of_ours_has_operands_and_peers_need_none(
    make_plan: Callable[..., Plan],
) -> None:
    """Ops of policies that are executed have typed operands, and ops of other systems need none."""
    for policy in policies.names():
        assert policies.lower(make_plan(policy)).is_typed
    for policy in policies.peers():
        assert not policies.lower(make_plan(policy)).is_typed
    used = {
        op.kind
        for policy in policies.names()
        for clipping in ("global", "update")
        for placement in (Placement(), OFFLOADED)
        for micros in (1, 2)
        for op in every_op(make_plan, policy, clipping, placement, micros)
    }
    used |= {op.kind for op in policies.lower(make_plan("overlapped", gradients="8bit")).ops}
    used |= {op.kind for op in policies.lower(make_plan("overlapped", gpus=2, accumulation=2)).ops}
    assert used == set(OPERANDS)


def every_op(
    make_plan: Callable[..., Plan], policy: str, clipping: str, placement: Placement, micros: int
) -> list[Op]:
    place = placement if policies.find(policy).places_state else Placement()
    plan = make_plan(policy, clipping=clipping, placement=place, accumulation=micros, hidden=64)
    return [*policies.lower(plan).ops, *policies.evaluation(plan).ops]
