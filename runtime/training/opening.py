"""Finds and checks the model and the data of a run, before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
from transformers import AutoConfig, PretrainedConfig

from megatrain.runtime.batch import Batch
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import EVALUATION_FIELDS, DataOptions, Packing
from megatrain.runtime.data.summary import DataSummary
from megatrain.runtime.files import quantized
from megatrain.runtime.files.checkpoint_names import CheckpointNames, is_multimodal
from megatrain.runtime.files.folder_tensors import FolderTensors
from megatrain.runtime.files.model_folder import model_folder
from megatrain.runtime.layers.model_config import differences, full_config, refused_config
from megatrain.runtime.layers.supported import refuse_multimodal
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.schedule.plan import Plan


class BatchSource(Protocol):
    """A source of training batches.

    If it has an attribute `digest`, a run can only be resumed with data of the same digest.
    """

    def step(self, number: int) -> list[Batch]:
        """Returns the micro-batches of step `number`, counted from 1.

        Must return the same batches whenever it is called with the same number.
        """


class EvaluationSource(Protocol):
    """A source of evaluation batches."""

    def batches(self) -> Iterable[Batch]:
        """Returns all micro-batches. Must return the same batches every time."""


def refuse_unusable_data(data: object, evaluation_data: object) -> None:
    """Raises UserError unless `data` can be trained on, and `evaluation_data` can be evaluated or
    is None.
    """
    if not (data is None or isinstance(data, Path | str) or callable(getattr(data, "step", None))):
        raise UserError(
            "training: data",
            found=f"a {type(data).__name__}",
            allowed="a path, or an object with a method step(number) that returns micro-batches",
            fix="put the batches behind such a method",
        )
    if not (evaluation_data is None or callable(getattr(evaluation_data, "batches", None))):
        raise UserError(
            "training: evaluation_data",
            found=f"a {type(evaluation_data).__name__}",
            allowed="an object with a method batches() that returns micro-batches, or None",
            fix="put the batches behind such a method, or name files in DataOptions.evaluation_data"
            " of the config",
        )


def refuse_unread_data(options: DataOptions, data: object, evaluation_data: object) -> None:
    """Raises UserError if `options` name data that is not read, because `data` or
    `evaluation_data` is an object of the user.
    """
    unread: tuple[str, ...] = ()
    if not isinstance(data, Path | str | None):
        unread, argument = ("data", *EVALUATION_FIELDS), "data"
    elif evaluation_data is not None:
        unread, argument = EVALUATION_FIELDS, "evaluation_data"
    named = [name for name in unread if getattr(options, name)]
    if named:
        instead = named != ["data"] and evaluation_data is None
        raise UserError(
            "config: data",
            found=f"{', '.join(named)}, beside an object as the argument `{argument}`",
            allowed="no such field beside it, because the data that it names is not read",
            fix=f"{'pass an object as `evaluation_data`, and ' if instead else ''}leave"
            f" {'it' if len(named) == 1 else 'them'} out of the config",
        )


def find_data(
    options: DataOptions,
    plan: Plan,
    folder: Path | None,
    seed: int,
    on_note: Callable[[str], None],
    on_summary: Callable[[dict[str, DataSummary]], object] = lambda _: None,
) -> tuple[Corpus, Corpus | None]:
    """Returns the training data, and the evaluation data or None.

    Args:
        options: the options of the data. If `packing` is empty, the workload of the plan decides.
        plan: has the workload and the vocabulary.
        folder: the model's folder with the tokenizer, or None.
        seed: the seed for the order of the data.
        on_note: called with lines for the user.
        on_summary: called with the summaries of the data.

    Raises UserError if the plan cannot execute the packing, and for every mistake that `open_data`
    reports.
    """
    complete = msgspec.structs.replace(options, packing=packing_of(options, plan))
    training, held_out = open_data(
        complete,
        plan.workload,
        folder,
        plan.model.vocabulary,
        on_note,
        seed=seed,
        on_summary=on_summary,
    )
    if training.conversations and not training.documents:
        on_note(
            "each conversation attends to those before it in its row; to keep them apart, make the"
            " plan without --plain-packing"
        )
    return training, held_out


def packing_of(options: DataOptions, plan: Plan) -> Packing:
    """Returns the packing of `options` or, if it is empty, the packing for the plan's workload.

    Raises UserError if the plan cannot execute it.
    """
    packing = options.packing or ("documents" if plan.workload.documents else "plain")
    refuse_packing(packing, plan)
    return packing


def refuse_packing(packing: str, plan: Plan) -> None:
    """Raises UserError if `packing` separates documents but the plan attends across them."""
    if packing != "plain" and not plan.workload.documents:
        raise UserError(
            "data: packing",
            found=packing,
            allowed="plain, since the plan attends over whole rows",
            fix="leave packing out, or make a plan for it",
        )


def find_model(source: str, planned: ModelSpec, *, needed: bool) -> Path | None:
    """Returns the folder of the planned model, or None if there is none and it is not needed.

    Args:
        source: a folder, or a name on the hub.
        planned: the model in the plan.
        needed: whether the folder's weights are needed.

    Raises UserError if the model is needed but missing, or if it is not the planned model.
    """
    if not needed and not Path(source).is_dir():
        return None
    folder = model_folder(source)
    if _is_model(folder, planned):
        return folder
    if not needed:
        return None
    raise UserError(
        f"model {folder}",
        found="no config.json",
        allowed="a Hugging Face model folder",
        fix="check `source` in the plan, or pass --init random",
    )


def exported_config(folder: Path | None, planned: ModelSpec, *, init: str) -> PretrainedConfig:
    """Returns the config to write with the trained weights.

    It is the config in the model's `folder`, with all of its keys except `quantization_config`,
    because the exported weights are not quantized. A multimodal model keeps its config. If there is
    no folder, or if the folder has a multimodal model and `init` is "random", it is the config of
    the planned language model.

    Raises UserError if transformers refuses a value in the config.
    """
    if folder is None:
        return full_config(planned)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a config class may raise anything for a value of a wrong type
        raise refused_config(str(folder / "config.json"), error) from None
    for part in (config, config.get_text_config()):
        vars(part).pop(quantized.KEY, None)
    return full_config(planned) if init == "random" and is_multimodal(config) else config


def not_trained(folder: Path | None, config: PretrainedConfig) -> str:
    """Returns a note on the tensors of a multimodal model that are not trained, or an empty string
    for another model.

    Raises UserError if the files cannot be read.
    """
    if folder is None or not is_multimodal(config):
        return ""
    with FolderTensors(folder) as tensors:
        others = CheckpointNames(config).other_keys(tensors.entries)
    names = sorted({name.removeprefix("model.").partition(".")[0] for name in others})
    return (
        f"only the language model is trained; {len(others)} tensors of {', '.join(names)} are"
        " exported unchanged"
    )


def _is_model(folder: Path, planned: ModelSpec) -> bool:
    """Returns whether `folder` has a model. Raises UserError if it is not the planned model."""
    config = folder / "config.json"
    if not config.exists():
        return False
    model = ModelSpec.load(str(config))
    refuse_multimodal(folder, model)
    if differing := differences(model, planned):
        expected = ", ".join(f"{entry.key} {entry.second}" for entry in differing)
        raise UserError(
            str(config),
            found=", ".join(f"{entry.key} {entry.first}" for entry in differing),
            allowed=f"{expected}, as planned",
            fix="make the plan again with `megatrain plan`, or restore config.json",
        )
    return True
