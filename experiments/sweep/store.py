"""The store of a sweep: rows as JSON lines, appended as soon as they are known, so that an
interrupted sweep can continue.

A row is found by its key. The key is a digest of everything that decides the row: the plan, the
machine, and for a simulation the simulator's sources, so that a sweep with an edited policy is
simulated again. If a key occurs twice, the later line counts.
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
from megatrain.experiments.files.code_digest import code_digest
from megatrain.experiments.files.row_file import parse_rows, write_rows
from megatrain.runtime.files.file_lock import FileLock
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Plan

Decided = Literal["refused", "memory", "evaluator", "engine", "execution"]


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one plan. Sizes in bytes, times in seconds."""

    key: str
    """Digest of everything that decides the row."""
    model: str
    """The model's name."""
    hardware: str
    """The machine's name."""
    policy: str
    """The plan's policy: a name, or the path of a file."""
    knobs: Knobs
    """The plan's knobs."""
    workload: Workload
    """The plan's workload."""
    device_limit_bytes: int
    """The plan's limit of device memory."""
    host_limit_bytes: int
    """The plan's limit of host memory."""
    decided_by: Decided
    """How the result was found. `refused`: the policy or the run cannot do the plan. `memory`: the
    plan does not fit. `evaluator`: no op slows another, so the evaluator is as exact as the engine.
    `engine`: simulated by the engine. `execution`: run on a machine.
    """
    planned: bool = False
    """Whether the planner chose the knobs. Otherwise the sweep gave them."""
    reason: str = ""
    """Why the plan was refused. Empty if it was not."""
    binding: str = ""
    """The lane with the most work. If the plan does not fit, the pool that binds."""
    device_peak_bytes: int = 0
    """Peak of device memory, or 0 if the plan was refused."""
    host_peak_bytes: int = 0
    """Peak of host memory, or 0 if the plan was refused."""
    step_seconds: float | None = None
    """Time of a step, or None if there is none. For an execution, the median of the steps after the
    warm-up.
    """
    tokens_per_second: float | None = None
    """Tokens of a step divided by `step_seconds`."""
    predicted_seconds: float | None = None
    """For an execution, the predicted step time."""

    @property
    def timed(self) -> bool:
        """Returns whether the plan has a step time."""
        return self.step_seconds is not None

    @property
    def seconds_per_token(self) -> float:
        """Returns the time per token, which is infinite if the plan was not timed."""
        return 1 / self.tokens_per_second if self.tokens_per_second else float("inf")


def sources_digest() -> str:
    """Returns a digest of all source files of the simulator, also of policies that a user added."""
    return code_digest(Path(str(megatrain.simulator.__file__)).parent.rglob("*.py"))


class Keys:
    """Makes keys for one model's plans on one machine. `context` holds everything else that decides
    a row.
    """

    def __init__(self, plan: Plan, hardware: HardwareSpec, context: Iterable[Any]) -> None:
        self._common = xxhash.xxh3_128(
            msgspec.msgpack.encode((plan.model, hardware, list(context)), order="sorted")
        ).digest()

    def of(self, plan: Plan, *, planned: bool = False) -> str:
        """Returns the key of a plan, or of a point whose knobs the planner chooses (`planned`)."""
        source = (
            Path(plan.policy).read_text(encoding="utf-8") if plan.policy.endswith(".py") else ""
        )
        identity = (
            plan.policy,
            source,
            plan.workload,
            "planned" if planned else plan.knobs,
            plan.device_limit_bytes,
            plan.host_limit_bytes,
        )
        return xxhash.xxh3_64_hexdigest(self._common + msgspec.msgpack.encode(identity))


class Store:
    """The rows of a file, which is open for more. One process at a time may use it."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if the file holds other content or another sweep writes it."""
        self._path = path
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                FileLock(
                    path.with_name(f".{path.name}.lock"),
                    what=f"{path.name}",
                    fix="wait for that sweep, or choose another --out",
                )
            )
            self._file = stack.enter_context(path.open("a+b"))
            self.rows = self._read()
            self._held = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._held:
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self) -> dict[str, SweepRow]:
        self._file.seek(0)
        rows, whole = parse_rows(self._file.read(), SweepRow, str(self._path))
        self._file.truncate(whole)
        return {row.key: row for row in rows}

    def add(self, rows: Iterable[SweepRow]) -> None:
        """Appends the rows to the file."""
        rows = list(rows)
        self.rows.update((row.key, row) for row in rows)
        write_rows(self._file, rows)
