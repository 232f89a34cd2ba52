"""StepState: the values that ops read and that change from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.runtime.execution.host_scalars import HostScalarCopy
from megatrain.runtime.layers.functional_layers import SavedForBackward


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
