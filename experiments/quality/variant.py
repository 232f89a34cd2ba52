"""Variants: names such as `master24` or `exact+layer`, which set fields of a workload."""

from __future__ import annotations

import typing
from collections import Counter
from typing import Any, NamedTuple

from megatrain.experiments.quality.rows import RunSettings
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import registered
from megatrain.simulator.model.state_format import EXACT, FORMATS
from megatrain.simulator.model.workload import Workload

_FIXED = ("attention",)
"""Fields of a workload that no variant changes although their values are words. They decide which
kernels run, not what is computed."""


class FieldValue(NamedTuple):
    """A field of a workload and its value."""

    field: str
    """The field's name."""
    value: str
    """Its value."""


def words() -> dict[str, FieldValue]:
    """Returns word -> the field and the value that it sets, for words that may follow a state
    format.

    A word is a value of a field, such as `layer`. The name of a field that is None by default is
    also a word, which sets the first value of the field. A word that is a value of two fields is
    left out.
    """
    hints = typing.get_type_hints(Workload)
    values = {
        name: _words_of(hint)
        for name, hint in hints.items()
        if name not in ("state", "optimizer", *_FIXED)
    }
    values["optimizer"] = tuple(registered())
    found = [(word, FieldValue(name, word)) for name, texts in values.items() for word in texts]
    found += [
        (name, FieldValue(name, texts[0]))
        for name, texts in values.items()
        if texts and type(None) in typing.get_args(hints[name])
    ]
    counts = Counter(word for word, _ in found)
    return {word: value for word, value in found if counts[word] == 1}


def _words_of(hint: Any) -> tuple[str, ...]:
    """Returns the words of a `Literal` type, or of the `Literal` types in a union."""
    if typing.get_origin(hint) is typing.Literal:
        return tuple(word for word in typing.get_args(hint) if isinstance(word, str))
    return tuple(word for part in typing.get_args(hint) for word in _words_of(part))


def fields_of(variant: str) -> dict[str, str]:
    """Returns field -> value for the fields of a workload that `variant` sets. One is `state`.

    A variant is `STATE[+WORD ...]`. STATE is a state format, and each WORD is one of `words`, such
    as `layer` (clipping) or `fp32` (dtype).

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
        found = known.get(word)
        if found is None or found.field in fields:
            raise UserError(
                f"--variants {variant}",
                found=repr(word) if found is None else f"two words for {found.field}",
                allowed=", ".join(f"{name} ({value.field})" for name, value in known.items()),
                fix="use one of these words for each field, or leave it out",
            )
        fields[found.field] = found.value
    return fields


def workload_of(variant: str, settings: RunSettings) -> Workload:
    """Returns the workload of a variant: bf16 unless the variant says otherwise, with the
    loss in one chunk.

    Raises UserError if the workload cannot have the variant's fields.
    """
    fields: dict[str, Any] = {"dtype": "bf16", **fields_of(variant)}
    try:
        return Workload(
            batch=settings.batch,
            sequence=settings.sequence,
            loss_chunk=settings.step_tokens,
            compiled=settings.compiled,
            **fields,
        )
    except UserError as error:
        raise error.inside(f"--variants {variant}") from None


def variants(text: str) -> list[str]:
    """Returns the variants in a comma-separated list, each once. It is the argparse type of
    `--variants`.

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
