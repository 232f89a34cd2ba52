"""Trainer: executes a plan for some steps on a corpus and leaves a run folder.

The folder holds `plan.toml`, `environment.json`, `metrics.jsonl` (a line a step), `measured.json` (the timeline of the steady step whose
duration is the median), `memory.json` (bytes allocated), and the trained model in Hugging Face format.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from megatrain.runtime.data import Corpus
from megatrain.runtime.executor import Executor, StepResult
from megatrain.runtime.machine import describe, forget_device_memory
from megatrain.runtime.model_files import ModelState, export, folder_weights, random_weights
from megatrain.runtime.optimizer import AdamW
from megatrain.runtime.supported import refuse_unsupported
from megatrain.runtime.templates import config_of
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_text, write_json, write_text
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import executable
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.timeline import Timeline, median_timeline
from megatrain.simulator.units import format_bytes

WARM_UP_STEPS = 2
"""not counted as steady: memory is touched and libraries are initialised for the first time"""
_KEPT_TIMELINES = 64


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What the plan does not say: nothing of it changes the schedule."""

    steps: int
    rate: float = 1e-3
    """learning rate after warm-up"""
    warm_up_steps: int = 10
    """of the learning rate, linear from 0"""
    seed: int = 0
    """of the order of the corpus, and of random weights"""
    random_init: bool = False
    """random weights instead of the model folder's"""
    export: bool = True
    settings: AdamW = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("rate", 0), ("warm_up_steps", 0)):
            if not getattr(self, name) >= least:
                raise UserError(f"training: {name}", found=getattr(self, name), allowed=f">= {least}", fix=f"set {name} to a sensible number")

    def rate_at(self, number: int) -> float:
        """Learning rate of step `number`, from 1."""
        return self.rate * min(1.0, number / max(self.warm_up_steps, 1))


@dataclass(frozen=True)
class Progress:
    """One step, as told to the caller while training."""

    number: int
    steps: int
    result: StepResult
    tokens_per_second: float


def train(
    plan_path: Path, data: Path, out: Path, options: TrainingOptions, device: torch.device, *,
    on_step: Callable[[Progress], None] = lambda _: None, on_load: Callable[[int], None] = lambda _: None,
) -> Timeline:  # fmt: skip
    """Trains; returns the steady step's measured timeline.

    `on_load` hears of each layer's parameters as they are read. Raises UserError, before anything is written, for a plan that does not
    fit or is not its digest's, a missing model or corpus, or an `out` that is taken.
    """
    plan = Plan.load(plan_path)
    refuse_unsupported(plan.model, plan.workload)
    schedule = executable(plan)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(str(out), found="something there already", allowed="a new or empty folder", fix="name another one with --out")
    _refuse_what_does_not_fit(plan, schedule)
    folder = plan_path.parent / plan.source
    from_folder = _is_model(folder, plan.model)
    if not from_folder and not options.random_init:
        raise UserError(
            f"model {folder}", found="no config.json", allowed="a Hugging Face model folder", fix="check `source` in the plan, or pass --init random"
        )
    corpus = Corpus.read(data, plan.workload, vocabulary=plan.model.vocabulary, seed=options.seed)
    config = config_of(plan.model, str(folder) if from_folder else None)
    forget_device_memory(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with Executor(plan, config, options.settings, device, schedule=schedule) as executor:
        state = ModelState(plan, executor.schedule, executor.arenas, executor.templates.persistent)
        if options.random_init:
            state.load(random_weights(options.seed, device), on_load)
        else:
            with folder_weights(folder) as weights:
                state.load(weights, on_load)
        out.mkdir(parents=True, exist_ok=True)
        _save_plan(plan, plan_path, out)
        write_json(out / "environment.json", describe(device))
        timelines = _loop(executor, corpus, out / "metrics.jsonl", options, on_step)
        executor.drain()
        write_json(out / "memory.json", measured_memory(executor, before))
        measured = median_timeline(timelines)
        measured.save(out / "measured.json")
        if options.export:
            export(state, plan, config, out / "model")
    return measured


def _refuse_what_does_not_fit(plan: Plan, schedule: Schedule) -> None:
    """Activations and workspace included, as predicted; the pools themselves are checked where they are allocated."""
    if plan.prediction is None:
        return
    for place, peak, limit in (
        ("device", plan.prediction.device_peak_bytes, plan.device_limit_bytes),
        ("host", plan.prediction.host_peak_bytes, plan.host_limit_bytes),
    ):
        if peak > limit:
            pools = Counter({buffer.pool: 0 for buffer in schedule.buffers})
            for buffer in schedule.buffers:
                pools[buffer.pool] += buffer.allocated if buffer.place == place else 0
            (largest, size), *_ = pools.most_common(1)
            raise UserError(
                f"{place} memory", found=f"a plan whose peak is {format_bytes(peak)}, of which {largest} {format_bytes(size)}", allowed=format_bytes(limit),
                fix=f"raise the limit by {format_bytes(peak - limit)}, or make a plan for this limit with `megatrain plan`",
            )  # fmt: skip


def _is_model(folder: Path, planned: ModelSpec) -> bool:
    """Whether `folder` has a model. Raises UserError where it is another one than was planned."""
    config = folder / "config.json"
    if not config.exists():
        return False
    found = ModelSpec.load(str(config))
    both = found.config.keys() & planned.config.keys()
    keys = [key for key in found.config if key in both and found.config[key] != planned.config[key]]
    if keys or found.stack != planned.stack:  # a key that one of them leaves out has its default there
        shown = keys or sorted(found.config.keys() ^ planned.config.keys())
        differs, expected = (", ".join(f"{key} {model.config.get(key)}" for key in shown) for model in (found, planned))
        raise UserError(str(config), found=differs, allowed=f"{expected}, as planned", fix="make the plan again with `megatrain plan`")
    return True


def _save_plan(plan: Plan, origin: Path, out: Path) -> None:
    """The plan, and the hardware file that it was made for, so that the run can be compared wherever its folder goes."""
    hardware = origin.parent / plan.hardware
    if hardware.suffix == ".toml" and hardware.is_file():
        write_text(out / "hardware.toml", read_text(hardware))
        plan = msgspec.structs.replace(plan, hardware="hardware.toml")
    source = origin.parent / plan.source
    if source.exists():
        plan = msgspec.structs.replace(plan, source=os.path.relpath(source.resolve(), out.resolve()))
    plan.save(out / "plan.toml")


def _loop(executor: Executor, corpus: Corpus, metrics: Path, options: TrainingOptions, on_step: Callable[[Progress], None]) -> list[Timeline]:
    """All steps; the timelines of the last steady ones."""
    timelines: list[Timeline] = []
    tokens = executor.plan.workload.step_tokens
    for number in range(1, options.steps + 1):
        rate = options.rate_at(number)
        result = executor.step(corpus.step(number), rate=rate, number=number)
        if number > WARM_UP_STEPS or options.steps <= WARM_UP_STEPS:
            timelines = [*timelines[1 - _KEPT_TIMELINES :], result.timeline]
        speed = tokens / result.seconds
        row = {
            "step": number,
            "loss": result.loss,
            "gradient_norm": result.gradient_norm,
            "rate": rate,
            "seconds": round(result.seconds, 6),
            "tokens_per_second": round(speed, 1),
        }
        _append(metrics, row)
        on_step(Progress(number, options.steps, result, speed))
    return timelines


def _append(metrics: Path, row: Mapping[str, object]) -> None:
    """One more line of `metrics`. Raises UserError where it cannot be written."""
    try:
        with metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(str(metrics), found=str(error.strerror).lower(), allowed="a disk with room", fix="free some space or name another folder") from None


def measured_memory(executor: Executor, before: int) -> dict[str, object]:
    """Bytes: each pool as allocated, and with CUDA the most that was allocated on the device, less what was there `before`."""
    sizes: dict[str, object] = {"pools": dict(executor.arenas.pool_bytes)}
    sizes.update({f"{place}_pool_bytes": executor.arenas.total(place) for place in ("device", "host")})
    if executor.device.type == "cuda":
        sizes["device_peak_bytes"] = torch.cuda.max_memory_allocated(executor.device) - before
    return sizes
