"""FileLock: an exclusive lock on a file that says who holds it."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Self

from megatrain.simulator.aside import is_at, try_lock
from megatrain.simulator.errors import UserError

_LONGEST = 300  # characters that are shown of what a lock file says


class FileLock:
    """Held by one process at a time, which may enter it again. However that process ends, the lock is free afterwards.

    The file is removed at the end, and so are the folders that were made for it, where nothing else is in them. A file system without
    locks locks nothing.
    """

    def __init__(self, path: Path, *, what: str, fix: str) -> None:
        """`what` is locked, in words, and the `fix` for who finds it locked."""
        self._path, self._what, self._fix = path, what, fix
        self._handle: int | None = None
        self._depth = 0
        self._made: list[Path] = []
        self._abandoned = False

    @property
    def abandoned(self) -> bool:
        """While this process holds the lock: one held it before and died."""
        return self._abandoned

    def __enter__(self) -> Self:
        """Raises UserError, without waiting, where another process holds it, and where the file cannot be written."""
        if self._depth == 0:
            try:
                self._acquire()
            except OSError as error:
                self._remove_folders()
                raise UserError(
                    str(self._path.parent), found=str(error.strerror).lower(), allowed="a folder that can be made and written", fix="name another one"
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
            except FileNotFoundError:  # its last holder has just removed the folder
                continue
            try:
                if try_lock(handle) is False:
                    found = f"{self._what} in use by {_told(handle)}"
                    raise UserError(str(self._path.parent), found=found, allowed="one process at a time", fix=self._fix)
                if is_at(handle, self._path):  # or its last holder has just removed it
                    self._abandoned = os.fstat(handle).st_size > 0
                    with contextlib.suppress(OSError):  # on a full disk it is locked all the same
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, f"{_me()}\n".encode(), 0)
                    self._handle = handle
            finally:
                if self._handle is None:
                    os.close(handle)

    def _make_folders(self) -> None:
        for folder in reversed([folder for folder in (self._path.parent, *self._path.parent.parents) if not folder.exists()]):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                self._made.insert(0, folder)

    def _remove_folders(self) -> None:
        with contextlib.suppress(OSError):  # one that is not empty stays
            for folder in self._made:
                folder.rmdir()
        self._made = []


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {datetime.now().astimezone().isoformat(' ', 'seconds')}"


def _told(handle: int) -> str:
    """What the holder wrote into the file."""
    text = os.pread(handle, _LONGEST, 0).decode(errors="replace").partition("\n")[0]
    return text if text.isprintable() and text else "another process"
