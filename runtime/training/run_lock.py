"""RunLock: a run's folder for one process, and whether a new run may begin in it."""

from __future__ import annotations

from pathlib import Path

from megatrain.runtime.file_lock import FileLock
from megatrain.simulator.aside import is_aside
from megatrain.simulator.errors import UserError

LOCK = ".lock"
START = ("hardware.toml", "plan.toml", "environment.json", "config.toml")
"""what a run writes first, in this order: with the last of them it has begun"""


class RunLock(FileLock):
    """Of the run's `folder`, from before anything expensive is done to the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCK, what="a run", fix="wait until it ends, stop it, or name another folder with --out")
        self.folder = folder

    def refuse_taken(self) -> None:
        """Raises UserError where another process runs there, or there is something. What a run has left that died before it had begun is removed."""
        taken = self.folder.exists()
        if self.folder.is_dir():
            with self:
                found = [path for path in self.folder.iterdir() if path.name != LOCK]
                if self.abandoned and not any(path.name == START[-1] for path in found) and all(_of_a_start(path.name) for path in found):
                    for path in found:
                        path.unlink(missing_ok=True)
                    found = []
                taken = bool(found)
        if taken:
            raise UserError(str(self.folder), found="something there already", allowed="a new or empty folder", fix="name another one with --out")


def _of_a_start(name: str) -> bool:
    return any(name == start or is_aside(name, start) for start in START)
