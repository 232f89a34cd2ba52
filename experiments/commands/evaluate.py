"""Compute the loss of a trained model on other data.

The run's plan is executed with the model that the run exported last, and the data is read as in
the run. It takes as much memory as the training.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.verdict.layout import fitted
from megatrain.runtime.data.rows.sources import EVALUATION_SPLITS, sources_at
from megatrain.runtime.files.exported_models import model_to_evaluate
from megatrain.simulator.schedule.plan import Plan


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a folder written by `megatrain train`"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="PATH[:WEIGHT]",
        help="files or folders, as for `megatrain train --data`",
    )
    parser.add_argument(
        "--split",
        default="",
        help="the split to read if the folder has several (default: the first of validation, test"
        " and train)",
    )
    parser.add_argument(
        "--model",
        metavar="SOURCE",
        help="a folder or hub name with other weights, such as the base model's (default: the model"
        " that the run exported last)",
    )
    parser.add_argument(
        "--data-cache", metavar="FOLDER", help="folder for tokenized data (default: the run's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    file_arguments.refuse_no_run(args.run, "check the path")
    # These calls report a mistake before slow imports begin.
    options.refuse_missing_gpu(args)
    if args.model is None and Plan.load(args.run / "plan.toml").gpus == 1:
        model_to_evaluate(args.run)
    sources_at(args.data, (args.split,) if args.split else EVALUATION_SPLITS)

    from megatrain.runtime.training.evaluating import evaluate_run

    result = evaluate_run(
        args.run,
        tuple(args.data),
        model=args.model,
        split=args.split,
        cache=args.data_cache,
        device=options.device(args),
        on_note=(lambda _: None) if args.json else lambda note: print(fitted(note)),
    )
    if args.json:
        loss, perplexity = (
            value if math.isfinite(value) else None for value in (result.loss, result.perplexity)
        )
        print(
            json.dumps(
                {
                    "loss": loss,
                    "perplexity": perplexity,
                    "tokens": result.tokens,
                    "seconds": result.seconds,
                }
            )
        )
    else:
        print(
            f"loss {result.loss:.4f}, perplexity {result.perplexity:,.2f}, over {result.tokens:,}"
            " tokens"
        )
    return 0
