"""Checks that the runtime computes a model exactly as transformers does."""

from __future__ import annotations

from pathlib import Path

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_config
from megatrain.simulator.model.attention_masks import documents_obstacle
from megatrain.simulator.model.families import FAMILIES, INSIDE, nulls_of
from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

DROPOUT = (
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "residual_dropout",
    "embedding_dropout",
    "router_jitter_noise",
    "attn_pdrop",
    "dropout",
    "layerdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "activation_dropout",
)
"""Config keys that make a layer use random numbers during training."""


def dropout_keys(family: str) -> list[str]:
    """Returns the keys of `DROPOUT` that mean dropout in `family`. Keys in `Family.draws` do not,
    because the runtime supports their random numbers (`layer_draws.py`).
    """
    return [key for key in DROPOUT if key not in FAMILIES[family].draws]


def refuse_multimodal(folder: Path, model: ModelSpec) -> None:
    """Raises UserError if `folder` has a multimodal model that the runtime cannot train. `model` is
    the language model of `folder`.

    Steps of the language model can be predicted, but it is unknown whether an export of such a
    model would contain its other parts unchanged.
    """
    path = folder / "config.json"
    config = read_config(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in (None, model.family) and not (
        kind in INSIDE and INSIDE[kind].family == model.family
    ):
        raise UserError(
            f"{path}: model_type",
            found=repr(kind),
            allowed=(
                f"the language model alone, {model.family!r}, or a multimodal model of"
                f" {', '.join(INSIDE)}"
            ),
            fix="save the language model by itself and train that",
        )


def refuse_unsupported(model: ModelSpec, workload: Workload | None = None) -> None:
    """Raises UserError for a model that the runtime would not compute as transformers does:

    * with dropout, because a recompute would use other random numbers;
    * with attention to later tokens;
    * with rows that are longer than the model's positions;
    * with packed documents that the model cannot separate;
    * of a family whose layers carry more than the hidden size, if `Family.carried_by` names no file
      of the runtime.

    Families that are not in `simulator/model/families` are refused earlier, when the ModelSpec is
    made.
    """
    where = f"model {model.name}"
    family = FAMILIES[model.family]
    if family.carried and not family.carried_by:
        raise UserError(
            where,
            found=f"family {model.family}, whose layers carry more than the hidden size",
            allowed="families whose `carried_by` names the runtime's file for that",
            fix="set carried_by in the family's entry, or only predict this model",
        )
    keys = dropout_keys(model.family)
    if null := nulls_of(model.config).intersection(keys):
        raise UserError(
            f"{where}: {min(null)}",
            found="null",
            allowed="a number",
            fix=f"set {min(null)} to 0.0 in config.json",
        )
    # Keys that are not in config.json have the default of the family.
    defaults = FAMILIES[model.family].defaults
    for key in keys if workload is None or not workload.no_dropout else ():
        if value := model.config.get(key, defaults.get(key)):
            raise UserError(
                f"{where}: {key}",
                found=repr(value),
                allowed="0",
                fix="make the plan with --no-dropout, which trains without it",
            )
    if workload is not None and model.positions:
        most = (
            min(
                tensor.shape[0]
                for tensor in model.stack[EMBEDDING].tensors
                if tensor.name in model.positions
            )
            - FAMILIES[model.family].unused_positions
        )
        if workload.sequence > most:
            raise UserError(
                f"{where}: sequence",
                found=workload.sequence,
                allowed=f"at most the model's {most} positions",
                fix="plan shorter rows",
            )
    if workload is not None and (key := FAMILIES[model.family].longest):
        longest = int(model.config.get(key, defaults[key]))
        if workload.sequence > longest:
            raise UserError(
                f"{where}: sequence",
                found=workload.sequence,
                allowed=f"at most {key} = {longest}",
                fix="plan shorter rows",
            )
    # "vision" (Gemma 4) affects only the tokens of images.
    if model.config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UserError(
            f"{where}: use_bidirectional_attention",
            found="true",
            allowed="false",
            fix="set use_bidirectional_attention to false in config.json",
        )
    if (
        workload is not None
        and workload.documents
        and (obstacle := documents_obstacle(model, workload.sequence))
    ):
        raise UserError(
            where,
            found=obstacle,
            allowed="rows of one document",
            fix=(
                "make the plan with --plain-packing; padding at a row's end needs no documents,"
                " only labels that are ignored"
            ),
        )
