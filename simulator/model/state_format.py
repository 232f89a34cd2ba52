"""StateFormat: how a model's master weights and moments are stored.

A format says which planes of state a layer has in addition to its bf16 or fp32 weights, and the
dtype of each plane. The runtime's arithmetic is in `runtime/optimizer/`: `adamw.py` for fp32
moments, `blockwise.py` for moments in 8 bits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

EXACT = "exact"
ANY = "any"
"""No key of `FORMATS`. It stands for the format with the most bytes with which the model fits."""
BLOCK = 32
"""Parameters that share one scale of 8-bit codes. Tensors and chunks are whole multiples of it."""
PlaneDtype = Literal["bf16", "fp32", "int16", "int8", "block8"]
PLANE_BYTES: dict[PlaneDtype, float] = {
    "bf16": 2,
    "fp32": 4,
    "int16": 2,
    "int8": 1,
    "block8": (BLOCK + 2) / BLOCK,
}
"""Dtype -> bytes per parameter. `block8` stores each block of 32 parameters as 32 codes of 8 bits
and a scale in bf16. All values are multiples of 1/32, so their products with a number of parameters
in whole blocks are exact."""


class UpdateCosts(NamedTuple):
    """Costs of AdamW's update for one dtype of the moments, in addition to reading and writing
    state.
    """

    gpu_least_bytes: int
    """The least bytes of state per parameter that the time of an update on a GPU is computed from.
    With 8-bit moments, arithmetic takes more time than memory: on an H200, the update takes as long
    as reading and writing 20 bytes of state (184.5e9 parameters/s, against 155.8e9 with 26 bytes in
    `exact`, of which 2 are the gradient; `experiments/results/h200-updates`). One more byte is
    assumed."""
    gpu_temporary_bytes: int
    """Bytes of temporary tensors on a GPU if PyTorch updates. They are always reserved, because the
    fused kernel is used only if a test shows that it gives PyTorch's bits."""
    core_per_s: float
    """Parameters per second that a core of the host updates if memory does not limit it, or 0 for
    no limit. Calibrations measure fp32 moments, whose updates are limited by memory. In `master24`,
    a core of an H200's host updates 0.40e9 alone, 0.31e9 if 8 cores work and 0.27e9 if all 16 do
    (`experiments/results/h200-updates`). The runtime uses 14 of 16."""


GPU_BLOCK = 2**22
"""Parameters that PyTorch updates at a time on a GPU."""
UPDATE_COSTS: dict[PlaneDtype, UpdateCosts] = {
    "fp32": UpdateCosts(gpu_least_bytes=0, gpu_temporary_bytes=0, core_per_s=0.0),
    "block8": UpdateCosts(
        gpu_least_bytes=21, gpu_temporary_bytes=64 * GPU_BLOCK, core_per_s=0.28e9
    ),
}
"""Dtype of the moments -> costs of the update."""


class CodedGradientBytes(NamedTuple):
    """Bytes per parameter that PyTorch moves and allocates to encode and decode gradients in 8
    bits. No fused kernel does this. `tests/runtime/test_coded_gradients.py` counts them.
    """

    encode: int
    """Bytes that encoding reads and writes, without the gradient and its codes."""
    decode: int
    """Bytes that decoding reads and writes, without the codes. The update's read of the decoded
    gradient is included."""
    temporary: int
    """Bytes of temporary tensors that exist at the same time while encoding. At most `GPU_BLOCK`
    parameters are encoded at a time. Decoding needs less."""


CODED_GRADIENT_BYTES = CodedGradientBytes(encode=160, decode=20, temporary=18)


class StateFormat(NamedTuple):
    """The planes of state of a layer with bf16 weights, in addition to the weights. Layers that
    compute in fp32 have the format `exact`, and their weights are the whole masters.
    """

    name: str
    """The name that commands take."""
    low: PlaneDtype | None
    """The dtype of the low half, the part of the master that the bf16 weight does not have. None if
    there is no low half."""
    moments: PlaneDtype
    """The dtype of each of the optimizer's moments."""
    what: str
    """The master and the moments, in words."""
    costs: str
    """The disadvantages of the format, in words. Empty for `exact`."""


FORMATS = {
    state_format.name: state_format
    for state_format in (
        StateFormat(name=EXACT, low="int16", moments="fp32", what="fp32 master weights", costs=""),
        StateFormat(
            name="master24",
            low="int8",
            moments="block8",
            what="24-bit master weights and 8-bit moments",
            costs="not exact AdamW: 24-bit masters, 8-bit moments; same loss in a test of 100 M",
        ),
        StateFormat(
            name="bf16-sr",
            low=None,
            moments="block8",
            what="bf16 weights with stochastic rounding and 8-bit moments",
            costs="not exact AdamW: no masters, 8-bit moments; loss 0.03 higher in a test of 100 M",
        ),
    )
}
"""Name -> format, in descending order of bytes."""


def smaller_formats(state: str) -> tuple[str, ...]:
    """Returns the names of the formats with fewer bytes than `state`, the largest first."""
    names = tuple(FORMATS)
    return names[names.index(state) + 1 :]
