"""A corpus of plain text as bytes: packed, windowed, shuffled by seed. Token 0 to 255 is the byte, 256 ends a document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatrain.runtime.batch import Batch
from megatrain.simulator.errors import UserError
from megatrain.simulator.specs import Workload

END_OF_DOCUMENT = 256
VOCABULARY = 257
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")


class Corpus:
    """Documents one after the other, cut into windows of one sequence and its next token."""

    def __init__(self, tokens: np.ndarray, workload: Workload, seed: int, where: str = "corpus") -> None:
        """`tokens` [n] uint16. Raises UserError where they do not fill one step."""
        self._work = workload
        self._tokens = tokens
        self.windows = (len(tokens) - 1) // workload.sequence
        if self.windows < workload.batch * workload.accumulation:
            needed = workload.step_tokens + 1
            raise UserError(
                where, found=f"{len(tokens)} tokens", allowed=f"at least the {needed} of one step", fix="give more text, or a smaller batch or sequence"
            )
        self._order = np.random.default_rng(seed).permutation(self.windows)

    @classmethod
    def read(cls, path: Path, workload: Workload, *, vocabulary: int, seed: int, most_bytes: int = 2**26) -> Corpus:
        """From a text file, or every text file below a folder in sorted order, up to `most_bytes`.

        Raises UserError where there is none, one cannot be read, or the model's vocabulary is too small for bytes.
        """
        if vocabulary < VOCABULARY:
            raise UserError("model: vocabulary", found=vocabulary, allowed=f">= {VOCABULARY} for byte-level text", fix="use a model with a larger vocabulary")
        suffixes = ", ".join(f"*{suffix}" for suffix in TEXT_SUFFIXES)
        try:
            files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
            if not files:
                found = "a folder without text files" if path.is_dir() else "no such file or folder"
                raise UserError(f"corpus {path}", found=found, allowed=f"a text file, or a folder with {suffixes}", fix="check the path")
            pieces, total = [], 0
            for file in files:
                document = np.frombuffer(file.read_bytes(), dtype=np.uint8)[: most_bytes - total]
                pieces += [document.astype(np.uint16), np.array([END_OF_DOCUMENT], dtype=np.uint16)]
                total += len(document)
                if total >= most_bytes:
                    break
        except OSError as error:
            raise UserError(
                f"corpus {error.filename or path}", found=str(error.strerror).lower(), allowed="a readable text file", fix="check the path and its permissions"
            ) from None
        return cls(np.concatenate(pieces), workload, seed, f"corpus {path}")

    def step(self, number: int) -> list[Batch]:
        """The micro-batches of step `number` (from 1): ids and next-token labels, each [batch, sequence] int64. A function of seed and number alone."""
        work = self._work
        per_step = work.batch * work.accumulation
        chosen = [self._order[index % self.windows] for index in range((number - 1) * per_step, number * per_step)]
        rows = np.stack([self._tokens[window * work.sequence : (window + 1) * work.sequence + 1] for window in chosen]).astype(np.int64)
        micro = torch.from_numpy(rows).view(work.accumulation, work.batch, work.sequence + 1)
        return [Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in micro]
