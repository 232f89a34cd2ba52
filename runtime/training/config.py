"""Config: the settings of a training run that are not in its plan, in sections.

Each field has its type, its range, and a description that `megatrain train --help` prints.

No setting changes the schedule. Batch size, sequence length, gradient accumulation, dtype and the
kind of gradient clipping are in the plan. This module does not import torch.
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
"""The upper bound of all counts."""


class TrainingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of steps, the seed and the initial weights. Either `steps` or `epochs` is set."""

    steps: Annotated[
        int,
        Meta(
            ge=0,
            le=_LARGEST,
            description=(
                "number of optimizer steps, counted from the beginning of the run; 0: as many as"
                " the epochs have"
            ),
        ),
    ] = 0
    epochs: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description="how often to train on all of the data, e.g. 2 or 0.5; instead of steps",
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
        Meta(description="initial weights: from the model's folder, or random"),
    ] = "model"
    deterministic: Annotated[
        bool,
        Meta(
            description=(
                "use only deterministic kernels: a repeated run then gives the same bits; slower"
                " than predicted"
            )
        ),
    ] = False


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and on how much data to evaluate, and the questions for the trained model.

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
                "maximum amount of data in an evaluation, as a number of optimizer steps; 0: all of"
                " the evaluation data"
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
        int, Meta(ge=0, le=_LARGEST, description="optimizer steps between checkpoints; 0: off")
    ] = 0
    every_minutes: Annotated[
        float,
        Meta(
            ge=0,
            le=2**20,
            description=(
                "minutes of wall time between checkpoints; 0: off. One more checkpoint is saved"
                " after the last step. If this and --save-every are both 0, only a signal saves"
                " one"
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
                "number of checkpoints with the lowest loss to keep, too; the loss is the"
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
    """All settings of a training run. Without a number of steps or epochs, it has one epoch."""

    training: TrainingSettings = TrainingSettings(epochs=1.0)
    """Number of steps, seed and initial weights."""
    optimizer: AdamW = AdamW()
    """Hyperparameters of AdamW."""
    schedule: LearningRate = LearningRate()
    """Learning rate of each step. If the config has a number of steps, its missing values are set
    (`LearningRate.settled`)."""
    data: DataOptions = DataOptions()
    """Training data, evaluation data, and their packing into rows."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """When to evaluate, and the questions for the trained model."""
    saving: Saving = Saving()
    """Checkpoints, and the exported model."""
    logging: Logging = Logging()
    """TensorBoard and experiment trackers."""

    def __post_init__(self) -> None:
        training = self.training
        # Python code may pass other objects and values, which are compared and computed with here.
        _refuse_other_than("training", training, TrainingSettings)
        _refuse_other_than("schedule", self.schedule, LearningRate)
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
        """Returns the config with a number of steps instead of epochs."""
        training = msgspec.structs.replace(self.training, steps=steps, epochs=0.0)
        return msgspec.structs.replace(self, training=training)

    @classmethod
    def load(
        cls,
        path: Path | None,
        overrides: Mapping[str, Any] | None = None,
        *,
        base: Path | None = None,
    ) -> Config:
        """Returns the config in the TOML file at `path`, changed by `overrides`.

        Args:
            path: the file, or None to start from the defaults.
            overrides: `SECTION.FIELD` -> the plain value that replaces the value in the file.
            base: the config file of a run to resume, which has the fields that `path` does not
                have. None for the defaults.

        Raises UserError for an unknown key, a wrong type, or a value out of its range.
        """
        where = "config" if path is None else str(path)
        data: dict[str, Any] = {} if base is None else msgspec.to_builtins(cls.load(base))
        if path is not None:
            try:
                file = tomllib.loads(read_text(path))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    where,
                    found=f"text that is not TOML ({error})",
                    allowed="a TOML file",
                    fix="correct the file",
                ) from None
            _change(data, file, where)
        given: dict[str, dict[str, Any]] = {}
        for key, value in (overrides or {}).items():
            section, _, field = key.partition(".")
            given.setdefault(section, {})[field] = value
        _change(data, given, where)
        data.setdefault("training", {})
        return checked(data, where)


def _change(data: dict[str, Any], changes: Mapping[str, Any], where: str) -> None:
    """Replaces values in `data` by those in `changes`. Both are section -> field -> plain value.

    A number of steps replaces epochs, and epochs replace a number of steps. A section of `changes`
    that is no dict is taken over, because `checked` refuses it. Raises UserError if it is in `data`
    and `changes` have fields for it. `where` names the config in the error.
    """
    for section, values in changes.items():
        if not isinstance(values, dict):
            data[section] = values
            continue
        before = data.get(section, {})
        if not isinstance(before, dict):
            raise UserError(
                f"{where}: {section}",
                found=repr(before),
                allowed="a section",
                fix=f"write [{section}]",
            )
        data[section] = {**before, **values}
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if section == "training" and values.get(name) and other not in values:
                data[section].pop(other, None)


def checked(value: object, where: str = "config") -> Config:
    """Returns `value` as a Config with every type and range checked.

    `value` is a Config or plain data for one. A Config that Python code builds must be checked,
    too, because msgspec validates only decoded data.

    Raises UserError if a value has a wrong type or is out of its range. `where` names the config in
    the error.
    """
    return convert(msgspec.to_builtins(value), Config, where)


def _refuse_other_than(name: str, section: object, kind: type) -> None:
    """Raises UserError unless `section`, the section `name` of a Config, is of the class `kind` and
    has values of the right types and ranges. A subclass is refused, too, because config.toml stores
    only the fields of `kind`.
    """
    if type(section) is not kind:
        raise UserError(
            f"config: {name}",
            found=f"a {type(section).__name__}",
            allowed=f"a {kind.__name__}, whose fields describe the {name}",
            fix=f"pass {name}={kind.__name__}(...); a class of your own is not supported",
        )
    convert(msgspec.to_builtins(section), kind, f"config: {name}")


def with_data(config: Config, data: str) -> Config:
    """Returns `config` with `data` as the path of the training data."""
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, data=data))


class Field(NamedTuple):
    """The description of one config field, from which its command-line option is made."""

    meaning: str
    """The help text."""
    default: object
    """The default value, or msgspec.NODEFAULT if the field is required."""
    words: tuple[str, ...]
    """The allowed values of a `Literal` field, without the empty string. Empty for other fields."""


def fields() -> dict[str, Field]:
    """Returns all fields of all sections, keyed by `SECTION.FIELD`."""
    by_name = {}
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            plain, *extra = get_args(field.type)
            words = (
                tuple(word for word in get_args(plain) if word)
                if get_origin(plain) is Literal
                else ()
            )
            by_name[f"{section.name}.{field.name}"] = Field(
                next(meta.description for meta in extra if meta.description), field.default, words
            )
    return by_name


def full_name(key: str) -> str:
    """Returns `key` as `SECTION.FIELD`.

    `key` may be the field's name alone if only one section has a field of this name.

    Raises UserError if no field or several fields have this name.
    """
    names = list(fields())
    matches = [name for name in names if key in (name, name.partition(".")[2])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(
            f"--set {key}",
            found="a field of several sections",
            allowed=", ".join(matches),
            fix="name the section too",
        )
    raise UserError(
        f"--set {key}",
        found="no field of this name",
        allowed="a field of the config, which `megatrain train --help` lists",
        fix=suggestion(key, _spellings(names), "correct its spelling"),
    )


def _spellings(names: Iterable[str]) -> list[str]:
    """Returns each of `names`, with and without its section."""
    return [spelling for name in names for spelling in (name, name.partition(".")[2])]


def parse_value(text: str) -> Any:
    """Returns the value of `text` as a TOML value.

    If `text` is not a TOML value, returns `text` itself, so words need no quotes.
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
