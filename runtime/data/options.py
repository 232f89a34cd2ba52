"""The options of a run that concern its data. Reading them does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatrain.runtime.user_cache import user_cache
from megatrain.simulator.base.errors import UserError

Columns = Literal["auto", "text", "prompt/completion", "messages", "alpaca", "sharegpt"]
"""The layout of a row's columns (`columns.py`)."""
Loss = Literal["assistant", "last", "all"]
"""The tokens that have loss (`DataOptions.loss`)."""
Packing = Literal["documents", "plain", "none"]
"""How rows are filled (`DataOptions.packing`)."""
EVALUATION_FIELDS = (
    "evaluation_data",
    "evaluation_split",
    "evaluation_fraction",
    "evaluation_documents",
)
"""The fields of `DataOptions` that name the data to evaluate on."""


class DataOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data to train and evaluate on, and how it is read and packed.

    No field changes a schedule. The seed for the order of the data is `training.seed`. Raises
    UserError if more than one kind of evaluation data is given.
    """

    data: Annotated[
        str | tuple[str, ...],
        Meta(
            description=(
                "a .jsonl, .json, .csv, .parquet, .arrow or text file, a folder of files of one"
                " such kind (of several kinds, only the one with the most bytes is read), a folder"
                " that datasets.save_to_disk wrote, or a data set on the hub as org/name:split or"
                " org/name/config; or several of these. With PATH:WEIGHT, an epoch has each"
                " document of PATH that many times; 0.5 draws half of the documents"
            )
        ),
    ] = ""
    split: Annotated[
        str,
        Meta(
            description=(
                "split to train on, for a folder with several splits, which are recognized from the"
                " names of its files and folders"
            )
        ),
    ] = "train"
    columns: Annotated[
        Columns, Meta(description="layout of a row's columns; auto: recognized from the first rows")
    ] = "auto"
    loss: Annotated[
        Loss,
        Meta(
            description=(
                "tokens with loss. In a conversation: every assistant turn, the last assistant"
                " turn, or all tokens. In a prompt with its completion: the completion, and with"
                " `all` also the prompt"
            )
        ),
    ] = "assistant"
    chat_template: Annotated[
        str,
        Meta(
            description=(
                "Jinja file with a chat template, used for conversations and for the exported"
                " model instead of the tokenizer's own"
            )
        ),
    ] = ""
    packing: Annotated[
        Literal["", Packing],
        Meta(
            description=(
                "how rows are filled. documents: several documents a row, and attention stays"
                " within each; plain: one text, whose attention crosses the borders of documents;"
                " none: one document a row; by default as in the plan"
            )
        ),
    ] = ""
    strict: Annotated[
        bool, Meta(description="stop at the first bad row instead of leaving it out")
    ] = False
    evaluation_fraction: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="share of the documents kept for evaluation; the choice does not depend on"
            " the seed",
        ),
    ] = 0.0
    evaluation_documents: Annotated[
        int, Meta(ge=0, le=2**40, description="number of documents at the end kept for evaluation")
    ] = 0
    evaluation_data: Annotated[
        str,
        Meta(
            description=(
                "file, folder or data set on the hub to evaluate on, read in the same way as the"
                " data"
            )
        ),
    ] = ""
    evaluation_split: Annotated[
        str,
        Meta(
            description=(
                "split to evaluate on, of the evaluation data or, without any, of the training"
                " data; by default the first of validation, test and train that exists"
            )
        ),
    ] = ""
    trust_remote_code: Annotated[
        bool, Meta(description=("run the code in the tokenizer's folder, with your permissions"))
    ] = False
    cache: Annotated[
        str,
        Meta(
            description=(
                "folder for tokenized data; by default ~/.cache/megatrain/tokens. Its files may be"
                " deleted at any time"
            )
        ),
    ] = ""

    def __post_init__(self) -> None:
        if (
            sum(
                [
                    self.evaluation_fraction > 0,
                    self.evaluation_documents > 0,
                    bool(self.evaluation_data or self.evaluation_split),
                ]
            )
            > 1
        ):
            raise UserError(
                "data: evaluation",
                found="more than one of a fraction, a number of documents, and a file or split",
                allowed="one of them",
                fix="leave the others out",
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """`data` as a tuple of `PATH` or `PATH:WEIGHT`. The tuple is empty if there is no data."""
        return self.data if isinstance(self.data, tuple) else (self.data,) if self.data else ()

    @property
    def cache_folder(self) -> Path:
        """`cache` as a path. If it is empty, the folder `tokens` in the user's cache folder."""
        return Path(self.cache) if self.cache else user_cache() / "tokens"
