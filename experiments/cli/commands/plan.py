"""Choose the fastest plan for a model on a machine, and write it to a file.

A plan has the policy, the placement, the number of slots, the size of copies and the checkpoint
interval.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatrain.experiments.cli import layout, options, policy_table, verdict_text
from megatrain.experiments.cli.commands import check
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.simulator.base.errors import DoesNotFit, UserError


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a Hugging Face folder, a config.json, or a name in the library, e.g. qwen2.5-7b",
    )
    options.add_hardware(parser)
    options.add_policy(parser)
    options.add_workload(parser)
    options.add_step_tokens(parser)
    parser.add_argument(
        "--why",
        action="store_true",
        help="also print the placement, the runner-up and the bounds of the step time",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PLAN",
        help="the plan file to write, e.g. plan.toml",
    )


@without_garbage_collection()
def run(args: argparse.Namespace) -> int:
    from megatrain.runtime.layers.supported import refuse_multimodal, refuse_unsupported
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.verdict.verdict import explain, summarize

    if args.policy == "all":
        args.policy = "best"
    options.check_writable(args.out)
    hardware = HardwareSpec.load(args.hardware)
    source = (
        options.relative(Path(args.model), args.out.parent)
        if os.path.exists(args.model)
        else args.model
    )
    named = (
        options.relative(Path(args.hardware), args.out.parent)
        if os.path.exists(args.hardware)
        else args.hardware
    )
    found = check.choices(args, hardware, source, named)
    verdicts, best = [summarize(choice, hardware) for choice in found], found[0]
    verdict = explain(best, hardware, check.policies(args.policy))
    print(verdict_text.text(verdict, layout.terminal_width(), why=args.why))
    if len(found) > 1:
        print("\nThe best plan of each policy:\n" + policy_table.table(verdicts))
    if not best.feasible:
        raise DoesNotFit(
            str(args.out),
            found="no plan that fits; nothing was written",
            allowed=verdict_text.limits(verdicts[0]),
            fix=best.account.advice,
        )
    best.plan.save(args.out)
    try:
        refuse_unsupported(best.plan.model, best.plan.workload)
        if os.path.isdir(args.model):
            refuse_multimodal(Path(args.model), best.plan.model)
    except UserError as error:
        print(f"\nfor prediction only, `megatrain train` will refuse this plan: {error}")
    print(f"\nwrote {args.out}: policy {best.plan.policy}, schedule {best.plan.digest}")
    return 0
