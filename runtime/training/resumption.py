"""settings_of: what has to be the same when a run goes on, or it would not be the run that it was. The optimizer and the workload are not here:
a checkpoint holds them itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.runtime.training.config import Config
from megatrain.runtime.training.opening import Source

_OF_DATA = ("split", "columns", "loss", "evaluation_fraction", "evaluation_documents")


def settings_of(config: Config, data: Source | None) -> dict[str, Any]:
    """By `SECTION.FIELD`, plain values: learning-rate schedule, seed, and of the data how it is read, packed and what it holds, wherever it lies.

    The number of steps counts where the learning rate depends on it: a constant rate may go on for longer. Of `data` without a `digest` nothing is known;
    with None, not read yet, what it holds and how it is packed are left out.
    """
    found = {f"schedule.{key}": value for key, value in msgspec.to_builtins(config.schedule).items()}
    found |= {f"data.{key}": getattr(config.data, key) for key in _OF_DATA}
    if data is not None:
        found |= {"data.packing": getattr(data, "packing", ""), "data.digest": getattr(data, "digest", "")}
    steps = None if config.schedule.kind == "constant" else config.training.steps
    return {**found, "training.seed": config.training.seed, "training.steps": steps}
