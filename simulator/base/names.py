"""Names as people write them: which entry of a library a name means, and which ones resemble it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

_LONGEST = 100
_VENDORS = "nvidia|geforce|rtx|quadro|tesla|amd|radeon|instinct|apple|meta"
_VENDOR = re.compile(rf"^(?:(?:{_VENDORS})(?=[-\d])-?)+")
_VARIANT = re.compile(r"(?:-(?:instruct|chat|base|it|pt|hf))+$")
_UNIT = re.compile(r"(?<=\d)gi?b(?=-|$)")


class _Key(NamedTuple):
    """A name without what people write in several ways."""

    letters: str
    """Its letters and digits."""
    hyphens: frozenset[int]
    """The places in `letters` where a hyphen is between two digits."""
    separators: frozenset[int]
    """The places in `letters` where a hyphen or a dot is between two digits."""


def _key(name: str) -> _Key:
    text = re.sub(r"[-_\s]+", "-", name[-_LONGEST:].strip().rstrip("/").rpartition("/")[2].lower())
    text = _VARIANT.sub("", _VENDOR.sub("", text)) or text
    text = _UNIT.sub("", text)
    letters, hyphens, separators = "", set(), set()
    for place, character in enumerate(text):
        if character not in "-.":
            letters += character
        elif text[place - 1 : place].isdigit() and text[place + 1 : place + 2].isdigit():
            separators.add(len(letters))
            if character == "-":
                hyphens.add(len(letters))
    return _Key(letters, frozenset(hyphens), frozenset(separators))


def is_path(text: str) -> bool:
    """Returns whether `text` is a path and cannot be a name, of the library or on the hub.

    It is a path if there is such a file or folder, if its first folder exists, or if it begins like
    a path.
    """
    first = text.partition("/")[0]
    return text.startswith((".", "/", "~")) or os.path.exists(text) or os.path.isdir(first)


def meant(name: str, known: Iterable[str]) -> str | None:
    """Returns the one of the `known` names that `name` means, or None.

    Case, hyphens, underscores, dots, blanks, the organization before a slash, the vendor before the
    name, a variant after it (`-instruct`, `-chat`, `-base`, `-it`), and the unit of a size are
    ignored. A hyphen between two digits may be another separator, but it must be there: `qwen2-57b`
    is not `qwen2.5-7b`.

    >>> meant("Qwen/Qwen2.5-14B-Instruct", ["qwen2.5-14b", "qwen2.5-7b"])
    'qwen2.5-14b'
    >>> meant("4090", ["rtx4090"]), meant("qwen2-57b", ["qwen2.5-7b"])
    ('rtx4090', None)
    """
    names = list(known)
    if name in names:
        return name
    wanted = _key(name)
    found = []
    for each in names:
        key = _key(each)
        if key.letters == wanted.letters and key.hyphens <= wanted.separators <= key.separators:
            found.append(each)
    return found[0] if len(found) == 1 else None


def alike(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Returns up to `most` of the `known` names that resemble `name`.

    These are the names that begin with it, or with which it begins. If there are none, they are
    those that contain it, or that it contains, and otherwise those of a similar spelling, the most
    similar first.

    >>> alike("h100", ["h100-sxm", "h200", "h100-pcie", "l40s"])
    ['h100-pcie', 'h100-sxm']
    """
    wanted, keys = _key(name).letters, {each: _key(each).letters for each in sorted(known)}
    beginnings, parts = [], []
    for each, key in keys.items():
        shorter, longer = sorted((wanted, key), key=len)
        if len(shorter) > 2 and longer.startswith(shorter):
            beginnings.append(each)
        elif len(shorter) > 3 and shorter in longer:
            parts.append(each)
    close = difflib.get_close_matches(wanted, keys.values(), most)
    similar = [each for key in close for each in keys if keys[each] == key]
    return (beginnings or parts or similar)[:most]


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Returns the fix for an unknown `name`: up to three known names that resemble it, or
    `otherwise` if none does.

    >>> suggestion("qwen2", ["qwen3", "llama"], "check the name")
    'did you mean qwen3?'
    """
    *others, last = alike(name, known) or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"did you mean {listed}?" if last else otherwise
