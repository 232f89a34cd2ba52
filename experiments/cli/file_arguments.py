"""Files and folders that a user names: checks before they are read or written, with messages that
name them. Slow imports are inside the functions, because `--help` must answer at once.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.schedule.plan import Plan


def relative(path: Path, base: Path) -> str:
    """Returns `path` relative to the folder `base`.

    Plans store relative paths, so a folder can be moved together with its plan.
    """
    return os.path.relpath(path.resolve(), base.resolve())


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Makes a UserError from the block name `file`, unless its place is `file` or an option."""
    try:
        yield
    except UserError as error:
        if error.where.startswith((str(file), "--")):
            raise
        error.where = error.where.removeprefix("plan: ")
        raise error.inside(str(file)) from None


def plan_of(file: Path) -> Plan:
    """Returns the plan in `file`. Raises UserError, which names `file`, if it is not a plan."""
    from megatrain.simulator.schedule.plan import Plan

    refuse_no_plan(file)
    return Plan.load(file)


def refuse_no_plan(file: Path) -> None:
    """Raises UserError if `file` is missing, a folder, or another file than a plan."""
    folder = os.path.isdir(file)
    if folder and os.path.isfile(file / "plan.toml"):
        found, fix = "a folder with a plan in it", f"name the plan, {file / 'plan.toml'}"
    elif folder and os.path.isfile(file / "config.json"):
        found = "the folder of a model"
        fix = f"make a plan first: `megatrain plan {file} --hardware H --out plan.toml`"
    elif folder:
        found, fix = "a folder", "name a plan, or make one with `megatrain plan`"
    elif not os.path.lexists(file):
        found, fix = "no such file", "check the path, or make a plan with `megatrain plan`"
    elif file.suffix == ".json":
        found = "a JSON file"
        fix = f"make a plan first: `megatrain plan {file} --hardware H --out plan.toml`"
    elif file.suffix != ".toml" and _keys(file) is None:
        found, fix = "another file", "name a plan, or the folder of a model"
    elif {"name", "peak_tflops"} <= (_keys(file) or set()):
        found = "a hardware file"
        fix = f"make a plan first: `megatrain plan MODEL --hardware {file} --out plan.toml`"
    else:
        return
    raise UserError(str(file), found=found, allowed="a plan that `megatrain plan` wrote", fix=fix)


def _keys(file: Path) -> set[str] | None:
    """Returns the keys of a TOML file, or None if `file` is not one."""
    import tomllib

    from megatrain.simulator.base.files import read_text

    try:
        return set(tomllib.loads(read_text(file)))
    except (UserError, ValueError, RecursionError):
        return None


def refuse_no_run(folder: Path, fix: str) -> None:
    """Raises UserError if `folder` is not the folder of a run. `fix` is the fix of a wrong path."""
    if os.path.isfile(folder / "config.toml"):
        return
    if os.path.isdir(folder):
        runs = sorted(file.parent for file in folder.glob("*/config.toml"))
        found = "a folder without config.toml, so no run"
        fix = f"name the run, {runs[0]}" if runs else fix
    else:
        found = "a file, not a folder" if os.path.exists(folder) else "no such folder"
    raise UserError(
        str(folder), found=found, allowed="the folder of a run that has started", fix=fix
    )


def hardware_of(plan_path: Path, name: str) -> HardwareSpec:
    """Returns the hardware that a plan names: a file relative to the plan, or a library name.

    Raises UserError, which names the plan, if there is no such machine.
    """
    from megatrain.simulator.hardware.machine import HardwareSpec

    file = plan_path.parent / name
    if file.suffix == ".toml" and not os.path.lexists(file):
        raise UserError(
            f"{plan_path}: hardware",
            found=f"{name}, but there is no file {file}",
            allowed="a file that `megatrain calibrate` wrote, seen from the folder of the plan, or"
            " a name that `megatrain list hardware` prints",
            fix="move the file there, or correct the path in the plan",
        )
    with naming(plan_path):
        return HardwareSpec.load(
            str(file) if file.suffix == ".toml" or os.path.isfile(file) else name
        )


def check_writable(path: Path, like: str = "NAME") -> None:
    """Raises UserError if `path`, a file or a new folder, cannot be written. `like` is an example
    of the file's name.

    Commands check this before their long work, not after it.
    """
    import tempfile  # takes 8 ms, and few commands write a file

    from megatrain.simulator.base.files import refuse_special

    refuse_special(path)
    parent = next(
        folder
        for folder in (path.absolute().parent, *path.absolute().parents)
        if os.path.exists(folder)
    )
    if os.path.isdir(path):
        raise UserError(
            str(path),
            found="a folder",
            allowed="a file to write",
            fix=f"name a file in it, like {path / like}",
        )
    try:
        # Checking permissions is not enough: root has them in /proc and on a full disk.
        tempfile.TemporaryFile(dir=parent).close()
    except OSError:
        raise UserError(
            str(path),
            found=f"{parent}, which is not a writable folder",
            allowed="a path in a writable folder",
            fix="choose another path",
        ) from None


PLAN_FILE = "plan", "NAME.toml", rb"(?m)^policy\s*="
TRACE_FILE = "trace", "NAME.json", rb'"traceEvents"'
PAGE_FILE = "web page", "NAME.html", rb"(?i)<!doctype html"
PICTURE_FILE = "picture", "NAME.png", rb"^\x89PNG"
"""What a command writes, an example of the file's name, and a pattern that the beginning of such a
file contains."""
_BEGINNING_BYTES = 4096


def check_replaceable(path: Path, kind: tuple[str, str, bytes]) -> None:
    """Raises UserError if the file `path` cannot be written, or if it exists and is another kind of
    file, which would be lost. `kind` is one of the constants above.
    """
    name, like, pattern = kind
    check_writable(path, like)
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING_BYTES)
    except OSError:
        return
    if beginning and not re.search(pattern, beginning):
        raise UserError(
            str(path),
            found=f"a file that is not a {name}",
            allowed=f"a new file, or an earlier {name}, which is replaced",
            fix="name another file",
        )


def check_new_file(path: Path, option: str) -> None:
    """Raises UserError if `path`, the new file of `option`, exists or cannot be written.

    It is for measurements, which nothing can restore.
    """
    check_writable(path, "NAME.toml")
    if os.path.lexists(path):
        raise UserError(
            str(path),
            found="a file there already",
            allowed="a new file, so that no measurement is lost",
            fix=f"name another one with {option}, or remove this one first",
        )


def check_new(path: Path) -> None:
    """Raises UserError if `path`, a new folder, exists or cannot be made."""
    from megatrain.simulator.base.files import refuse_existing

    refuse_existing(path)
    check_writable(path)
