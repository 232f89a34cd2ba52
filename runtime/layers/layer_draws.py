"""LayerDraws: makes layers draw the same random numbers for every plan and in every recompute.

`Family.draws` names the random numbers of a family. In Phi-3.5-MoE, for example, the router draws
experts, and its input is multiplied with noise. Such a layer runs several times for a micro-batch,
in the forward pass and in each recompute, and must draw the same numbers each time. So before each
call, the device's global generator is seeded with the run's seed, the number of the step, the index
of the micro-batch and the name of the layer. After the call, the state of the generator is
restored. So a resumed run draws the same numbers as a run without interruption. transformers' whole
model draws the same numbers if the generator is seeded in this way before each layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(run: int, step: int, micro: int, layer: str) -> int:
    """Returns the seed of a layer for a micro-batch of a step. `run` is the seed of the run."""
    return zlib.crc32(f"{run} {step} {micro} {layer}".encode())


class LayerDraws:
    """Seeds the generator of one device before each layer. `run_seed` is the seed of the run."""

    def __init__(self, device: torch.device, run_seed: int) -> None:
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
        else:
            self._generator = torch.default_generator
        self._run_seed = run_seed
        self.step = 0
        """Number of the step."""

    @contextmanager
    def seeded(self, layer: str, micro: int) -> Iterator[None]:
        """Seeds the generator for a call of `layer`. Does not synchronize with the device."""
        state = self._generator.get_state()
        self._generator.manual_seed(seed_of(self._run_seed, self.step, micro, layer))
        try:
            yield
        finally:
            self._generator.set_state(state)
