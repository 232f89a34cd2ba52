"""FileLock: an exclusive lock on a file. The file describes the process that holds the lock."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Self

from megatrain.simulator.base.atomic_files import is_at, try_lock
from megatrain.simulator.base.errors import UserError

_LONGEST = 300  # bytes of a lock file that are shown


class FileLock:
    """A lock that one process at a time can hold. The process may enter it several times.

    The lock is released when the process ends, even if the process is killed. When it is released
    by the last exit, the file is removed, and also the folders that were created for it if they are
    empty. On a file system without locks, the lock has no effect.
    """

    def __init__(self, path: Path, *, what: str, fix: str) -> None:
        """Does not acquire the lock yet.

        Args:
            path: the lock file.
            what: name of the locked object, for the error message.
            fix: the fix in the error message if another process holds the lock.
        """
        self._path, self._what, self._fix = path, what, fix
        self._handle: int | None = None
        self._depth = 0
        self._made: list[Path] = []
        self.abandoned = False
        """Whether an earlier process died while it held the lock. Valid while this process holds
        the lock."""

    def __enter__(self) -> Self:
        """Acquires the lock without waiting.

        Raises UserError if another process holds it, or if the file cannot be written.
        """
        if self._depth == 0:
            try:
                self._acquire()
            except OSError as error:
                self._remove_folders()
                raise UserError(
                    str(self._path.parent),
                    found=str(error.strerror).lower(),
                    allowed="a folder that can be made and written",
                    fix="name another one",
                ) from None
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._handle is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._remove_folders()
            os.close(self._handle)
            self._handle = None

    def _acquire(self) -> None:
        while self._handle is None:
            self._make_folders()
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:  # another process has just removed the folder
                continue
            try:
                if try_lock(handle) is False:
                    found = f"{self._what} in use by {_holder(handle)}"
                    raise UserError(
                        str(self._path.parent),
                        found=found,
                        allowed="one process at a time",
                        fix=self._fix,
                    )
                # Otherwise another process has just removed the file, and the loop tries again.
                if is_at(handle, self._path):
                    self.abandoned = os.fstat(handle).st_size > 0
                    with contextlib.suppress(OSError):  # the lock works even on a full disk
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, f"{_this_process()}\n".encode(), 0)
                    self._handle = handle
            finally:
                if self._handle is None:
                    os.close(handle)

    def _make_folders(self) -> None:
        for folder in reversed(
            [
                folder
                for folder in (self._path.parent, *self._path.parent.parents)
                if not folder.exists()
            ]
        ):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                self._made.insert(0, folder)

    def _remove_folders(self) -> None:
        with contextlib.suppress(OSError):  # a folder that is not empty is not removed
            for folder in self._made:
                folder.rmdir()
        self._made = []


def _this_process() -> str:
    return (
        f"process {os.getpid()} on {socket.gethostname()} since"
        f" {datetime.now().astimezone().isoformat(' ', 'seconds')}"
    )


def _holder(handle: int) -> str:
    """Returns the description in the lock file of the process that holds the lock."""
    text = os.pread(handle, _LONGEST, 0).decode(errors="replace").partition("\n")[0]
    return text if text.isprintable() and text else "another process"
