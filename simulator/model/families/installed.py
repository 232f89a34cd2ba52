"""Families: the built-in model families, and those that installed packages add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.simulator.base import plugins
from megatrain.simulator.model.families.family import Family

GROUP = "megatrain.families"
"""The entry point group of packages that add families."""


class Families(Mapping[str, Family]):
    """A mapping from `model_type` to family.

    A family of an installed package is loaded at its first lookup.

    A lookup raises UserError if the installed family cannot be imported or is not a `Family`.
    """

    def __init__(self, built_in: Mapping[str, Family]) -> None:
        self._loaded = dict(built_in)

    def __getitem__(self, model_type: str) -> Family:
        if model_type not in self._loaded and model_type in plugins.installed(GROUP):
            allowed = "an instance of megatrain.simulator.model.families.family.Family"
            self._loaded[model_type] = plugins.load_as(GROUP, model_type, Family, allowed)
        return self._loaded[model_type]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._loaded, *plugins.installed(GROUP)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def loaded(self) -> list[Family]:
        """Returns the built-in families, and the installed families that were looked up."""
        return list(self._loaded.values())
