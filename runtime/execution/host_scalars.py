"""Copies a few fp32 values from the device to pinned host memory, for ops on the cpu lane.

The copy is enqueued once, directly after the op that writes the values. If each CPU update copied
the clipping factor itself, this copy of 4 bytes would wait behind all state that is being copied to
the host. On an H200, updates of 4 ms took up to 58 ms in this way (`docs/lab_notes.md`).
"""

from __future__ import annotations

import torch


class HostScalarCopy:
    """A copy in host memory of `values`, [n] fp32 on a CUDA device."""

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
