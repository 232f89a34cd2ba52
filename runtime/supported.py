"""What of the models that can be predicted can also be executed, exactly."""

from __future__ import annotations

from megatrain.simulator.errors import UserError
from megatrain.simulator.specs import ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DROPOUT = ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout")


def refuse_unsupported(model: ModelSpec) -> None:
    """Raises UserError for a model that the templates would not compute as transformers does: another family, attention that is not full in every
    layer, dropout. A layer's template is the first layer's, and the head is a norm and a matrix.
    """
    where, predicted = f"model {model.name}", "; `check`, `plan` and `simulate` predict it"
    if model.family not in FAMILIES:
        raise UserError(
            f"{where}: model_type", found=repr(model.family), allowed=f"{', '.join(FAMILIES)}{predicted}", fix="train a model of one of these families"
        )
    other = next((layer for layer in model.decoders if layer.attention != "full_attention"), None)
    if other is not None:
        raise UserError(
            f"{where}: sliding_window", found=f"{other.attention} in layer {other.name}", allowed=f"full_attention in every layer{predicted}",
            fix="train a model with full attention in every layer",
        )  # fmt: skip
    for key in _DROPOUT:
        if model.config.get(key):
            raise UserError(f"{where}: {key}", found=repr(model.config[key]), allowed="0", fix=f"set {key} to 0 in config.json")
