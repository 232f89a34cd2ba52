"""Chooses the sequence length and the rows of a step from the lengths of the documents."""

from __future__ import annotations

import math

import numpy as np

COVERED = 0.99
"""The least share of documents that a chosen sequence does not cut, unless the model's own limit is
shorter."""
STEP_TOKENS = 32_768
"""The maximum number of tokens in a step."""
STEPS_AN_EPOCH = 20
"""The least number of steps in an epoch, unless each step has a single row."""
_MULTIPLE = 64
"""A chosen sequence is a multiple of this number of tokens, unless a limit prevents it."""
_TEXT_SEQUENCE = 2048
"""The longest sequence that is chosen for running text, in tokens."""


def chosen_sequence(lengths: np.ndarray, *, whole: bool, limit: int | None) -> int:
    """Returns the sequence length: the number of tokens in a row.

    Args:
        lengths: the number of tokens in each document, [documents].
        whole: whether a document that is longer than a row is cut. Otherwise, as with running text,
            it continues in the next row, and rows are shorter if the data is small.
        limit: the maximum sequence length by the model's config, or None.

    >>> chosen_sequence(np.array([100, 150, 420]), whole=True, limit=4096)
    448
    >>> chosen_sequence(np.array([100, 150, 420]), whole=True, limit=400)
    400
    >>> chosen_sequence(np.array([1_000_000]), whole=False, limit=None)
    2048
    >>> chosen_sequence(np.array([6400]), whole=False, limit=None)
    320
    """
    covered = int(np.sort(lengths)[math.ceil(COVERED * len(lengths)) - 1])
    sequence = -(-covered // _MULTIPLE) * _MULTIPLE
    if not whole:
        total = int(lengths.sum())
        few = max(total // STEPS_AN_EPOCH // _MULTIPLE * _MULTIPLE, min(_MULTIPLE, total // 2), 1)
        sequence = min(sequence, _TEXT_SEQUENCE, few)
    return min(sequence, limit or sequence)


def chosen_rows(rows: int, sequence: int) -> int:
    """Returns the number of rows in a step, for an epoch of `rows` rows of `sequence` tokens.

    It is a power of two, so a step can be split into equal micro-batches.

    >>> chosen_rows(100_000, 448), chosen_rows(400, 448), chosen_rows(9, 448)
    (64, 16, 1)
    """
    most = max(min(STEP_TOKENS // sequence, rows // STEPS_AN_EPOCH), 1)
    return 1 << (most.bit_length() - 1)


def described(lengths: np.ndarray, sequence: int, *, cuts: bool) -> str:
    """Returns a phrase with the lengths of documents and the number that a sequence cuts.

    Args:
        lengths: the number of tokens in each document, [documents].
        sequence: the number of tokens in a row.
        cuts: whether documents that are longer than a row are cut.

    >>> described(np.array([100, 150, 420]), 448, cuts=True)
    'median 150 tokens, 95 % up to 420, longest 420: sequence 448 cuts none'
    """
    middle, most = (int(np.quantile(lengths, part, method="higher")) for part in (0.5, 0.95))
    longer = int((lengths > sequence).sum())
    if not cuts:
        effect = "; longer documents continue in the next row" if longer else ""
    elif longer:
        effect = f" cuts {longer:,} of {len(lengths):,}"
    else:
        effect = " cuts none"
    return (
        f"median {middle:,} tokens, 95 % up to {most:,}, longest {int(lengths.max()):,}: sequence"
        f" {sequence:,}{effect}"
    )
