"""Lists the models of the library that a machine can train, with the speed of each."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING

from megatrain.experiments.cli.verdict import from_options, layout
from megatrain.experiments.cli.verdict.reasons import without_cuda
from megatrain.simulator.base.errors import DoesNotFit, UserError

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.verdict.verdict import Verdict


_SIZES = {"model": 19, "size": 8, "batch": 6, "tokens/s": 10, "VRAM": 11, "RAM": 11}
_DROPPED = ("VRAM", "batch")
"""Columns that are left out on a narrow terminal, in this order."""


def list_what_fits(args: argparse.Namespace, hardware: HardwareSpec) -> int:
    """Prints one line for each model of the library that fits, the largest first. Returns the exit
    status.

    A line is printed as soon as the plan of its model is found. The micro-batch is that of
    `--batch`, or the largest up to 32 that fits the model.
    """
    from megatrain.simulator.verdict.alternatives import library_models

    fitting: list[Verdict] = []
    refused: UserError | None = None
    too_large, planned = 0, 0
    for model in library_models():
        try:
            verdict = _verdict(args, hardware, model)
        except UserError as error:
            # A calibrated machine has no costs for most models.
            refused = error
            continue
        planned += verdict is not None
        if verdict is None or not verdict.feasible:
            too_large += 1
            continue
        if not args.json:
            if not fitting:
                print("\n".join(_heading(verdict, args)), flush=True)
            print(_row(verdict), flush=True)
        fitting.append(verdict)
    if refused and not fitting and not planned:
        raise refused
    if args.json:
        print(json.dumps({"models": [from_options.as_json(verdict) for verdict in fitting]}))
    elif fitting:
        others = "1 other model of the library does" if too_large == 1 else f"{too_large} others do"
        print(f"{others} not fit.")
        if not hardware.cuda:
            print("\n".join(textwrap.wrap(without_cuda(fitting[0]), layout.terminal_width())))
        for line in layout.left_out(_SIZES, _shown(), layout.terminal_width()):
            print(line)
    else:
        print("NO      No model of the library fits.")
    return 0 if fitting else DoesNotFit.status


def _verdict(args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec) -> Verdict | None:
    """Returns the verdict on a model's fastest plan or, if no plan fits, on one of its plans.

    Returns None if the model's state alone is too large. The search would take longest for these
    models, which come first.
    """
    from megatrain.experiments.cli import options
    from megatrain.simulator.planner.search import candidates
    from megatrain.simulator.verdict.alternatives import usual_policies
    from megatrain.simulator.verdict.verdict import summarize

    kernel_chosen = args.attention is None
    args = from_options.with_fitting_state(args, hardware, model)
    usual = args.policy in ("best", "all")
    if usual and from_options.state_exceeds_memory(args, hardware, model):
        return None
    # The list ignores `--tokens-per-step`, so that each model has its largest micro-batch.
    args = options.replaced(args, tokens_per_step=None)
    args, _ = from_options.with_fitting_workload(args, hardware, model)
    names = usual_policies(hardware) if usual else [args.policy]
    choices = candidates(
        model,
        hardware,
        options.workload(args, model, quiet=True),
        device_limit=options.device_limit(args.device_memory, hardware),
        host_limit=options.host_limit(args.host_memory, hardware),
        policies=names,
    )
    return summarize(choices[0], hardware, kernel_chosen=kernel_chosen)


def _heading(verdict: Verdict, args: argparse.Namespace) -> list[str]:
    from megatrain.experiments.cli.verdict import text as verdict_text

    return [
        *layout.labelled(
            "YES",
            "These models of the library can be fine-tuned in full on"
            f" {verdict_text.where(verdict)}, with sequences of {args.seq:,} tokens.",
            layout.terminal_width(),
        ),
        "",
        _line({name: name for name in _SIZES}),
    ]


def _row(verdict: Verdict) -> str:
    return _line(
        {
            "model": verdict.model,
            "size": layout.count(verdict.parameters),
            "batch": str(verdict.workload.batch),
            "tokens/s": layout.speed(verdict.tokens_per_second),
            "VRAM": layout.size(verdict.device_peak_bytes),
            "RAM": "" if verdict.unified else layout.size(verdict.host_peak_bytes),
        }
    )


def _line(cells: dict[str, str]) -> str:
    """Returns a line of the table, with the columns that fit in the terminal."""
    first, *others = _shown()
    return cells[first].ljust(_SIZES[first]) + "".join(
        cells[name].rjust(_SIZES[name]) for name in others
    )


def _shown() -> list[str]:
    return layout.shown_columns(_SIZES, layout.terminal_width(), _DROPPED)
