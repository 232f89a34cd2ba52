"""Config: the settings of a training run that are not in its plan, in sections.

Each field has its type, its range, and a description that `megatrain train --help` prints.

No setting changes the schedule. Batch size, sequence length, gradient accumulation, dtype and the
kind of gradient clipping belong to the plan. This module does not import torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_text
from megatrain.simulator.base.names import suggestion

_LARGEST = 2**40
"""upper bound of all counts"""


class TrainingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of steps, the seed and the initial weights. Either `steps` or `epochs` is set."""

    steps: Annotated[
        int,
        Meta(
            ge=0,
            le=_LARGEST,
            description=(
                "number of optimizer steps, counted from the beginning of the run; 0: as many as"
                " the epochs take"
            ),
        ),
    ] = 0
    epochs: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description="how often to train on all of the data, e.g. 2 or 0.5; in place of steps",
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=2**32 - 1,
            description=(
                "seed for the order of the data, for random initial weights, and for routers that"
                " draw experts at random"
            ),
        ),
    ] = 0
    init: Annotated[
        Literal["model", "random"],
        Meta(description="initial weights: those in the model's folder, or random ones"),
    ] = "model"
    deterministic: Annotated[
        bool,
        Meta(
            description=(
                "use only deterministic kernels, so that a repeated run gives the same bits;"
                " slower with CUDA"
            )
        ),
    ] = False


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the loss on the evaluation data is measured, on how much of the data, and what the
    trained model is asked.

    With evaluation data, there is always an evaluation after the last step.
    """

    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=_LARGEST,
            description="optimizer steps between evaluations; 0: evaluate only after the last step",
        ),
    ] = 0
    over_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=_LARGEST,
            description=(
                "largest size of an evaluation, in batches of one optimizer step; 0: all of the"
                " evaluation data"
            ),
        ),
    ] = 0
    ask: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description=(
                "question that `megatrain train` asks the trained model at the end; it prints the"
                " answer and stores it in `answers.jsonl`; may be repeated"
            )
        ),
    ] = ()


class Saving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoints a run folder keeps, and how the trained model is exported.

    A run can be resumed from a checkpoint. The exported model is a Hugging Face folder.
    """

    every_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=_LARGEST,
            description="optimizer steps between checkpoints; 0: none by the number of steps",
        ),
    ] = 0
    every_minutes: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description=(
                "minutes by the clock between checkpoints; 0: none by the clock. There is one more"
                " after the last step, unless both are 0: then only a signal saves one"
            ),
        ),
    ] = 30.0
    keep_last: Annotated[
        int, Meta(ge=1, le=_LARGEST, description="number of newest checkpoints to keep")
    ] = 2
    keep_best: Annotated[
        int,
        Meta(
            ge=0,
            le=_LARGEST,
            description=(
                "number of checkpoints with the lowest loss to keep as well; the loss is the"
                " evaluation loss, or the training loss if there is no evaluation data"
            ),
        ),
    ] = 0
    on_failure: Annotated[
        Literal["stop", "go on"],
        Meta(description="whether to stop or go on if a checkpoint cannot be written"),
    ] = "stop"
    export: Annotated[
        bool, Meta(description="write the model to `model/` at the end, in Hugging Face format")
    ] = True
    export_dtype: Annotated[
        Literal["", "bf16", "fp32"],
        Meta(
            description=(
                "dtype of the exported weights; fp32 exports the master weights; by default the"
                " dtype that the plan computes in"
            )
        ),
    ] = ""


class Logging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where metrics are written in addition to `metrics.jsonl` in the run folder."""

    tensorboard: Annotated[
        bool, Meta(description="write TensorBoard event files to `tensorboard/` in the run folder")
    ] = False
    tracker: Annotated[
        Literal["", "wandb", "trackio"],
        Meta(
            description=(
                "experiment tracker that receives the metrics; its package must be installed;"
                " by default none"
            )
        ),
    ] = ""
    project: Annotated[
        str, Meta(min_length=1, description="name of the project in the tracker")
    ] = "megatrain"
    name: Annotated[
        str, Meta(description="name of this run in the tracker; by default the tracker chooses one")
    ] = ""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a training run. Only the number of steps, or of epochs, has no default."""

    training: TrainingSettings
    """number of steps, seed and initial weights"""
    optimizer: AdamW = AdamW()
    """hyperparameters of AdamW"""
    schedule: LearningRate = LearningRate()
    """learning rate of each step; with the number of steps, a config sets what is left open"""
    data: DataOptions = DataOptions()
    """training data, evaluation data, and how they are packed into rows"""
    evaluation: EvaluationSettings = EvaluationSettings()
    """when to evaluate"""
    saving: Saving = Saving()
    """checkpoints and the exported model"""
    logging: Logging = Logging()
    """TensorBoard and experiment trackers"""

    def __post_init__(self) -> None:
        training = self.training
        if bool(training.steps) == bool(training.epochs):
            raise UserError(
                "training",
                found="both steps and epochs" if training.steps else "neither steps nor epochs",
                allowed="one of the two",
                fix="set steps, or epochs",
            )
        if training.steps:
            schedule = self.schedule.settled(training.steps, pretrained=training.init == "model")
            msgspec.structs.force_setattr(self, "schedule", schedule)

    def with_steps(self, steps: int) -> Config:
        """Returns the config with a number of steps in place of epochs."""
        training = msgspec.structs.replace(self.training, steps=steps, epochs=0.0)
        return msgspec.structs.replace(self, training=training)

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
        """Returns the config in the TOML file at `path`, changed by `overrides`.

        Args:
            path: the file, or None to start from the defaults.
            overrides: maps `SECTION.FIELD` to the plain value that replaces the file's.

        Raises UserError for an unknown key, a wrong type, or a value out of its range.
        """
        where = "config" if path is None else str(path)
        data: dict[str, Any] = {}
        if path is not None:
            try:
                data = tomllib.loads(read_text(path))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    where,
                    found=f"text that is not TOML ({error})",
                    allowed="a TOML file",
                    fix="correct the file",
                ) from None
        for key, value in (overrides or {}).items():
            section, _, field = key.partition(".")
            held = data.setdefault(section, {})
            if not isinstance(held, dict):
                raise UserError(
                    f"{where}: {section}",
                    found=repr(held),
                    allowed="a section",
                    fix=f"write [{section}]",
                )
            held[field] = value
        training = data.setdefault("training", {})
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            given = overrides or {}
            if f"training.{name}" in given and f"training.{other}" not in given:
                training.pop(other, None)
        return checked(data, where)


def checked(value: object, where: str = "config") -> Config:
    """Returns `value` as a Config with every type and range checked.

    `value` is a Config or plain data for one. The check is needed because msgspec does not validate
    a struct that Python code builds.

    Raises UserError if a value has a wrong type or is out of its range.
    """
    return convert(msgspec.to_builtins(value), Config, where)


def with_data(config: Config, data: str) -> Config:
    """Returns `config` with `data` as the path of the training data."""
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, data=data))


class Field(NamedTuple):
    """The description of one config field, from which the command-line options are made."""

    meaning: str
    """the help text"""
    default: object
    """the default value, or msgspec.NODEFAULT if the field is required"""
    words: tuple[str, ...]
    """the allowed values of a `Literal` field, without the empty string; empty for other fields"""


def fields() -> dict[str, Field]:
    """Returns all fields of all sections, keyed by `SECTION.FIELD`."""
    found = {}
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            plain, *extra = get_args(field.type)
            words = (
                tuple(word for word in get_args(plain) if word)
                if get_origin(plain) is Literal
                else ()
            )
            found[f"{section.name}.{field.name}"] = Field(
                next(meta.description for meta in extra if meta.description), field.default, words
            )
    return found


def full_name(key: str) -> str:
    """Returns `key` as `SECTION.FIELD`.

    `key` may be the field's name alone if only one section has a field of that name.

    Raises UserError if no field has this name, or fields of several sections have it.
    """
    names = list(fields())
    found = [name for name in names if key in (name, name.partition(".")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"--set {key}",
            found="a field of several sections",
            allowed=", ".join(found),
            fix="name the section too",
        )
    raise UserError(
        f"--set {key}",
        found="no field of this name",
        allowed="a field of the config, which `megatrain train --help` lists",
        fix=suggestion(key, _spellings(names), "correct its spelling"),
    )


def _spellings(names: Iterable[str]) -> list[str]:
    """Returns all `names` and, of each, the field's name alone."""
    return [spelling for name in names for spelling in (name, name.partition(".")[2])]


def parse_value(text: str) -> Any:
    """Returns the value of `text` as a TOML value.

    Returns `text` itself if it is not a TOML value, so that words need no quotes.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
