"""Write a copy of a run with one of its checkpoints in another state format.

`megatrain train --resume` continues the new run. The old run does not change. This needs no GPU and
little memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatrain.experiments.cli import file_arguments, options
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.model.state_format import FORMATS


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a folder written by `megatrain train`, or one of its checkpoints",
    )
    parser.add_argument(
        "--state",
        choices=tuple(FORMATS),
        required=True,
        help="the new format of master weights and moments",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the new folder to write"
    )
    parser.add_argument(
        "--from-step",
        type=options.whole("--from-step"),
        metavar="N",
        help="the checkpoint after step N (default: the newest)",
    )


def run(args: argparse.Namespace) -> int:
    import os

    from megatrain.runtime.checkpoint.stored_steps import steps_to_export

    # These checks take place before PyTorch is loaded.
    if not os.path.exists(args.run / "manifest.json"):
        steps_to_export(args.run, args.from_step)
    file_arguments.check_new(args.out)

    from megatrain.runtime.training.converting import convert_run

    converted = convert_run(args.run, args.out, args.state, step=args.from_step, on_note=print)
    print(
        f"wrote {args.out}: the state after step {converted.step} in {args.state} instead of"
        f" {converted.before}, {format_bytes(converted.bytes)}"
    )
    if converted.is_run:
        print(f"megatrain train --resume {args.out} continues it")
    return 0
