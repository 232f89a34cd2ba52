"""The store of a sweep: rows as JSON lines, which are appended as soon as they are known. So an
interrupted sweep can continue.

The key of a row is a digest of everything that decides the row: the plan, the machine, the
simulator's sources, and the files outside the package that define the policy, the optimizer or the
cost model. So a sweep with an edited policy is simulated again. If a key occurs twice, the later
line counts. A key has three parts with hyphens between them: a digest of where the machine's file
is (`SweepRow.machine`), a digest of the machine, its cost model and the simulator (`made_with`),
and a digest of the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import msgspec
import xxhash

import megatrain.simulator
from megatrain.experiments.files.code_digest import code_digest
from megatrain.experiments.files.row_file import parse_rows, write_rows
from megatrain.runtime.files.file_lock import FileLock
from megatrain.simulator.base import plugins
from megatrain.simulator.costs import outside_file
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Knobs, Plan

Decided = Literal["refused", "memory", "evaluator", "engine", "execution"]
"""How a row's result was found (`SweepRow.decided_by`)."""


class RowWorkload(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workload of a row. Unlike other workloads, it may have values that exclude each other,
    because such a combination has a row that says why it was refused.
    """

    def __post_init__(self) -> None:
        """Allows every value."""

    @classmethod
    def of(cls, workload: Workload, changes: dict[str, Any] | None = None) -> Self:
        """Returns `workload` with `changes`."""
        return cls(**{**msgspec.structs.asdict(workload), **(changes or {})})


class ImpossiblePlan(NamedTuple):
    """A combination of values that no plan can have."""

    policy: str
    """The policy."""
    knobs: Knobs
    """The knobs."""
    workload: RowWorkload
    """The workload."""
    device_limit_bytes: int
    """The limit of device memory."""
    host_limit_bytes: int
    """The limit of host memory."""
    reason: str
    """Why no plan can have these values together."""


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one plan. Sizes in bytes, times in seconds."""

    key: str
    """Digest of everything that decides the row. It is unique in a store."""
    model: str
    """The model's name."""
    hardware: str
    """The machine's name."""
    policy: str
    """The plan's policy: a name, or the path of a file."""
    knobs: Knobs
    """The plan's knobs."""
    workload: RowWorkload
    """The plan's workload."""
    device_limit_bytes: int
    """The plan's limit of device memory."""
    host_limit_bytes: int
    """The plan's limit of host memory."""
    decided_by: Decided
    """How the result was found. `refused`: no plan can have these values together, the policy
    refuses the plan, this machine has too little memory to run it, or its run failed.
    `memory`: the plan does not fit. `evaluator`: computed by the evaluator, which is exact because
    no op slows another. `engine`: simulated by the engine. `execution`: measured on a machine.
    """
    planned: bool = False
    """Whether the planner chose the knobs. Otherwise they are those of the grid."""
    reason: str = ""
    """Why the plan was refused, or why its run failed. Empty otherwise."""
    binding: str = ""
    """The lane with the most work. If the plan does not fit, the largest pool of the fuller memory.
    """
    device_peak_bytes: int = 0
    """Predicted peak of device memory, or 0 if the policy refused the plan."""
    host_peak_bytes: int = 0
    """Predicted peak of host memory, or 0 if the policy refused the plan."""
    step_seconds: float | None = None
    """Time of a step, or None if the plan was refused or does not fit. For an execution, the median
    of the steps after the warm-up.
    """
    tokens_per_second: float | None = None
    """Tokens of a step divided by `step_seconds`."""
    predicted_seconds: float | None = None
    """For an execution, the predicted step time. Also if the execution failed or was refused."""
    measured_device_peak_bytes: int | None = None
    """For an execution, the peak of PyTorch's allocator. Without CUDA, the size of the pool that
    represents the device.
    """
    measured_host_peak_bytes: int | None = None
    """For an execution, the peak of the process's resident memory."""

    @property
    def machine(self) -> str:
        """Digest of where the machine's file is. Empty for a row stored before 2026-11-30."""
        return self.key.partition("-")[0] if "-" in self.key else ""

    @property
    def made_with(self) -> str:
        """Digest of the machine, its cost model and the simulator. Empty for a row stored before
        2026-11-30.
        """
        return self.key.rpartition("-")[0].partition("-")[2]

    @property
    def kind(self) -> Literal["impossible", "executed", "simulated"]:
        """Whether no plan can have the values of the row, or else how its plan was to be timed."""
        if self.predicted_seconds is not None:
            return "executed"
        return "impossible" if self.decided_by == "refused" else "simulated"

    @property
    def timed(self) -> bool:
        """Whether the plan has a step time."""
        return self.step_seconds is not None

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token, or infinity if the plan has no step time."""
        return 1 / self.tokens_per_second if self.tokens_per_second else float("inf")


def sources_digest() -> str:
    """Returns a digest of all source files in the simulator's folder, including policies that a
    user added there.
    """
    return code_digest(Path(str(megatrain.simulator.__file__)).parent.rglob("*.py"))


class Keys:
    """Makes keys for one model's plans on one machine. `sources` is the digest of the simulator's
    sources, and `context` has everything else on which a row depends. Files outside the package are
    read once. The plan's `hardware` says where the machine's file is, if it has one.
    """

    def __init__(
        self, plan: Plan, hardware: HardwareSpec, sources: str, context: Iterable[Any] = ()
    ) -> None:
        self._outside: dict[tuple[str, str], str] = {}
        """(what it defines, path) of each file outside the package that was read so far -> the
        digest of its source."""
        costs = outside_file(hardware)
        source = self._source("cost model", str(costs)) if costs else ""
        made_with = msgspec.msgpack.encode((hardware, source, sources), order="sorted")
        place = os.path.abspath(plan.hardware) if plan.hardware.endswith(".toml") else plan.hardware
        self._first = (
            f"{xxhash.xxh32_hexdigest(place.encode())}-{xxhash.xxh32_hexdigest(made_with)}"
        )
        self._common = xxhash.xxh3_128(
            made_with + msgspec.msgpack.encode((plan.model, list(context)), order="sorted")
        ).digest()

    def of(self, plan: Plan | ImpossiblePlan, *, planned: bool = False) -> str:
        """Returns the key of a plan. With `planned`, the planner chooses the knobs, so the key does
        not depend on those of `plan`.
        """
        identity = (
            plan.policy,
            plan.workload,
            [
                self._source(what, name)
                for what, name in (("policy", plan.policy), ("optimizer", plan.workload.optimizer))
                if name.endswith(".py")
            ],
            "planned" if planned else plan.knobs,
            plan.device_limit_bytes,
            plan.host_limit_bytes,
        )
        rest = xxhash.xxh3_64_hexdigest(self._common + msgspec.msgpack.encode(identity))
        return f"{self._first}-{rest}"

    def _source(self, what: str, name: str) -> str:
        """Returns the digest of a `.py` file, which defines a `what`, and of the modules that it
        imports from its folder.
        """
        if (what, name) not in self._outside:
            self._outside[what, name] = plugins.digest(what, name)
        return self._outside[what, name]


class Store:
    """A file of rows to which rows can be added. Only one process at a time can open it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises UserError if it has other content, or if another sweep
        has opened it.
        """
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
        last = {row.key: row for row in reversed(rows)}  # the later line of a key counts
        return dict(reversed(last.items()))

    def add(self, rows: Iterable[SweepRow]) -> None:
        """Appends rows to the file and to `rows`."""
        rows = list(rows)
        for row in rows:
            self.rows.pop(row.key, None)  # so that the order is that of the file
            self.rows[row.key] = row
        write_rows(self._file, rows)
