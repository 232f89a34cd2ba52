"""The source of a model: a folder or a name on the hub. This module does not import PyTorch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.names import is_path

_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(@(?P<revision>[A-Za-z0-9][\w./-]{0,127}))?"
)


class HubName(NamedTuple):
    """The name of a model on the hub."""

    name: str
    """`org/name`."""
    revision: str | None
    """A branch, a tag or a commit; None for the newest revision."""


def hub_name(text: str) -> HubName | None:
    """Parses `text` as a name on the hub. Returns None if it is a path or not such a name."""
    named = None if is_path(text) else _HUB_NAME.fullmatch(text)
    return HubName(named["name"], named["revision"]) if named else None


def name_on_hub(source: str, *, fix: str = "") -> HubName | None:
    """Parses `source` as a name on the hub. Returns None if it is a folder. Raises UserError if it
    is neither. `fix` is the fix in the error message, if there is a better one than the usual.
    """
    if named := hub_name(source):
        return named
    if os.path.isdir(source):
        return None
    raise no_folder(
        f"model {source}",
        source,
        fix=fix
        or f"{_correction(source)}; if it is the `source` of a plan, pass --model or --init random",
    )


def no_folder(where: str, source: str, *, fix: str = "") -> UserError:
    """Returns the error for `source`, which is neither a folder nor a name on the hub.

    Args:
        where: the start of the error message.
        source: the path.
        fix: the fix, or an empty text for a correction of the path.
    """
    return UserError(
        where,
        found="a file, not the folder with the weights"
        if os.path.exists(source)
        else "no such folder",
        allowed="a Hugging Face model folder, or a name on the hub such as org/name",
        fix=fix or _correction(source),
    )


def _correction(source: str) -> str:
    folder = os.path.dirname(source) or "."
    return (
        f"name a folder with weights, such as {folder} if they are there"
        if os.path.exists(source)
        else "correct the path or the name"
    )


def planned_source(source: str, origin: Path) -> str:
    """Returns the source of a plan: a name, or a path. A path is relative to the current folder if
    it exists inside this folder, and absolute otherwise.

    Args:
        source: `source` in the plan.
        origin: the folder of the plan, to which a path in the plan is relative.
    """
    path = os.path.normpath(os.path.join(os.path.realpath(origin), source))
    if os.path.exists(path):
        here = os.path.relpath(path)
        return path if here.startswith(os.pardir) else here
    is_relative_to_plan = source.startswith(os.curdir) and not os.path.exists(source)
    return path if is_relative_to_plan else source
