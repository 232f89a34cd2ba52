"""Simulated: rows of a sweep without a run: memory first, then time: the evaluator's where no op slows another, which is exact, else the engine's.

What is common between plans is done once, so plans should come sorted by `likeness`:

* a limit changes neither schedule nor time, only whether that fits;
* another batch or sequence length changes the sizes of ops and buffers, and in most policies nothing else. So one lowering serves all of them: what
  hangs on the tokens gets the size that it has with the other workload. Whether a policy is so is tried, not believed: for each policy and workload
  the first such schedule is also lowered, and where the two differ every later one is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from megatrain.experiments.sweep.store import Decided, Row
from megatrain.simulator import engine, evaluator, policies
from megatrain.simulator.arithmetic import cost_keys
from megatrain.simulator.assessment import plan_account
from megatrain.simulator.capacity import resized
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COMPUTE_KINDS, HardwareSpec
from megatrain.simulator.memory import Account
from megatrain.simulator.metrics import tokens_per_second
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.schedule import Op, Schedule, is_kept
from megatrain.simulator.specs import DTYPE_BYTES
from megatrain.simulator.workload import Workload

_SIZES = ("bytes", "parameters", "flops", "elements", "shape", "offset")
_PARKING = ("save_activations", "load_activations")


def structure(plan: Plan) -> tuple[str, Knobs, Workload]:
    """What the order of a plan's ops may hang on, tokens left out."""
    return plan.policy, plan.knobs, msgspec.structs.replace(plan.workload, batch=1, sequence=1)


def likeness(plan: Plan) -> tuple[bytes, int, int]:
    """A key to sort by: plans of one structure stand together, and among them those of one workload."""
    return msgspec.msgpack.encode(structure(plan)), plan.workload.batch, plan.workload.sequence


class _Lowered(NamedTuple):
    """A schedule, and the plan it was made for."""

    plan: Plan
    schedule: Schedule


class Simulator:
    """Simulates plans of one model on one machine, one after the other."""

    def __init__(self, hardware: HardwareSpec) -> None:
        self.hardware = hardware
        self._costs: dict[Workload, CostModel] = {}
        self._last: _Lowered | None = None
        self._alike: dict[tuple[str, Workload], bool] = {}  # (policy, workload) -> another workload's schedule serves
        self._known: tuple[object, Account, tuple[float, str, Decided] | None] | None = None  # of the last plan without its limits

    def row(self, plan: Plan, key: str) -> Row:
        """The plan's row; one of a plan that its policy refuses, or of whose ops no cost is known, says so."""
        told: dict[str, Any] = {
            "key": key, "model": plan.model.name, "hardware": self.hardware.name, "policy": plan.policy, "knobs": plan.knobs, "workload": plan.workload,
            "device_limit_bytes": plan.device_limit_bytes, "host_limit_bytes": plan.host_limit_bytes,
        }  # fmt: skip
        try:
            account, timed = self._measure(plan, self._cost_model(plan))
        except UserError as error:
            return Row(**told, decided_by="refused", reason=str(error))
        told |= {"device_peak_bytes": account.device_peak_bytes, "host_peak_bytes": account.host_peak_bytes}
        if timed is None:
            return Row(**told, decided_by="memory", binding=account.binding)
        seconds, binding, decided = timed
        return Row(**told, decided_by=decided, binding=binding, step_seconds=seconds, tokens_per_second=tokens_per_second(plan.workload, seconds))

    def _cost_model(self, plan: Plan) -> CostModel:
        if plan.workload not in self._costs:
            self._costs[plan.workload] = cost_model(self.hardware, plan.model, plan.workload)
        return self._costs[plan.workload]

    def _measure(self, plan: Plan, costs: CostModel) -> tuple[Account, tuple[float, str, Decided] | None]:
        """Memory, and where that fits time."""
        known = (plan.policy, plan.knobs, plan.workload)
        if self._known is None or self._known[0] != known:
            self._known = known, plan_account(plan, self._outline(_bare(plan)), costs), None
        account = msgspec.structs.replace(self._known[1], device_limit_bytes=plan.device_limit_bytes, host_limit_bytes=plan.host_limit_bytes)
        if not account.fits:
            return account, None
        if self._known[2] is None:
            self._known = (*self._known[:2], self._time(_bare(plan), costs))
        return account, self._known[2]

    def _time(self, plan: Plan, costs: CostModel) -> tuple[float, str, Decided]:
        base = self._base(plan)
        schedule = base.schedule if base else self._lower(plan)
        if base and base.plan.workload != plan.workload:
            costs = Changed(costs, _Resizing(plan))
        sizes, lanes = costs.sizes(schedule), Counter[str]()
        for index, count in Counter(sizes.which).items():
            lanes[sizes.ops[index].lane] += count * costs.duration_ns(sizes.ops[index])
        decided: Decided = "evaluator" if all(costs.demand(op) is None for op in sizes.ops) else "engine"
        player = engine.makespan_ns if decided == "engine" else evaluator.makespan_ns
        return (player(schedule, costs) + costs.step_overhead_ns) / 1e9, max(lanes, key=lanes.__getitem__, default="none"), decided

    def _outline(self, plan: Plan) -> Schedule:
        """A schedule with the plan's buffers."""
        if base := self._base(plan):
            share = plan.workload.tokens / base.plan.workload.tokens
            buffers = tuple(resized(buffer, share) for buffer in base.schedule.buffers)
            return Schedule(policy=plan.policy, buffers=buffers, ops=())
        outline = policies.outline(plan)
        if outline.ops:  # the policy tells its buffers by lowering: then that is done
            self._adopt(_Lowered(plan, outline))
        return outline

    def _base(self, plan: Plan) -> _Lowered | None:
        """The last schedule, where it serves for the plan."""
        if self._last is None or structure(self._last.plan) != structure(plan):
            return None
        return self._last if self._last.plan.workload == plan.workload or self._alike.get((plan.policy, plan.workload)) else None

    def _lower(self, plan: Plan) -> Schedule:
        schedule = policies.lower_anew(plan)
        self._adopt(_Lowered(plan, schedule))
        return schedule

    def _adopt(self, fresh: _Lowered) -> None:
        """Keeps the schedule; and looks whether the last one would have served, where that was never tried for this policy and workload."""
        plan, last = fresh.plan, self._last
        if last is not None and structure(last.plan) == structure(plan) and (plan.policy, plan.workload) not in self._alike:
            self._alike[plan.policy, plan.workload] = _serves(last, fresh)
        self._last = fresh


def _bare(plan: Plan) -> Plan:
    """Without limits: no schedule hangs on them."""
    return msgspec.structs.replace(plan, device_limit_bytes=1, host_limit_bytes=1)


class _Resizing:
    """An op of another workload's schedule, with the sizes that `plan` gives it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._parked = plan.workload.tokens * plan.model.hidden * DTYPE_BYTES[plan.workload.dtype]
        self._found: dict[str, Op] = {}

    def __call__(self, op: Op) -> Op:
        if op.id not in self._found:
            self._found[op.id] = self._resized(op)
        return self._found[op.id]

    def _resized(self, op: Op) -> Op:
        kind = op.kind
        if kind in COMPUTE_KINDS:
            return msgspec.structs.replace(op, **cost_keys(self.plan, kind, op.layer, kept=is_kept(op.shape)))
        return msgspec.structs.replace(op, bytes=self._parked) if kind in _PARKING else op


def _serves(last: _Lowered, fresh: _Lowered) -> bool:
    """The last schedule, resized, is the one that was lowered."""
    base, found, resizing, share = last.schedule, fresh.schedule, _Resizing(fresh.plan), fresh.plan.workload.tokens / last.plan.workload.tokens
    return (
        base.compiled == found.compiled
        and [op.id for op in base.ops] == [op.id for op in found.ops]
        and base.sizes.which == found.sizes.which
        and all(_sizes(resizing(one)) == _sizes(other) for one, other in zip(base.sizes.ops, found.sizes.ops, strict=True))
        and tuple(resized(buffer, share) for buffer in base.buffers) == found.buffers
    )


def _sizes(op: Op) -> tuple[object, ...]:
    return tuple(getattr(op, name) for name in _SIZES)
