"""settings_of: the settings that must not change when a run is resumed.

The optimizer and the workload must not change either. A checkpoint stores them separately, so they
are not included here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.runtime.training.config import Config
from megatrain.runtime.training.opening import BatchSource

_DATA_FIELDS = ("split", "columns", "loss", "evaluation_fraction", "evaluation_documents")


def settings_of(config: Config, data: BatchSource | None) -> dict[str, Any]:
    """Returns the settings that must not change, as plain values keyed by `SECTION.FIELD`.

    They are the learning-rate schedule, the seed, the options for reading and packing the data, and
    the digest of the data. The path of the data may change. The number of steps is included only if
    the learning rate depends on it.

    Args:
        config: the config of the run.
        data: the training data, or None if it has not been read yet. Without data, the packing and
            the digest are left out. If the config has epochs and not yet steps, the number of steps
            is left out, too. The digest is empty if `data` has none.
    """
    settings = {
        f"schedule.{key}": value
        for key, value in msgspec.to_builtins(config.schedule).items()
        if value is not None
    }
    settings |= {f"data.{key}": getattr(config.data, key) for key in _DATA_FIELDS}
    if data is not None:
        settings |= {
            "data.packing": getattr(data, "packing", ""),
            "data.digest": getattr(data, "digest", ""),
        }
    settings["training.seed"] = config.training.seed
    if config.training.steps:
        decays = config.schedule.kind != "constant"
        settings["training.steps"] = config.training.steps if decays else None
    return settings
