"""DataOptions: what to train and evaluate on, and how rows are made of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from megatrain.simulator.errors import UserError

Columns = Literal["auto", "text", "prompt/completion", "messages", "alpaca", "sharegpt"]
Loss = Literal["assistant", "last"]
Packing = Literal["documents", "plain", "none"]


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/megatrain/tokens`, or `~/.cache/megatrain/tokens`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain" / "tokens"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Everything about the data that a run may choose. None of it changes a schedule, but `packing` must agree with the plan's workload."""

    data: Path
    """a .jsonl, .ndjson, .json (an object a line), .parquet, .arrow or text file; a folder of them; or a folder of `datasets.save_to_disk`"""
    split: str = "train"
    """of a `save_to_disk` folder that holds several splits"""
    columns: Columns = "auto"
    """what a row's columns are; auto: what the first rows with known columns say, in the order of `columns.LAYOUTS`"""
    loss: Loss = "assistant"
    """of a conversation: every assistant turn, or the last one alone"""
    packing: Packing = "documents"
    """rows of several documents that do not see each other; plain: one text without borders, no mask; none: a document a row, padded"""
    seed: int = 0
    """of the order"""
    strict: bool = False
    """stop at the first bad row, instead of leaving it out"""
    evaluation_fraction: float = 0.0
    """of the documents, drawn without regard to `seed`, kept for evaluation"""
    evaluation_documents: int = 0
    """as many documents from the end, kept for evaluation"""
    evaluation_data: Path | None = None
    """evaluate on this instead; read like `data`"""
    cache: Path = field(default_factory=default_cache)
    """folder for tokenised data; files in it may be removed at any time"""

    def __post_init__(self) -> None:
        for name, kind in (("columns", Columns), ("loss", Loss), ("packing", Packing)):
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"data: {name}", found=repr(getattr(self, name)), allowed=", ".join(get_args(kind)), fix="name one of these")
        if not 0 <= self.evaluation_fraction < 1:
            raise UserError("data: evaluation_fraction", found=self.evaluation_fraction, allowed="0 to below 1", fix="write it like 0.01")
        for name in ("evaluation_documents", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"data: {name}", found=getattr(self, name), allowed=">= 0", fix=f"set {name} to 0 or more")
        if sum([self.evaluation_fraction > 0, self.evaluation_documents > 0, self.evaluation_data is not None]) > 1:
            raise UserError("data: evaluation", found="more than one of a fraction, documents and a file", allowed="one of them", fix="leave the others out")
