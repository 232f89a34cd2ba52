"""Tests of plans for several GPUs that are derived from a plan for one GPU."""

from __future__ import annotations

import msgspec
import pytest
import small_model

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.search import search
from megatrain.simulator.planner.shared_step import shared_step, shares
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule.plan import Plan

H200 = HardwareSpec.load("h200")
GIB = 2**30


@pytest.fixture(scope="module")
def one() -> Plan:
    """Returns the best plan of `overlapped` for one GPU with 4 GiB."""
    work = Workload(batch=8, sequence=1024, accumulation=2)
    model = small_model.SMALL.with_layers(6)
    return search(model, H200, work, device_limit=4 * GIB, policies=["overlapped"])[0].plan


def test_a_shared_step_is_a_plan_that_ranks_can_execute(one: Plan) -> None:
    """It has N times the micro-batches, its own prediction, and an N-th of the host's memory."""
    choice = shared_step(one, H200, 4)
    plan = choice.plan
    assert (plan.gpus, plan.workload.accumulation, plan.micro_batches) == (4, 8, 2)
    assert plan.host_limit_bytes == one.host_limit_bytes // 4
    assert plan.knobs.micro_batch_group == plan.workload.sum_group
    assert verified(plan).digest == plan.digest
    costs = cost_model(H200, plan.model, plan.workload, 4)
    assert assess(plan, costs).step_seconds == choice.step_seconds
    assert choice.feasible
    assert {op.lane for op in verified(plan).ops} >= {"exchange", "h2d", "d2h"}


def test_tied_embeddings_share_a_step_without_groups() -> None:
    """Their gradients are added one micro-batch at a time, so no group of them is tried."""
    config = {**small_model.SMALL.config, "num_hidden_layers": 2, "tie_word_embeddings": True}
    model = ModelSpec(name="tied", config=config)
    work = Workload(batch=1, sequence=256, accumulation=2)
    (one,) = search(model, H200, work, policies=["overlapped"])
    assert shares(one.plan, 2)
    plan = shared_step(one.plan, H200, 2).plan
    assert (plan.knobs.micro_batch_group, plan.workload.sum_group) == (1, 1)


def test_other_policies_and_models_cannot_share_a_step(one: Plan) -> None:
    assert shares(one, 2)
    model = small_model.SMALL.with_layers(6)
    (resident,) = search(model, H200, one.workload, policies=["resident"])
    assert not shares(resident.plan, 2)
    with pytest.raises(UserError, match="policy resident: gpus: found 2"):
        shared_step(resident.plan, H200, 2)


def test_a_step_with_too_many_micro_batches_is_estimated_or_refused(one: Plan) -> None:
    """`check` estimates the step from the plan for one GPU. `plan` names the allowed number."""
    work = msgspec.structs.replace(one.workload, accumulation=300)
    many = msgspec.structs.replace(one, workload=work, digest="")
    assert shares(many, 2)
    assert not shares(many, 4)
    with pytest.raises(
        UserError,
        match="found 300 micro-batches on each of 4 GPUs; allowed: 256, which is 1,024 in a step;",
    ):
        shared_step(many, H200, 4)
