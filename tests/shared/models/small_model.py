"""A model of 0.6 billion parameters for tests of the planner.

A search takes a fraction of a second.
"""

from __future__ import annotations

from megatrain.simulator.model.specs import ModelSpec

SMALL = ModelSpec(
    name="small",
    config={
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
)
