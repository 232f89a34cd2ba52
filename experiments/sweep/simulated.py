"""Simulates the rows of a sweep. Memory is computed first, and then the time of plans that fit. If
no op slows another, the time is computed by the evaluator, which is exact, and otherwise by the
engine.

Work that plans share is done once, so plans should be sorted by `likeness`:

* A memory limit does not change the schedule or its time, only whether the plan fits.
  * In most policies, another batch or sequence length changes only the sizes of ops and buffers. So
    one lowered schedule is resized for other workloads. The first schedule of each policy and
    workload is both lowered and resized. If the two differ, every later schedule is lowered.

A plan whose knobs the planner chooses shares no work, because the planner searches knobs and
placement.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatrain.experiments.sweep.store import Decided, RowWorkload, SweepRow
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine import discrete_event as engine
from megatrain.simulator.engine import evaluator
from megatrain.simulator.hardware.cost_table import COMPUTE_KINDS
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.metrics import tokens_per_second
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import expected_ns, plan_account
from megatrain.simulator.planner.capacity import resized
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.schedule import (
    OFFLOADING,
    Op,
    Schedule,
    computes_output,
    has_saved_attention,
)
from megatrain.simulator.schedule.arithmetic import cost_keys
from megatrain.simulator.schedule.plan import Knobs, Plan

_SIZES = ("bytes", "parameters", "flops", "elements", "shape", "offset")


def structure(plan: Plan) -> tuple[str, Knobs, Workload]:
    """Returns the fields of a plan on which the order of its ops may depend. Batch and sequence are
    set to 1.
    """
    return plan.policy, plan.knobs, msgspec.structs.replace(plan.workload, batch=1, sequence=1)


def likeness(plan: Plan) -> tuple[bytes, int, int]:
    """Returns a sort key that puts plans with the same `structure` next to each other, and among
    them, plans with the same workload.
    """
    return msgspec.msgpack.encode(structure(plan)), plan.workload.batch, plan.workload.sequence


_Timed = tuple[float, str, Decided]
"""Seconds of a step, the lane with the most work, and how they were found."""


class _Lowered(NamedTuple):
    """A schedule and the plan from which it was lowered."""

    plan: Plan
    """The plan."""
    schedule: Schedule
    """Its schedule."""


class Simulator:
    """Simulates plans of one model on one machine, one after the other."""

    def __init__(self, hardware: HardwareSpec) -> None:
        self.hardware = hardware
        self._costs: dict[Workload, CostModel] = {}
        self._last: _Lowered | None = None
        # (policy, workload) -> whether the schedule of another workload can be resized
        self._resizable: dict[tuple[str, Workload], bool] = {}
        # the last plan without its limits, its memory and its time
        self._known: tuple[object, Account, _Timed | None] | None = None

    def planned_row(self, plan: Plan, key: str) -> SweepRow:
        """Returns the row of the fastest plan that fits, with the policy, workload and limits of
        `plan` and with any knobs. If none fits, it is the row of the plan with the least memory.
        """
        fields = {**self._fields(plan, key), "planned": True}
        try:
            best = candidates(
                plan.model,
                self.hardware,
                plan.workload,
                device_limit=plan.device_limit_bytes,
                host_limit=plan.host_limit_bytes,
                policies=[plan.policy],
            )[0]
        except Exception as error:
            return SweepRow(**fields, decided_by="refused", reason=_reason(error))
        timed: _Timed | None = None
        if best.feasible:
            timed = best.step_seconds, best.bounds.binding, "engine"
        fields["knobs"] = best.plan.knobs
        return _row(fields, plan.workload, best.account, timed)

    def _fields(self, plan: Plan, key: str) -> dict[str, Any]:
        return {
            "key": key,
            "model": plan.model.name,
            "hardware": self.hardware.name,
            "policy": plan.policy,
            "knobs": plan.knobs,
            "workload": RowWorkload.of(plan.workload),
            "device_limit_bytes": plan.device_limit_bytes,
            "host_limit_bytes": plan.host_limit_bytes,
        }

    def row(self, plan: Plan, key: str) -> SweepRow:
        """Returns the plan's row. If the policy refuses the plan or makes an incorrect schedule, if
        the cost of an op is not known, or if anything fails, the row has the reason.
        """
        fields = self._fields(plan, key)
        try:
            policies.check_outside(plan)
            account, timed = self._measure(plan, self.cost_model_of(plan))
        except Exception as error:
            return SweepRow(**fields, decided_by="refused", reason=_reason(error))
        return _row(fields, plan.workload, account, timed)

    def cost_model_of(self, plan: Plan) -> CostModel:
        """Returns the cost model for the plan's workload, the same one for all plans of it."""
        if plan.workload not in self._costs:
            self._costs[plan.workload] = cost_model(self.hardware, plan.model, plan.workload)
        return self._costs[plan.workload]

    def _measure(self, plan: Plan, costs: CostModel) -> tuple[Account, _Timed | None]:
        """Returns the memory and the time of a plan. The time is None if the plan does not fit."""
        known = (plan.policy, plan.knobs, plan.workload)
        if self._known is None or self._known[0] != known:
            self._known = known, plan_account(plan, self._outline(_bare(plan)), costs), None
        account = msgspec.structs.replace(
            self._known[1],
            device_limit_bytes=plan.device_limit_bytes,
            host_limit_bytes=plan.host_limit_bytes,
        )
        if not account.fits:
            return account, None
        if self._known[2] is None:
            self._known = (*self._known[:2], self._time(_bare(plan), costs))
        return account, self._known[2]

    def _time(self, plan: Plan, costs: CostModel) -> _Timed:
        base = self._base(plan)
        schedule = base.schedule if base else self._lower(plan)
        if base and base.plan.workload != plan.workload:
            costs = ScaledCosts(costs, _Resizing(plan))
        sizes, lanes = costs.sizes(schedule), Counter[str]()
        for index, count in Counter(sizes.which).items():
            lanes[sizes.ops[index].lane] += count * costs.duration_ns(sizes.ops[index])
        decided: Decided = (
            "evaluator" if all(costs.demand(op) is None for op in sizes.ops) else "engine"
        )
        player = engine.makespan_ns if decided == "engine" else evaluator.uncontended_makespan_ns
        return (
            (expected_ns(schedule, costs, player) + costs.step_overhead_ns) / 1e9,
            max(lanes, key=lanes.__getitem__, default="none"),
            decided,
        )

    def _outline(self, plan: Plan) -> Schedule:
        """Returns a schedule with the plan's buffers. Its ops may be left out."""
        if base := self._base(plan):
            share = plan.workload.tokens / base.plan.workload.tokens
            buffers = tuple(resized(buffer, share) for buffer in base.schedule.buffers)
            return Schedule(policy=plan.policy, buffers=buffers, ops=())
        outline = policies.outline(plan)
        if outline.ops:  # the policy lowers the whole plan to know its buffers
            self._keep(_Lowered(plan, outline))
        return outline

    def _base(self, plan: Plan) -> _Lowered | None:
        """Returns the last schedule if it can be resized for the plan."""
        if self._last is None or structure(self._last.plan) != structure(plan):
            return None
        return (
            self._last
            if self._last.plan.workload == plan.workload
            or self._resizable.get((plan.policy, plan.workload))
            else None
        )

    def _lower(self, plan: Plan) -> Schedule:
        schedule = policies.lower_uncached(plan)
        self._keep(_Lowered(plan, schedule))
        return schedule

    def _keep(self, fresh: _Lowered) -> None:
        """Keeps the schedule as the last one. If it is the first of its policy and workload, also
        checks whether resizing the previous one would have given the same schedule.
        """
        plan, last = fresh.plan, self._last
        if (
            last is not None
            and structure(last.plan) == structure(plan)
            and (plan.policy, plan.workload) not in self._resizable
        ):
            self._resizable[plan.policy, plan.workload] = _equal_when_resized(last, fresh)
        self._last = fresh


def _reason(error: Exception) -> str:
    """Returns why a plan has no time. An error that is not a UserError is described too, since it
    must not end the sweep of the other plans. Raises a MemoryError again: it says nothing about the
    plan.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        raise error
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"


def _row(
    fields: dict[str, Any], workload: Workload, account: Account, timed: _Timed | None
) -> SweepRow:
    """Returns a row with the memory, and with the time if the plan fits."""
    fields |= {
        "device_peak_bytes": account.device_peak_bytes,
        "host_peak_bytes": account.host_peak_bytes,
    }
    if timed is None:
        return SweepRow(**fields, decided_by="memory", binding=account.binding)
    seconds, binding, decided = timed
    return SweepRow(
        **fields,
        decided_by=decided,
        binding=binding,
        step_seconds=seconds,
        tokens_per_second=tokens_per_second(workload, seconds),
    )


def _bare(plan: Plan) -> Plan:
    """Returns the plan without limits, because no schedule depends on them."""
    return msgspec.structs.replace(plan, device_limit_bytes=1, host_limit_bytes=1)


class _Resizing:
    """Maps an op of another workload's schedule to the same op with the sizes of `plan`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._activation_bytes = (
            plan.workload.tokens * plan.model.carried * DTYPE_BYTES[plan.workload.dtype]
        )
        self._cache: dict[str, Op] = {}

    def __call__(self, op: Op) -> Op:
        if op.id not in self._cache:
            self._cache[op.id] = self._resized(op)
        return self._cache[op.id]

    def _resized(self, op: Op) -> Op:
        kind = op.kind
        if kind in COMPUTE_KINDS:
            return msgspec.structs.replace(
                op,
                **cost_keys(
                    self.plan,
                    kind,
                    op.layer,
                    kept=has_saved_attention(op.shape),
                    read=kind == "recompute" and computes_output(op.shape),
                ),
            )
        if kind not in OFFLOADING:
            return op
        work, size = self.plan.workload, self._activation_bytes
        if kind in ("save_attention", "load_attention"):
            size = self.plan.model.kept_attention(op.layer, work).bytes
        return msgspec.structs.replace(op, bytes=size)


def _equal_when_resized(last: _Lowered, fresh: _Lowered) -> bool:
    """Returns whether the last schedule, resized for the fresh plan, equals the fresh schedule."""
    base, lowered, resizing, share = (
        last.schedule,
        fresh.schedule,
        _Resizing(fresh.plan),
        fresh.plan.workload.tokens / last.plan.workload.tokens,
    )
    return (
        base.compiled == lowered.compiled
        and [op.id for op in base.ops] == [op.id for op in lowered.ops]
        and base.sizes.which == lowered.sizes.which
        and all(
            _sizes(resizing(op)) == _sizes(other)
            for op, other in zip(base.sizes.ops, lowered.sizes.ops, strict=True)
        )
        and tuple(resized(buffer, share) for buffer in base.buffers) == lowered.buffers
    )


def _sizes(op: Op) -> tuple[object, ...]:
    return tuple(getattr(op, name) for name in _SIZES)
