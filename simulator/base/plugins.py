"""Plugins: objects that are defined outside the package, installed or in a file.

An installed package names an object under one of these entry point groups:

    megatrain.policies     a subclass of Policy, or an instance of one
    megatrain.optimizers   a subclass of Optimizer, or an instance of one
    megatrain.families     a Family; the entry point's name is the `model_type`
    megatrain.hardware     a HardwareSpec, or the path of its TOML file
    megatrain.cost_models  a function (HardwareSpec, ModelSpec, Workload) -> CostModel

A package cannot replace a built-in object, because built-in names are looked up first.

A file can import modules of its folder, which belong to it (`outside_module.py`). If one of these
files is edited, the next operation loads it again. What was computed with its old content is then
forgotten (`cached`). No operation mixes the two (`unchanging`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.outside_module import FILE, load_module
from megatrain.simulator.base.outside_source import outside_source

if TYPE_CHECKING:
    import importlib.metadata

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


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


class _LoadedFile(NamedTuple):
    """A `.py` file that was loaded."""

    files: dict[Path, bytes]
    """Its `outside_source`."""
    module: ModuleType


class _Loaded:
    """The files that were loaded, and what depends on them."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], _LoadedFile] = {}
        """(what it defines, path) -> the file."""
        self.forgetting: list[Callable[[], None]] = []
        """Functions that forget what was computed with the files."""
        self.lock = threading.Lock()
        """Held while `operations` changes, because threads may begin operations."""
        self.operations = 0
        """The number of operations in which no file is loaded again."""
        self.changes = 0
        """How often files had changed."""


_loaded = _Loaded()


def load_file(what: str, path: str) -> ModuleType:
    """Returns the module in the `.py` file `path`, which is executed once, and again after it or a
    module that it imports from its folder has changed.

    `what` is what the file defines, such as "policy", for error texts. Raises UserError if there
    is no such file, or if executing it fails.
    """
    refresh()
    if (what, path) in _loaded.files:
        return _loaded.files[what, path].module
    files = _files(path)
    if not files:
        allowed = f"the path of a .py file that defines {with_article(what)}"
        missing = "a file that cannot be read:" if os.path.lexists(path) else "no file"
        raise UserError(what, found=f"{missing} {path}", allowed=allowed, fix="check the path")
    # Files of the same name have modules of their own, and so have the contents of a file at
    # different times.
    about = f"{_loaded.changes}\0{os.path.abspath(path)}\0{_digest(files)}"
    key = hashlib.sha256(about.encode()).hexdigest()[:12]
    name = re.sub(r"\W", "_", f"megatrain_{what}_{Path(path).stem}_{key}")
    try:
        module = load_module(name, Path(path), files)
    except (Exception, SystemExit) as error:
        raise _cannot_load(f"{what} {path}", error, line_in(name, error)) from error
    _loaded.files[what, path] = _LoadedFile(files, module)
    return module


def line_in(module: str, error: BaseException) -> str:
    """Returns the last line of `module` that `error` passed through, such as " (ring.py, line 72)".
    Lines of its submodules count, and for a `.py` file those of the modules of its folder. Returns
    an empty text if it passed through none.
    """
    place, module = "", module.removesuffix(f".{FILE}")
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__"))
        if name == module or name.startswith(f"{module}."):
            place = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return place


def path_in(folder: Path, file: str) -> str:
    """Returns the path of `file`, which is written in a file of `folder` and relative to it.

    If it is only in the current folder, where files of earlier versions were looked up, the result
    is `file`.
    """
    there = os.path.normpath(folder / file)
    return there if os.path.isfile(there) or not os.path.isfile(file) else file


def path_from(folder: Path, file: str) -> str:
    """Returns the path of `file` relative to `folder`, as a file of `folder` is to have it."""
    return os.path.relpath(Path(file).resolve(), folder.resolve())


def source(what: str, path: str) -> dict[Path, bytes]:
    """Returns the content of the file `path` and of the modules that it imports from its folder, by
    path relative to this folder. It is the content with which they were loaded, or else their
    content now. Returns an empty dict if there is no such file.
    """
    known = _loaded.files.get((what, path))
    return known.files if known else _files(path)


def digest(what: str, path: str) -> str:
    """Returns the digest of `source`, or an empty text if there is no such file."""
    return _digest(source(what, path))


def _digest(files: dict[Path, bytes]) -> str:
    parts = [part for name in sorted(files) for part in (os.fsencode(name), files[name])]
    lengths = [str(len(part)).encode() for part in parts]
    return hashlib.sha256(b" ".join([*lengths, *parts])).hexdigest()[:12] if files else ""


def _files(path: str) -> dict[Path, bytes]:
    """Returns the `outside_source` of `path`, or an empty dict if a file cannot be read."""
    try:
        return outside_source(Path(path))
    except (OSError, ValueError):
        return {}


def _changed(path: str, files: dict[Path, bytes]) -> bool:
    """Returns whether one of `files`, the `outside_source` of `path`, has another content now."""
    folder = Path(path).parent
    try:
        return any((folder / name).read_bytes() != content for name, content in files.items())
    except (OSError, ValueError):
        return True


def refresh() -> None:
    """Forgets all files, and what was computed with them, if one of them has changed. Does nothing
    inside `unchanging`.
    """
    if _loaded.files and not _loaded.operations:
        if not any(_changed(path, file.files) for (_, path), file in [*_loaded.files.items()]):
            return
        _loaded.changes += 1
        forget()


def forget() -> None:
    """Forgets all files, and what was computed with them."""
    _loaded.files.clear()
    for function in _loaded.forgetting:
        function()


def changes() -> int:
    """Returns a number that differs from an earlier one if a file was found to be changed since."""
    refresh()
    return _loaded.changes


def on_forget(function: Callable[[], None]) -> None:
    """Calls `function` whenever the files are forgotten."""
    _loaded.forgetting.append(function)


def cached(maxsize: int) -> Callable[[F], F]:
    """Returns `functools.lru_cache(maxsize)` for results that may depend on a policy, an optimizer
    or a cost model in a file. They are forgotten when a file has changed.
    """

    def decorated(function: F) -> F:
        remembering = functools.lru_cache(maxsize)(function)
        on_forget(remembering.cache_clear)
        return cast(F, remembering)

    return decorated


class unchanging(contextlib.ContextDecorator):  # noqa: N801  # is used like a function
    """Keeps the files as they are at the beginning, for one operation. Files that are edited
    meanwhile are loaded again by the next one.
    """

    def __enter__(self) -> None:
        refresh()
        with _loaded.lock:
            _loaded.operations += 1

    def __exit__(self, *_: object) -> None:
        with _loaded.lock:
            _loaded.operations -= 1


def with_article(what: str) -> str:
    """Returns `what` with "a" or "an" before it."""
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _cannot_load(where: str, error: BaseException, line: str = "") -> UserError:
    found = f"{type(error).__name__} while it was loaded: {error}".splitlines()[0]
    return UserError(
        where,
        found=f"{found}{line}",
        allowed="a module that can be imported",
        fix="correct the file",
    )
