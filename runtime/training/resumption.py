"""settings_of: the settings that must not change when a run is resumed.

The optimizer and the workload must not change either. They are not included here, because a
checkpoint stores them separately.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.runtime.training.config import Config
from megatrain.runtime.training.opening import BatchSource

_OF_DATA = ("split", "columns", "loss", "evaluation_fraction", "evaluation_documents")


def settings_of(config: Config, data: BatchSource | None) -> dict[str, Any]:
    """Returns the settings that must not change, as plain values keyed by `SECTION.FIELD`.

    They are the learning-rate schedule, the seed, and how the data is read and packed. The digest
    of the data is included, its path is not. The number of steps is included only if the learning
    rate depends on it.

    Args:
        config: the config of the run.
        data: the training data; None if it has not been read yet. Then its packing and digest are
            left out, and so is what follows from the number of steps if that is not known. The
            digest is empty if `data` has none.
    """
    found = {
        f"schedule.{key}": value
        for key, value in msgspec.to_builtins(config.schedule).items()
        if value is not None
    }
    found |= {f"data.{key}": getattr(config.data, key) for key in _OF_DATA}
    if data is not None:
        found |= {
            "data.packing": getattr(data, "packing", ""),
            "data.digest": getattr(data, "digest", ""),
        }
    found["training.seed"] = config.training.seed
    if config.training.steps:
        decays = config.schedule.kind != "constant"
        found["training.steps"] = config.training.steps if decays else None
    return found
