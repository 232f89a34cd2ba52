"""Write a checkpoint as a Hugging Face model folder, which transformers loads.

The folder has the config, the tokenizer, the generation config, and the weights as safetensors.
For a run's folder, the newest checkpoint that passes its checksums is used. This needs no GPU and
little memory. --push-to-hub without other options uploads the model that the run exported last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

from megatrain.experiments.cli import file_arguments, options
from megatrain.experiments.cli.training import upload
from megatrain.simulator.base.errors import UserError

_REPEATED = ("from_step", "dtype", "model")
"""Options that the command to repeat a failed upload must have as well."""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a folder written by `megatrain train`, or one of its checkpoints",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="MODEL",
        help="the new folder to write; may be left out with --push-to-hub",
    )
    upload.describe(parser)
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
    from megatrain.runtime.files.exported_models import newest_model
    from megatrain.runtime.files.model_source import name_on_hub

    # These checks take place before PyTorch is loaded.
    if args.out is None and args.push_to_hub is None:
        raise UserError(
            "export",
            found="neither --out nor --push-to-hub",
            allowed="megatrain export RUN --out MODEL, or --push-to-hub NAME",
            fix="name a new folder with --out",
        )
    is_checkpoint = os.path.exists(args.run / "manifest.json")
    home = args.run.parent.parent if is_checkpoint else args.run  # RUN/checkpoints/step-00000123
    chosen = args.out or args.from_step or args.dtype or args.model or is_checkpoint
    exported = None if chosen else newest_model(home)
    if not (is_checkpoint or exported):
        steps_to_export(args.run, args.from_step)
    if args.out is not None:
        file_arguments.check_new(args.out)
    if args.model is not None:
        name_on_hub(args.model)
    if args.push_to_hub is not None and not (home / "config.toml").is_file():
        raise UserError(
            f"--push-to-hub, {args.run}",
            found="no config.toml",
            allowed="the folder of a run, because the model card describes its settings",
            fix="name the folder of the run, with --from-step for a checkpoint",
        )
    upload.check(args)
    with contextlib.ExitStack() as stack:
        if exported:
            folder, step = exported, None
        else:
            folder = args.out or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=".upload-", dir=home)),
                "model",
            )
            step = _export(args, folder)
        if args.push_to_hub is not None:
            from megatrain.experiments.run_report.model_card import model_card

            card = model_card(home, args.push_to_hub, base=args.model, step=step)
            again = [f"--{name.replace('_', '-')}={vars(args)[name]}" for name in _REPEATED]
            again = [word for word in again if not word.endswith("=None")]
            upload.upload(folder, card, args, ["megatrain", "export", str(args.run), *again])
    return 0


def _export(args: argparse.Namespace, folder: Path) -> int:
    """Writes the model to `folder`, and returns the step of its checkpoint."""
    from megatrain.runtime.training.exporting import export_run

    exported = export_run(
        args.run, folder, step=args.from_step, dtype=args.dtype, model=args.model, on_note=print
    )
    if args.out is not None:
        print(
            f"wrote {args.out}: the weights after step {exported.step},"
            f" {exported.parameters:,} parameters in {exported.dtype}"
        )
    return exported.step
