"""A variant: a workload's fields by name, such as `master24` or `exact+layer`."""

from __future__ import annotations

import typing
from typing import Any

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import registered
from megatrain.simulator.model.state_format import EXACT, FORMATS
from megatrain.simulator.model.workload import Workload

_FIXED = ("attention",)
"""Fields of a workload with words as values that no variant changes: they decide which kernels run,
not what is computed."""


def words() -> dict[str, str]:
    """Returns every word that may follow a state format, and the field of a workload that it is a
    value of. A word that is a value of two fields is in neither.
    """
    hints = typing.get_type_hints(Workload)
    values = {name: _words_of(hint) for name, hint in hints.items() if name not in _FIXED}
    values["optimizer"] = tuple(registered())
    found = [(word, name) for name, each in values.items() for word in each if name != "state"]
    counts = [word for word, _ in found]
    return {word: name for word, name in found if counts.count(word) == 1}


def _words_of(hint: Any) -> tuple[str, ...]:
    """Returns the words of a `Literal`, also within a union; none for another type."""
    if typing.get_origin(hint) is typing.Literal:
        return tuple(word for word in typing.get_args(hint) if isinstance(word, str))
    return tuple(word for each in typing.get_args(hint) for word in _words_of(each))


def fields_of(variant: str) -> dict[str, str]:
    """Returns the fields of a workload that `variant` sets, among them `state`.

    A variant is `STATE[+WORD ...]`. STATE is a state format, and each WORD a value of another
    field of the workload, such as `layer` (clipping) or `fp32` (dtype).

    Raises UserError for an unknown state or word, or two words for one field.
    """
    state, *others = variant.split("+")
    if state not in FORMATS:
        raise UserError(
            f"--variants {variant}",
            found=repr(state),
            allowed=f"a state format: {', '.join(FORMATS)}",
            fix=f"begin the variant with one of these, as in {EXACT}+layer",
        )
    known, fields = words(), {"state": state}
    for word in others:
        field = known.get(word)
        if field is None or field in fields:
            raise UserError(
                f"--variants {variant}",
                found=repr(word) if field is None else f"two words for {field}",
                allowed=", ".join(f"{each} ({name})" for each, name in known.items()),
                fix="use one of these words for each field, or leave it out",
            )
        fields[field] = word
    return fields


def variants(text: str) -> list[str]:
    """Returns the variants in a comma-separated list, each once; an argparse type.

    Raises UserError if one of them is unknown, or if there is none.
    """
    names = list(dict.fromkeys(filter(None, text.replace(" ", "").split(","))))
    if not names:
        raise UserError(
            "--variants", found="none", allowed="at least one", fix="write it like --variants exact"
        )
    for name in names:
        fields_of(name)
    return names
