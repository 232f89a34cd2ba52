"""Muon's sizes: which tensors it orthogonalises, and the FLOPs and memory that this takes. The
arithmetic is in `runtime/optimizer/muon.py`.

Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum M of a
matrix by a nearly orthogonal matrix, computed by five Newton-Schulz iterations in bf16:

    X = M / |M|;  five times: A = X X^T;  X = a X + (b A + c A A) X

For a matrix with more rows than columns, A is X^T X and stands on the right. The iterations need
whole matrices, so an update never ends inside one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatrain.simulator.model import state_format

ITERATIONS = 5
"""Newton-Schulz iterations. The number is odd, because the result must be in the first of the two
buffers of X."""
_GROUP = 2**24
"""Elements that are orthogonalised together, unless one matrix has more. Groups avoid many
small kernels for small matrices, such as those of experts. The number changes the bits of the
result, because a library may choose another kernel for another number of matrices."""
BLOCK = 2**24
"""Elements that are updated at a time, before and after the iterations."""
GPU_BYTES = 172
"""Bytes per parameter that PyTorch's elementwise operations move on a GPU, in addition to reading
and writing the state and the gradient. They are the sum over the operations of the update."""
CODED_GPU_BYTES = 246
"""Bytes per parameter that are moved in addition if the momentum is in 8 bits, because no fused
kernel converts it. `tests/runtime/test_muon.py` counts them."""
LIBRARY_BYTES = 32 * 2**20
"""Bytes of cuBLAS's workspace for each stream on which it multiplies matrices. This is PyTorch's
setting for an H100 and later. Earlier GPUs need 8 MiB."""
_ALIGNED = 256


class Matrices(NamedTuple):
    """Matrices of one shape, one after the other in a tensor."""

    number: int
    """The number of matrices: 1, or the number of experts."""
    rows: int
    """The rows of each."""
    columns: int
    """The columns of each."""

    @property
    def size(self) -> int:
        """The elements of each matrix."""
        return self.rows * self.columns

    @property
    def side(self) -> int:
        """The rows and columns of the square matrix A."""
        return min(self.rows, self.columns)

    @property
    def group(self) -> int:
        """How many matrices are orthogonalised together. The elements of a group are whole blocks
        of 8-bit codes, except in the last group of a tensor.
        """
        step = state_format.BLOCK // math.gcd(self.size, state_format.BLOCK)
        return min(max(_GROUP // self.size // step, 1) * step, self.number)

    @property
    def padded(self) -> int:
        """The elements of all matrices, rounded up to whole blocks of 8-bit codes."""
        return -(-self.number * self.size // state_format.BLOCK) * state_format.BLOCK

    @property
    def flops(self) -> int:
        """FLOPs of all iterations on one matrix. With m rows and n >= m columns, an iteration takes
        2 m m n for A, 2 m m m for A A, and 2 m m n for the product with X.
        """
        side, longer = self.side, max(self.rows, self.columns)
        return ITERATIONS * (4 * side * side * longer + 2 * side**3)

    @property
    def rate_factor(self) -> float:
        """Factor on the learning rate, 0.2 sqrt(max(rows, columns)). It gives updates with a root
        mean square of about 0.2, like those of AdamW, so both can use the same learning rate (Liu
        et al., arXiv 2502.16982, section 2.2).
        """
        return float(0.2 * max(self.rows, self.columns) ** 0.5)

    @property
    def workspace(self) -> tuple[int, ...]:
        """Bytes of each temporary tensor of the update of one group.

        These are X and the next X in bf16, A and b A + c A A in bf16, and three blocks in fp32.
        """
        matrix, square = 2 * self.group * self.size, 2 * self.group * self.side**2
        block = 4 * min(self._replace(number=self.group).padded, BLOCK)
        return tuple(
            -(-size // _ALIGNED) * _ALIGNED
            for size in (matrix, matrix, square, square, *[block] * 3)
        )


def matrices_of(kind: str, name: str, shape: tuple[int, ...]) -> Matrices | None:
    """Returns the matrices of a tensor that Muon orthogonalises, or None if AdamW updates it.

    Muon updates the matrices of decoder layers. A tensor of experts, [experts, rows, columns], is
    one matrix for each expert. AdamW updates the embedding, the head, biases (also those of
    experts, which have two dimensions), and tensors with one row or one column.

    Args:
        kind: the kind of the layer, `LayerSpec.kind`.
        name: the name of the tensor inside the layer.
        shape: its shape.
    """
    if kind != "decoder" or len(shape) not in (2, 3) or name.endswith("bias"):
        return None
    rows, columns = shape[-2:]
    return (
        Matrices(shape[0] if len(shape) == 3 else 1, rows, columns)
        if min(rows, columns) > 1
        else None
    )
