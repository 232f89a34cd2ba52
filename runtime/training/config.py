"""Config: everything that a training run may choose and its plan does not say, in sections, each field with its range and meaning.

None of it changes a schedule: batch, sequence, accumulation, dtype and the kind of clipping belong to the plan. Reading it loads no torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.training.data_options import DataOptions
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert, read_text

_MANY = 2**40


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, from what."""

    steps: Annotated[int, Meta(ge=1, le=_MANY, description="optimizer steps")]
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1, description="of everything random: the order of the data, random weights, dropout")] = 0
    init: Annotated[Literal["model", "random"], Meta(description="weights of the model's folder, or random ones")] = "model"
    deterministic: Annotated[bool, Meta(description="only kernels that give the same bits every time; slower with CUDA")] = False


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the loss on the evaluation data is measured: at the end, and in between."""

    every_steps: Annotated[int, Meta(ge=0, le=_MANY, description="optimizer steps between evaluations; 0: at the end alone")] = 0
    over_steps: Annotated[int, Meta(ge=0, le=_MANY, description="at most as many steps' worth of tokens an evaluation is over; 0: all")] = 0


class Saving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run folder keeps: checkpoints, from which the run goes on, and the model at its end."""

    every_steps: Annotated[
        int, Meta(ge=0, le=_MANY, description="optimizer steps between checkpoints, and one at the end; 0: only when a signal ends the run")
    ] = 0
    keep_last: Annotated[int, Meta(ge=1, le=_MANY, description="the newest checkpoints are kept, as many")] = 2
    keep_best: Annotated[int, Meta(ge=0, le=_MANY, description="so are as many of least loss, on the evaluation data where there is some")] = 0
    on_failure: Annotated[Literal["stop", "go on"], Meta(description="when a checkpoint cannot be written")] = "stop"
    export: Annotated[bool, Meta(description="write `model/` at the end, in Hugging Face format")] = True
    export_dtype: Annotated[Literal["", "bf16", "fp32"], Meta(description="its weights: fp32 are the masters; empty: what the plan computes in")] = ""


class Logging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who hears of it besides metrics.jsonl."""

    tensorboard: Annotated[bool, Meta(description="event files in `tensorboard/` of the run folder")] = False
    tracker: Annotated[Literal["", "wandb", "trackio"], Meta(description="an experiment tracker; its package must be installed")] = ""
    project: Annotated[str, Meta(min_length=1, description="the tracker's project")] = "megatrain"
    name: Annotated[str, Meta(description="the tracker's name of this run; empty: it chooses")] = ""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    training: Training
    optimizer: AdamW = AdamW()
    schedule: LearningRate = LearningRate()
    data: DataOptions = DataOptions()
    evaluation: Evaluation = Evaluation()
    saving: Saving = Saving()
    logging: Logging = Logging()

    def __post_init__(self) -> None:
        self.schedule.refuse_impossible(self.training.steps)

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
        """The TOML file at `path`, if any, with `overrides` (`SECTION.FIELD` -> plain value) on top.

        Raises UserError for an unknown key, a wrong type, or a value out of its range.
        """
        where = "config" if path is None else str(path)
        data: dict[str, Any] = {}
        if path is not None:
            try:
                data = tomllib.loads(read_text(path))
            except (ValueError, RecursionError) as error:
                raise UserError(where, found=f"text that is not TOML ({error})", allowed="a TOML file", fix="correct the file") from None
        for key, value in (overrides or {}).items():
            section, _, field = key.partition(".")
            held = data.setdefault(section, {})
            if not isinstance(held, dict):
                raise UserError(f"{where}: {section}", found=repr(held), allowed="a section", fix=f"write [{section}]")
            held[field] = value
        data.setdefault("training", {})
        return checked(data, where)


def checked(value: object, where: str = "config") -> Config:
    """A Config, or plain data for one, with every type and range looked at: what Python code builds is not checked as it is built.

    Raises UserError.
    """
    return convert(msgspec.to_builtins(value), Config, where)


def with_data(config: Config, data: str) -> Config:
    """`config` for other data."""
    return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, data=data))


class Field(NamedTuple):
    """One field, for whoever offers it."""

    meaning: str
    default: object
    """msgspec.NODEFAULT where it must be given"""
    words: tuple[str, ...]
    """its values, where they are words; without the empty one"""


def fields() -> dict[str, Field]:
    """Every field by `SECTION.FIELD`."""
    found = {}
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            plain, *extra = get_args(field.type)
            words = tuple(word for word in get_args(plain) if word) if get_origin(plain) is Literal else ()
            found[f"{section.name}.{field.name}"] = Field(next(meta.description for meta in extra if meta.description), field.default, words)
    return found


def full_name(key: str) -> str:
    """`key` as `SECTION.FIELD`: a field's name alone is enough where only one section has it. Raises UserError for one that is no field's."""
    names = list(fields())
    found = [name for name in names if key in (name, name.partition(".")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"--set {key}", found="a field of several sections", allowed=", ".join(found), fix="name the section too")
    raise UserError(f"--set {key}", found="no field of this name", allowed=", ".join(names), fix="correct its spelling")


def parse_value(text: str) -> Any:
    """What `text` means in TOML; where it means nothing there, the text itself, so that words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
