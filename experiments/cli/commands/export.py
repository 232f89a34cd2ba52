"""Write a checkpoint as a Hugging Face model folder, which transformers loads.

The folder has the config, the tokenizer, the generation config, and the weights as safetensors.
Given a run's folder, the newest checkpoint that passes its checksums is written. This needs no GPU
and little memory.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatrain.experiments.cli import options


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a folder written by `megatrain train`, or one of its checkpoints",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="MODEL", help="the new folder to write"
    )
    parser.add_argument(
        "--from-step",
        type=options.whole("--from-step"),
        metavar="N",
        help="the checkpoint after step N (default: the newest)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        help="dtype of the weights; fp32 writes the master weights (default: as in the run's"
        " config, or else the dtype that layers compute in)",
    )
    parser.add_argument(
        "--model",
        metavar="SOURCE",
        help=(
            "folder or hub name from which config, tokenizer and generation config are copied"
            " (default: the plan's model)"
        ),
    )


def run(args: argparse.Namespace) -> int:
    from megatrain.runtime.checkpoint.stored_steps import steps_to_export
    from megatrain.runtime.files.model_source import name_on_hub

    # Checked before PyTorch is loaded.
    if not os.path.exists(args.run / "manifest.json"):
        steps_to_export(args.run, args.from_step)
    options.check_new(args.out)
    if args.model is not None:
        name_on_hub(args.model)

    from megatrain.runtime.training.exporting import export_run

    done = export_run(
        args.run, args.out, step=args.from_step, dtype=args.dtype, model=args.model, on_note=print
    )
    print(
        f"wrote {args.out}: the weights after step {done.step}, {done.parameters:,} parameters in"
        f" {done.dtype}"
    )
    return 0
