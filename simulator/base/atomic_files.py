"""AtomicWrite: a temporary file or folder next to a target, which is renamed to the target when it
is complete.

The writer holds a lock on the temporary file as long as the file exists. A temporary file without a
lock was left by a process that died. The next writer of the same target removes it.
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
_LOCKED_BY_OTHER = (errno.EWOULDBLOCK, errno.EACCES)


class AtomicWrite:
    """A context manager that makes a temporary file or folder for a target.

    For the target NAME, its name is `.NAME.aside-` and a random suffix. At the end of the context
    it is removed, unless it has been renamed.
    """

    def __init__(self, target: Path, *, folder: bool = False) -> None:
        """Makes an empty file, or a folder if `folder` is True, after removing the temporary files
        of dead writers of `target`. Raises OSError if the file or folder cannot be made.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target)
        while True:
            self.path = _make(target, folder=folder)
            self._handle = os.open(self.path, os.O_RDONLY)
            # On a file system without locks, files of dead writers are never removed.
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_EX)
            if is_at(self._handle, self.path):
                break
            os.close(self._handle)  # another writer removed it before it was locked

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        try:
            _remove(self.path)
        finally:
            os.close(self._handle)


def remove_abandoned(target: Path) -> None:
    """Removes the temporary files that dead writers of `target` left next to it. It ignores errors,
    because the next call may succeed.
    """
    with contextlib.suppress(OSError):
        for path in [
            path for path in target.parent.iterdir() if is_temporary_of(path.name, target.name)
        ]:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if try_lock(handle) and is_at(handle, path):
                        _remove(path)
                finally:
                    os.close(handle)


def is_temporary_of(name: str, target: str) -> bool:
    """Checks whether `name` is the name of a temporary file for a target called `target`."""
    return name.startswith(f".{target}{_MARK}")


def try_lock(handle: int) -> bool | None:
    """Takes an exclusive lock on an open file without waiting.

    Returns True if it has the lock, False if another process has it, and None if the file system
    has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _LOCKED_BY_OTHER else None
    return True


def is_at(handle: int, path: Path) -> bool:
    """Checks whether the open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _make(target: Path, *, folder: bool) -> Path:
    """Makes the temporary file or folder and returns its path."""
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
