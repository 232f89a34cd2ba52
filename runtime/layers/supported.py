"""What of the models that can be predicted can also be executed, exactly."""

from __future__ import annotations

from pathlib import Path

from megatrain.simulator.errors import UserError
from megatrain.simulator.families import FAMILIES, INSIDE, nulls_of
from megatrain.simulator.files import read_json
from megatrain.simulator.specs import EMBEDDING, ModelSpec
from megatrain.simulator.workload import Workload

DROPOUT = (
    "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout", "router_jitter_noise",
    "attn_pdrop", "dropout", "layerdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout",
)  # fmt: skip
"""keys that make a layer draw random numbers while it is trained"""


def refuse_multimodal(folder: Path, model: ModelSpec) -> None:
    """Raises UserError where the model in `folder` is a multimodal one, of which `model` is the language model, and not one of those whose language model
    is trained inside of them: it can be predicted, but what would be exported is not known to be the model that went in.
    """
    path = folder / "config.json"
    config = read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in (None, model.family) and not (kind in INSIDE and INSIDE[kind].family == model.family):
        raise UserError(
            f"{path}: model_type", found=repr(kind), allowed=f"the language model alone, {model.family!r}, or a multimodal model of {', '.join(INSIDE)}",
            fix="save the language model by itself and train that",
        )  # fmt: skip


def refuse_unsupported(model: ModelSpec, workload: Workload | None = None) -> None:
    """Raises UserError for a model that the templates would not compute as transformers does. A family that `simulator/families` does not know
    is refused where its ModelSpec is made.

    Randomness is refused (a recomputed layer would draw anew), attention to later tokens, and several documents where nothing keeps them apart.
    """
    where = f"model {model.name}"
    if null := nulls_of(model.config).intersection(DROPOUT):
        raise UserError(f"{where}: {min(null)}", found="null", allowed="a number", fix=f"set {min(null)} to 0.0 in config.json")
    defaults = FAMILIES[model.family].defaults  # a key that config.json leaves out has the family's value
    for key in DROPOUT if workload is None or not workload.no_dropout else ():
        if value := model.config.get(key, defaults.get(key)):
            raise UserError(f"{where}: {key}", found=repr(value), allowed="0", fix="make the plan with --no-dropout, which trains without it")
    if workload is not None and model.positions:
        most = min(tensor.shape[0] for tensor in model.stack[EMBEDDING].tensors if tensor.name in model.positions) - FAMILIES[model.family].unused_positions
        if workload.sequence > most:
            raise UserError(f"{where}: sequence", found=workload.sequence, allowed=f"at most the {most} positions that it knows", fix="plan shorter rows")
    if workload is not None and (key := FAMILIES[model.family].longest):
        longest = int(model.config.get(key, defaults[key]))
        if workload.sequence > longest:
            raise UserError(f"{where}: sequence", found=workload.sequence, allowed=f"at most {key} = {longest}", fix="plan shorter rows")
    if model.config.get("use_bidirectional_attention") not in (None, False, "vision"):  # Gemma 4's "vision" is about tokens of images
        raise UserError(f"{where}: use_bidirectional_attention", found="true", allowed="false", fix="set use_bidirectional_attention to false in config.json")
    if workload is not None and workload.documents and (obstacle := model.against_documents(workload.sequence)):
        raise UserError(
            where, found=obstacle, allowed="rows of one document",
            fix="make the plan with --plain-packing; padding at a row's end needs no documents, only labels that are ignored",
        )  # fmt: skip
