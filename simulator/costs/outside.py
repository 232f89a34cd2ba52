"""Checks of cost models from outside the package: a mistake in one is an error of one line."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs.contention import Demand
from megatrain.simulator.costs.protocol import CostModel
from megatrain.simulator.hardware.cost_table import COMPUTE_KINDS, Workspace
from megatrain.simulator.schedule import Op, Sizes

_BYTES = "a whole number of bytes >= 0"


def checked(costs: Any, where: str, module: str) -> CostModel:
    """Returns a copy of `costs` whose methods raise UserError if they fail, or if they return what
    `CostModel` does not allow. Numbers of NumPy become those of Python.

    Raises UserError if it lacks an attribute of `CostModel`, or if one has a wrong value.

    Args:
        costs: What the function `cost_model` returned.
        where: Names the cost model in errors.
        module: The module that defines it. Errors name its line.
    """
    missing = [name for name in vars(CostModel) if name[0] != "_" and not hasattr(costs, name)]
    if missing:
        raise UserError(
            where,
            found=f"{type(costs).__name__} without {missing[0]}",
            allowed="a CostModel, such as a subclass of Datasheet",
            fix="return one from the function cost_model",
        )
    if isinstance(costs.duration_ns, _Checked):
        known: CostModel = costs
        return known
    costs = copy.copy(costs)  # it may be a cost model of this package, which others use
    changed: dict[str, Any] = {}
    for name, (wrong, plain) in _ATTRIBUTES.items():
        value = getattr(costs, name)
        if allowed := wrong(value):
            raise _refusal(where, f"{value!r} as {name}", allowed)
        if not _is_plain(value):
            changed[name] = plain(value)
    dispatched = costs.dispatch_ns.get("compute", 0) > 0
    duration: Callable[[Any, Any], str] = functools.partial(_duration, dispatched=dispatched)
    for name, refused in {**_METHODS, "duration_ns": duration}.items():
        changed[name] = _Checked(getattr(costs, name), refused, name, where, module)
    for name, value in changed.items():
        try:
            object.__setattr__(costs, name, value)  # also in a frozen dataclass
        except (AttributeError, TypeError) as error:
            raise UserError(
                where,
                found=f"{type(costs).__name__}, whose attributes cannot be set",
                allowed="an object of a class without __slots__",
                fix="derive the class from Datasheet, Calibrated or EstimatedCosts",
            ) from error
    found: CostModel = costs
    return found


class _Checked:
    """A method of a cost model, with its failures and its results checked."""

    def __init__(
        self,
        method: Callable[..., Any],
        refused: Callable[[Any, Any], str],
        name: str,
        where: str,
        module: str,
    ) -> None:
        """`refused` is as in `_METHODS`, and the rest as in `checked`."""
        self._method, self._refused, self._name = method, refused, name
        self._where, self._module = where, module

    def __call__(self, *given: Any, **named: Any) -> Any:
        first = next(iter((*given, *named.values())), None)
        try:
            result = self._method(*given, **named)
            allowed = self._refused(result, first)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            line = plugins.line_in(self._module, error)
            text = f"{type(error).__name__} in {self._called(first)}: {error}{line}"
            raise _refusal(self._where, text, "a result, or a UserError") from error
        if allowed:
            raise _refusal(self._where, f"{result!r} as {self._called(first)}", allowed)
        if self._name == "rates":
            return tuple(map(int, result))
        # A number of NumPy could overflow.
        is_number = isinstance(result, Integral) and not isinstance(result, bool)
        return int(result) if is_number else result

    def _called(self, op: object) -> str:
        return f"{self._name} of {op.kind} {op.id}" if isinstance(op, Op) else self._name


def _refusal(where: str, found: str, allowed: str) -> UserError:
    return UserError(where, found=found, allowed=allowed, fix="correct the cost model")


def _whole(value: object, least: int = 0) -> bool:
    return isinstance(value, Integral) and int(value) >= least


def _duration(value: object, op: Op, *, dispatched: bool) -> str:
    # A step takes time only if its products or their dispatch do.
    least = 0 if dispatched or op.kind not in COMPUTE_KINDS else 1
    return "" if _whole(value, least) else f"a whole number of ns >= {least}"


def _rates(value: Any, busy: tuple[Demand, ...]) -> str:
    fits = len(value) == len(busy) and all(_whole(rate, 1) for rate in value)
    return "" if fits else f"{len(busy)} whole numbers of millionths, each >= 1"


def _bytes(value: object, _: object = None) -> str:
    return "" if _whole(value) else _BYTES


def _none_or_bytes(value: object, _: object) -> str:
    return "" if value is None or _whole(value) else f"None, or {_BYTES}"


def _instance(kind: type, *, optional: bool) -> Callable[[object, object], str]:
    def refused(value: object, _: object) -> str:
        fits = isinstance(value, kind) or (optional and value is None)
        return "" if fits else f"{'None, or ' if optional else ''}a {kind.__name__}"

    return refused


def _dispatch(value: object) -> str:
    fits = isinstance(value, Mapping) and all(_whole(each) for each in value.values())
    return "" if fits else "lane -> a whole number of ns >= 0"


def _factors(value: object) -> str:
    fits = isinstance(value, tuple) and all(
        isinstance(each, Real) and float(each) > 0 for each in value
    )
    return "" if fits else "a tuple of numbers > 0"


def _nanoseconds(value: object) -> str:
    return "" if _whole(value) else "a whole number of ns >= 0"


def _is_plain(value: Any) -> bool:
    """Returns whether a number, or all numbers of a mapping or a tuple, are those of Python."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    parts = value if isinstance(value, tuple) else (value,)
    return all(type(each) in (int, float) for each in parts)


def _plain(value: Mapping[str, Integral]) -> dict[str, int]:
    return {lane: int(each) for lane, each in value.items()}


_ATTRIBUTES: dict[str, tuple[Callable[[object], str], Callable[[Any], object]]] = {
    "dispatch_ns": (_dispatch, _plain),
    "step_overhead_ns": (_nanoseconds, int),
    "process_bytes": (_bytes, int),
    "library_bytes": (_bytes, int),
    "host_factors": (_factors, lambda value: tuple(map(float, value))),
}
"""Attribute of a cost model -> two functions: one that returns what is allowed, or an empty text if
the value is, and one that returns the value in numbers of Python."""
_METHODS: dict[str, Callable[[Any, Any], str]] = {
    "sizes": _instance(Sizes, optional=False),
    "demand": _instance(Demand, optional=True),
    "rates": _rates,
    "extrapolated": lambda _, __: "",
    "collective_bytes": _bytes,
    "activations_bytes": _none_or_bytes,
    "workspace": _instance(Workspace, optional=True),
}
"""Method, except `duration_ns` -> a function (result, first argument) that returns the same."""
