"""The model card: the text that describes a trained model on the hub."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from megatrain.experiments.run_report.step_record import read_record
from megatrain.runtime.data.rows.sources import hub_data, weighted_path
from megatrain.runtime.files.model_source import hub_name
from megatrain.runtime.training.config import Config
from megatrain.simulator.base.units import format_count
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.schedule.plan import Plan


def model_card(run: Path, title: str, *, base: str | None = None, step: int | None = None) -> str:
    """Returns a card in Markdown with the base model, the data, the settings and the loss of `run`.

    It names local files and folders without their paths.

    Args:
        run: the folder of a run.
        title: the model's name.
        base: the model from which the run started; None for the plan's model.
        step: the step after which the weights were exported; None for the last step.

    Raises UserError if the run's files cannot be read.
    """
    plan, config = Plan.load(run / "plan.toml"), Config.load(run / "config.toml")
    record = read_record(run)
    work, source = plan.workload, base or plan.source
    on_hub = hub_name(source)
    random = config.training.init == "random"
    sets = [hub_data(weighted_path(text).path) for text in config.data.paths]
    head: dict[str, str | list[str]] = {
        "base_model": [on_hub.name] if on_hub and not random else [],
        "datasets": sorted({data.name for data in sets if data}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatrain"],
    }
    steps = [number for number in record.steps if step is None or number <= step]
    losses = record.losses[: len(steps)]
    tokens = len(steps) * work.accumulation * work.batch * work.sequence
    name = on_hub.name if on_hub else Path(source).name
    begun = "random initial weights" if random else f"the weights of `{name}`"
    lines = [
        *_front_matter(head),
        f"# {title}",
        "",
        f"A model of {format_count(plan.model.parameters)} parameters. It began with {begun}, and"
        f" all weights were trained with megatrain {version('megatrain')}.",
        "",
        "## Data",
        "",
        *(f"* `{_shown(text)}`" for text in config.data.paths),
        "",
        f"{format_count(tokens)} tokens with padding were trained on, in {len(steps):,} steps.",
        "",
        "## Settings",
        "",
        "| setting | value |",
        "|---|---|",
        f"| learning rate | {config.schedule} |",
        f"| optimizer | {work.optimizer}, weight decay {config.optimizer.weight_decay:g} |",
        f"| clipping | {work.clipping} |",
        *(["| gradients | stored in 8 bits |"] if work.gradients == "8bit" else []),
        f"| tokens a step | {work.accumulation} x {work.batch} x {work.sequence:,} |",
        f"| computed in | {work.precision}, with {FORMATS[work.state].what} |",
        f"| loss on | {config.data.loss} |",
        f"| seed | {config.training.seed} |",
        "",
        "## Loss",
        "",
    ]
    if losses:
        few = min(20, -(-len(losses) // 2))
        first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
        lines.append(f"* training: {first:.4f} at the beginning, {last:.4f} at the end")
    if found := [each.loss for each in record.evaluations if step is None or each.step <= step]:
        lines.append(f"* evaluation: {found[-1]:.4f}")
    return "\n".join([*lines, ""])


def _front_matter(head: dict[str, str | list[str]]) -> list[str]:
    """Returns `head` as lines of YAML, which the hub reads. Empty lists are left out."""
    lines = ["---"]
    for key, value in head.items():
        if isinstance(value, str):
            lines.append(f"{key}: {value}")
        elif value:
            lines += [f"{key}:", *(f"- {entry}" for entry in value)]
    return [*lines, "---", ""]


def _shown(text: str) -> str:
    """Returns the name of a data source in the card: its name on the hub, or the last part of its
    path.
    """
    path = weighted_path(text).path
    return text if hub_data(path) else f"{path.name}{text[len(str(path)) :]}"
