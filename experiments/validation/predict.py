"""Predicts published rows with the policies and with the simulator's costs, engine and memory
account.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from megatrain.experiments.validation.rows import PublishedRow, Setting
from megatrain.simulator import policies
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.metrics import tflops_6n, tokens_per_second
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Clipping, Workload
from megatrain.simulator.planner.search import plan_account
from megatrain.simulator.policies import megatrain_code
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.schedule import Op, OpId, Schedule
from megatrain.simulator.schedule.plan import Plan

GIB = 2**30
_MOST_BATCH, _MOST_STEPS = 1024, 128  # bounds of `fill`; a sequence grows by _SEQUENCE tokens
_SEQUENCE = 256
_COPY = 256 * 2**20
BASELINES = ("zero3_offload", "zero_offload", "fsdp2_offload")
_TIMES = 200  # ops of each lane; more would change a rate by less than 1 %


class Predicted(NamedTuple):
    """The predicted figure of a row, and the workload of the prediction."""

    value: float
    """The figure, in the row's unit."""
    batch: int
    """Sequences in a micro-batch."""
    sequence: int
    """Tokens in a sequence."""
    fits: bool
    """Whether the plan fits into the machine's memory."""


class Implied(NamedTuple):
    """The batch whose predicted speed is nearest to a published one."""

    batch: int
    """Sequences in a micro-batch."""
    value: float
    """The predicted speed with this batch, in the row's unit."""


class _Case(NamedTuple):
    """A system's step on a machine. Several rows may report figures of the same step."""

    setting: Setting
    """The assumptions about the machine and the system."""
    policy: str
    """The policy that stands for the system."""
    model: ModelSpec
    """The model, with the row's changes."""
    ablation: tuple[tuple[str, int], ...]
    """Changes to the published code, as pairs of field and value of `Ablation`."""
    batch: int
    """Sequences in a micro-batch."""
    sequence: int
    """Tokens in a sequence."""
    clipping: Clipping = "global"
    """How gradients are clipped."""

    def plan(self, hardware: HardwareSpec) -> Plan:
        """Returns the system's plan on `hardware`."""
        work = Workload(batch=self.batch, sequence=self.sequence, clipping=self.clipping)
        return Plan(
            policy=self.policy,
            hardware=hardware.name,
            source=self.model.name,
            model=self.model,
            workload=work,
            device_limit_bytes=hardware.device_bytes,
            host_limit_bytes=hardware.host_bytes,
        )

    def schedule(self, plan: Plan) -> Schedule:
        """Returns the schedule of `plan`, or that of the published code's version and changes."""
        if self.policy == "megatrain_code":
            return megatrain_code.lower_ablated(
                plan,
                megatrain_code.Ablation(
                    **dict(self.ablation),
                    copies=self.setting.pinned_copies,
                    packs=self.setting.packs,
                ),
            )
        return policies.lower(plan)


class _Step(NamedTuple):
    """A simulated step."""

    seconds: float
    """Time of the step in seconds."""
    parts: dict[str, float]
    """Quantity of a part of the step -> its time in seconds."""
    account: Account
    """The account of memory."""


@functools.cache
def _machine(setting: Setting) -> HardwareSpec:
    """Returns the machine of a setting."""
    return setting.machine()


@functools.cache
def _account(case: _Case) -> Account:
    """Returns the account of memory of a case."""
    plan = case.plan(_machine(case.setting))
    return plan_account(
        plan, case.schedule(plan), cost_model(_machine(case.setting), plan.model, plan.workload)
    )


@functools.cache
def _step(case: _Case) -> _Step:
    """Returns the times of a simulated step, and its account of memory."""
    plan = case.plan(_machine(case.setting))
    schedule, costs = (
        case.schedule(plan),
        cost_model(_machine(case.setting), plan.model, plan.workload),
    )
    spans = {
        op.id: (op, span)
        for op, span in zip(schedule.ops, simulate(schedule, costs).spans, strict=True)
    }
    end = max(span.end_ns for _, span in spans.values())
    late = [(op, span) for op, span in spans.values() if _of_the_update(op)]
    optimizer = min((span.start_ns for _, span in late), default=end)
    head = spans["H.m0"][1]
    # The other systems stop their forward timer after the loss, a third of the head's work.
    forward = head.start_ns + (0 if case.policy == "megatrain_code" else head.duration_ns / 3)
    parts = {
        "forward_s": forward,
        "backward_s": optimizer - forward,
        "optimizer_s": end - optimizer,
    }
    if case.policy == "megatrain_code":
        for name, ids in (
            ("clip_s", ("TP", "HP.c0")),
            ("adam_s", ("UA",)),
            ("copy_s", ("HP.c1", "TP.c1", "We", "TP.c2", "Wh")),
            ("zero_s", ("HP.c2", "TP.c3")),
        ):
            parts[name] = sum(spans[key][1].duration_ns for key in ids if key in spans)
    return _Step(
        (end + costs.step_overhead_ns) / 1e9,
        {name: time / 1e9 for name, time in parts.items()},
        _account(case),
    )


def _of_the_update(op: Op) -> bool:
    """Returns whether the op belongs to the update of the whole model, after the last backward
    pass. The id of such an op has no micro-batch.
    """
    return ".m" not in op.id and (
        op.kind in ("cpu_adam", "load_weights") or (op.kind.endswith("pass") and not op.layer)
    )


def predict(row: PublishedRow, setting: Setting) -> Predicted | None:
    """Returns the prediction of a row, or None if the row has no policy."""
    if not row.policy:
        return None
    if row.policy == "engine":
        return Predicted(_rate(row, setting), 1, 1, True)
    case = _filled(row, setting)
    if row.quantity.startswith("layer_"):
        return Predicted(_layer_ms(case, row.quantity), case.batch, case.sequence, True)
    account = _account(case)
    return Predicted(_figure(row.quantity, case, account), case.batch, case.sequence, account.fits)


def implied_batch(row: PublishedRow, setting: Setting) -> Implied | None:
    """Returns the batch whose predicted speed is nearest to a baseline's published speed. Returns
    None if the source states the batch, or if the row is not the speed of a baseline. The batch is
    fitted to the row, so this can explain the row but does not test it.
    """
    if row.policy not in BASELINES or row.quantity != "tflops" or row.batch or not row.value:
        return None
    published, (policy, model) = row.value, (row.policy, row.spec())
    sequence = row.sequence or setting.sequence
    if not isinstance(sequence, int):
        return None

    def speed(batch: int) -> float:
        case = _Case(setting, policy, model, (), batch, sequence)
        return tflops_6n(model, Workload(batch=batch, sequence=sequence), _step(case).seconds)

    most = _filled(row, msgspec.structs.replace(setting, batch="fill")).batch
    below = _largest(most, lambda batch: speed(batch) <= published)
    return min(
        (Implied(batch, speed(batch)) for batch in {below, min(below + 1, most)}),
        key=lambda found: abs(found.value - published),
    )


def _figure(quantity: str, case: _Case, account: Account) -> float:
    moments = account.held("host", "moments") * (8 - case.setting.moments_bytes) // 8
    # The published code reads its resident memory after it frees the step's gradients.
    resident = account.host_peak_bytes - account.held("host", "gradients") - moments
    sizes = {
        "runs": float(account.fits),
        "device_gib": account.device_peak_bytes / GIB,
        "host_gib": account.host_peak_bytes / GIB,
        "rss_gib": resident / GIB,
        "state_gb": account.held("host", "weights", "gradients", "moments") / 1e9,
    }
    if quantity in sizes:
        return sizes[quantity]
    step = _step(case)
    work = Workload(batch=case.batch, sequence=case.sequence)
    speeds = {
        "step_s": step.seconds,
        "tflops": tflops_6n(case.model, work, step.seconds),
        "tokens_per_s": tokens_per_second(work, step.seconds),
    }
    return (speeds | step.parts)[quantity]


def _filled(row: PublishedRow, setting: Setting) -> _Case:
    """Returns the step of a row. If the source does not report the batch or the sequence, the
    setting's value or rule is used.
    """
    batch, sequence = row.batch or setting.batch, row.sequence or setting.sequence

    def case(batch: int, sequence: int) -> _Case:
        ablation = tuple(row.ablation.items())
        return _Case(setting, row.policy, model, ablation, batch, sequence, clipping)

    def fits(batch: int, sequence: int) -> bool:
        account = _account(case(batch, sequence))
        return account.device_peak_bytes <= account.device_limit_bytes

    model = row.spec()
    clipping: Clipping = "none" if row.changes.get("clipping") == "none" else "global"
    if sequence == "fill":
        if batch == "fill":
            raise ValueError(f"row {row.item}: batch and sequence cannot both fill the memory")
        known = batch
        sequence = _SEQUENCE * _largest(_MOST_STEPS, lambda steps: fits(known, _SEQUENCE * steps))
    if batch == "fill":
        each = sequence
        batch = _largest(_MOST_BATCH, lambda size: fits(size, each))
    return case(batch, sequence)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to `most` that fits, or 1 if none does. It is found by
    bisection, so `fits` must be true up to this number and false above.
    """
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _layer_ms(case: _Case, quantity: str) -> float:
    plan = case._replace(model=case.model.with_layers(1)).plan(_machine(case.setting))
    costs = cost_model(_machine(case.setting), plan.model, plan.workload)
    times = {
        op.kind: costs.duration_ns(op) / 1e6
        for op in policies.lower(plan).ops
        if op.kind in ("forward", "backward")
    }
    return times["forward"] + (times["backward"] if quantity == "layer_both_ms" else 0)


# ---- rates of lanes that work at the same time


def _rate(row: PublishedRow, setting: Setting) -> float:
    """Returns the rate of a lane in the row's unit, while all lanes in the row's `changes` are
    busy.
    """
    lanes, hardware = row.changes["lanes"].split("+"), _machine(setting)
    model, work = ModelSpec.load("qwen2.5-0.5b"), Workload(batch=1, sequence=1024)
    costs = cost_model(hardware, model, work)
    if row.quantity == "streamed_g_per_s":
        return _streamed(costs)
    adam_bytes = {"adam_fp32_g_per_s": 28, "adam_bf16_g_per_s": 14}.get(row.quantity, 22)
    builder, parameters = Builder("rates"), 2**25
    for lane in lanes:
        buffer = builder.persistent(f"host.{lane}", "all", _COPY, "workspace")
        for index in range(_TIMES):
            if lane == "cpu":
                builder.op(
                    OpId("cpu_adam", str(index)),
                    "cpu",
                    [],
                    [buffer],
                    parameters=parameters,
                    bytes=adam_bytes * parameters,
                )
            else:
                builder.op(
                    OpId(
                        {"h2d": "load_weights", "d2h": "save_gradients"}[lane],
                        str(index),
                        "f",
                        0,
                        0,
                    ),
                    lane,
                    [],
                    [buffer],
                    bytes=_COPY,
                )
    schedule = builder.build()
    timeline = simulate(schedule, costs)
    wanted = "cpu" if row.quantity.startswith("adam") else row.quantity[:3]
    window = min(max(span.end_ns for span in timeline.spans if span.lane == lane) for lane in lanes)
    done = [
        op
        for op, span in zip(schedule.ops, timeline.spans, strict=True)
        if op.lane == wanted and span.end_ns <= window
    ]
    return sum(op.parameters if wanted == "cpu" else op.bytes for op in done) / max(
        timeline.by_op[op.id].end_ns for op in done
    )


def _streamed(costs: CostModel) -> float:
    """Returns the rate of AdamW on the device in 10^9 parameters per second. Its fp32 moments are
    streamed through four slots of 64 MiB.
    """
    builder, size = Builder("rates"), 64 * 2**20
    builder.slots("device.state", 4, size, "workspace")
    held: list[str] = []
    home = builder.persistent("host.moments", "all", size, "workspace")
    for index in range(_TIMES):
        if len(held) == 3:
            builder.release(held.pop(0))
        slot = builder.acquire("device.state")
        held.append(slot)
        builder.op(OpId("load_state", str(index), chunk=0), "h2d", [], [slot], bytes=size)
        builder.op(OpId("update", str(index), chunk=0), "update", [], [slot], parameters=size // 8)
        builder.op(OpId("save_state", str(index), chunk=0), "d2h", [slot], [home], bytes=size)
    schedule = builder.build()
    return _TIMES * (size // 8) / max(span.end_ns for span in simulate(schedule, costs).spans)
