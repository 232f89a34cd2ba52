"""StateFormat: how a model's master weights and moments are stored.

A format says which planes a layer has in addition to its bf16 or fp32 weights, and the dtype of
each. The simulator reads the sizes here. The runtime's arithmetic is in `runtime/optimizer/`:
`adamw.py` for fp32 moments, `blockwise.py` for moments in 8 bits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

EXACT = "exact"
ANY = "any"
"""Stands for the format with the most bytes in which the model fits."""
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

    gpu_least_bytes: int
    """An update on a GPU takes at least as long as reading and writing so many bytes of state per
    parameter. With 8-bit moments arithmetic takes more time than memory. On an H200, `master24`
    updates 184.5e9 parameters/s and `exact` 155.8e9, which reads and writes 26 bytes for each, two
    of them of the gradient: so 8-bit moments count as 22 bytes, 20 of them state, and one more is
    assumed (`experiments/results/h200-updates`)."""
    gpu_temporary_bytes: int
    """Bytes of temporary tensors on a GPU if PyTorch does the update. They are set aside in any
    case, because a GPU's kernel is used only if it proves to have PyTorch's bits."""
    core_per_s: float
    """Parameters per second that a core of the host updates if memory does not limit it, 0 for no
    limit. Machines are measured with fp32 moments, which memory limits. In `master24`, a core of
    an H200's host does 0.40e9 alone, 0.31e9 if 8 work and 0.27e9 if all 16 do
    (`experiments/results/h200-updates`). The runtime uses all but two."""


GPU_BLOCK = 2**22
"""Parameters that PyTorch updates at a time on a GPU."""
UPDATE_COSTS: dict[PlaneDtype, UpdateCosts] = {
    "fp32": UpdateCosts(gpu_least_bytes=0, gpu_temporary_bytes=0, core_per_s=0.0),
    "block8": UpdateCosts(
        gpu_least_bytes=21, gpu_temporary_bytes=64 * GPU_BLOCK, core_per_s=0.28e9
    ),
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
    costs: str
    """What the format gives up, in words. Empty for `exact`."""


FORMATS = {
    made.name: made
    for made in (
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
"""All formats by name, the one with the most bytes first."""


def smaller_formats(state: str) -> tuple[str, ...]:
    """Returns the formats with fewer bytes than `state`, the one with the most first."""
    names = tuple(FORMATS)
    return names[names.index(state) + 1 :]
