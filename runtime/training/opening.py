"""What a run needs before its first step, each looked at before anything is allocated or written: where is the model, the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec
from transformers import AutoConfig, PretrainedConfig

from megatrain.runtime.batch import Batch
from megatrain.runtime.data import Corpus, DataOptions, open_data
from megatrain.runtime.files.checkpoint_names import CheckpointNames, is_multimodal
from megatrain.runtime.files.folder_tensors import FolderTensors
from megatrain.runtime.files.model_folder import model_folder
from megatrain.runtime.layers.model_config import completed, differences, refused_config
from megatrain.runtime.layers.supported import refuse_multimodal
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.specs import ModelSpec


class Source(Protocol):
    """Where batches to train on come from. One with a `digest` of what it holds is recognised when a run goes on."""

    def step(self, number: int) -> list[Batch]:
        """The micro-batches of step `number`, from 1: always the same."""


class HeldOut(Protocol):
    """Where batches to evaluate on come from."""

    def batches(self) -> Iterable[Batch]:
        """All micro-batches, the same every time."""


def find_data(options: DataOptions, plan: Plan, folder: Path | None, seed: int, on_note: Callable[[str], None]) -> tuple[Corpus, Corpus | None]:
    """What is trained and what is evaluated on, where there is such, packed as the plan's workload has it unless `options` say how.

    Raises UserError for what `open_data` does, and for a packing that the plan cannot execute, before anything is tokenised.
    """
    chosen = msgspec.structs.replace(options, packing=options.packing or ("documents" if plan.workload.documents else "plain"))
    refuse_packing(chosen.packing, plan)
    training, held_out = open_data(chosen, plan.workload, folder, plan.model.vocabulary, on_note, seed=seed)
    if training.conversations and not training.documents:
        on_note("conversations are packed so that each sees the ones before it in its row; a plan made without --plain-packing keeps them apart")
    return training, held_out


def refuse_packing(packing: str, plan: Plan) -> None:
    """Raises UserError where batches would number their documents and the plan does not keep them apart."""
    if packing != "plain" and not plan.workload.documents:
        raise UserError("data: packing", found=packing, allowed="plain, since the plan attends over whole rows", fix="leave packing out, or make a plan for it")


def find_model(source: str, planned: ModelSpec, *, needed: bool) -> Path | None:
    """The folder of `source`, a folder or a hub name, where it holds the model that was planned; None where it holds none and its weights are not `needed`.

    Raises UserError where there is none but one is needed, or another one.
    """
    if not needed and not Path(source).is_dir():
        return None
    folder = model_folder(source)
    if _is_model(folder, planned):
        return folder
    if not needed:
        return None
    raise UserError(f"model {folder}", found="no config.json", allowed="a Hugging Face model folder", fix="check `source` in the plan, or pass --init random")


def exported_config(folder: Path | None, planned: ModelSpec, *, init: str) -> PretrainedConfig:
    """The config that is written with trained weights: that of the model's `folder`, which may be a multimodal model and has keys that matter to no step.
    Where there is no folder, or a multimodal model's weights were not read from it, that of the planned language model alone.

    Raises UserError for a value that transformers refuses.
    """
    if folder is None:
        return completed(planned)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config class computes on values that nobody has checked
        raise refused_config(str(folder / "config.json"), error) from None
    return completed(planned) if init == "random" and is_multimodal(config) else config


def not_trained(folder: Path | None, config: PretrainedConfig) -> str:
    """A note that says which tensors of a multimodal model are not trained; empty where there are none. Raises UserError where its files cannot be read."""
    if folder is None or not is_multimodal(config):
        return ""
    with FolderTensors(folder) as tensors:
        others = CheckpointNames(config).other_keys(tensors.entries)
    names = sorted({name.removeprefix("model.").partition(".")[0] for name in others})
    return f"only the language model is trained; {len(others)} tensors of {', '.join(names)} are exported unchanged"


def _is_model(folder: Path, planned: ModelSpec) -> bool:
    """Whether `folder` has a model. Raises UserError where it is another one than was planned."""
    config = folder / "config.json"
    if not config.exists():
        return False
    found = ModelSpec.load(str(config))
    refuse_multimodal(folder, found)
    if differing := differences(found, planned):
        differs, expected = (", ".join(f"{key} {value}" for key, value in named) for named in (
            [(entry.key, entry.first) for entry in differing], [(entry.key, entry.second) for entry in differing],
        ))  # fmt: skip
        raise UserError(str(config), found=differs, allowed=f"{expected}, as planned", fix="make the plan again with `megatrain plan`, or restore config.json")
    return True
