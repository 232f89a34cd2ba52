"""Tests of evaluation schedules: they are valid under every policy and have a predicted time.

They have one forward pass for each micro-batch, and load no weights that a slot still holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import makespan_ns, simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.policies.building.evaluation import forward_only
from megatrain.simulator.schedule.arithmetic import part_elements
from megatrain.simulator.schedule.plan import Placement, Plan

RESULTS = Path(__file__).parents[3] / "experiments" / "results"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("policy", policies.names())
def test_an_evaluation_is_a_forward_pass_of_every_micro_batch(
    make_plan: Callable[..., Plan], policy: str, accumulation: int, tied: bool
) -> None:
    plan = make_plan(policy, accumulation=accumulation, tied=tied, chunk_bytes=5000)
    schedule = policies.evaluation(plan)
    schedule.check()
    computed = Counter((op.kind, op.layer) for op in schedule.lanes["compute"])
    layers = {("forward", str(index)): accumulation for index in range(plan.model.layers)}
    assert computed == {("embed", ""): accumulation, **layers, ("loss", ""): accumulation}
    assert {
        name for op in schedule.ops for name in op.writes if schedule.buffer[name].persistent
    } == {f"device.losses:{micro}" for micro in range(accumulation)}
    bytes_of = Counter[str]()
    for op in schedule.lanes.get("h2d", ()):
        assert op.offset == bytes_of[op.layer] % (
            DTYPE_BYTES["bf16"] * plan.model.stack[op.layer].elements
        ), f"{op.id} leaves a gap"
        bytes_of[op.layer] += op.bytes
    streamed = {layer for layer in plan.model.stack if f"host.weights:{layer}" in schedule.buffer}
    assert bytes_of.keys() == streamed
    for layer in streamed:
        loads, rest = divmod(
            bytes_of[layer], DTYPE_BYTES["bf16"] * plan.model.stack[layer].elements
        )
        kept = tied and layer == "e"  # no other layer uses its slot
        assert (loads, rest) == (1 if kept else accumulation, 0)


def test_on_several_gpus_an_evaluation_gathers_the_parts_of_each_layer(
    make_plan: Callable[..., Plan],
) -> None:
    """A part that stays on the device is not loaded, but is gathered like any other."""
    plan = make_plan("overlapped", gpus=2, accumulation=4, placement=Placement(weights="1"))
    schedule = policies.evaluation(plan)
    schedule.check()
    gathers = [op for op in schedule.ops if op.kind == "gather_weights"]
    loads = Counter(op.layer for op in schedule.lanes["h2d"])
    micro_batches = sum(op.kind == "loss" for op in schedule.ops)
    assert micro_batches == 2
    assert Counter(op.layer for op in gathers) == dict.fromkeys(plan.model.stack, micro_batches)
    assert loads.keys() == plan.model.stack.keys() - {"1"}
    for op in gathers:
        assert op.bytes == DTYPE_BYTES["bf16"] * part_elements(plan, op.layer)
        following = schedule.ops[schedule.ops.index(op) + 1 :]
        assert op.writes[0] in next(one for one in following if one.lane == "compute").reads


@pytest.mark.parametrize("run", ["h200-qwen2.5-7b-24GiB", "h200-qwen2.5-7b-whole"])
def test_the_time_of_an_evaluation_is_predicted(run: str) -> None:
    """The time of an evaluation is at least its compute and at most 0.6 of a step.

    A forward pass is a quarter of the compute of a step that recomputes.
    """
    plan = Plan.load(RESULTS / run / "plan.toml")
    hardware = HardwareSpec.load(str(RESULTS / run / "hardware.toml"))
    costs, schedule = cost_model(hardware, plan.model, plan.workload), policies.evaluation(plan)
    loss = next(op for op in schedule.ops if op.kind == "loss")
    head = next(op for op in policies.lower(plan).ops if op.kind == "head")
    assert costs.duration_ns(loss) == pytest.approx(costs.duration_ns(head) / 3, rel=1e-6)
    assert costs.extrapolated(loss)
    assert (
        sum(costs.duration_ns(op) for op in schedule.lanes["compute"])
        <= makespan_ns(schedule, costs)
        < 0.6 * makespan_ns(policies.lower(plan), costs)
    )


def test_a_datasheet_knows_the_loss(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("overlapped")
    costs = cost_model(HardwareSpec.load("h200"), plan.model, plan.workload)
    spans = simulate(policies.evaluation(plan), costs).by_op
    assert (
        0
        < spans["HL.m0"].duration_ns
        < simulate(policies.lower(plan), costs).by_op["H.m0"].duration_ns
    )


def test_a_schedule_that_streams_no_weights_is_refused(make_plan: Callable[..., Plan]) -> None:
    """The forward pass needs a slot for each layer whose weights are on the host."""
    plan = make_plan("k_buffer")
    schedule = policies.lower(plan)
    others = tuple([op for op in schedule.ops if op.kind != "load_weights"])
    with pytest.raises(
        UserError,
        match=(
            r"^policy k_buffer: evaluation: found no slot that the weights of e stream through;"
            r" allowed: one for "
        ),
    ):
        forward_only(plan, msgspec.structs.replace(schedule, ops=others))


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("host.weights:0", "the weights of 0"),
        ("device.tokens:1", "the tokens of 1"),
        ("device.losses:0", "the losses of 0"),
    ],
)
def test_a_schedule_that_keeps_no_weights_tokens_or_losses_is_refused(
    make_plan: Callable[..., Plan], missing: str, found: str
) -> None:
    """A policy from outside the package may keep this data in buffers that are not persistent."""
    plan = make_plan("k_buffer", accumulation=2)
    schedule = policies.lower(plan)
    buffers = [
        msgspec.structs.replace(buffer, persistent=buffer.persistent and buffer.id != missing)
        for buffer in schedule.buffers
    ]
    assert missing in schedule.buffer
    with pytest.raises(
        UserError,
        match=(
            f"^policy k_buffer: evaluation: found no persistent buffer of {found}; allowed: one for"
            " each layer's weights, each micro-batch's tokens and loss; fix: train without"
        ),
    ):
        forward_only(plan, msgspec.structs.replace(schedule, buffers=tuple(buffers)))
