"""Results: the stored files that figures are drawn from. Whatever is missing or malformed is named, with the command that makes it."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert, read_json, read_text
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Plan
from megatrain.simulator.timeline import Timeline

T = TypeVar("T")
EXPERIMENTS = Path(__file__).parents[1] / "experiments"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One plan's predicted step, as `experiments/figures/answers.py` writes it."""

    policy: str
    regime: str
    fits: bool
    batch: int
    accumulation: int
    sequence: int
    interval: int
    step_s: float
    tokens_per_s: float
    tflops: float
    device_gib: float
    host_gib: float


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of a published system's own code."""

    value: float
    fits: bool
    batch: int
    sequence: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the paper, or a point beside it, and what is predicted of it."""

    item: str
    source: str
    setting: str
    machine: str
    system: str
    model: str
    changes: dict[str, str]
    layers: int
    parameters: int
    active_parameters: int
    quantity: str
    unit: str
    paper: float | None
    sure: str
    note: str
    code: Code | None
    paper_schedule: Answer | None
    ours: Answer | None
    factor: float = 0.0


class Stored(NamedTuple):
    """What a simulation left: its data as plain values, and when."""

    data: Any
    date: str
    path: Path


class Run(NamedTuple):
    """A run of this project, measured."""

    plan: Plan
    predicted: Timeline
    measured: Timeline
    machine: dict[str, Any]
    comparison: dict[str, Any]
    memory: dict[str, Any]
    date: str

    @property
    def where(self) -> str:
        return f"{self.machine['device']}, {self.machine['cores']} cores, {self.date}"


class Results:
    """Reads from a folder such as `experiments/results`."""

    def __init__(self, folder: Path = EXPERIMENTS / "results", published: Path = EXPERIMENTS / "published") -> None:
        self.folder, self.published = folder, published

    def stored(self, name: str) -> Stored:
        """`figures/NAME.json`."""
        path, fix = self.folder / "figures" / f"{name}.json", f"make it with `megatrain figures {name} --rerun`"
        found = _or(fix, read_json, path)
        if not isinstance(found, dict) or not {"data", "date", "command"} <= set(found):
            raise UserError(str(path), found="other content", allowed="data, date and command", fix=fix)
        return Stored(found["data"], str(found["date"]), path)

    def typed(self, name: str, into: type[T]) -> tuple[T, str]:
        """The data of `figures/NAME.json` as a checked `into`, and its date."""
        stored = self.stored(name)
        return _or(f"make it with `megatrain figures {name} --rerun`", convert, stored.data, into, str(stored.path)), stored.date

    def run(self, name: str) -> Run:
        """A folder that `megatrain train` and `compare` wrote."""
        folder, fix = self.folder / name, f"make the run again with the run.sh that {self.folder / name / 'README.md'} names"
        plan = _or(fix, Plan.load, folder / "plan.toml")
        predicted, measured = (_or(fix, Timeline.load, folder / f"{kind}.json") for kind in ("predicted", "measured"))
        machine, comparison, memory = (_or(fix, read_json, folder / f"{kind}.json") for kind in ("environment", "comparison", "memory"))
        hardware = _or(fix, HardwareSpec.load, str(folder / "hardware.toml"))
        for path, found, key in (("environment", machine, "device"), ("comparison", comparison, "measured_seconds"), ("memory", memory, "pools")):
            if not isinstance(found, dict) or key not in found:
                raise UserError(str(folder / f"{path}.json"), found="other content", allowed=f"an object with `{key}`", fix=fix)
        return Run(plan, predicted, measured, machine, comparison, memory, hardware.costs.date if hardware.costs else "")

    def benchmark(self, path: str) -> dict[str, Any]:
        """What `megatrain.experiments.benchmark --out` wrote."""
        fix = f"make it with the command that {(self.folder / path).parent / 'README.md'} names"
        found = _or(fix, read_json, self.folder / path)
        if not isinstance(found, dict) or not {"systems", "machine", "plan", "arguments", "date"} <= set(found):
            raise UserError(str(self.folder / path), found="other content", allowed="systems, machine, plan, arguments, date", fix=fix)
        return found

    def runs(self) -> dict[str, Run]:
        """Every run on an H200 that was compared, by its folder's name."""
        return {name: self.run(name) for name, compared in self._folders().items() if compared}

    def ablations(self) -> dict[str, dict[str, Any]]:
        """Every benchmark of `experiments/figures/measure.py` by its path: some of their plans are made worse on purpose."""
        found = sorted((self.folder / "figures" / "measured").glob("*.json"))
        return {name: self.benchmark(name) for name in (f"figures/measured/{path.name}" for path in found)}

    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """Every other benchmark on an H200 that timed ours, by its path. Files beside them that are none are left out."""
        names = [f"{name}/{path.name}" for name, compared in self._folders().items() if not compared for path in sorted((self.folder / name).glob("*.json"))]
        fix = "make it with the command that the README.md beside it names"
        found = {name: self.benchmark(name) for name in names if "systems" in (_or(fix, read_json, self.folder / name) or {})}
        return {name: record for name, record in found.items() if any(system["system"] == "ours" for system in record["systems"])}

    def proofs(self) -> dict[str, list[dict[str, Any]]]:
        """The plans that `megatrain.experiments.prove` executed on an H200, each once, by its folder's name."""
        found = {}
        for path in sorted(self.folder.glob("h200-*/rows.jsonl")):
            fix = f"make it with the command that {path.parent / 'README.md'} names"
            try:
                rows = [json.loads(line) for line in _or(fix, read_text, path).splitlines()]
                found[path.parent.name] = [row for row in rows if not row.get("failure") and not row.get("same_as") and row["plan"]["prediction"]]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(str(path), found=str(error), allowed="a row of JSON a line, with its plan", fix=fix) from None
        return found

    def _folders(self) -> dict[str, bool]:
        """Names; whether it is a run that was compared."""
        found = sorted(path for path in self.folder.glob("h200-*") if path.is_dir())
        return {path.name: any((path / f"{name}.json").exists() for name in ("measured", "comparison")) for path in found}

    def measured(self, name: str) -> dict[str, Any] | None:
        """`figures/measured/NAME.json`, a benchmark of `experiments/figures/measure.py`; None where nobody has run it yet."""
        path = f"figures/measured/{name}.json"
        return self.benchmark(path) if (self.folder / path).exists() else None

    def validation(self) -> list[dict[str, str]]:
        """Every published figure and its prediction."""
        path, fix = self.folder / "published" / "published.csv", "make it with `megatrain figures published --rerun`"
        rows = list(csv.DictReader(_or(fix, read_text, path).splitlines()))
        if not rows or not {"item", "predicted", "published", "sure", "source", "quantity"} <= set(rows[0]):
            raise UserError(str(path), found="other columns", allowed="those of validate_published --csv", fix=fix)
        return rows

    def facts(self) -> dict[str, Any]:
        """What the paper tells that no policy predicts."""
        path = self.published / "facts.toml"
        try:
            return tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise UserError(str(path), found=str(error), allowed="a TOML file", fix="restore it from the repository") from None


def _or(fix: str, reader: Any, *arguments: Any) -> Any:
    """What `reader` reads; its complaint with the command that makes the file."""
    try:
        return reader(*arguments)
    except UserError as error:
        raise UserError(error.where, found=error.found, allowed=error.allowed, fix=fix) from None
