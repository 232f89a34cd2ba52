"""INSIDE: the multimodal models whose language model is trained inside of them, and written back into them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Inside(NamedTuple):
    """A multimodal model's language model, which its config.json describes under `text_config`."""

    family: str
    """its `model_type`"""
    tied: bool | None
    """whether its head is the embedding table where the multimodal config does not say; None: what its own config says counts, and nothing else"""

    def tie_of(self, config: dict[str, Any]) -> Any:
        """`tie_word_embeddings` of the language model inside a multimodal `config`, as transformers 5.23 understands it; None where nothing says."""
        if self.tied is None:
            return config["text_config"].get("tie_word_embeddings")
        said = config.get("tie_word_embeddings")
        return self.tied if said is None else said


INSIDE: dict[str, Inside] = {
    "gemma3": Inside("gemma3_text", tied=True),
    "gemma4": Inside("gemma4_text", tied=True),
    "llama4": Inside("llama4_text", tied=None),
    "qwen3_5": Inside("qwen3_5_text", tied=False),
    "qwen3_5_moe": Inside("qwen3_5_moe_text", tied=False),
}
"""by the multimodal model's `model_type`"""
