"""StepState: values that change from step to step and that ops read."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.runtime.execution.host_scalars import HostScalarCopy
from megatrain.runtime.layers.functional_layers import SavedForBackward


@dataclass
class StepState:
    """Values that change from step to step and that ops read."""

    scale: float = 0.0
    """Factor on each token's loss: 1 / (labelled tokens of the step)."""
    number: int = 0
    """Number of the step whose gradients are computed."""
    update_at: tuple[float, int] | None = None
    """Learning rate and number of the step whose update is applied. None if no update is due, as
    in the first step of a plan that defers updates."""
    saved: dict[str, SavedForBackward] = field(default_factory=dict)
    """The autograd graph of each buffer of activations, from forward or recompute to backward."""
    host_scalars: dict[str, HostScalarCopy] = field(default_factory=dict)
    """The host copy of each device buffer of losses, norms or clipping factors that ops on the cpu
    lane read."""
