"""What of the models that can be predicted can also be executed, exactly."""

from __future__ import annotations

from megatrain.simulator.errors import UserError
from megatrain.simulator.specs import ModelSpec, Workload

_DROPOUT = (
    "attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout", "router_jitter_noise",
)  # fmt: skip


def refuse_unsupported(model: ModelSpec, workload: Workload | None = None) -> None:
    """Raises UserError for a model that the templates would not compute as transformers does. A family that `simulator/families` does not know
    is refused where its ModelSpec is made.

    Randomness is refused (a recomputed layer would draw anew), attention to later tokens, and linear attention over several documents: in PyTorch
    transformers carries its state from one document into the next.
    """
    where = f"model {model.name}"
    for key in _DROPOUT:
        if model.config.get(key):
            raise UserError(f"{where}: {key}", found=repr(model.config[key]), allowed="0", fix=f"set {key} to 0 in config.json")
    if model.config.get("use_bidirectional_attention"):
        raise UserError(f"{where}: use_bidirectional_attention", found="true", allowed="false", fix="set use_bidirectional_attention to false in config.json")
    linear = next((layer for layer in model.decoders if layer.attention == "linear_attention"), None)
    if workload is not None and workload.documents and linear is not None:
        raise UserError(
            f"{where}: layer {linear.name}", found="linear_attention, which lets a document see the ones before it", allowed="rows of one document",
            fix="make the plan with --plain-packing; padding at a row's end needs no documents, only labels that are ignored",
        )  # fmt: skip
