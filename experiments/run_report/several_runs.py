"""Compares several runs with each other: their loss, speed, memory and settings."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatrain.experiments.run_report.step_record import StepRecord, read_record
from megatrain.runtime.data.summary import data_labels, read_summaries
from megatrain.runtime.training.learning_rate import format_rate
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json, read_toml
from megatrain.simulator.base.names import short_paths
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.error_table import align, signed_percent
from megatrain.simulator.schedule.plan import Plan

_LEFT_OUT = {"data.cache", "evaluation.ask", "logging.name"}
"""Settings that are not compared: places, questions, and names of runs."""
_DATA, _EVALUATION_DATA = "data.data", "data.evaluation_data"
"""Settings that name data. They differ if the data differs, wherever it is stored."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of the compared runs. A value that was not measured is None."""

    run: str
    """The run's folder."""
    model: str
    """Name of the model."""
    machine: str
    """Name of the GPU, or of the CPU if there is none."""
    policy: str
    """Policy of the plan."""
    tokens_per_step: int
    """Tokens of one step."""
    steps: int
    """Number of the last step."""
    highest_rate: float
    """Highest learning rate."""
    loss: float
    """Mean loss of the last steps. All runs have the same number of these."""
    common_loss: float
    """Mean loss of as many steps before `RunsCompared.common_step`."""
    evaluation_loss: float | None
    """Loss of the last evaluation."""
    best_evaluation_loss: float | None
    """Lowest loss of an evaluation."""
    tokens_per_second: float
    """Median over the steps under the run's current plan, without warm-up steps."""
    text_tokens_per_second: float | None
    """The same without padding. None if the share of padding is not known."""
    step_seconds: float
    """Median wall time of the same steps."""
    predicted_step_seconds: float | None
    """The step time that the plan predicts."""
    device_bytes: int | None
    """Peak of device memory. Without a GPU, the size of the pools that represent it."""
    host_bytes: int | None
    """Size of the pools in host memory."""


class RunsCompared(msgspec.Struct, frozen=True, kw_only=True):
    """Several runs, and the settings in which they differ."""

    runs: list[RunSummary]
    """The runs, in the order in which they were named."""
    last_steps: int
    """Number of steps over which losses are averaged."""
    common_step: int
    """Last step that all runs have."""
    settings: dict[str, list[str]]
    """Name of a setting in which the runs differ -> its value in each run."""


class NamedRun(msgspec.Struct, frozen=True):
    """A run's record and its short name."""

    name: str
    """The shortest end of its path that no other run has."""
    record: StepRecord
    """The run's steps and machine."""


def read_runs(folders: Sequence[Path]) -> tuple[RunsCompared, list[NamedRun]]:
    """Returns the comparison of the runs in `folders`, and their records.

    Raises UserError if one of them is not the folder of a run with at least one step.
    """
    records = [_record(folder) for folder in folders]
    last_steps = max(min(len(record.steps) for record in records) // 25, 1)
    common = min(record.steps[-1] for record in records)
    pairs = list(zip(folders, records, strict=True))
    compared = RunsCompared(
        runs=[_summary(folder, record, last_steps, common) for folder, record in pairs],
        last_steps=last_steps,
        common_step=common,
        settings=_differences(_with_data(folders, [_settings(folder) for folder in folders])),
    )
    names = short_paths([str(folder) for folder in folders])
    return compared, [NamedRun(*pair) for pair in zip(names, records, strict=True)]


def _record(folder: Path) -> StepRecord:
    if not (folder / "metrics.jsonl").is_file() or not (record := read_record(folder)).steps:
        raise UserError(
            str(folder),
            found="no steps in metrics.jsonl" if folder.is_dir() else "no such folder",
            allowed="a folder in which `megatrain train` did a step",
            fix="check the path",
        )
    return record


def _summary(folder: Path, record: StepRecord, last_steps: int, common: int) -> RunSummary:
    """Returns the summary of a run. `common` is the last step that all compared runs have."""
    plan = Plan.load(folder / "plan.toml")
    measured: dict[str, Any] = {}
    if (folder / "memory.json").is_file():
        measured = read_json(folder / "memory.json")
    shared = [
        loss for step, loss in zip(record.steps, record.losses, strict=True) if step <= common
    ]
    evaluations = [evaluation.loss for evaluation in record.evaluations]
    speeds = record.speeds[record.first :]
    speed = statistics.median(speeds[WARM_UP_STEPS:] or speeds)
    training = read_summaries(folder).get("training")
    return RunSummary(
        run=str(folder),
        model=plan.model.name,
        machine=record.device,
        policy=plan.policy,
        tokens_per_step=plan.workload.step_tokens,
        steps=record.steps[-1],
        highest_rate=max(record.rates),
        loss=statistics.fmean(record.losses[-last_steps:]),
        common_loss=statistics.fmean(shared[-last_steps:]),
        evaluation_loss=evaluations[-1] if evaluations else None,
        best_evaluation_loss=min(evaluations) if evaluations else None,
        tokens_per_second=speed,
        text_tokens_per_second=(speed * (1 - training.padding) if training else None),
        step_seconds=statistics.median(record.steady_seconds.values()),
        predicted_step_seconds=plan.prediction.step_seconds if plan.prediction else None,
        device_bytes=measured.get("device_peak_bytes", measured.get("device_pool_bytes")),
        host_bytes=measured.get("host_pool_bytes"),
    )


def _settings(folder: Path) -> dict[str, str]:
    """Returns the settings of a run's config and plan by name, as text."""
    config = folder / "config.toml"
    found = read_toml(config, dict[str, Any]) if config.is_file() else {}
    flat = {
        f"{section}.{key}": str(value)
        for section, values in found.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }
    # The path of a copy in a run's folder says less than the file's name and content.
    plan = Plan.load(folder / "plan.toml").with_files(
        lambda what, file: f"{Path(file).name} {plugins.digest(what, file)}"
    )
    parts = {
        "workload": plan.workload,
        "knobs": plan.knobs,
        "knobs.placement": plan.knobs.placement,
    }
    flat |= {
        f"{name}.{key}": "-" if value == "" else str(value)  # a field that places no layer
        for name, part in parts.items()
        for key, value in msgspec.to_builtins(part).items()
        if not isinstance(value, dict)
    }
    summaries = read_summaries(folder)
    flat |= {f"tokens of the {name} data": f"{data.tokens:,}" for name, data in summaries.items()}
    flat |= {"plan.gpus": str(plan.gpus), "plan.hosts": str(plan.hosts)}
    flat["plan.device_limit"] = format_bytes(plan.device_limit_bytes)
    # That of a host, because a plan has the part of each rank.
    flat["plan.host_limit"] = format_bytes(plan.host_limit_bytes * plan.gpus_per_host)
    return flat


def _with_data(folders: Sequence[Path], settings: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the settings of the runs in `folders`, in which the names of data are the same if the
    data is the same, and different if the data differs.

    If the data of a run is not known, its name stays as it is.
    """
    summaries = [read_summaries(folder) for folder in folders]
    found = [dict(run) for run in settings]
    for key, kind in ((_DATA, "training"), (_EVALUATION_DATA, "evaluation")):
        # Without a name of its own, evaluation data is a part or a split of the training data.
        names = [
            run.get(key) or (run.get(_DATA, "-") if kind in summary else "-")
            for run, summary in zip(settings, summaries, strict=True)
        ]
        known = {
            place: summary[kind]
            for place, summary in enumerate(summaries)
            if kind in summary and summary[kind].digest
        }
        labels = dict(zip(known, data_labels(list(known.values())), strict=True))
        named = {(names[place], label) for place, label in labels.items()}
        different = len(set(labels.values()))
        for place, label in labels.items():
            if different == 1:
                names[place] = names[next(iter(labels))]
            elif not different == len({name for name, _ in named}) == len(named):
                names[place] += f" ({label})"
        for run, name in zip(found, names, strict=True):
            run[key] = name
    return found


def _differences(settings: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Returns `RunsCompared.settings` from the settings of each run."""
    keys = dict.fromkeys(key for run in settings for key in run if key not in _LEFT_OUT)
    rows = {key: [run.get(key, "-") for run in settings] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def format_runs(compared: RunsCompared, names: Sequence[str], width: int = 80) -> str:
    """Returns a line of facts that all runs have in common, and a table with one column for each
    run. With two runs, a further column has the change from the first to the second. The line is
    wrapped at `width` columns.
    """
    runs, last = compared.runs, compared.last_steps
    two = len(runs) == 2
    evaluation_data = compared.settings.get(_EVALUATION_DATA, [""] * len(runs))
    evaluated = {
        data
        for data, run in zip(evaluation_data, runs, strict=True)
        if run.evaluation_loss is not None
    }
    evaluated_alike = len(evaluated) <= 1

    def row(
        name: str, field: str, shown: Callable[[Any], str], *, change: bool = True
    ) -> list[str]:
        values = [getattr(run, field) for run in runs]
        cells = [name, *("-" if value is None else shown(value) for value in values)]
        if two:
            # If the first value is shown as zero, the relative change means nothing.
            known = change and None not in values and shown(values[0]) != shown(0)
            cells.append(signed_percent(values[1] / values[0] - 1) if known else "")
        return cells

    facts = [
        row("model", "model", str, change=False),
        row("machine", "machine", str, change=False),
        row("policy", "policy", str, change=False),
        row("tokens a step", "tokens_per_step", "{:,}".format, change=False),
        row("steps", "steps", "{:,}".format, change=False),
    ]
    shared = [cells for cells in facts if len(set(cells[1 : len(runs) + 1])) == 1]
    some_have_padding = any(
        run.text_tokens_per_second not in (None, run.tokens_per_second) for run in runs
    )
    some_are_longer = len({run.steps for run in runs}) > 1
    rows = [
        ["", *names, *(["change"] if two else [])],
        *(cells for cells in facts if cells not in shared),
        row("highest learning rate", "highest_rate", format_rate, change=False),
        row(f"loss, last {last} steps" if last > 1 else "loss, last step", "loss", _loss),
        *(
            [row(f"loss up to step {compared.common_step:,}", "common_loss", _loss)]
            if some_are_longer
            else []
        ),
        row("evaluation loss, last", "evaluation_loss", _loss, change=evaluated_alike),
        row("evaluation loss, best", "best_evaluation_loss", _loss, change=evaluated_alike),
        row("tokens/s", "tokens_per_second", "{:,.1f}".format),
        *(
            [row("tokens/s without padding", "text_tokens_per_second", "{:,.1f}".format)]
            if some_have_padding
            else []
        ),
        row("step", "step_seconds", format_seconds),
        row("step, predicted", "predicted_step_seconds", format_seconds),
        row("device memory", "device_bytes", format_bytes),
        row("host memory", "host_bytes", format_bytes),
    ]
    rows = [cells for cells in rows if set(cells[1:]) - {"-", ""}]
    common = "; ".join(f"{cells[0]} {cells[1]}" for cells in shared)
    lines = [*textwrap.wrap(f"the same in all: {common}", width), ""] if shared else []
    lines += align(rows)
    if compared.settings:
        settings = [[key, *values] for key, values in compared.settings.items()]
        lines += ["", *align([["settings that differ", *names], *settings])]
    if not evaluated_alike:
        said = "Evaluation losses on different evaluation data are not comparable."
        lines += ["", *textwrap.wrap(said, width)]
    return "\n".join(line.rstrip() for line in lines)


def _loss(value: float) -> str:
    return f"{value:.4f}"
