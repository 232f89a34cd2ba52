"""The grid of a sweep: a plan for each combination of the axes' values. An axis is a name with its
values, from the command line or from TOML. A combination may be impossible: its values exclude each
other.

The name of an axis is `policy`, a knob (such as `weight_slots` or `placement.weights`), a field of
the workload (such as `batch` or `clipping`), or a limit (`device_memory` or `host_memory`). Sizes
may be written as `24GiB`. A file may have several grids. The sweep has the plans of all of them:

    [[grid]]
    policy = ["k_buffer"]
    weight_slots = [1, 2, 4]

    [[grid]]
    policy = ["overlapped"]
    chunk_bytes = ["64MiB", "256MiB"]
    "placement.weights" = ["", "e,0-11", "all"]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from megatrain.experiments.sweep.store import ImpossiblePlan, RowWorkload
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_toml
from megatrain.simulator.base.names import suggestion
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.model.workload import MOST_MICRO_BATCHES, Workload
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

_MOST = 1_000_000
LIMITS = {"device_memory": "device_limit_bytes", "host_memory": "host_limit_bytes"}
"""The axes that are a limit -> the field of a plan."""
_SIZES = {"chunk_bytes", "exchange_bytes", *LIMITS}
_WORK = Workload.__struct_fields__
_PLACED = tuple(f"placement.{name}" for name in Placement.__struct_fields__)
KNOBS = frozenset({*Knobs.__struct_fields__, *_PLACED} - {"placement"})
"""The axes that are a knob or a class of the placement."""
AXES = (
    "policy",
    *(name for name in Knobs.__struct_fields__ if name != "placement"),
    *_PLACED,
    *_WORK,
    *LIMITS,
)
"""The full name of every axis."""
ALIASES = {"seq": "sequence", "compile": "compiled"} | {
    short: f"placement.{short}" for short in Placement.__struct_fields__ if short not in AXES
}
"""Another name of an axis -> its full name. A class of the placement may be named without
`placement.`, except `placement.gradients`, because `gradients` is a field of the workload."""

Axes = dict[str, tuple[Any, ...]]
"""Name of an axis -> its values."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a grid file."""

    grid: list[dict[str, list[Any]]]
    """The grids: axis -> its values."""


def in_words() -> str:
    """Returns the names of all axes, as text for a help."""
    short = {name: f"{name} (or {other})" for other, name in ALIASES.items() if name in _WORK}
    work = [short.get(name, name) for name in _WORK]
    knobs = [name for name in AXES if name in KNOBS and name not in _PLACED]
    return (
        f"policy; the fields of the workload {', '.join(work)}; the knobs {', '.join(knobs)}; the"
        f" classes of the placement {', '.join(_PLACED)}; and the limits {' and '.join(LIMITS)}"
    )


def read_grids(path: Path) -> list[Axes]:
    """Returns the grids of a TOML file. Raises UserError if the file is not a list of grids."""
    found = read_toml(path, _File).grid
    if not found:
        raise UserError(
            str(path),
            found="no [[grid]]",
            allowed="one or more",
            fix="write [[grid]] and under it lines like weight_slots = [1, 2]",
        )
    return [dict(axis(name, values, str(path)) for name, values in grid.items()) for grid in found]


def axis(
    name: str,
    values: Sequence[Any],
    where: str,
    *,
    others: tuple[str, ...] = (),
    verb: str = "sweep",
) -> tuple[str, tuple[Any, ...]]:
    """Returns the full name and the converted values of an axis. The given values are texts or TOML
    values.

    Args:
        name: the name of the axis, or its alias.
        values: the values.
        where: names the source in an error.
        others: names that the command accepts beside the axes. An error lists them, too.
        verb: the command whose help an error names.

    Raises UserError for an unknown name or a value that the axis cannot have.
    """
    name = ALIASES.get(name, name)
    if name not in AXES:
        *first, last = (*LIMITS, *others)
        listed = ", ".join(first)
        raise UserError(
            where,
            found=f"{name!r}",
            allowed=f"policy, a knob, placement.CLASS, a field of the workload, {listed} or {last}",
            fix=suggestion(name, (*AXES, *others), f"see `megatrain {verb} --help`"),
        )
    if not values:
        raise UserError(
            f"{where}: {name}",
            found="no value",
            allowed="one or more",
            fix=f"give values to {name}, or leave it out",
        )
    return name, tuple(dict.fromkeys(_value(name, value, f"{where}: {name}") for value in values))


def _value(name: str, value: Any, where: str) -> Any:
    """Returns the converted value of an axis. Raises UserError for one that no plan can have."""
    nothing = name == "exchange_bytes" and value == "0"
    if name in _SIZES and isinstance(value, str) and not nothing:
        return parse_bytes(value, where)
    wanted = (
        int
        if name in LIMITS
        else str
        if name == "policy" or name in _PLACED
        else _type_of(Workload if name in _WORK else Knobs, name)
    )
    try:
        converted = msgspec.convert(value, wanted, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        raise UserError(
            where,
            found=repr(value),
            allowed=_in_words(name, wanted),
            fix=f"set {value} instead, which is {_in_words(value, _type_of(Workload, value))}"
            if value in _WORK
            else suggestion(str(value), _choices(wanted), "write another value"),
        ) from None
    if name in _WORK:
        _refuse_alone(name, converted)
    elif name in Knobs.__struct_fields__:
        msgspec.structs.replace(Knobs(), **{name: converted})
    return converted


def _refuse_alone(name: str, value: Any) -> None:
    """Raises UserError for a value of a field of the workload that no workload can have."""
    fields: dict[str, Any] = {"batch": 1, "sequence": 1, name: value}
    if name == "sum_group":  # the only field whose value needs another one that is not the default
        fields["accumulation"] = min(max(value, 1), MOST_MICRO_BATCHES)
    Workload(**fields)


def _type_of(into: type[msgspec.Struct], name: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(into) if field.name == name)


def _choices(kind: Any) -> list[str]:
    """Returns the texts that a value of type `kind` may have, if there are few."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return ["true", "false"]
    return [text for part in get_args(kind) for text in _choices(part)]


def _in_words(name: str, kind: Any) -> str:
    """Returns the values that an axis of type `kind` may have, in words."""
    if name in _SIZES:
        return "a size such as 24GiB, or a whole number of bytes"
    values = ", ".join(_choices(kind)) or ("a text" if kind is str else "a whole number")
    return f"{values}, or null to leave it unset" if type(None) in get_args(kind) else values


def plans(base: Plan, grids: Sequence[Axes]) -> list[Plan]:
    """Returns the possible plans of `combinations`."""
    return [plan for plan in combinations(base, grids) if isinstance(plan, Plan)]


def combinations(base: Plan, grids: Sequence[Axes]) -> list[Plan | ImpossiblePlan]:
    """Returns every combination of values of the grids, each once. Fields that a grid does not name
    are taken from `base`. Raises UserError for a limit that no plan can have, or for more than a
    million combinations.
    """
    count = sum(math.prod(len(values) for values in grid.values()) for grid in grids)
    if count > _MOST:
        raise UserError(
            "sweep",
            found=f"{count:,} plans",
            allowed=f"at most {_MOST:,}",
            fix="give fewer values, or sweep in parts",
        )
    found: dict[bytes, Plan | ImpossiblePlan] = {}
    for grid in grids:
        for name in LIMITS:
            for limit in grid.get(name, ()):
                changed(base, {name: limit})
        for values in itertools.product(*grid.values()):
            plan = _combined(base, dict(zip(grid, values, strict=True)))
            identity = (
                plan.policy,
                plan.workload,
                plan.knobs,
                plan.device_limit_bytes,
                plan.host_limit_bytes,
            )
            found.setdefault(msgspec.msgpack.encode(identity), plan)
    return list(found.values())


def _combined(base: Plan, values: dict[str, Any]) -> Plan | ImpossiblePlan:
    """Returns `base` with the `values` of some axes, whether or not they exclude each other."""
    try:
        return changed(base, values)
    except UserError as error:
        limits = {field: values.get(name, getattr(base, field)) for name, field in LIMITS.items()}
        return ImpossiblePlan(
            policy=values.get("policy", base.policy),
            knobs=_knobs(base, values),
            workload=RowWorkload.of(base.workload, _within(values, _WORK)),
            reason=str(error),
            **limits,
        )


def changed(base: Plan, values: dict[str, Any]) -> Plan:
    """Returns `base` with the `values` of some axes. Raises UserError if no plan can have them."""
    changes: dict[str, Any] = {
        field: values[name] for name, field in LIMITS.items() if name in values
    }
    for name, field in (
        ("policy", "policy"),
        ("gpus", "gpus"),
        ("hosts", "hosts"),
        ("network", "network_gb_per_s"),
    ):
        if name in values:
            changes[field] = values[name]
    return msgspec.structs.replace(
        base,
        knobs=_knobs(base, values),
        workload=msgspec.structs.replace(base.workload, **_within(values, _WORK)),
        **changes,
    )


def _knobs(base: Plan, values: dict[str, Any]) -> Knobs:
    """Returns the knobs of `base` with those of `values`."""
    placed = {name.partition(".")[2]: values[name] for name in _PLACED if name in values}
    placement = msgspec.structs.replace(base.knobs.placement, **placed)
    changes = _within(values, Knobs.__struct_fields__)
    return msgspec.structs.replace(base.knobs, **changes, placement=placement)


def _within(values: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the entries of `values` whose key is one of `names`."""
    return {name: value for name, value in values.items() if name in names}
