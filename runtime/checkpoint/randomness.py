"""RandomState: saves and restores the states of the global random generators of the process.

Training uses separate generators, which are seeded for each step. But callbacks and modules may use
the global generators. PyTorch is imported only to take or put a state.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from megatrain.simulator.base.errors import UserError

if TYPE_CHECKING:
    import torch

_WORDS = 624  # in the state of a Mersenne Twister


class RandomState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The states of the global random generators of PyTorch, Python and NumPy."""

    cpu: bytes
    """State of PyTorch's generator for the CPU."""
    cuda: bytes | None = None
    """State of PyTorch's generator for the training device; None if this device is the CPU."""
    python: tuple[int, tuple[int, ...], float | None]
    """Result of `random.getstate()`."""
    numpy: tuple[str, tuple[int, ...], int, int, float]
    """Result of `numpy.random.get_state()`."""

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """Returns the current states. `device` is the training device."""
        import numpy as np
        import torch

        state: Any = np.random.get_state()  # noqa: NPY002 (what others may draw from)
        return cls(
            cpu=_bytes(torch.get_rng_state()),
            cuda=_bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
            python=random.getstate(),
            numpy=(
                str(state[0]),
                tuple(state[1].tolist()),
                int(state[2]),
                int(state[3]),
                float(state[4]),
            ),
        )

    def put(self, device: torch.device) -> None:
        """Sets the generators to these states. Does not change the generator of `device` if the
        states were saved on a device of another type. Raises UserError if a state is not valid.
        """
        import numpy as np
        import torch

        try:
            name, words, position, has_gauss, gauss = self.numpy
            # NumPy does not check this, and would read outside its array.
            if len(words) != _WORDS or not 0 <= position <= _WORDS:
                raise ValueError("not a state of numpy's generator")
            random.setstate(self.python)
            np.random.set_state(  # noqa: NPY002
                (name, np.array(words, dtype=np.uint32), position, has_gauss, gauss)
            )
            torch.set_rng_state(_tensor(self.cpu))
            if self.cuda is not None and device.type == "cuda":
                torch.cuda.set_rng_state(_tensor(self.cuda), device)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise UserError(
                "random state",
                found=str(error).partition("\n")[0],
                allowed="the state of a generator",
                fix="resume from another checkpoint",
            ) from None


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy())


def _tensor(state: bytes) -> torch.Tensor:
    import torch

    return torch.tensor(list(state), dtype=torch.uint8)
