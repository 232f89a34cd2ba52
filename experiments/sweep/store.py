"""Store: a sweep's rows as JSON lines, appended as they are found, so that what is interrupted can go on.

A row is found again by its key, a digest of all that decides it: plan, machine, and for a simulation the simulator's own sources, so that a policy
that was edited since is tried anew. Where a key stands twice the later line counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import xxhash

import megatrain.simulator
from megatrain.experiments.code_digest import code_digest
from megatrain.experiments.row_file import parse_rows, write_rows
from megatrain.runtime.file_lock import FileLock
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.workload import Workload

Decided = Literal["refused", "memory", "evaluator", "engine", "execution"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one plan. Sizes in bytes, times in seconds."""

    key: str
    model: str
    hardware: str
    policy: str
    knobs: Knobs
    workload: Workload
    device_limit_bytes: int
    host_limit_bytes: int
    decided_by: Decided
    """`refused`: the policy, or the run, cannot do it; `memory`: it does not fit; `evaluator`: no op slows another, so the engine would say the same;
    `engine`; `execution`: run on a machine"""
    reason: str = ""
    """why it was refused"""
    binding: str = ""
    """the lane with the most work, or the pool of the place that is too small"""
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    step_seconds: float | None = None
    """None where there is none; of an execution the median of the steps after the warm-up"""
    tokens_per_second: float | None = None
    predicted_seconds: float | None = None
    """of an execution: what the engine said"""

    @property
    def timed(self) -> bool:
        return self.step_seconds is not None

    @property
    def seconds_per_token(self) -> float:
        """Infinite where it was not timed."""
        return 1 / self.tokens_per_second if self.tokens_per_second else float("inf")


def sources_digest() -> str:
    """Of every source of the simulator, a policy that somebody added included."""
    return code_digest(Path(str(megatrain.simulator.__file__)).parent.rglob("*.py"))


class Keys:
    """Keys of one model's plans on one machine. `context`: whatever else decides a row."""

    def __init__(self, plan: Plan, hardware: HardwareSpec, context: Iterable[Any]) -> None:
        self._common = xxhash.xxh3_128(msgspec.msgpack.encode((plan.model, hardware, list(context)), order="sorted")).digest()

    def of(self, plan: Plan) -> str:
        source = Path(plan.policy).read_text(encoding="utf-8") if plan.policy.endswith(".py") else ""
        told = (plan.policy, source, plan.workload, plan.knobs, plan.device_limit_bytes, plan.host_limit_bytes)
        return xxhash.xxh3_64_hexdigest(self._common + msgspec.msgpack.encode(told))


class Store:
    """The rows of a file, and the file open to take more; by one process at a time."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a file that holds something else, or that another sweep writes."""
        self._path = path
        with contextlib.ExitStack() as stack:
            stack.enter_context(FileLock(path.with_name(f".{path.name}.lock"), what=f"{path.name}", fix="wait for that sweep, or name another --out"))
            self._file = stack.enter_context(path.open("a+b"))
            self.rows = self._read()
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._held:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self) -> dict[str, Row]:
        self._file.seek(0)
        rows, whole = parse_rows(self._file.read(), Row, str(self._path))
        self._file.truncate(whole)
        return {row.key: row for row in rows}

    def add(self, rows: Iterable[Row]) -> None:
        """Appends them."""
        rows = list(rows)
        self.rows.update((row.key, row) for row in rows)
        write_rows(self._file, rows)
