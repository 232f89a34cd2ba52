"""RunLock: gives one process exclusive use of a run folder, and checks that a new run may begin in
it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatrain.runtime.checkpoint.same_run import CODE
from megatrain.runtime.files.file_lock import FileLock
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.training.stopped_run import command_to_continue, last_step
from megatrain.simulator.base.atomic_files import is_temporary_of
from megatrain.simulator.base.errors import UserError

LOCK = ".lock"
"""The name of the lock file in a run folder."""
START = (
    CODE,
    "hardware.toml",
    "plan.toml",
    CHAT_TEMPLATE,
    "environment.json",
    "data.json",
    "config.toml",
)
"""The files and folders that a run writes first, in this order. The run has begun when it has
written the last one."""


class RunLock(FileLock):
    """The lock of a run `folder`. A run holds it from before the first expensive operation to its
    end.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder / LOCK,
            what="a run",
            fix="wait until it ends, stop it, or name another folder with --out",
        )
        self.folder = folder

    def refuse_taken(self) -> None:
        """Raises UserError if the folder is not empty, or if another process holds its lock.

        First removes the files of a run that was killed before it had begun.
        """
        taken = self.folder.exists()
        if self.folder.is_dir():
            with self:
                contents = [path for path in self.folder.iterdir() if path.name != LOCK]
                if (
                    self.abandoned
                    and not any(path.name == START[-1] for path in contents)
                    and all(_is_start_file(path.name) for path in contents)
                ):
                    for path in contents:
                        _remove(path)
                    contents = []
                taken = bool(contents)
        if taken and (self.folder / START[-1]).is_file():
            raise UserError(
                str(self.folder),
                found=f"a run that ended after step {last_step(self.folder)}",
                allowed="a new or empty folder",
                fix=(
                    f"continue it with `{command_to_continue(self.folder)}`, or name another folder"
                    " with --out"
                ),
            )
        if taken:
            raise UserError(
                str(self.folder),
                found="something there already",
                allowed="a new or empty folder",
                fix="name another one with --out",
            )


def remove_start(folder: Path) -> None:
    """Removes the files of START from a run folder."""
    for name in START:
        _remove(folder / name)


def _remove(path: Path) -> None:
    if path.name == CODE:
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_start_file(name: str) -> bool:
    """Returns whether `name` is a file of START, or a temporary file for one."""
    return any(name == start or is_temporary_of(name, start) for start in START)
