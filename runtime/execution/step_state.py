"""StepState: the values that ops read and that change from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatrain.runtime.layers.functional_layers import SavedForBackward


class HostScalarCopy:
    """A copy in pinned host memory of `values`, [n] fp32 on a CUDA device, for ops on the cpu lane.

    The copy is enqueued once, directly after the op that writes the values. If each CPU update
    copied the clipping factor itself, this copy of 4 bytes would wait behind all state that is
    being copied to the host. On an H200, updates of 4 ms took up to 58 ms in this way
    (`docs/lab_notes.md`).
    """

    def __init__(self, values: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """`stream` is the CUDA stream that all copies of this class share. With a stream for each
        copy, a copy could run on the stream of a lane, because PyTorch has only 32 streams and
        hands them out in turn.
        """
        self._values = values
        self.landed = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        """[n] fp32 in pinned memory. After `wait` it holds the values of the last `send`."""
        self._stream, self._arrived = stream, torch.cuda.Event()

    def send(self) -> None:
        """Enqueues the copy. It starts when all work that was enqueued on the current stream before
        this call is done. The current stream does not wait for the copy.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._values.device))
        with torch.cuda.stream(self._stream):
            self.landed.copy_(self._values, non_blocking=True)
            self._arrived.record()

    def wait(self) -> None:
        """Blocks until the last copy has arrived."""
        self._arrived.synchronize()


@dataclass
class StepState:
    """The values that ops read and that change from step to step."""

    scale: float = 0.0
    """Factor on each token's loss: 1 / (labelled tokens of the step)."""
    number: int = 0
    """Number of the step whose gradients are computed."""
    update_at: tuple[float, int] | None = None
    """Learning rate and number of the step whose update is applied. None if there is no update to
    apply, as in the first step of a plan that defers updates."""
    saved: dict[str, SavedForBackward] = field(default_factory=dict)
    """Autograd graphs by activation buffer. Forward or recompute adds a graph, and backward removes
    it."""
    host_scalars: dict[str, HostScalarCopy] = field(default_factory=dict)
    """Host copies by device buffer, for buffers of losses, norms or clipping factors that ops on
    the `cpu` lane read."""
