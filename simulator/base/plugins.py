"""Plugins: objects that are defined outside the package, installed or in a file.

An installed package names an object under one of these entry point groups:

    megatrain.policies     a subclass of Policy, or an instance of one
    megatrain.optimizers   a subclass of Optimizer, or an instance of one
    megatrain.families     a Family; the entry point's name is the `model_type`
    megatrain.hardware     a HardwareSpec, or the path of its TOML file
    megatrain.cost_models  a function (HardwareSpec, ModelSpec, Workload) -> CostModel

A package cannot replace a built-in object, because built-in names are looked up first.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    import importlib.metadata

T = TypeVar("T")


@functools.cache
def installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Returns the entry points of `group` by name."""
    import importlib.metadata  # takes 50 ms, and most commands do not need it

    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def load_as(group: str, name: str, kind: type[T], allowed: str) -> T:
    """Returns the object of the entry point `name`.

    Raises UserError if importing it fails, or if it is not an instance of `kind`. `allowed`
    describes such an instance in the error.
    """
    loaded = load(group, name)
    if isinstance(loaded, kind):
        return loaded
    where = f"{group} entry point {installed(group)[name].value}"
    raise UserError(where, found=type(loaded).__name__, allowed=allowed, fix="see docs/adding.md")


@functools.cache
def load(group: str, name: str) -> object:
    """Returns the object of the entry point `name`. Raises UserError if importing it fails."""
    point = installed(group)[name]
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a plugin that exits must not end the command
        raise _cannot_load(f"{group} entry point {point.value}", error) from error


@functools.cache
def load_file(what: str, path: str) -> ModuleType:
    """Returns the module in the `.py` file `path`, which is executed once.

    `what` is what the file defines, such as "policy", for error texts. Raises UserError if there
    is no such file, or if executing it fails.
    """
    if not Path(path).is_file():
        allowed = f"the path of a .py file that defines {with_article(what)}"
        raise UserError(what, found=f"no file {path}", allowed=allowed, fix="check the path")
    name = f"megatrain_{what.replace(' ', '_')}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _cannot_load(f"{what} {path}", error) from error
    return module


def with_article(what: str) -> str:
    """Returns `what` with "a" or "an" before it."""
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _cannot_load(where: str, error: BaseException) -> UserError:
    found = f"{type(error).__name__} while it was loaded: {error}".splitlines()[0]
    return UserError(
        where, found=found, allowed="a module that can be imported", fix="correct the file"
    )
