"""Every single-key change of a family's config.json."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tiny_families import OWN, SMALL
from tiny_families import config_of as tiny_config
from whole_models import CHANGES, TINY

ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "gelu_new",
    "relu",
    "relu2",
    "quick_gelu",
    "tanh",
    "of tomorrow",
)
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "of tomorrow"},
]
_NOT_CHANGED = (
    "model_type",
    "architectures",
    "transformers_version",
    "dtype",
    "_name_or_path",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "return_dict",
)
_WIDTHS = ("hidden_size", "n_embd")
"""Sizes that are never 1, because a norm of one element amplifies rounding."""
_NOTHING_GIVEN: tuple[Any, ...] = (2, 0.5, True, "silu")
"""Values for a key whose default is null, so its type is unknown."""


class Change(NamedTuple):
    """One key of a family's tiny config, and its other value."""

    family: str
    key: str
    value: Any

    @property
    def number(self) -> int:
        """A pseudorandom number that is the same in every process."""
        return zlib.crc32(f"{self.family} {self.key} {self.value}".encode())

    def __str__(self) -> str:
        return f"{self.family}: {self.key} = {self.value}"

    def config(self) -> dict[str, Any]:
        """The whole config.json: the keys that make the model tiny, and the changed one."""
        return {"model_type": self.family, **base_of(self.family), self.key: self.value}


def base_of(family: str) -> dict[str, Any]:
    """Returns the keys that make the family's model tiny. Other keys keep the family's defaults."""
    return {**SMALL, **OWN.get(family, {}), **TINY, **CHANGES.get(family, {})}


def changes_of(family: str) -> Iterator[Change]:
    """Returns every change of one key of the family's config."""
    config = tiny_config(family, **{**TINY, **CHANGES.get(family, {})}).to_dict()
    for key, value in config.items():
        if key in _NOT_CHANGED:
            continue
        for other in _others(key, value, config):
            if other != value or type(other) is not type(value):
                yield Change(family, key, other)
    for rope in ROPES:
        yield Change(family, "rope_scaling", rope)
    yield Change(family, "rope_theta", 500.0)


def _others(key: str, value: Any, config: dict[str, Any]) -> Iterator[Any]:
    layers = config.get("num_hidden_layers") or config.get("n_layer") or config["n_layers"]
    if value is not None:
        yield None
    if key == "layer_types":
        full, other = (
            "full_attention",
            next((kind for kind in value or () if kind != "full_attention"), "sliding_attention"),
        )
        yield from (
            [full] * layers,
            [other] * layers,
            [other] + [full] * (layers - 1),
            [full, other] * (layers // 2),
            [full] * (layers - 1),
            ["of tomorrow"] * layers,
        )
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value + 1) if key in _WIDTHS else (2 * value, value + 1, 1)
        if value > 3:
            yield value // 2
    elif isinstance(value, float):
        yield from (1.5 * value + 0.01, 1)
    elif isinstance(value, str):
        yield from ACTIVATIONS if "act" in key else ("of tomorrow",)
    elif isinstance(value, dict):
        yield from ({**value, **rope} for rope in ROPES) if key == "rope_parameters" else ({},)
    elif isinstance(value, list):
        yield from ([], value[::-1], value[:-1], [0] * layers, [1] * layers)
    else:
        yield from _NOTHING_GIVEN
