"""The tensors of one micro-batch, and checks of their shape and values.

The checks use NumPy, which has one thread. PyTorch splits an op on more than 32,768 numbers among
all threads of the host, which sleep between steps. Waking them takes longer than the op.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megatrain.simulator.base.errors import UserError

IGNORED = -100
"""Label of a position without loss, as in transformers."""


class Batch(NamedTuple):
    """One micro-batch in host memory. Each tensor is int64 of shape [batch, sequence]."""

    ids: torch.Tensor
    """Input token ids."""
    labels: torch.Tensor
    """The id of the next token for each position, or IGNORED. Labels are already shifted."""
    documents: torch.Tensor | None = None
    """Index of the document that each position belongs to, counted from 0 in each row; -1 for
    padding. A position attends only to its own document, and position ids start at 0 in each
    document. None means that every row is one document without padding."""

    @property
    def trained_labels(self) -> torch.Tensor:
        """The labels, with IGNORED at the positions of padding."""
        if self.documents is None:
            return self.labels
        padded = _numbers(self.documents) < 0
        return torch.from_numpy(np.where(padded, IGNORED, _numbers(self.labels)))


def count_labelled(labels: torch.Tensor) -> int:
    """Returns the number of positions in `Batch.trained_labels` that have a loss."""
    return int(np.count_nonzero(_numbers(labels) != IGNORED))


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """Returns the values of a tensor as an array, without a copy if they are in host memory."""
    return tensor.cpu().numpy()


def refuse_batch(batch: Batch, shape: tuple[int, int], vocabulary: int, where: str) -> None:
    """Raises UserError if a tensor of `batch` is not int64 of `shape` or has a value out of range.

    Args:
        batch: The micro-batch to check.
        shape: The planned shape, [batch, sequence].
        vocabulary: The size of the vocabulary. Token ids must be smaller.
        where: The start of the error message.
    """
    for name, tensor in batch._asdict().items():
        if name != "documents" or tensor is not None:
            _refuse_shape(tensor, shape, f"{where}: {name}")
    last, fix = vocabulary - 1, "tokenize with the model's own tokenizer"
    _refuse_out_of_range(_numbers(batch.ids), 0, last, f"{where}: ids", "ids", f"0 to {last}", fix)
    labels = _numbers(batch.trained_labels)
    labelled = labels[labels != IGNORED]
    _refuse_out_of_range(
        labelled,
        0,
        last,
        f"{where}: labels",
        "ids",
        f"0 to {last}, or {IGNORED} where there is no loss",
        fix,
    )
    if batch.documents is not None:
        number_from_0 = "number each row's documents from 0"
        _refuse_out_of_range(
            _numbers(batch.documents),
            -1,
            shape[1] - 1,
            f"{where}: documents",
            "numbers",
            f"0 to {shape[1] - 1}, or -1 for padding",
            number_from_0,
        )


def _refuse_shape(tensor: object, shape: tuple[int, int], where: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        found = f"a {type(tensor).__name__}"
    elif tensor.is_meta:
        found = "a tensor on meta"
    elif tensor.layout != torch.strided:
        found = "a sparse tensor"
    elif tensor.shape != shape or tensor.dtype != torch.int64:
        found = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    else:
        return
    raise UserError(
        where,
        found=found,
        allowed=f"{list(shape)} int64, as planned",
        fix="pass int64 tensors of the plan's shape, or make another plan",
    )


def _refuse_out_of_range(
    numbers: np.ndarray, least: int, most: int, where: str, what: str, allowed: str, fix: str
) -> None:
    if numbers.size:
        low, high = int(numbers.min()), int(numbers.max())
        if low < least or high > most:
            raise UserError(where, found=f"{what} from {low} to {high}", allowed=allowed, fix=fix)
