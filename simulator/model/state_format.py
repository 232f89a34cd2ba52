"""StateFormat: how a model's master weights and moments are stored.

A format says which planes a layer has beside its bf16 or fp32 weights, and the dtype of each. The
simulator reads the sizes here. The runtime's arithmetic is in `runtime/optimizer/`: `adamw.py` for
fp32 moments, `blockwise.py` for moments in 8 bits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

EXACT = "exact"
BLOCK = 32
"""Parameters that share one scale. Tensors and chunks are whole multiples of it."""
PlaneDtype = Literal["bf16", "fp32", "int16", "int8", "block8"]
PLANE_BYTES: dict[PlaneDtype, float] = {
    "bf16": 2,
    "fp32": 4,
    "int16": 2,
    "int8": 1,
    "block8": (BLOCK + 2) / BLOCK,
}
"""Bytes per parameter, by dtype. `block8` is a row of records, one for each 32 parameters: 32 codes
of 8 bits and their scale in bf16. Every value is a whole number of 32nds, so products with whole
blocks are exact."""


class UpdateCosts(NamedTuple):
    """What AdamW's update of moments with one dtype takes, beyond reading and writing state."""

    gpu_bytes: int
    """Bytes per parameter that it moves on a GPU in PyTorch, 0 if a kernel does it in one pass."""
    gpu_temporary_bytes: int
    """Bytes of its temporary tensors on a GPU."""
    host_share: float
    """The least time on the host over that with fp32 moments, which machines are measured with. An
    update that reads less is still limited by the cores: one core does 0.2 instead of 0.6 G
    parameters/s (on a busy machine with two cores). Nobody measured it on all cores of a host, so
    this may be too little where few cores suffice for fp32 moments."""


GPU_BLOCK = 2**22
"""Parameters that PyTorch updates at a time on a GPU."""
UPDATE_COSTS: dict[PlaneDtype, UpdateCosts] = {
    "fp32": UpdateCosts(gpu_bytes=0, gpu_temporary_bytes=0, host_share=0.0),
    "block8": UpdateCosts(gpu_bytes=850, gpu_temporary_bytes=64 * GPU_BLOCK, host_share=1.0),
}
"""By the dtype of the moments."""


class CodedGradientBytes(NamedTuple):
    """What gradients in 8 bits take in PyTorch, in bytes per parameter. No kernel does it in one
    pass. `tests/runtime/test_coded_gradients.py` counts them.
    """

    encode: int
    """What encoding reads and writes, beyond the gradient and its codes."""
    decode: int
    """What decoding reads and writes, beyond the codes, and the update's read of the result."""
    temporary: int
    """The temporaries of encoding that exist at one time, of at most `GPU_BLOCK` parameters.
    Decoding has fewer."""


CODED_GRADIENT_BYTES = CodedGradientBytes(encode=160, decode=20, temporary=18)


class StateFormat(NamedTuple):
    """The planes of a layer whose weights are bf16, besides the weights. Layers that compute in
    fp32 have the format `exact`, in which the weight is the whole master.
    """

    name: str
    """The name that commands take."""
    low: PlaneDtype | None
    """The dtype of the part of the master that its bf16 weight does not have, None for no such
    part."""
    moments: PlaneDtype
    """The dtype of each of the optimizer's moments."""
    what: str
    """What the master and the moments are, in words."""


FORMATS = {
    made.name: made
    for made in (
        StateFormat(name=EXACT, low="int16", moments="fp32", what="fp32 master weights"),
        StateFormat(
            name="master24",
            low="int8",
            moments="block8",
            what="24-bit master weights and 8-bit moments",
        ),
        StateFormat(
            name="bf16-sr",
            low=None,
            moments="block8",
            what="bf16 weights with stochastic rounding and 8-bit moments",
        ),
    )
}
"""All formats by name."""
