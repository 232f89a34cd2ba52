"""The source of a model: a folder or a name on the hub. This module does not import PyTorch."""

from __future__ import annotations

import os
import re
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


def name_on_hub(source: str) -> HubName | None:
    """Parses `source` as a name on the hub. Returns None if it is a folder. Raises UserError if it
    is neither.
    """
    if named := hub_name(source):
        return named
    if os.path.isdir(source):
        return None
    raise UserError(
        f"model {source}",
        found="no such folder",
        allowed="a Hugging Face model folder, or a name on the hub such as org/name",
        fix="correct the path or the name; if it is the `source` of a plan, pass --model or --init"
        " random",
    )
