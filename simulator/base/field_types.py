"""Checks the types of values that Python code gives to the fields of a struct.

msgspec checks types when it reads a file, but not when a struct is made in Python. There, values
may come from NumPy or pandas.
"""

from __future__ import annotations

import contextlib
import functools
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from megatrain.simulator.base.errors import UserError


def check_types(struct: msgspec.Struct, where: str) -> None:
    """Checks that each field of `struct` with a simple type has a value of this type: an integer, a
    float, a bool, a text, one of several words, or None.

    A value of another type, such as one of NumPy, is replaced by the equal value of this type.
    Otherwise 8 and 8.0 would be equal keys of a cache, and only one of them could be used.

    Args:
        struct: The struct. It may be frozen, if this is called in `__post_init__`.
        where: The name of the struct for error texts, such as `workload`.

    Raises UserError for a value of another type.
    """
    for name, allowed in _simple_fields(type(struct)):
        value = getattr(struct, name)
        if type(value) in allowed.types or (type(value) is str and value in allowed.words):
            continue
        same = allowed.same(value)
        if same is None:
            raise UserError(
                f"{where}: {name}",
                found=repr(value),
                allowed=allowed.text,
                fix=f"give {name} a value of this type",
            )
        msgspec.structs.force_setattr(struct, name, same)


class _Allowed(msgspec.Struct, frozen=True):
    """The values that a field may have."""

    types: tuple[type, ...]
    """The types of values."""
    words: tuple[str, ...]
    """The texts that are allowed, if not all are."""

    @property
    def text(self) -> str:
        """The values as text."""
        names = {int: "an integer", float: "a number", bool: "True or False", str: "a text"}
        parts = [*self.words, *(names[kind] for kind in self.types if kind in names)]
        return ", ".join(parts + ["None"] * (NoneType in self.types))

    def same(self, value: Any) -> int | float | str | None:
        """Returns the value of an allowed type that equals `value`, or None if there is none."""
        name = type(value).__name__
        if isinstance(value, str):
            return str(value) if str in self.types or value in self.words else None
        if isinstance(value, bool) or name in ("bool", "bool_"):  # the latter is that of NumPy
            return bool(value) if bool in self.types else None
        for kind in self.types:
            if kind in (int, float):
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    number: int | float = kind(value)
                    if number == value:
                        return number
        return None


@functools.cache
def _simple_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, _Allowed], ...]:
    """Returns the fields of the struct type `kind` that have a simple type, and what they allow."""
    found: list[tuple[str, _Allowed]] = []
    for field in msgspec.structs.fields(kind):
        parts = _parts(field.type)
        words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        types = [part for part in parts if part in (int, float, bool, str, NoneType)]
        literals = sum(get_origin(part) is Literal for part in parts)
        if len(types) + literals == len(parts):
            found.append((field.name, _Allowed(tuple(types), tuple(words))))
    return tuple(found)


def _parts(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself, without annotations."""
    if hasattr(kind, "__metadata__"):
        return _parts(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return tuple(part for each in get_args(kind) for part in _parts(each))
    return (kind,)
