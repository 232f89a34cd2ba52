"""Clears caches of plugins, which an earlier test may have loaded."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.base import plugins
from megatrain.simulator.base.registry import Registry


def forget(*registries: Registry[Any]) -> None:
    """Clears the caches of installed packages and files, and those of `registries`."""
    for registry in registries:
        registry._loaded.clear()
    for cached in (plugins.installed, plugins.load):
        cached.cache_clear()
    plugins.forget()
