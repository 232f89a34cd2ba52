"""Show what data files are recognized as, how long rows are, and which tokens have loss.

The files are read and tokenized as by `megatrain train`, and the tokens are kept in its cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatrain.experiments.cli import options
from megatrain.experiments.cli.verdict.layout import fitted
from megatrain.runtime.data.options import Columns, DataOptions, Loss
from megatrain.runtime.data.rows.sources import sources_at

if TYPE_CHECKING:
    from megatrain.runtime.data.survey import Survey


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE[:WEIGHT]",
        help="files or folders, as for `megatrain train --data`",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="SOURCE",
        help="a Hugging Face folder or a name on the hub, for its tokenizer",
    )
    parser.add_argument(
        "--seq",
        type=options.whole("--seq", 2),
        help="tokens per row (default: enough to cut no document, or 1024 for running text, up to"
        " the model's own limit)",
    )
    parser.add_argument(
        "--row",
        type=options.whole("--row"),
        default=1,
        metavar="N",
        help="the document to show, counted without rows that are left out (default 1)",
    )
    parser.add_argument(
        "--split",
        default="train",
        help="the split to read if the folder has several (default train)",
    )
    parser.add_argument(
        "--columns",
        choices=get_args(Columns),
        default="auto",
        help="layout of a row's columns (default auto)",
    )
    parser.add_argument(
        "--loss",
        choices=get_args(Loss),
        default="assistant",
        help="tokens with loss (default assistant)",
    )
    parser.add_argument(
        "--chat-template", default="", metavar="FILE", help="Jinja file with a chat template"
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first bad row")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code in the tokenizer's folder"
    )
    parser.add_argument(
        "--data-cache", default="", metavar="FOLDER", help="folder for tokenized data"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from megatrain.runtime.data.tokens.tokenize import read_chat_template
    from megatrain.runtime.files.model_folder import model_folder
    from megatrain.simulator.model.specs import ModelSpec

    # These calls report a mistake before slow imports begin.
    sources_at(args.files, (args.split,))
    if args.chat_template:
        read_chat_template(args.chat_template)
    folder = model_folder(args.model, weights=False)
    model = ModelSpec.load(str(Path(folder, "config.json")))

    from megatrain.runtime.data.preview import GUILLEMETS, Marks
    from megatrain.runtime.data.survey import survey

    coloured = not args.json and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    result = survey(
        DataOptions(
            data=tuple(args.files),
            split=args.split,
            columns=args.columns,
            loss=args.loss,
            chat_template=args.chat_template,
            strict=args.strict,
            trust_remote_code=args.trust_remote_code,
            cache=args.data_cache,
        ),
        folder,
        model.vocabulary,
        (lambda _: None) if args.json else lambda note: print(fitted(note)),
        sequence=args.seq,
        limit=model.longest_row,
        number=args.row,
        marks=Marks("\x1b[1;32m", "\x1b[0m", "green text") if coloured else GUILLEMETS,
    )
    if args.json:
        sources = [source._asdict() for source in result.sources]
        cuts = [cut._asdict() for cut in result.cuts]
        print(json.dumps({**result._asdict(), "sources": sources, "cuts": cuts}))
    else:
        print(fitted(text(result)))
    return 0


def text(result: Survey) -> str:
    """Returns the lines that show lengths, packing, remarks and one document."""
    lines = [
        "",
        f"length: median {result.median:,} tokens, 95 % at most {result.percentile_95:,}, longest"
        f" {result.longest:,}",
    ]
    if result.cuts:
        rows = [("--seq", "documents cut", "tokens lost", "left out")] + [
            (
                f"{cut.sequence:,}",
                _share(cut.documents, result.documents),
                _share(cut.tokens, result.tokens),
                f"{cut.left_out:,}",
            )
            for cut in result.cuts
        ]
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  " + "  ".join(cell.rjust(size) for cell, size in zip(row, sizes, strict=True))
            for row in rows
        ]
    lines += [f"packed: {result.packed}", *result.remarks]
    return "\n".join([*lines, *(["", *result.shown] if result.shown else [])])


def _share(number: int, total: int) -> str:
    return f"{number:,} ({number / total:.1%})"
