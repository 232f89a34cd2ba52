"""Makes the micro-batches of each step from documents.

The micro-batches depend only on the documents, the options, the seed and the number of the step, so
resuming a run needs no other state. Every row occurs once in each epoch. Text is shuffled by
document and packed again in each epoch. Conversations are packed once. Rows are always shuffled.

The label of a row's last token is the next token of its document, even if this token is in another
row. Padding is at the end of a row and its labels are ignored, so causal attention needs no mask
for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.data.corpus.packing import Rows, best_fit, in_sequence, one_a_row
from megatrain.runtime.data.documents import Documents, truncated
from megatrain.runtime.data.options import Packing
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload


class Corpus:
    """Documents that are packed into rows of one sequence, from which micro-batches are made.

    Documents and rows are shuffled by `seed`. If it is None, they keep their order.
    """

    def __init__(
        self,
        documents: Documents,
        workload: Workload,
        *,
        seed: int | None,
        packing: Packing = "documents",
        where: str = "corpus",
    ) -> None:
        """Packs the documents.

        Args:
            documents: the documents of an epoch.
            workload: has the sequence, the batch and the accumulation.
            seed: the seed of the order, or None to keep the order of the documents.
            packing: how rows are filled (`DataOptions.packing`).
            where: names the data in errors.

        Raises UserError if the packed documents have no label, or with a seed if they do not fill
        one step.
        """
        self._work, self._seed, self.packing = workload, seed, packing
        self.truncated_documents = self.truncated_tokens = self.left_out = 0
        self.chosen_digest = documents.chosen_digest
        """Digest of the documents before they are cut at the sequence. Unlike `digest`, it depends
        on their choice and order."""
        if documents.whole and packing != "plain":
            documents, self.truncated_documents, self.truncated_tokens, self.left_out = truncated(
                documents, workload.sequence
            )
        self._documents = documents
        self.tokens = documents.total
        """Number of tokens per epoch."""
        if not len(documents):
            raise UserError(
                where,
                found=f"no document with an answer within {workload.sequence} tokens",
                allowed="at least one",
                fix="train on a longer sequence",
            )
        needed = (1 if seed is None else workload.step_tokens) + (packing == "plain")
        if not documents.whole and packing != "none" and self.tokens < needed:
            raise UserError(
                where,
                found=f"{self.tokens} tokens",
                allowed=f"at least the {needed} of one step",
                fix="give more text, or a smaller batch or sequence",
            )
        # Conversations keep their rows in every epoch, and so do documents that are not shuffled.
        constant = documents.whole or seed is None or packing == "none"
        self._constant = (
            self._pack(np.random.default_rng(seed or 0))
            if constant and packing != "plain"
            else None
        )
        self._epoch: tuple[int, Rows, np.ndarray] | None = None
        self.rows = len(self._rows_of(0)[0])
        """Number of rows per epoch."""
        per_step = workload.batch * workload.accumulation
        if seed is not None and self.rows < per_step:
            raise UserError(
                where,
                found=f"{self.tokens} tokens in {self.rows} rows of {workload.sequence}",
                allowed=f"at least the {per_step} rows of one step",
                fix="give more data, or a smaller batch or sequence",
            )
        if seed is None and not any((batch.labels != IGNORED).any() for batch in self.batches()):
            raise UserError(
                where,
                found=f"{self.tokens} tokens and no label",
                allowed="a document of two tokens or more",
                fix="give more text",
            )

    @property
    def digest(self) -> str:
        """Digest of the tokens of all documents.

        It does not depend on the paths of files, nor on the choice, packing and order of documents.
        """
        return self._documents.digest

    @property
    def count(self) -> int:
        """Number of documents per epoch."""
        return len(self._documents)

    @property
    def targets(self) -> int:
        """Number of tokens per epoch that have loss."""
        return self._documents.targets

    @property
    def documents(self) -> bool:
        """Whether batches have `Batch.documents`, the number of each token's document."""
        return self.packing != "plain"

    @property
    def conversations(self) -> bool:
        """Whether documents are conversations or prompts with answers, which are kept whole."""
        return self._documents.whole

    @property
    def padding(self) -> float:
        """The share of padding in an epoch's rows."""
        plain = self.packing == "plain"
        return 1 - (self.tokens - plain) / (self.rows * self._work.sequence)

    @property
    def pieces(self) -> int:
        """Number of pieces in the first epoch. A document counts once for each of its pieces."""
        return len(self._rows_of(0)[0].begins)

    @property
    def document_length(self) -> int:
        """The value for `Workload.document_length`: the sum of the squared lengths divided by the
        sum of the lengths, rounded.

        A document that continues in another row counts as two, and the padding of a row as one,
        because it attends to itself. Without documents, a row attends as a whole.
        """
        sequence = self._work.sequence
        if not self.documents:
            return sequence
        rows = self._rows_of(0)[0]
        lengths = (rows.ends - rows.begins).astype(np.float64)
        padding = sequence - np.add.reduceat(lengths, rows.firsts[:-1])
        squares = (lengths**2).sum() + (padding**2).sum()
        return max(round(float(squares / (len(rows) * sequence))), 1)

    def step(self, number: int) -> list[Batch]:
        """Returns the micro-batches of step `number`, counted from 1. Steps may be requested in any
        order.
        """
        return self.micro_batches(number, range(self._work.accumulation))

    def micro_batches(self, number: int, places: Iterable[int]) -> list[Batch]:
        """Returns the micro-batches `places`, counted from 0, of step `number`, from 1."""
        work = self._work
        firsts = [((number - 1) * work.accumulation + place) * work.batch for place in places]
        return [self._batch(range(first, first + work.batch)) for first in firsts]

    def batches(self) -> Iterator[Batch]:
        """Yields every row of the first epoch once, in micro-batches.

        If the last micro-batch is not full, it is filled with copies of its first row that have no
        labels.
        """
        for first in range(0, self.rows, self._work.batch):
            real = min(self._work.batch, self.rows - first)
            batch = self._batch([*range(first, first + real), *[first] * (self._work.batch - real)])
            batch.labels[real:] = IGNORED
            yield batch

    # ---- rows ----

    def _pack(self, generator: np.random.Generator) -> Rows:
        """Packs the documents into rows, in an order drawn from `generator`."""
        count = len(self._documents)
        order = np.arange(count) if self._seed is None else generator.permutation(count)
        if self.packing == "none":
            return one_a_row(self._documents, order, self._work.sequence)
        if self._documents.whole and self.packing == "documents":
            return best_fit(self._documents, order, self._work.sequence)
        return in_sequence(
            self._documents, order, self._work.sequence, plain=self.packing == "plain"
        )

    def _rows_of(self, epoch: int) -> tuple[Rows, np.ndarray]:
        """Returns the rows of an epoch and their order, [rows]. The last result is cached."""
        cached = self._epoch
        if cached is None or cached[0] != epoch:
            generator = np.random.default_rng([self._seed or 0, epoch])
            rows = self._constant or self._pack(generator)
            order = np.arange(len(rows)) if self._seed is None else generator.permutation(len(rows))
            self._epoch = cached = (epoch, rows, order)
        return cached[1], cached[2]

    def _batch(self, indices: range | list[int]) -> Batch:
        """Returns the micro-batch of the rows `indices`, counted over all epochs."""
        shape = (len(indices), self._work.sequence)
        ids, labels, numbers = (
            np.zeros(shape, dtype=np.int64),
            np.full(shape, IGNORED, dtype=np.int64),
            np.full(shape, -1, dtype=np.int64),
        )
        for place, index in enumerate(indices):
            epoch, index = divmod(index, self.rows)
            rows, order = self._rows_of(epoch)
            self._fill(rows, int(order[index]), ids[place], labels[place], numbers[place])
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(labels),
            torch.from_numpy(numbers) if self.documents else None,
        )

    def _fill(
        self, rows: Rows, row: int, ids: np.ndarray, labels: np.ndarray, numbers: np.ndarray
    ) -> None:
        """Writes the ids, labels and document numbers of row `row` into arrays, [sequence]."""
        at = 0
        for number, piece in enumerate(range(rows.firsts[row], rows.firsts[row + 1])):
            begin, end, follows = (
                int(rows.begins[piece]),
                int(rows.ends[piece]),
                int(rows.follows[piece]),
            )
            here = slice(at, at + end - begin)
            at = here.stop
            ids[here], targets = self._documents.read(begin, end)
            labels[here][:-1] = np.where(targets[1:], ids[here][1:], IGNORED)
            if follows >= 0:
                (label,), (target,) = self._documents.read(follows, follows + 1)
                labels[at - 1] = label if target else IGNORED
            numbers[here] = number
