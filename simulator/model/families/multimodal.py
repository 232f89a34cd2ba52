"""INSIDE: multimodal models whose language model can be trained.

The language model is read from the folder of the multimodal model. Its trained weights are written
into a copy of that folder.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Inside(NamedTuple):
    """The language model of a multimodal model, whose config.json has it under `text_config`."""

    family: str
    """The `model_type` of the language model."""
    tied: bool | None
    """Whether embedding and head are tied if the multimodal config does not have
    `tie_word_embeddings`. None means that only the key in `text_config` is read."""
    towerless: bool = False
    """Whether the whole model is built without its vision tower, because the tower requires an
    additional package."""

    def tie_of(self, config: dict[str, Any]) -> Any:
        """Returns `tie_word_embeddings` of the language model in a multimodal `config`, by the
        rules of transformers 5.23. Returns None if no key decides it.
        """
        if self.tied is None:
            return config["text_config"].get("tie_word_embeddings")
        tied = config.get("tie_word_embeddings")
        return self.tied if tied is None else tied


INSIDE: dict[str, Inside] = {
    "gemma3": Inside("gemma3_text", tied=True),
    "gemma3n": Inside("gemma3n_text", tied=True, towerless=True),  # timm
    "gemma4": Inside("gemma4_text", tied=True),
    "llama4": Inside("llama4_text", tied=None),
    "qwen3_5": Inside("qwen3_5_text", tied=False),
    "qwen3_5_moe": Inside("qwen3_5_moe_text", tied=False),
}
"""The multimodal model's `model_type` -> its language model."""
