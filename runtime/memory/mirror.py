"""Mirror: a few values of the device that ops of the host read, sent behind the op that writes them, once.

A copy of 4 bytes waits for all copies in its direction that were enqueued before it. Each host update brought the clip coefficient over for itself, behind the
state that streams to the host: two of a step's fourteen chunks took 20 to 58 ms instead of 4 (Qwen3-4B's shape on an H200, 16 x 1024 tokens, half of the state streamed).
"""

from __future__ import annotations

import torch


class Mirror:
    """The host's copy of `values` [n] fp32, which lie on a CUDA device."""

    def __init__(self, values: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """`stream`: to copy on, of mirrors alone. PyTorch hands out 32 streams in turn, so that one for each mirror would meet the lanes' before long."""
        self._values = values
        self.landed = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        """[n] fp32, in pinned memory; what was sent last, after `wait`"""
        self._stream, self._arrived = stream, torch.cuda.Event()

    def send(self) -> None:
        """Copies what the work that is enqueued on the current stream leaves in `values`; that stream does not wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._values.device))
        with torch.cuda.stream(self._stream):
            self.landed.copy_(self._values, non_blocking=True)
            self._arrived.record()

    def wait(self) -> None:
        """Blocks until what was sent last is there."""
        self._arrived.synchronize()
