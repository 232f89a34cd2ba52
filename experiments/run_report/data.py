"""Data of the page's pictures, as plain lists. A thousand ops take some hundred kilobytes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megatrain.experiments.run_report.compared_run import ComparedRun
from megatrain.experiments.run_report.step_record import StepRecord
from megatrain.simulator.base.units import format_bytes, format_count
from megatrain.simulator.memory.account import CLASSES, PLACES, WORKSPACE, class_of, kinds_of, usage
from megatrain.simulator.planner.assessment import layer_activations, plan_account, slot_bytes
from megatrain.simulator.plots.pictures import DATA_COLOURS, KIND_COLOURS, UNKNOWN
from megatrain.simulator.schedule import Op

_CLASS_COLOURS = {name: DATA_COLOURS[name] for name in CLASSES}


def pictures(run: ComparedRun) -> dict[str, Any]:
    """Returns the data of all pictures. Times are in nanoseconds from the start of the step, sizes
    in bytes.
    """
    return {
        "ops": _ops(run),
        "lanes": list(run.schedule.lanes),
        "kinds": _kinds(run),
        "memory": _memory(run),
        "training": _training(run.record),
    }


def _kinds(run: ComparedRun) -> list[dict[str, str]]:
    """Returns the kinds of op with their colours, in the order of the legends of other pictures."""
    used = {op.kind for op in run.schedule.ops}
    return [
        {"name": kind, "colour": KIND_COLOURS.get(kind, UNKNOWN)}
        for kind in sorted(used, key=[*KIND_COLOURS, *sorted(used)].index)
    ]


def _ops(run: ComparedRun) -> dict[str, list[Any]]:
    """Returns column -> one value for each op, in program order. `after` has the indices of the ops
    on other lanes for which an op waits.
    """
    schedule, place = run.schedule, {op.id: index for index, op in enumerate(run.schedule.ops)}
    kinds, lanes = [kind["name"] for kind in _kinds(run)], list(schedule.lanes)
    columns: dict[str, list[Any]] = {
        "id": [op.id for op in schedule.ops],
        "kind": [kinds.index(op.kind) for op in schedule.ops],
        "lane": [lanes.index(op.lane) for op in schedule.ops],
        "after": [[place[other] for other in op.after] for op in schedule.ops],
        "size": [_size(op) for op in schedule.ops],
    }
    for timeline in (run.predicted, run.measured):
        spans = [timeline.by_op[op.id] for op in schedule.ops]
        columns[timeline.name] = [
            [span.start_ns for span in spans],
            [span.end_ns for span in spans],
        ]
    return columns


def _size(op: Op) -> str:
    """Returns the sizes that an op's cost depends on, as text."""
    parts = []
    if op.bytes:
        parts.append(format_bytes(op.bytes))
    if op.flops:
        parts.append(f"{op.flops / 1e12:,.3g} TFLOP")
    if op.parameters:
        parts.append(f"{format_count(op.parameters)} parameters")
    return ", ".join(parts)


def _memory(run: ComparedRun) -> dict[str, Any]:
    """Returns the memory of each place with any bytes: its limit, and for each timeline the bytes
    of each class. Entry i of a class is its bytes from time i on. The first time is 0.
    """
    plan, costs = run.plan, run.costs
    account = plan_account(plan, run.schedule, costs)
    limits = {"device": plan.device_limit_bytes, "host": plan.host_limit_bytes}
    places: dict[str, Any] = {}
    # The account leaves out slots that share the bytes of another pool. `kinds_of` has all slots.
    kinds = kinds_of(run.schedule)
    classes = {pool: class_of(kinds.get(pool)) for pool in (*account.pools, *kinds)}
    for timeline in (run.predicted, run.measured):
        steps = usage(run.schedule, timeline, slot_bytes(plan, layer_activations(plan, costs)))
        if workspace := account.pools.get(WORKSPACE):
            steps[WORKSPACE] = [(0, workspace)]
        for place in PLACES:
            held = _by_class(
                {pool: points for pool, points in steps.items() if pool.startswith(f"{place}.")},
                classes,
            )
            if any(any(values) for values in held["classes"].values()):
                places.setdefault(place, {"limit": limits[place]})[timeline.name] = held
    return {"classes": _CLASS_COLOURS, "places": places}


def _by_class(
    pools: dict[str, list[tuple[int, int]]], class_by_pool: dict[str, str]
) -> dict[str, Any]:
    """Returns the times at which a class changes, and the bytes of each class from each time on.
    `pools` has the points (time, bytes) of each pool.
    """
    changes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pool, points in pools.items():
        before = 0
        for time, held in points:
            changes[time][class_by_pool[pool]] += held - before
            before = held
    held_now = dict.fromkeys(
        [name for name in CLASSES if name in {class_by_pool[pool] for pool in pools}], 0
    )
    classes: dict[str, list[int]] = {name: [] for name in held_now}
    times = sorted(changes)
    for time in times:
        for name in held_now:
            held_now[name] += changes[time].get(name, 0)
            classes[name].append(held_now[name])
    return {"times": times, "classes": classes}


def _training(record: StepRecord) -> dict[str, Any]:
    """Returns the columns of the run's metrics, and (step, loss) of each evaluation. `window` is
    the number of steps of the running mean.
    """
    return {
        "steps": record.steps,
        "losses": [round(loss, 6) for loss in record.losses],
        "rates": [float(f"{rate:.6g}") for rate in record.rates],
        "norms": [None if norm is None else float(f"{norm:.6g}") for norm in record.norms],
        "speeds": [round(speed, 1) for speed in record.speeds],
        "evaluations": [[found.step, round(found.loss, 6)] for found in record.evaluations],
        "window": record.smoothing,
    }
