"""RunLock: gives one process exclusive use of a run folder, and checks that a new run may begin in
it.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.runtime.files.file_lock import FileLock
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.training.stopped_run import command_to_continue, last_step
from megatrain.simulator.base.atomic_files import is_temporary_of
from megatrain.simulator.base.errors import UserError

LOCK = ".lock"
START = (
    "hardware.toml",
    "plan.toml",
    CHAT_TEMPLATE,
    "environment.json",
    "data.json",
    "config.toml",
)
"""the files that a run writes first, in this order. With the last one, the run has begun."""


class RunLock(FileLock):
    """The lock of a run `folder`. It is held from before the first expensive operation to the end
    of the run.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder / LOCK,
            what="a run",
            fix="wait until it ends, stop it, or name another folder with --out",
        )
        self.folder = folder

    def refuse_taken(self) -> None:
        """Raises UserError if the folder is not empty or another process holds its lock.

        First removes the files of a run that was killed before it had begun.
        """
        taken = self.folder.exists()
        if self.folder.is_dir():
            with self:
                found = [path for path in self.folder.iterdir() if path.name != LOCK]
                if (
                    self.abandoned
                    and not any(path.name == START[-1] for path in found)
                    and all(_is_start_file(path.name) for path in found)
                ):
                    for path in found:
                        path.unlink(missing_ok=True)
                    found = []
                taken = bool(found)
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


def _is_start_file(name: str) -> bool:
    return any(name == start or is_temporary_of(name, start) for start in START)
