"""DataOptions: what to train and evaluate on, and how rows are made of it, as plain data: read from files and options before torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatrain.simulator.errors import UserError

Columns = Literal["auto", "text", "prompt/completion", "messages", "alpaca", "sharegpt"]
Loss = Literal["assistant", "last", "all"]
Packing = Literal["documents", "plain", "none"]


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/megatrain/tokens`, or `~/.cache/megatrain/tokens`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain" / "tokens"


class DataOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about the data that a run may choose, but the seed of its order. None of it changes a schedule."""

    data: Annotated[str, Meta(description="a .jsonl, .json, .csv, .parquet, .arrow or text file, a folder of them, or one of datasets.save_to_disk")] = ""
    split: Annotated[str, Meta(description="of a folder that holds several splits, by the names of its files and folders")] = "train"
    columns: Annotated[Columns, Meta(description="what a row's columns are; auto: what the first rows say")] = "auto"
    loss: Annotated[
        Loss,
        Meta(
            description="of a conversation: every assistant turn, the last one alone, or all of it; of a prompt with its completion: all of it, or the completion"
        ),
    ] = "assistant"
    chat_template: Annotated[str, Meta(description="a Jinja file: for conversations, and for the exported model, instead of the tokenizer's own")] = ""
    packing: Annotated[
        Literal["", Packing],
        Meta(description="rows of documents that do not see each other; plain: one text without borders; none: a document a row; empty: as the plan has it"),
    ] = ""
    strict: Annotated[bool, Meta(description="stop at the first bad row, instead of leaving it out")] = False
    evaluation_fraction: Annotated[float, Meta(ge=0, lt=1, description="of the documents, drawn without regard to the seed, kept for evaluation")] = 0.0
    evaluation_documents: Annotated[int, Meta(ge=0, le=2**40, description="as many documents from the end, kept for evaluation")] = 0
    evaluation_data: Annotated[str, Meta(description="evaluate on this instead, as it is read for training")] = ""
    evaluation_split: Annotated[
        str, Meta(description="evaluate on this split of the evaluation data, or, without such, of the data; empty: validation, else test, else train")
    ] = ""
    trust_remote_code: Annotated[bool, Meta(description="run the code that the model's tokenizer brings along, with all that you may do")] = False
    cache: Annotated[str, Meta(description="folder for tokenised data; empty: ~/.cache/megatrain/tokens. Files in it may be removed at any time")] = ""

    def __post_init__(self) -> None:
        if sum([self.evaluation_fraction > 0, self.evaluation_documents > 0, bool(self.evaluation_data or self.evaluation_split)]) > 1:
            raise UserError(
                "data: evaluation", found="more than one of a fraction, documents and a file or split", allowed="one of them", fix="leave the others out"
            )

    @property
    def cache_folder(self) -> Path:
        """`cache`, or the default one."""
        return Path(self.cache) if self.cache else default_cache()
