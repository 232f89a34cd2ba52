"""SharedMachine: measurements of a machine that users can share with others.

`megatrain calibrate --share FILE` writes them as a small file without names of people or hosts. If
such a file is in `machines_folder`, it replaces the library's estimates for the machine with the
same GPU. If the library does not have this GPU, the name of the file is the name of the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_toml
from megatrain.simulator.hardware.rates import Rates

FORMAT = 1
UNCERTAINTY = 0.10
"""`HardwareSpec.uncertainty` of a machine whose link and layers were measured."""
_LONGEST_TEXT = 100


class SharedMachine(Rates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rates of one calibration, and the names of its GPU and CPU. `linear_efficiency` is a
    share of `matrix_tflops`.
    """

    format: int = FORMAT
    """The version of the file format."""
    gpu: str
    """The name that the driver reports for the GPU."""
    cpu: str
    """The name of the processor."""
    date: str
    """The date of the calibration, like 2026-11-23."""
    megatrain: str
    """The version of megatrain that measured."""
    dtype: Literal["bf16", "fp32"]
    """The dtype of the matrix products that were measured."""
    matrix_tflops: float
    """The rate of a large matrix product, in 10^12 FLOP/s."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise UserError(
                "format",
                found=self.format,
                allowed=FORMAT,
                fix="use a file of this version of megatrain",
            )
        for field in ("gpu", "cpu", "megatrain"):
            text = getattr(self, field)
            if not (0 < len(text) <= _LONGEST_TEXT and text.isprintable()):
                raise UserError(
                    field,
                    found=repr(text[:_LONGEST_TEXT]),
                    allowed=f"1 to {_LONGEST_TEXT} printable characters",
                    fix=f"correct {field}",
                )
        check_date("date", self.date)

    def rates(self) -> dict[str, Any]:
        """Returns the fields of HardwareSpec that these measurements replace."""
        return {
            "source": f"measured on {self.gpu} with {self.cpu}, {self.date}, by others",
            "measured_by_others": self.date,
            "uncertainty": UNCERTAINTY,
            **{field: getattr(self, field) for field in Rates.__struct_fields__},
        }


def check_date(where: str, text: str) -> None:
    """Raises UserError if `text` is not a date like 2026-11-23. `where` names the field."""
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise UserError(
            where,
            found=repr(text[:_LONGEST_TEXT]),
            allowed="a date like 2026-11-23",
            fix="correct the date",
        ) from None


def machines_folder() -> Path:
    """Returns the folder with machines that others measured: `$MEGATRAIN_MACHINES`, or
    `$XDG_CONFIG_HOME/megatrain/machines`, or `~/.config/megatrain/machines`.
    """
    if named := os.environ.get("MEGATRAIN_MACHINES"):
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "megatrain" / "machines"


@contextlib.contextmanager
def library_only() -> Iterator[None]:
    """A context manager in which `machines_folder` has no machines, so that published predictions
    are the same on every machine.
    """
    before = os.environ.get("MEGATRAIN_MACHINES")
    os.environ["MEGATRAIN_MACHINES"] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ["MEGATRAIN_MACHINES"]
        else:
            os.environ["MEGATRAIN_MACHINES"] = before


def shared_machines(
    check: Callable[[str, SharedMachine], object],
) -> dict[str, tuple[str, SharedMachine]]:
    """Returns GPU -> (name of the file, machine) for the files in `machines_folder`. If several
    machines have the same GPU, it is the newest.

    Raises UserError if a file has another format than `megatrain calibrate --share` writes, or if
    `check`, called with its name and machine, raises it.
    """
    machines: dict[str, tuple[str, SharedMachine]] = {}
    folder = machines_folder()
    for file in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
        machine = _read(file, check)
        if machine.gpu not in machines or machine.date > machines[machine.gpu][1].date:
            machines[machine.gpu] = (file.stem, machine)
    return machines


def _read(file: Path, check: Callable[[str, SharedMachine], object]) -> SharedMachine:
    """Returns the machine of `file`. The fix of an error also says that the file can be removed."""
    try:
        machine = read_toml(file, SharedMachine)
        try:
            check(file.stem, machine)
        except UserError as error:
            raise error.inside(str(file)) from None
        return machine
    except UserError as error:
        raise UserError(
            error.where,
            found=error.found,
            allowed=error.allowed,
            fix=f"{error.fix}, or remove the file",
        ) from None
