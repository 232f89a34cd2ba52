"""The models whose layers the stored calibrations measured."""

from __future__ import annotations

import functools

from megatrain.experiments.heldout.suites import suite
from megatrain.simulator.model.specs import ModelSpec

_NAMES = (
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "llama-3.1-8b",
    "llama-3.2-3b",
    "olmoe-1b-7b",
    "qwen3-4b",
)


@functools.cache
def _models() -> tuple[ModelSpec, ...]:
    return (*map(ModelSpec.load, _NAMES), *suite("compiled").models.values())


def calibrated_model(shape: str) -> ModelSpec:
    """Returns the model of a shape `MODEL_SHAPE/WORKLOAD_SHAPE`."""
    return next(model for model in _models() if shape.startswith(model.shape + "/"))
