"""The process' random generators, in and out. Training draws from generators of its own, seeded by step; a callback or a module may use these."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch

from megatrain.simulator.errors import UserError

_WORDS = 624  # of a Mersenne twister


class RandomState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """torch's generators of the CPU and of the device that trains, Python's and numpy's."""

    cpu: bytes
    cuda: bytes | None = None
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """As they are now."""
        state: Any = np.random.get_state()  # noqa: NPY002 (what others may draw from)
        return cls(
            cpu=_bytes(torch.get_rng_state()), cuda=_bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
            python=random.getstate(), numpy=(str(state[0]), tuple(state[1].tolist()), int(state[2]), int(state[3]), float(state[4])),
        )  # fmt: skip

    def put(self, device: torch.device) -> None:
        """Sets them to this state; the device's stays where it was taken on another kind. Raises UserError where it is none."""
        try:
            name, words, position, has_gauss, gauss = self.numpy
            if len(words) != _WORDS or not 0 <= position <= _WORDS:  # numpy would read beside its words
                raise ValueError("no state of numpy's generator")
            random.setstate(self.python)
            np.random.set_state((name, np.array(words, dtype=np.uint32), position, has_gauss, gauss))  # noqa: NPY002
            torch.set_rng_state(_tensor(self.cpu))
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(_tensor(self.cuda), device)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise UserError(
                "random state", found=str(error).partition("\n")[0], allowed="the state of a generator", fix="resume from another checkpoint"
            ) from None


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.tensor(list(state), dtype=torch.uint8)
