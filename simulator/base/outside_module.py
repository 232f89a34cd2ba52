"""Loads a `.py` file of a user as a module of a package. The other modules of the package are those
of the file's folder.

An edited file is in a new package. So two files may import different modules of one name, and a
copy of a file uses the copies of its modules.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatrain.simulator.base.outside_source import is_elsewhere


class _Package(NamedTuple):
    """A file that is loaded as a package."""

    path: Path
    """The path of the file."""
    files: Mapping[Path, bytes]
    """The content of the file and of its modules, by path relative to the file's folder."""
    names: Set[str]
    """The names by which `import` finds its modules, without submodules."""


FILE = "file__"
"""The name of the file in its package. If the file were the package itself, each module that it
imports would replace what the file defines under the module's name."""
_packages: dict[str, _Package] = {}


def load_module(name: str, path: Path, files: Mapping[Path, bytes]) -> ModuleType:
    """Returns the file `path`, which is executed once in the package `name`. `files` is the
    `outside_source` of the file.
    """
    if not _packages:
        sys.meta_path.append(_Finder())
    # The file itself is left out, since an installed package may have its name.
    own = {file.parts[0].removesuffix(".py") for file in files if file != Path(path.name)}
    names = {module for module in own if not is_elsewhere(module)}
    _packages[name] = _Package(path.absolute(), files, names)
    return importlib.import_module(f"{name}.{FILE}")


class _Loader(SourceFileLoader):
    """Loads the content of a file that was read before, without `__pycache__`. Python takes a file
    there for the current one if the source has the same size and was written in the same second.
    """

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError

    def get_data(self, path: str) -> bytes:
        return self._content if path == self.path else super().get_data(path)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module. Its `import` statements find the modules of its package."""
        package = module.__name__.partition(".")[0]
        if _packages[package].names:
            vars(module)["__builtins__"] = vars(builtins) | {"__import__": _importing(package)}
        super().exec_module(module)


def _importing(package: str) -> Callable[..., ModuleType]:
    """Returns an `__import__` that looks for modules in `package` first."""
    own = _packages[package].names

    def found(
        name: str,
        globals: Any = None,  # noqa: A002  # the names that `__import__` has
        locals: Any = None,  # noqa: A002
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or top not in own:
            return builtins.__import__(name, globals, locals, fromlist, level)
        module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist)
        return module if fromlist else sys.modules[f"{package}.{top}"]

    return found


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the packages of `load_module` and their submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, *rest = fullname.split(".")
        if top not in _packages:
            return None
        package, place = _packages[top], Path(*rest)
        if not rest:
            return ModuleSpec(fullname, None, is_package=True)
        if rest == [FILE]:
            return _spec(fullname, package, Path(package.path.name), is_package=False)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file in package.files:
                is_package = file.name == "__init__.py"
                return _spec(fullname, package, file, is_package=is_package)
        if any(place in file.parents for file in package.files):
            return ModuleSpec(fullname, None, is_package=True)  # a folder without `__init__.py`
        return None


def _spec(name: str, package: _Package, file: Path, *, is_package: bool) -> ModuleSpec:
    path = str(package.path.parent / file)
    loader = _Loader(name, path, package.files[file])
    spec = ModuleSpec(name, loader, origin=path, is_package=is_package)
    spec.has_location = True
    return spec
