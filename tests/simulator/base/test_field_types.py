"""Tests of values that Python code gives to fields: of NumPy, of pandas, and of wrong types."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.field_types import check_types
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import plans_of, search
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan


class Sizes(msgspec.Struct, frozen=True):
    count: int = 1
    rate: float | None = None
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "sizes")


@pytest.mark.parametrize(
    "value", [8, 8.0, np.int64(8), np.float32(8), pd.Series([8])[0], pd.Series([8.0])[0]]
)
def test_an_integer_of_any_type_is_an_int(value: Any) -> None:
    work = Workload(batch=value, sequence=1024, token_piece=value)
    assert [type(each) for each in (work.batch, work.token_piece)] == [int, int]
    assert work == Workload(batch=8, sequence=1024, token_piece=8)
    assert msgspec.json.encode(work)
    assert type(Knobs(weight_slots=value).weight_slots) is int
    plan = plan_with(device_limit_bytes=2**30 * value)
    assert type(plan.device_limit_bytes) is int


def plan_with(**changes: Any) -> Plan:
    (plan,) = plans_of(
        ModelSpec.load("qwen2.5-0.5b"),
        HardwareSpec.load("h200"),
        Workload(batch=1, sequence=64),
        policies=["overlapped"],
    )
    return msgspec.structs.replace(plan, **changes)


@pytest.mark.parametrize("value", [2.5, 2, np.float32(2.5), np.int8(2)])
def test_a_number_of_any_type_is_a_float(value: Any) -> None:
    found = Sizes(rate=value).rate
    assert found == value
    assert type(found) in (float, int)
    assert Sizes(others=(value,)).others == (value,), "only simple types are checked"


def test_texts_and_bools_of_numpy_are_those_of_python() -> None:
    compiled: Any = np.bool_(True)
    dtype: Any = np.str_("bf16")
    optimizer: Any = np.str_("adamw")
    work = Workload(batch=1, sequence=64, compiled=compiled, dtype=dtype, optimizer=optimizer)
    assert [type(each) for each in (work.compiled, work.dtype, work.optimizer)] == [bool, str, str]
    assert msgspec.json.encode(work)
    number: Any = 3
    with pytest.raises(UserError, match="placement: weights: found 3; allowed: a text"):
        Placement(weights=number)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"batch": np.bool_(True)}, "batch: found .*True.*; allowed: an integer"),
        ({"batch": 8.5}, "batch: found 8.5; allowed: an integer; fix: "),
        ({"batch": True}, "batch: found True; allowed: an integer"),
        ({"batch": None}, "batch: found None; allowed: an integer; "),
        ({"batch": "8"}, "batch: found '8'; allowed: an integer"),
        ({"batch": float("nan")}, "batch: found nan; allowed: an integer"),
        ({"batch": float("inf")}, "batch: found inf; allowed: an integer"),
        ({"token_piece": [1]}, r"token_piece: found \[1\]; allowed: an integer, None; "),
        ({"compiled": "no"}, "compiled: found 'no'; allowed: True or False"),
        ({"attention": "sdpa"}, "attention: found 'sdpa'; allowed: flash, cudnn, flash4, None; "),
        ({"clipping": None}, "clipping: found None; allowed: global, layer, update, adagc, none; "),
        ({"optimizer": 3}, "optimizer: found 3; allowed: a text"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_name(changes: Any, error: str) -> None:
    with pytest.raises(UserError, match=f"^workload: {error}"):
        Workload(**{"batch": 1, "sequence": 64, **changes})


def test_a_refused_value_does_not_spoil_what_follows() -> None:
    model, hardware = ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load("h200")
    plans = [
        search(
            model,
            hardware,
            Workload(batch=batch, sequence=64),
            device_limit=limit,
            policies=["k_buffer"],
        )[0].plan
        for batch, limit in ((2.0, 24e9), (2, 24_000_000_000))
    ]
    assert plans[0] == plans[1]


class Pinned:
    """Stands for the class of a policy of one's own."""


@pytest.mark.parametrize(
    ("policies", "found"),
    [([Pinned], "the class Pinned"), (["k_buffer", 3], "3"), ([None], "None")],
)
def test_a_value_that_is_no_name_of_a_policy_is_refused(policies: list[Any], found: str) -> None:
    work = Workload(batch=1, sequence=64)
    model, hardware = ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load("h200")
    with pytest.raises(UserError, match=f"^policies: found {found}; allowed: names of .* paths of"):
        search(model, hardware, work, policies=policies)


def test_no_policy_is_refused() -> None:
    work = Workload(batch=1, sequence=64)
    with pytest.raises(UserError, match="policies: found none; allowed: names of pol"):
        search(ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load("h200"), work, policies=[])
