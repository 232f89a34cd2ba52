"""Reads the stored files that figures are drawn from. If a file is missing or malformed, the error
names the command that makes it.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, read_text, read_toml
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

T = TypeVar("T")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One plan's predicted step, as `experiments/paper_data/answers.py` stores it. The class
    `PredictedStep` there documents the fields.
    """

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
    """The prediction for a published system's own code."""

    value: float
    """The predicted figure."""
    fits: bool
    """Whether the plan fits into memory."""
    batch: int
    """Sequences in a micro-batch."""
    sequence: int
    """Tokens in a sequence."""


class ImpliedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The batch that a baseline's speed in the paper implies."""

    batch: int
    """Sequences in a micro-batch."""
    value: float
    """The predicted speed with this batch."""


class BenchmarkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the paper, or a point that the paper does not have, with its predictions."""

    item: str
    """What the figure describes."""
    source: str
    """The paper's figure or table."""
    setting: str
    """The validation's setting."""
    machine: str
    """A machine of the library."""
    system: str
    """The policy that ran, or the system's name."""
    model: str
    """A model of the library."""
    changes: dict[str, str]
    """Changed keys of the model's config.json, and ablations."""
    layers: int
    """Decoder layers."""
    parameters: int
    """All parameters."""
    active_parameters: int
    """Parameters that a token uses."""
    quantity: str
    """What was measured, such as `tflops`."""
    unit: str
    """The unit of `paper`."""
    paper: float | None
    """The paper's value, or None."""
    sure: str
    """Certainty of the paper's value."""
    note: str
    """Why there is no prediction, or an empty text."""
    code: Code | None
    """The prediction for the system's own code."""
    paper_schedule: StoredAnswer | None
    """The prediction for the paper's schedule, for rows of MegaTrain."""
    ours: StoredAnswer | None
    """The prediction for our best plan, for rows of MegaTrain."""
    paper_stated: StoredAnswer | None = None
    """The prediction for the paper's schedule with 12 bytes per parameter."""
    implied: ImpliedBatch | None = None
    """The batch that the paper's speed implies, for baselines whose batch is not stated."""
    bound: str = ""
    """`least` if the paper's value is a lower bound."""
    used: bool = False
    """Whether an assumption was chosen by the paper's value, so the value tests nothing."""
    repeats: str = ""
    """The row of the same experiment that counts instead of this one."""
    factor: float = 0.0
    """The width as a multiple of x1.0, in figure 6."""

    @property
    def how(self) -> str:
        """How the paper's value is drawn: `input`, `bound`, or its certainty."""
        return "input" if self.used else "bound" if self.bound else self.sure


class StoredRun(NamedTuple):
    """A measured run of this project."""

    plan: Plan
    """The executed plan."""
    predicted: Timeline
    """The predicted step."""
    measured: Timeline
    """The measured step."""
    machine: dict[str, Any]
    """The contents of `environment.json`."""
    comparison: dict[str, Any]
    """The contents of `comparison.json`."""
    memory: dict[str, Any]
    """The contents of `memory.json`."""
    date: str
    """Day of the machine's calibration."""

    @property
    def where(self) -> str:
        """Device, number of cores and date of the run, for captions."""
        return f"{self.machine['device']}, {self.machine['cores']} cores, {self.date}"


class Results:
    """Reads results from a folder such as `experiments/results`. Methods raise UserError if a file
    is missing or malformed.
    """

    def __init__(
        self, folder: Path = EXPERIMENTS / "results", published: Path = EXPERIMENTS / "published"
    ) -> None:
        self.folder, self.published = folder, published

    def typed(self, name: str, into: type[T]) -> tuple[T, str]:
        """Returns the data of `figures/NAME.json`, converted to type `into`, and its date."""
        path = self.folder / "figures" / f"{name}.json"
        fix = f"make it with `megatrain figures {name} --rerun`"
        found = _object(fix, path, "data", "date", "command")
        return _or(fix, convert, found["data"], into, str(path)), str(found["date"])

    def run(self, name: str) -> StoredRun:
        """Returns a run from the folder that `megatrain train` and `compare` wrote."""
        folder, fix = (
            self.folder / name,
            f"make the run again with the run.sh that {self.folder / name / 'README.md'} names",
        )
        plan = _or(fix, Plan.load, folder / "plan.toml")
        predicted, measured = (
            _or(fix, Timeline.load, folder / f"{kind}.json") for kind in ("predicted", "measured")
        )
        machine, comparison, memory = (
            _object(fix, folder / f"{name}.json", key)
            for name, key in (
                ("environment", "device"),
                ("comparison", "measured_seconds"),
                ("memory", "pools"),
            )
        )
        hardware = _or(fix, HardwareSpec.load, str(folder / "hardware.toml"))
        return StoredRun(
            plan,
            predicted,
            measured,
            machine,
            comparison,
            memory,
            hardware.costs.date if hardware.costs else "",
        )

    def seeds(self, name: str, into: type[T]) -> list[T]:
        """Returns the files `NAME/seed-*.json` of a job that ran with several seeds, converted to
        type `into`.
        """
        fix = f"make it with the command that {self.folder / name / 'README.md'} names"
        paths = sorted((self.folder / name).glob("seed-*.json"))
        if not paths:
            raise UserError(
                str(self.folder / name),
                found="no seed-*.json",
                allowed="one for each seed",
                fix=fix,
            )
        return [_or(fix, convert, _or(fix, read_json, path), into, str(path)) for path in paths]

    def benchmark(self, path: str) -> dict[str, Any]:
        """Returns a file that `megatrain.experiments.benchmark --out` wrote."""
        fix = f"make it with the command that {(self.folder / path).parent / 'README.md'} names"
        keys = ("systems", "machine", "plan", "arguments", "date")
        return _object(fix, self.folder / path, *keys)

    def runs(self) -> dict[str, StoredRun]:
        """Returns every run on an H200 that `megatrain compare` compared, by its folder's name."""
        return {name: self.run(name) for name, compared in self._folders().items() if compared}

    def ablations(self) -> dict[str, dict[str, Any]]:
        """Returns every benchmark of `experiments/paper_data/measure.py` by its path. Some of them
        execute plans that lack one optimization.
        """
        found = sorted((self.folder / "figures" / "measured").glob("*.json"))
        return {
            name: self.benchmark(name)
            for name in (f"figures/measured/{path.name}" for path in found)
        }

    def usual_benchmarks(self) -> dict[str, dict[str, Any]]:
        """Returns those of `benchmarks` with AdamW and without fp8 products, as in the paper."""
        return {
            name: file
            for name, file in self.benchmarks().items()
            if (work := file["plan"]["workload"]).get("fp8") is None
            and work.get("optimizer", "adamw") == "adamw"
        }

    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """Returns every benchmark on an H200 that timed ours, by its path, except `ablations`.
        Other JSON files in the same folders are ignored.
        """
        names = [
            f"{name}/{path.name}"
            for name, compared in self._folders().items()
            if not compared
            for path in sorted((self.folder / name).glob("*.json"))
        ]
        fix = "make it with the command in the README.md of the same folder"
        found = {
            name: self.benchmark(name)
            for name in names
            if "systems" in (_or(fix, read_json, self.folder / name) or {})
        }
        return {
            name: record
            for name, record in found.items()
            if any(system["system"] == "ours" for system in record["systems"])
        }

    def benchmarks_of_large_models(self) -> dict[str, dict[str, Any]]:
        """Returns the benchmarks of 72B and 123B on an H100, by their path."""
        names = [f"h100-x4-large-models/{name}.json" for name in ("q72", "l123")]
        return {name: self.benchmark(name) for name in names}

    def heldout_rows(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the rows of `megatrain.experiments.heldout` on an H200 by the name of their
        folder. Each case has one row, that of its repetition with the median step time. Failed
        plans have none.
        """
        found = {}
        for path in sorted(self.folder.glob("h200-*/rows.jsonl")):
            fix = f"make it with the command that {path.parent / 'README.md'} names"
            try:
                rows = [json.loads(line) for line in _or(fix, read_text, path).splitlines()]
                cases: dict[str, list[dict[str, Any]]] = {}
                for row in sorted(rows, key=lambda row: row["step_seconds"] or 0.0):
                    if not (row.get("failure") or row.get("same_as")) and row["plan"]["prediction"]:
                        cases.setdefault(row["name"], []).append(row)
                names = dict.fromkeys(row["name"] for row in rows)
                found[path.parent.name] = [
                    cases[name][len(cases[name]) // 2] for name in names if name in cases
                ]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    str(path),
                    found=str(error),
                    allowed="one row of JSON per line, with its plan",
                    fix=fix,
                ) from None
        return found

    def _folders(self) -> dict[str, bool]:
        """Returns folder -> whether it has a compared run, for all folders of H200 results."""
        found = sorted(path for path in self.folder.glob("h200-*") if path.is_dir())
        return {
            path.name: any((path / f"{name}.json").exists() for name in ("measured", "comparison"))
            for path in found
        }

    def measured(self, name: str) -> dict[str, Any] | None:
        """Returns `figures/measured/NAME.json`, a benchmark of `experiments/paper_data/measure.py`,
        or None if there is no such file.
        """
        path = f"figures/measured/{name}.json"
        return self.benchmark(path) if (self.folder / path).exists() else None

    def validation(self) -> list[dict[str, str]]:
        """Returns every published figure with its prediction: the rows of `published.csv`."""
        path, fix = (
            self.folder / "published" / "published.csv",
            "make it with `megatrain figures published --rerun`",
        )
        rows = list(csv.DictReader(_or(fix, read_text, path).splitlines()))
        if not rows or not {"item", "predicted", "published", "sure", "source", "quantity"} <= set(
            rows[0]
        ):
            raise UserError(
                str(path),
                found="other columns",
                allowed="those of validate_published --csv",
                fix=fix,
            )
        return rows

    def facts(self) -> dict[str, Any]:
        """Returns values of the paper that no policy predicts."""
        path = self.published / "facts.toml"
        found: dict[str, Any] = _or("restore it from the repository", read_toml, path, dict)
        return found


def _object(fix: str, path: Path, *keys: str) -> dict[str, Any]:
    """Returns the JSON object of a file. Raises UserError with `fix` if it lacks one of `keys`."""
    found = _or(fix, read_json, path)
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UserError(
            str(path), found="other content", allowed=f"an object with {', '.join(keys)}", fix=fix
        )
    return found


def _or(fix: str, reader: Any, *arguments: Any) -> Any:
    """Returns `reader(*arguments)`. If it raises UserError, the fix of the error is replaced by
    `fix`, which names the command that makes the file.
    """
    try:
        return reader(*arguments)
    except UserError as error:
        raise UserError(error.where, found=error.found, allowed=error.allowed, fix=fix) from None
