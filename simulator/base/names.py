"""Names as people write them: finds the entry of a library that a name means, or similar ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_LONGEST = 100
_NO_OTHERS: Mapping[str, str] = MappingProxyType({})
SIMILAR = 0.6
"""The share of two names that is equal if their spelling is similar: the default of difflib."""
_VENDORS = "nvidia|geforce|rtx|quadro|tesla|amd|radeon|instinct|apple|meta"
_VENDOR = re.compile(rf"^(?:(?:{_VENDORS})(?=[-\d])-?)+")
_VARIANT = re.compile(r"(?:-(?:instruct|chat|base|it|pt|hf))+$")
_UNIT = re.compile(r"(?<=\d)gi?b(?=-|$)")


class _Key(NamedTuple):
    """A name reduced to the parts that do not depend on how people write it."""

    letters: str
    """Its letters and digits, in lower case."""
    hyphens: frozenset[int]
    """The positions in `letters` where a hyphen is between two digits."""
    separators: frozenset[int]
    """The positions in `letters` where a hyphen or a dot is between two digits."""


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
    """Returns whether `text` is a path, rather than a name in the library or on the hub.

    It is a path if such a file or folder exists, if its first folder exists, or if it begins with
    `.`, `/` or `~`.
    """
    first = text.partition("/")[0]
    return text.startswith((".", "/", "~")) or os.path.exists(text) or os.path.isdir(first)


def meant(name: str, known: Iterable[str], others: Mapping[str, str] = _NO_OTHERS) -> str | None:
    """Returns the name in `known` that `name` means, or None if there is none or more than one.
    `others` has further names of the entries: name -> name in `known`.

    Case, hyphens, underscores, dots, blanks, the organization before a slash, the vendor before the
    name, a variant after it (`-instruct`, `-chat`, `-base`, `-it`), and the unit of a size are
    ignored. A hyphen between two digits may be written as another separator, but not left out:
    `qwen2-57b` is not `qwen2.5-7b`.

    >>> meant("Qwen/Qwen2.5-14B-Instruct", ["qwen2.5-14b", "qwen2.5-7b"])
    'qwen2.5-14b'
    >>> meant("4090", ["rtx4090"]), meant("qwen2-57b", ["qwen2.5-7b"])
    ('rtx4090', None)
    """
    entries = {**others, **{each: each for each in known}}
    if name in entries:
        return entries[name]
    wanted = _key(name)
    matches = set()
    for candidate, entry in entries.items():
        key = _key(candidate)
        if key.letters == wanted.letters and key.hyphens <= wanted.separators <= key.separators:
            matches.add(entry)
    return matches.pop() if len(matches) == 1 else None


def alike(
    name: str,
    known: Iterable[str],
    most: int = 3,
    others: Mapping[str, str] = _NO_OTHERS,
    similar_share: float = SIMILAR,
) -> list[str]:
    """Returns up to `most` of the `known` names that resemble `name`, or whose further name in
    `others` does (see `meant`).

    A name resembles `name` if one of the two begins with the other. If there is no such name, it
    resembles `name` if one contains the other. If there is none either, the names with the most
    similar spelling are returned, most similar first. Letters and digits are compared. Spellings
    are similar if at least `similar_share` of both names is equal. `gb10` has 0.67 in common with
    `gb200`.

    >>> alike("h100", ["h100-sxm", "h200", "h100-pcie", "l40s"])
    ['h100-pcie', 'h100-sxm']
    """
    import difflib  # takes 9 ms, and only errors need it

    wanted, entries = _key(name).letters, {**others, **{each: each for each in known}}
    names = sorted(entries, key=entries.__getitem__)
    keys = {candidate: _key(candidate).letters for candidate in names}
    beginnings, parts = [], []
    for candidate, key in keys.items():
        shorter, longer = sorted((wanted, key), key=len)
        if len(shorter) > 2 and longer.startswith(shorter):
            beginnings.append(candidate)
        elif len(shorter) > 3 and shorter in longer:
            parts.append(candidate)
    close = difflib.get_close_matches(wanted, dict.fromkeys(keys.values()), most, similar_share)
    similar = [candidate for key in close for candidate in keys if keys[candidate] == key]
    return list(dict.fromkeys(entries[each] for each in beginnings or parts or similar))[:most]


def suggestion(
    name: str,
    known: Iterable[str],
    otherwise: str,
    others: Mapping[str, str] = _NO_OTHERS,
    similar_share: float = SIMILAR,
) -> str:
    """Returns the fix for an unknown `name`: up to three known names that resemble it (see
    `alike`), or `otherwise` if none does.

    >>> suggestion("qwen2", ["qwen3", "llama"], "check the name")
    'did you mean qwen3?'
    """
    similar = alike(name, known, others=others, similar_share=similar_share)
    *first, last = similar or [""]
    listed = f"{', '.join(first)} or {last}" if first else last
    return f"did you mean {listed}?" if last else otherwise


def short_paths(paths: Sequence[str]) -> list[str]:
    """Returns the shortest end of each path that no other path has. All have as many parts."""
    parts = [Path(path).absolute().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return list(paths)
