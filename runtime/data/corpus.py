"""Corpus: documents -> the micro-batches of each step, as a function of the documents, the options, the seed and the step's number alone.

Nothing needs saving to resume but the number of the step. An epoch shows every row once, in an order of its own: text is shuffled by document
before it is packed, conversations are packed once, and rows are shuffled always. A row's last token has as its label the token that follows in
its document, also where that begins the next row. Padding stands at the end of a row; its labels are ignored, so that causal attention needs no
mask for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.data.documents import Documents, truncated
from megatrain.runtime.data.packing import Rows, best_fit, in_sequence, one_a_row
from megatrain.runtime.training.data_options import Packing
from megatrain.simulator.errors import UserError
from megatrain.simulator.workload import Workload


class Corpus:
    """Rows of one sequence, shuffled by `seed`, or in the documents' order without one."""

    def __init__(self, documents: Documents, workload: Workload, *, seed: int | None, packing: Packing = "documents", where: str = "corpus") -> None:
        """Raises UserError where the documents, packed, have no label, or with a seed do not fill one step."""
        self._work, self._seed, self.packing = workload, seed, packing
        self.truncated_documents = self.truncated_tokens = self.left_out = 0
        if documents.whole and packing != "plain":
            documents, self.truncated_documents, self.truncated_tokens, self.left_out = truncated(documents, workload.sequence)
        self._documents = documents
        self.tokens = documents.total
        """that an epoch shows"""
        if not len(documents):
            raise UserError(
                where, found=f"no document with an answer within {workload.sequence} tokens", allowed="at least one", fix="train on a longer sequence"
            )
        needed = (1 if seed is None else workload.step_tokens) + (packing == "plain")
        if not documents.whole and packing != "none" and self.tokens < needed:
            raise UserError(
                where, found=f"{self.tokens} tokens", allowed=f"at least the {needed} of one step", fix="give more text, or a smaller batch or sequence"
            )
        # what an epoch does not change: conversations keep their rows, and so does what is not shuffled
        constant = documents.whole or seed is None or packing == "none"
        self._constant = self._pack(np.random.default_rng(seed or 0)) if constant and packing != "plain" else None
        self._epoch: tuple[int, Rows, np.ndarray] | None = None
        self.rows = len(self._rows_of(0)[0])
        """an epoch has this many"""
        per_step = workload.batch * workload.accumulation
        if seed is not None and self.rows < per_step:
            raise UserError(
                where, found=f"{self.tokens} tokens in {self.rows} rows of {workload.sequence}", allowed=f"at least the {per_step} rows of one step",
                fix="give more data, or a smaller batch or sequence",
            )  # fmt: skip
        if seed is None and not any((batch.labels != IGNORED).any() for batch in self.batches()):
            raise UserError(where, found=f"{self.tokens} tokens and no label", allowed="a document of two tokens or more", fix="give more text")

    @property
    def digest(self) -> str:
        """Of the text, as tokens; the same wherever its files lie. How documents are chosen from it, packed and ordered is not in it."""
        return self._documents.digest

    @property
    def documents(self) -> bool:
        """Whether batches number their documents: `Batch.documents`."""
        return self.packing != "plain"

    @property
    def conversations(self) -> bool:
        """Documents that mean nothing without their beginning: conversations, prompts with their answers."""
        return self._documents.whole

    @property
    def padding(self) -> float:
        """The share of padding in an epoch's rows."""
        plain = self.packing == "plain"
        return 1 - (self.tokens - plain) / (self.rows * self._work.sequence)

    @property
    def pieces(self) -> int:
        """Documents in the first epoch's rows, those that a row's end cut in two counted twice."""
        return len(self._rows_of(0)[0].begins)

    def step(self, number: int) -> list[Batch]:
        """The micro-batches of step `number`, from 1: `accumulation` of them. Any step may be asked for at any time."""
        work = self._work
        per_step = work.batch * work.accumulation
        begin = (number - 1) * per_step
        return [self._batch(range(first, first + work.batch)) for first in range(begin, begin + per_step, work.batch)]

    def batches(self) -> Iterator[Batch]:
        """Every row of the first epoch once. Where the last micro-batch is not full, copies of its first row without labels fill it."""
        for first in range(0, self.rows, self._work.batch):
            real = min(self._work.batch, self.rows - first)
            batch = self._batch([*range(first, first + real), *[first] * (self._work.batch - real)])
            batch.labels[real:] = IGNORED
            yield batch

    # ---- rows ----

    def _pack(self, generator: np.random.Generator) -> Rows:
        count = len(self._documents)
        order = np.arange(count) if self._seed is None else generator.permutation(count)
        if self.packing == "none":
            return one_a_row(self._documents, order, self._work.sequence)
        if self._documents.whole and self.packing == "documents":
            return best_fit(self._documents, order, self._work.sequence)
        return in_sequence(self._documents, order, self._work.sequence, plain=self.packing == "plain")

    def _rows_of(self, epoch: int) -> tuple[Rows, np.ndarray]:
        """The rows of an epoch, and the order in which it shows them. The last epoch's are kept."""
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            generator = np.random.default_rng([self._seed or 0, epoch])
            rows = self._constant or self._pack(generator)
            order = np.arange(len(rows)) if self._seed is None else generator.permutation(len(rows))
            self._epoch = kept = (epoch, rows, order)
        return kept[1], kept[2]

    def _batch(self, indices: range | list[int]) -> Batch:
        shape = (len(indices), self._work.sequence)
        ids, labels, numbers = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
        for place, index in enumerate(indices):
            epoch, index = divmod(index, self.rows)
            rows, order = self._rows_of(epoch)
            self._fill(rows, int(order[index]), ids[place], labels[place], numbers[place])
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(numbers) if self.documents else None)

    def _fill(self, rows: Rows, row: int, ids: np.ndarray, labels: np.ndarray, numbers: np.ndarray) -> None:
        at = 0
        for number, piece in enumerate(range(rows.firsts[row], rows.firsts[row + 1])):
            begin, end, follows = int(rows.begins[piece]), int(rows.ends[piece]), int(rows.follows[piece])
            here = slice(at, at + end - begin)
            at = here.stop
            ids[here], targets = self._documents.read(begin, end)
            labels[here][:-1] = np.where(targets[1:], ids[here][1:], IGNORED)
            if follows >= 0:
                (label,), (target,) = self._documents.read(follows, follows + 1)
                labels[at - 1] = label if target else IGNORED
            numbers[here] = number
