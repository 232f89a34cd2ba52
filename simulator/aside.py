"""Aside: a temporary file or folder beside a target, which is renamed to the target once it is whole.

Its writer holds a lock on it for as long as it is there. One without a lock was left by a process that died, and the next writer of
the same target removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_MARK = ".aside-"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class Aside:
    """`.NAME.aside-` and a random ending, for the target NAME. Removed at the end unless it has been renamed."""

    def __init__(self, target: Path, *, folder: bool = False) -> None:
        """Makes an empty file, or a `folder`, after removing what dead writers of `target` have left. Raises OSError where it cannot be made."""
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        while True:
            self.path = _make(target, folder=folder)
            self._handle = os.open(self.path, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: then nobody removes what a dead writer has left
                fcntl.flock(self._handle, fcntl.LOCK_EX)
            if is_at(self._handle, self.path):
                break
            os.close(self._handle)  # another writer has removed it before it was locked

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        try:
            _remove(self.path)
        finally:
            os.close(self._handle)


def remove_abandoned(target: Path) -> None:
    """Removes what writers of `target` that have died left beside it. Raises nothing: the next one may have more success."""
    with contextlib.suppress(OSError):
        for path in [path for path in target.parent.iterdir() if is_aside(path.name, target.name)]:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if try_lock(handle) and is_at(handle, path):
                        _remove(path)
                finally:
                    os.close(handle)


def is_aside(name: str, target: str) -> bool:
    """Whether a file called `name` is beside a `target` of that name to be renamed to it."""
    return name.startswith(f".{target}{_MARK}")


def try_lock(handle: int) -> bool | None:
    """Locks an open file for this process alone. False: another has locked it; None: its file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _make(target: Path, *, folder: bool) -> Path:
    prefix = f".{target.name}{_MARK}"
    if folder:
        return Path(tempfile.mkdtemp(dir=target.parent, prefix=prefix))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=prefix)
    os.close(handle)
    return Path(name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
