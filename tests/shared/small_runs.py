"""A saved run and the bits of its state, for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.runtime.checkpoint.manifest import RunState

SETTINGS = {"rate": 1e-2, "seed": 0}


def run_of(step: int, loss: float | None = None) -> RunState:
    return RunState(step=step, loss=loss, settings=SETTINGS, progress={"patience": 3})


def everything(running: Any) -> dict[str, bytes]:
    """Returns the bits of weights, low halves and moments after the deferred update."""
    running.executor.flush_update()
    return {
        name: tensor.clone().view(torch.uint8).numpy().tobytes()
        for name, tensor in running.state.tensors().items()
    }
