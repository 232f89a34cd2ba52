"""Refuses fields of a config that have no effect without another setting, without importing torch.

`_NEEDS` is the only place that knows them. The command line, config files and Python use it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from megatrain.runtime.data.options import EVALUATION_FIELDS
from megatrain.runtime.training.config import Config
from megatrain.simulator.base.errors import UserError


class _Run(NamedTuple):
    """A run, as far as it decides whether fields of its config have an effect."""

    config: Config
    clipping: str
    evaluates: bool


class _Need(NamedTuple):
    """Fields that have an effect only together with another setting."""

    fields: tuple[str, ...]
    """The fields, as `SECTION.FIELD`."""
    is_met: Callable[[_Run], bool]
    """Returns whether the run has the other setting."""
    needed: str
    """The other setting, in words."""
    fix: str
    """How to get it."""


_NEEDS = (
    _Need(
        ("evaluation.every_steps", "evaluation.over_steps"),
        lambda run: run.evaluates,
        "evaluation data",
        "keep a part of the data with evaluation_fraction, or name evaluation_data",
    ),
    _Need(
        ("optimizer.max_norm",),
        lambda run: run.clipping in ("global", "layer", "adagc"),
        "clipping by a norm",
        "plan with clipping global, layer or adagc",
    ),
    _Need(
        ("optimizer.adagc_factor", "optimizer.adagc_decay", "optimizer.adagc_warm_up"),
        lambda run: run.clipping == "adagc",
        "clipping by adagc",
        "plan with clipping adagc",
    ),
    _Need(
        ("schedule.decay_steps",),
        lambda run: run.config.schedule.kind == "wsd",
        "the schedule wsd",
        "choose the schedule wsd",
    ),
    _Need(
        ("schedule.floor",),
        lambda run: run.config.schedule.kind != "constant",
        "a schedule that decays",
        "choose the schedule linear, cosine or wsd",
    ),
    _Need(
        ("saving.export_dtype",),
        lambda run: run.config.saving.export,
        "an exported model",
        "let the run export its model",
    ),
    _Need(
        ("logging.project", "logging.name"),
        lambda run: bool(run.config.logging.tracker),
        "a tracker",
        "name a tracker",
    ),
)


def refuse_unused(
    config: Config, clipping: str, *, run: Path | None = None, evaluates: bool = False
) -> None:
    """Raises UserError if a field of `config` was given and has no effect.

    A field was given if it differs from its default or, if a run is resumed, from the config of
    that run. So a run of an earlier version, which did not refuse such fields, can be resumed.

    Args:
        config: the settings of the run.
        clipping: the clipping of its plan.
        run: the folder of the run to resume, or None for a new run.
        evaluates: whether there is evaluation data that `config` does not name.
    """
    file = None if run is None else run / "config.toml"
    before = Config.load(file) if file is not None and file.is_file() else Config()
    evaluates = evaluates or any(getattr(config.data, field) for field in EVALUATION_FIELDS)
    asked = _Run(config, clipping, evaluates)
    for need in _NEEDS:
        for field in need.fields:
            value = attrgetter(field)(config)
            if value != attrgetter(field)(before) and not need.is_met(asked):
                raise UserError(
                    f"config: {field}",
                    found=f"{value}, without {need.needed}",
                    allowed=f"only with {need.needed}, because it has no effect otherwise",
                    fix=f"{need.fix}, or leave it out",
                )
