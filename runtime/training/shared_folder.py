"""refuse_unseen: checks that the ranks of all hosts see the same run folder."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from megatrain.runtime.ranks import Ranks
from megatrain.simulator.base.atomic_files import AtomicWrite
from megatrain.simulator.base.errors import UserError

_WAIT_S = 10.0
"""Seconds in which a file of one host must become visible on the others."""


def refuse_unseen(folder: Path, ranks: Ranks) -> None:
    """Raises UserError on every rank if a rank does not see what rank 0 writes to `folder`.

    Rank 0 makes an empty file, which the other ranks look for, and removes it. With one host,
    nothing is checked. Every rank must call this at the same point, and rank 0 must have made the
    folder.
    """
    if ranks.hosts == 1:
        return
    with contextlib.ExitStack() as held:
        # the name of a temporary file, which the next run removes if this one is killed
        made = held.enter_context(AtomicWrite(folder / "config.toml")) if ranks.leads else None
        name = ranks.values(made.name if made else None)[0]
        seen = ranks.values(_appears(folder / name))
    blind = next((rank for rank, found in enumerate(seen) if not found), None)
    if blind is not None:
        raise UserError(
            f"run folder {folder}",
            found=f"no file of rank 0 in it on {ranks.name(blind)}",
            allowed="a folder on storage that all hosts share",
            fix="name such a folder with --out, by the same path on all hosts",
        )


def _appears(file: Path) -> bool:
    """Returns whether `file` exists, or appears within `_WAIT_S` seconds."""
    end = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
